"""Reports for people: tables with share bars, units and closed forms, in Rich's styles. The only import of rich.

A figure is never cut. Where the terminal is narrow, columns are left out (first the bar, then the share, the count),
closed forms move below the table, a grid continues in a further table, and at last a table becomes lines.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from tfcost.report import FIGURE, Report, assumptions_line, notes
from tfcost.units import binary_and_decimal, scaled

PIPE_WIDTH = 132
"""Columns where nothing says how wide the reader is: in a pipe or a file."""

BAR = 10

GAP = 2
"""Columns between columns."""


def width_of_output(to_file: bool = False) -> int:
    """The columns to fill: the terminal's, ``COLUMNS`` where it is set, or :data:`PIPE_WIDTH`."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns[:9]) > 0:
        return int(columns[:9])
    if to_file or not _terminal():
        return PIPE_WIDTH
    return shutil.get_terminal_size((80, 24)).columns


def _terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


class Page:
    """Text being laid out at one width, in plain lines; on a terminal Rich gives them their styles."""

    def __init__(self, width: int, colour: bool = True) -> None:
        self.width = max(width, 20)
        self.colour = colour and _terminal() and not os.environ.get("NO_COLOR")
        self._lines: list[tuple[str, str | None]] = []

    def write(self, line: str = "", style: str | None = None) -> None:
        """Add a line, as long as it is, without spaces at its end."""
        self._lines.append((line.rstrip(), style))

    def paragraph(self, text: str, style: str | None = None, indent: str = "", further: str | None = None) -> None:
        """Add text wrapped at spaces, the first line indented by ``indent``, the others by ``further``."""
        lines = textwrap.wrap(
            text, self.width, initial_indent=indent, subsequent_indent=indent if further is None else further,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        for line in lines:
            self.write(line, style)

    def text(self) -> str:
        """All that was written."""
        lines = self._lines
        while lines and not lines[-1][0]:
            lines = lines[:-1]
        return styled(lines) if self.colour else "".join(f"{line}\n" for line, _ in lines)


def styled(lines: Iterable[tuple[str, str | None]]) -> str:
    """Lines in Rich's styles, for a terminal."""
    # Imported here, since most of what is printed goes to pipes and files, and it takes a while.
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, highlight=False, legacy_windows=False, markup=False, emoji=False)
    for line, style in lines:
        console.print(line, style=style, no_wrap=True, overflow="ignore", crop=False)
    return out.getvalue()


def cell(value: Any) -> str:
    """A value for reading: thousands separators, ratios to one place, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if value == 0 or abs(value) >= 10 else f"{value:.4g}"
    if isinstance(value, list):
        return " x ".join(str(each) for each in value)
    return form(value) if hasattr(value, "written") else str(value)


def share_of(part: int, whole: int) -> str:
    """A percentage to one place; what is there but rounds to nothing is ``<0.1%``."""
    if part and part * 2000 < whole:
        return "<0.1%"
    return f"{part / whole:.1%}" if whole else "-"


def bar(part: int, whole: int) -> str:
    """A share as a bar of :data:`BAR` cells, in eighths of a cell."""
    eighths = (part * BAR * 8 + whole // 2) // whole if whole else 0
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")


def reading(key: str, value: Any) -> str:
    """A total for reading, beside the exact one: a decimal prefix, or GiB and GB."""
    if not isinstance(value, (int, float)) or abs(value) < 1000:
        return ""
    if key.endswith("_bytes") or "_bytes_" in key:
        return binary_and_decimal(int(value))
    return scaled(value, "FLOPs" if "flops" in key else "MACs" if "macs" in key else "")


class Column(NamedTuple):
    """A column of a table: its header, whether it holds figures, whether it may be left out, or wrapped."""

    header: str
    right: bool = False
    droppable: bool = False
    wraps: bool = False

    def width(self, cells: Iterable[str]) -> int:
        """The least columns that it needs."""
        widest = max([*map(len, self.header.split("\n")), *map(len, cells)])
        return min(widest, MIN_WRAPPED) if self.wraps else widest


MIN_WRAPPED = 24
"""A column of text is wrapped no narrower."""


def needs(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """The least width of a table."""
    widths = [column.width(row[i] for row in rows) for i, column in enumerate(columns)]
    return sum(widths) + GAP * (len(columns) - 1)


def add_table(page: Page, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """A table that fits: droppable columns go, last first, until it does; if it still does not, it becomes lines."""
    keep = list(range(len(columns)))
    for index in reversed([i for i, column in enumerate(columns) if column.droppable]):
        if needs([columns[i] for i in keep], [[row[i] for i in keep] for row in rows]) <= page.width:
            break
        keep.remove(index)
    columns = [columns[i] for i in keep]
    rows = [[row[i] for i in keep] for row in rows]
    if needs(columns, rows) > page.width:
        headers = ["".join(column.header.split("\n")) for column in columns]
        _lines(page, [[row[0], *_labelled(headers[1:], row[1:])] for row in rows])
        return
    _table(page, columns, rows)


def _table(page: Page, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """A table that fits, its column of text wrapped to the width that the others leave; headers stand at the bottom."""
    headers = [column.header.split("\n") for column in columns]
    widths = [max(map(len, [*headers[i], *(row[i] for row in rows)])) for i in range(len(columns))]
    spare = page.width - sum(widths) - GAP * (len(columns) - 1)
    wrapped = [i for i, column in enumerate(columns) if column.wraps and spare < 0]
    for i in wrapped[:1]:
        widths[i] = max(widths[i] + spare, MIN_WRAPPED)

    def add(cells: Sequence[Sequence[str]], style: str | None = None) -> None:
        for texts in zip_longest(*cells, fillvalue=""):
            parts = [
                text.rjust(width) if column.right else text.ljust(width)
                for text, width, column in zip(texts, widths, columns, strict=True)
            ]
            page.write((" " * GAP).join(parts), style)

    tallest = max(map(len, headers))
    add([[""] * (tallest - len(header)) + header for header in headers], "bold")
    for row in rows:
        add([
            textwrap.wrap(text, widths[i], break_on_hyphens=False) if i in wrapped else [text]
            for i, text in enumerate(row)
        ])  # fmt: skip


def _labelled(headers: Sequence[str], cells: Sequence[str]) -> list[str]:
    """Figures with the headers that a table would have above them; one alone, bars and empty cells have none."""
    if len(headers) == 1:
        return list(cells)
    return [f"{header}: {cell}" if header and cell else cell for header, cell in zip(headers, cells, strict=True)]


def _lines(page: Page, rows: Sequence[Sequence[str]]) -> None:
    """A table of names and figures that does not fit: each name, and below it what stands beside it."""
    for name, *figures in rows:
        page.write(name)
        for text in filter(None, figures):
            page.paragraph(text, indent="  ", further="    ")


def add_forms(page: Page, forms: Iterable[tuple[str, str]]) -> None:
    """Closed forms by name, each on lines of its own."""
    for name, text in forms:
        page.paragraph(f"{name}: {text}", further="  ")


def table_text(report: Report, width: int, colour: bool = True) -> str:
    """A report as tables: a title, the rows, the totals, the letters, and the assumptions."""
    from tfcost.moments import add_moments  # which lays out with what is here

    page = Page(width, colour)
    page.paragraph(title(report), "bold", further="  ")
    page.write()
    if report.command == "formula":
        _closed_forms(page, report)
    elif report.command == "explain":
        _walk(page, report)
    elif report.grid:
        _grid(page, report)
    elif report.command not in FIGURE:
        _totals(page, report)
        page.write()
        _grid(page, report)
    else:
        _rows(page, report)
        page.write()
        _totals(page, report)
    add_moments(page, report)
    for note in notes(report):
        page.write()
        page.paragraph(note, "yellow" if note.startswith("Remark") else None, further="  ")
    if line := assumptions_line(report):
        page.write()
        page.paragraph(line, "dim", further="  ")
    return page.text()


def title(report: Report) -> str:
    """``tfcost flops gpt2: b=1, N=1,024``."""
    names = {"batch": "b", "seq_len": "T" if "src_len" in report.inputs else "N", "src_len": "S"}
    shown = {} if report.command == "params" else report.inputs
    given = ", ".join(f"{names.get(key, key)}={cell(value)}" for key, value in shown.items() if key not in report.grid)
    model = f" {report.model['name']}" if report.model.get("name") else ""
    return f"tfcost {report.command}{model}" + (f": {given}" if given else "")


def form(value: Any) -> str:
    """A closed form as the documents write it; empty for None."""
    return "" if value is None else str(value.written())


def _rows(page: Page, report: Report) -> None:
    key, unit = FIGURE[report.command]
    whole = sum(row[key] for row in report.rows)
    columns = [
        Column("path"), Column("count", right=True, droppable=True), Column(unit, right=True),
        Column("share", right=True, droppable=True), Column("", droppable=True),
    ]  # fmt: skip
    rows = [
        [row["path"], cell(row["count"]), cell(row[key]), share_of(row[key], whole), bar(row[key], whole)]
        for row in report.rows
    ]
    _with_forms(page, columns, rows, "each", [form(row.get("formula")) for row in report.rows])


def _totals(page: Page, report: Report) -> None:
    columns = [Column("total"), Column("value", right=True), Column("", droppable=True)]
    rows = [[key, cell(value), reading(key, value)] for key, value in report.totals.items()]
    _with_forms(page, columns, rows, "closed form", [form(report.formulas.get(key)) for key in report.totals])


def _with_forms(page: Page, columns: list[Column], rows: list[list[str]], header: str, forms: Sequence[str]) -> None:
    """A table with the closed forms beside it where they fit whole, else below it."""
    if not any(forms):
        add_table(page, columns, rows)
        return
    wide = [*columns, Column(header)], [[*row, text] for row, text in zip(rows, forms, strict=True)]
    if needs(*wide) <= page.width:
        add_table(page, *wide)
        return
    add_table(page, columns, rows)
    page.write()
    add_forms(page, ((row[0], text) for row, text in zip(rows, forms, strict=True) if text))


def _grid(page: Page, report: Report) -> None:
    """One row per combination; what does not fit beside the rest continues in a table below, with the same keys."""
    if not report.rows:
        page.write("none")
        return
    names = report.columns()
    keys = [name for name in names if name in report.grid]
    cells = {name: [cell(row.get(name)) for row in report.rows] for name in names}
    columns = {name: _grid_column(report, name) for name in names}
    if needs(list(columns.values()), list(zip(*cells.values(), strict=True))) <= page.width:
        add_table(page, *_with_readings(page, report, columns, cells))
    else:
        headers = {
            name: column if column.wraps or name in keys else column._replace(header=folded(name, cells[name]))
            for name, column in columns.items()
        }
        left = _width(headers, cells, keys)
        chunk = list(keys)
        for name in [name for name in names if name not in keys]:
            if len(chunk) > len(keys) and left + _width(headers, cells, [*chunk[len(keys) :], name]) + GAP > page.width:
                _part(page, headers, cells, chunk)
                page.write()
                chunk = list(keys)
            chunk.append(name)
        _part(page, headers, cells, chunk)
    if report.formulas and report.grid:
        page.write()
        add_forms(page, ((key, form(value)) for key, value in report.formulas.items()))


def _grid_column(report: Report, name: str) -> Column:
    text = any(isinstance(row.get(name), str) for row in report.rows)
    long = max(len(cell(row.get(name))) for row in report.rows) > MIN_WRAPPED
    return Column(name, right=not text, wraps=text and long and name not in report.grid)


def _with_readings(
    page: Page, report: Report, columns: dict[str, Column], cells: dict[str, list[str]]
) -> tuple[list[Column], list[list[str]]]:
    """A grid's columns, each of bytes with its reading beside it where all of them fit."""
    both: list[Column] = []
    texts: list[list[str]] = []
    for name, column in columns.items():
        both.append(column)
        texts.append(cells[name])
        if name.endswith("_bytes") or "_bytes_" in name:
            both.append(Column(""))
            texts.append([reading(name, row.get(name)).partition(" (")[0] for row in report.rows])
    rows = [list(row) for row in zip(*texts, strict=True)]
    if needs(both, rows) <= page.width:
        return both, rows
    return list(columns.values()), [list(row) for row in zip(*cells.values(), strict=True)]


def folded(name: str, cells: Sequence[str]) -> str:
    """A key as a header of several lines, cut after underscores, about as wide as the figures below it."""
    parts = name.replace("_", "_ ").split()
    width = max([*map(len, parts), *map(len, cells)])
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _width(columns: dict[str, Column], cells: dict[str, list[str]], names: Sequence[str]) -> int:
    folded = [columns[name]._replace(header=max(columns[name].header.split("\n"), key=len)) for name in names]
    return needs(folded, list(zip(*[cells[name] for name in names], strict=True)))


def _part(page: Page, columns: dict[str, Column], cells: dict[str, list[str]], names: Sequence[str]) -> None:
    """Some columns of a grid as a table."""
    rows = [list(row) for row in zip(*[cells[name] for name in names], strict=True)]
    if _width(columns, cells, names) > page.width:
        for *keys, figure in rows:
            head = ", ".join(f"{name}={text}" for name, text in zip(names, keys, strict=False))
            _lines(page, [[head, f"{names[-1]}: {figure}"]])
        return
    _table(page, [columns[name] for name in names], rows)


def _closed_forms(page: Page, report: Report) -> None:
    """Totals, then each component's or op's three closed forms."""
    columns = [Column("total"), Column("closed form")]
    forms = [(key, form(value)) for key, value in report.formulas.items()]
    if needs(columns, forms) <= page.width:
        add_table(page, columns, forms)
    else:
        add_forms(page, forms)
    for part in report.extra.get("ranges", ()):
        page.write()
        page.write(f"For {part['where']}:")
        add_forms(page, ((key, form(value)) for key, value in part["formulas"].items()))
    units = (("flops", "FLOPs forward"), ("parameters", "parameters"), ("bytes", "bytes kept (and weights)"))
    for key, words in units:
        rows = [row for row in report.rows if row[key].expr != 0]
        if not rows:
            continue
        page.write()
        columns = [Column(words), Column("count", right=True, droppable=True)]
        cells = [[row["path"], form(row["count"])] for row in rows]
        _with_forms(page, columns, cells, "each", [form(row[key]) for row in rows])


def _walk(page: Page, report: Report) -> None:
    """One block of lines per step."""
    for index, row in enumerate(report.rows, 1):
        page.write(f"{index}. {row['path']}", "bold")
        shown = [row["what"], row["shapes"]]
        if "shapes_here" in row:
            shown.append(row["shapes_here"])
        if row["flops_formula"].expr != 0:
            shown.append(f"FLOPs: {form(row['flops_formula'])}{_here(row, 'flops_each')}")
        if row["bytes_formula"].expr != 0:
            shown.append(f"keeps {row['keeps']}: {form(row['bytes_formula'])}{_here(row, 'bytes_each')} bytes")
        if "bytes_once_formula" in row:
            once = f"{form(row['bytes_once_formula'])}{_here(row, 'bytes_once')} bytes"
            shown.append(f"keeps {row['keeps_once']}: {once}, once for all layers")
        for text in shown:
            page.paragraph(text, indent="   ", further="     ")


def _here(row: dict[str, Any], key: str) -> str:
    return f" = {row[key]:,}" if key in row else ""
