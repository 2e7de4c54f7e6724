"""Where a report goes: stdout or a file, whole or not at all; warnings to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tfcost.errors import InputError, OutputError
from tfcost.report import Report

ENDINGS = {".json": "json", ".csv": "csv", ".md": "markdown", ".markdown": "markdown", ".tex": "latex", ".txt": "table"}


def format_of(values: dict[str, Any]) -> str:
    """The format that ``--format``, ``--json``, ``--csv`` and the ending of ``--output`` agree on."""
    asked = {name for name in ("json", "csv") if values.get(name)}
    if "format" in values:
        asked.add(values["format"])
    if len(asked) > 1:
        raise InputError(f"the formats {' and '.join(sorted(asked))} were asked for at once; choose one")
    output = values.get("output")
    if output == "":
        raise InputError("--output must name a file, or be - for stdout")
    if output is not None and output != "-":
        ending = ENDINGS.get(Path(output).suffix.lower())
        if ending is None and not asked:
            if os.path.isdir(output):
                raise OutputError(f"--output {output} is a folder")
            raise InputError(
                f"--output {output}: the ending picks the format; use {', '.join(ENDINGS)}, or say --format"
            )
        if ending is not None and asked and ending not in asked:
            raise InputError(f"--output {output} means {ending}, but {asked.pop()} was asked for")
        if ending is not None:
            return ending
    return asked.pop() if asked else "table"


ASCII = str.maketrans({
    "·": "*", "ᵀ": "^T", "√": "sqrt ", "█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "#", "▍": "-", "▎": "-", "▏": "-",
})  # fmt: skip
"""How tables are written where the output's encoding has no such characters."""

DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


def encoded(text: str, encoding: str, as_json: bool = False) -> bytes:
    """Text as bytes of an encoding, whatever it holds: what the encoding lacks is spelled out, in JSON escaped."""
    try:
        return text.encode(encoding)
    except UnicodeEncodeError:
        if as_json:
            import json

            return "".join(char if char.isascii() else json.dumps(char)[1:-1] for char in text).encode(encoding)
        import re

        # 4bN²d becomes 4bN^2*d: without the sign the d would seem to stand in the exponent.
        powers = re.sub(r"([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)(?=(\w?))", lambda m: f"^{m[1].translate(DIGITS)}{'*' if m[2] else ''}", text)
        return powers.translate(ASCII).encode(encoding, "backslashreplace")


def write(text: str, output: str | None, as_json: bool = False) -> None:
    """Text to stdout, or to a file by way of a temporary one beside it, so that the file is never half written."""
    text = text if text.endswith("\n") else text + "\n"
    if output is None or output == "-":
        _to_stdout(text, as_json)
        return
    data = encoded(text, "utf-8", as_json)
    try:
        if os.path.isdir(output):
            raise OutputError(f"--output {output} is a folder")
        if os.path.exists(output) and not os.path.isfile(output):
            Path(output).write_bytes(data)  # a device or a pipe cannot be replaced by a file
            return
        _replace(Path(os.path.realpath(output)), data)
    except (OutputError, BrokenPipeError):
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"--output {output} cannot be written: {reason}") from None


def _to_stdout(text: str, as_json: bool) -> None:
    stream = sys.stdout
    if stream is None:
        raise OutputError("stdout is closed; --output FILE writes to a file")
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(encoded(text, stream.encoding, as_json).decode(stream.encoding))
        stream.flush()
    except OSError as error:
        # What is left in the buffer must go nowhere, or the interpreter complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"stdout cannot be written: {error.strerror or error}") from None


def _replace(path: Path, data: bytes) -> None:
    import tempfile

    # A file that exists keeps its permissions; a new one gets those that the umask leaves.
    if path.exists():
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
        mode = path.stat().st_mode & 0o7777
    else:
        mask = os.umask(0)
        os.umask(mask)
        mode = 0o666 & ~mask
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tfcost.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


Layout = Callable[[Report, int, bool], str]
"""How a report becomes tables: of so many columns, in colour or not."""


def emit(report: Report, values: dict[str, Any], layout: Layout | None = None) -> None:
    """A report in the format and to the place that were asked for; its warnings to stderr unless ``--quiet``.

    ``layout`` is the report's own way to be tables, where it is not :func:`tfcost.render.table_text`.
    """
    form, output = format_of(values), values.get("output")
    to_file = output is not None and output != "-"
    if form == "table":
        from tfcost.render import table_text, width_of_output

        text = (layout or table_text)(report, width_of_output(to_file), not to_file)
    else:
        text = report.render(form)
    if to_file:
        write(text, output, form == "json")
    if not values.get("quiet"):
        for warning in report.warnings:
            tell(f"warning: {warning}")
    if not to_file:
        write(text, None, form == "json")


def tell(message: str) -> None:
    """One line on stderr, whatever the message quotes; where nobody listens, none."""
    line = " ".join(message.split())
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(f"tfcost: {line}\n")
            sys.stderr.flush()
