"""Where a report goes: stdout or a file, whole or not at all; warnings to stderr."""

from __future__ import annotations

import os
import sys
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
    if output is not None and output != "-":
        ending = ENDINGS.get(Path(output).suffix.lower())
        if ending is None and not asked:
            raise InputError(
                f"--output {output}: the ending picks the format; use {', '.join(ENDINGS)}, or say --format"
            )
        if ending is not None and asked and ending not in asked:
            raise InputError(f"--output {output} means {ending}, but {asked.pop()} was asked for")
        if ending is not None:
            return ending
    return asked.pop() if asked else "table"


def write(text: str, output: str | None) -> None:
    """Text to stdout, or to a file by way of a temporary one beside it, so that the file is never half written."""
    if output is None or output == "-":
        if not text.endswith("\n"):
            text += "\n"
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    if not output:
        raise InputError("--output must name a file, or be - for stdout")
    path = Path(os.path.realpath(output))
    data = (text if text.endswith("\n") else text + "\n").encode()
    try:
        if path.exists() and not path.is_file():
            if path.is_dir():
                raise OutputError(f"--output {output} is a folder")
            path.write_bytes(data)  # a device or a pipe cannot be replaced by a file
            return
        _replace(path, data)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"--output {output} cannot be written: {error.strerror or error}") from None


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
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def emit(report: Report, values: dict[str, Any]) -> None:
    """A report in the format and to the place that were asked for; its warnings to stderr unless ``--quiet``."""
    form = format_of(values)
    if form == "table":
        from tfcost.render import table_text, width_of_output

        output = values.get("output")
        to_file = output is not None and output != "-"
        text = table_text(report, width_of_output(to_file), colour=not to_file)
    else:
        text = report.render(form)
    if not values.get("quiet"):
        for warning in report.warnings:
            sys.stderr.write(f"tfcost: warning: {warning}\n")
    write(text, values.get("output"))
