"""Every error that tfcost raises on purpose.

::

    TfcostError
    ├── InputError          what the person gave cannot be used (exit status 2); also a ValueError
    │   ├── ConfigError     a config.json, or a key in it
    │   └── UnknownName     a name that is not in a table, with a "did you mean"
    ├── OutputError         a report could not be written (exit status 2); also an OSError
    ├── MissingExtra        an optional dependency is not installed (exit status 2); also an ImportError
    └── GraphError          the op graph contradicts itself: a defect in a block, never in the input

A message is one line that names the flag or key, what was given and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable


def shown(text: object, most: int = 120) -> str:
    """Somebody's text inside a one-line message: escaped where it cannot be printed, cut from the left."""
    line = str(text)
    line = line if line.isprintable() else repr(line)[1:-1]
    return line if len(line) <= most else "..." + line[-most:]


class TfcostError(Exception):
    """The base: catch this to catch everything that tfcost raises on purpose."""


class InputError(TfcostError, ValueError):
    """What the person gave cannot be used."""


class ConfigError(InputError):
    """A ``config.json`` that cannot be read, or a key in it that cannot be used."""


class UnknownName(InputError):
    """A name that is not in a table; the message lists close matches.

    ``what`` is the kind of thing ("model", "convention"), ``given`` the name, ``known`` the table's names;
    ``listed_by`` is the command that shows a table too long for a line.
    """

    def __init__(self, what: str, given: str, known: Iterable[str], listed_by: str = "") -> None:
        from difflib import get_close_matches

        names = sorted(known)
        spelled = {name.lower(): name for name in reversed(names)}  # people do not mind the case of a name
        close = [spelled[each] for each in get_close_matches(given.lower(), spelled, n=3, cutoff=0.5)]
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"
        if listed_by and not close:
            hint = f"{listed_by} lists the {len(names)} known"
        super().__init__(f"unknown {what} '{shown(given, 60)}'; {hint}")


class OutputError(TfcostError, OSError):
    """A report could not be written."""


class MissingExtra(TfcostError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class GraphError(TfcostError):
    """The op graph contradicts itself; a defect in a block or family, never in the input."""
