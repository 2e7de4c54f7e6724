"""Reports for people: Rich tables with share bars, units and closed forms. The only import of rich.

A figure is never cut: where the terminal is narrow, columns are left out (first the bar, then the share, the count),
and closed forms move below the table.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfcost.report import FIGURE, Report, assumptions_line
from tfcost.units import binary_and_decimal, scaled

PIPE_WIDTH = 132
"""Columns where nothing says how wide the reader is: in a pipe or a file."""

BAR = 10


def width_of_output(to_file: bool = False) -> int:
    """The columns to fill: the terminal's, ``COLUMNS`` where it is set, or :data:`PIPE_WIDTH`."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return int(columns)
    if to_file or not sys.stdout.isatty():
        return PIPE_WIDTH
    return shutil.get_terminal_size((80, 24)).columns


class Page:
    """Text being laid out at one width. ``print`` takes whatever Rich prints."""

    def __init__(self, width: int, colour: bool = True) -> None:
        self.width = max(width, 20)
        self._out = io.StringIO()
        terminal = colour and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._console = Console(
            file=self._out, width=self.width, force_terminal=terminal, no_color=not terminal, highlight=False,
            legacy_windows=False, markup=False, emoji=False,
        )  # fmt: skip

    def print(self, what: Any = "", style: str | None = None) -> None:
        """Add a line or a table."""
        self._console.print(what, style=style, soft_wrap=False)

    def text(self) -> str:
        """All that was printed, without trailing spaces."""
        return "\n".join(line.rstrip() for line in self._out.getvalue().splitlines()) + "\n"


def cell(value: Any) -> str:
    """A value for reading: thousands separators, ratios to one place, nothing for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, list):
        return " x ".join(str(each) for each in value)
    return str(value)


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


def add_table(page: Page, columns: Sequence[tuple[str, str, bool]], rows: Sequence[Sequence[str]]) -> None:
    """A table that fits: ``columns`` are (header, justify, droppable); droppable ones go, last first, until it does."""
    keep = list(range(len(columns)))

    def total() -> int:
        widths = [max([len(columns[i][0]), *(len(row[i]) for row in rows)]) for i in keep]
        return sum(widths) + 2 * (len(keep) - 1) + 2

    for index in reversed([i for i, column in enumerate(columns) if column[2]]):
        if total() <= page.width:
            break
        keep.remove(index)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for position, index in enumerate(keep):
        header, justify, _ = columns[index]
        last = position == len(keep) - 1
        table.add_column(header, justify=justify, no_wrap=not last, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*[Text(row[index]) for index in keep])
    page.print(table)


def table_text(report: Report, width: int, colour: bool = True) -> str:
    """A report as tables: a title, the rows, the totals, the letters, and the assumptions."""
    page = Page(width, colour)
    page.print(title(report), style="bold")
    page.print()
    if report.command == "formula":
        _closed_forms(page, report)
    elif report.command == "explain":
        _walk(page, report)
    elif report.grid:
        _grid(page, report)
    else:
        _rows(page, report)
        page.print()
        _totals(page, report)
    if legend := letters(report):
        page.print()
        page.print(legend, style="dim")
    page.print()
    page.print(assumptions_line(report), style="dim")
    return page.text()


def title(report: Report) -> str:
    """``tfcost flops gpt2: b=1, N=1,024``."""
    names = {"batch": "b", "seq_len": "T" if "src_len" in report.inputs else "N", "src_len": "S"}
    shown = {} if report.command == "params" else report.inputs
    given = ", ".join(f"{names.get(key, key)}={cell(value)}" for key, value in shown.items() if key not in report.grid)
    model = f" {report.model['name']}" if report.model.get("name") else ""
    return f"tfcost {report.command}{model}" + (f": {given}" if given else "")


def letters(report: Report) -> str:
    """What the letters of the closed forms stand for here."""
    if report.closed is None:
        return ""
    used = {str(each) for formula in report.formulas.values() for each in formula.expr.free_symbols}
    listed = {each for key in report.grid for each in GRID_LETTERS.get(key, ())}
    values = [
        (name, value) for name, value in sorted_letters(report.closed.values)
        if name in used and name not in listed and isinstance(value, int)
    ]  # fmt: skip
    shown = [f"{name}={cell(value)}" for name, value in values]
    return ", ".join(shown)


GRID_LETTERS = {
    "batch": "b", "seq_len": "NT", "src_len": "S", "hidden": "d", "heads": "h", "layers": "l", "vocab": "V",
    "kv_heads": ("h_kv",), "head_dim": ("d_k",), "ffn_hidden": ("d_ff",), "max_positions": ("N_max",),
}  # fmt: skip
"""The letters that a listed size takes, which then have no one value."""


def sorted_letters(values: dict[Any, int]) -> list[tuple[str, int]]:
    """Symbols and their values in the order in which products write them."""
    from tfcost.symbols import LETTERS

    order = {letter: index for index, letter in enumerate((*LETTERS, "l", "l_enc", "l_dec"))}
    return sorted(((str(key), value) for key, value in values.items()), key=lambda each: order.get(each[0], len(order)))


def form(value: Any) -> str:
    """A closed form as the documents write it; empty for None."""
    return "" if value is None else str(value.written())


def _rows(page: Page, report: Report) -> None:
    key, unit = FIGURE[report.command]
    whole = sum(row[key] for row in report.rows)
    forms = [form(row["formula"]) for row in report.rows if "formula" in row]
    beside = page.width >= 72 and bool(forms)
    columns = [("component", "left", False), ("count", "right", True), (unit, "right", False)]
    rows = [[row["path"], cell(row["count"]), cell(row[key])] for row in report.rows]
    if beside:
        columns.append(("each (closed form)", "left", False))
        for line, text in zip(rows, forms, strict=True):
            line.append(text)
    columns += [("share", "right", True), ("", "left", True)]
    for line, row in zip(rows, report.rows, strict=True):
        line += [share_of(row[key], whole), bar(row[key], whole)]
    order = [0, 1, 2, *([len(columns) - 2, len(columns) - 1]), *([3] if beside else [])]
    add_table(page, [columns[i] for i in order], [[line[i] for i in order] for line in rows])
    if forms and not beside:
        page.print()
        for row, text in zip(report.rows, forms, strict=True):
            page.print(f"{row['path']}: {text}")


def reading(key: str, value: Any) -> str:
    """A total for reading, beside the exact one: a decimal prefix, or GiB and GB."""
    if not isinstance(value, (int, float)) or abs(value) < 1000:
        return ""
    if key.endswith("_bytes") or "_bytes_" in key:
        return binary_and_decimal(int(value))
    if "flops" in key:
        return scaled(value, "FLOPs")
    return scaled(value, "MACs" if "macs" in key else "").rstrip()


def _totals(page: Page, report: Report) -> None:
    forms = {key: form(value) for key, value in report.formulas.items()}
    beside = page.width >= 100
    columns = [("total", "left", False), ("value", "right", False), ("", "left", True)]
    rows = [[key, cell(value), reading(key, value)] for key, value in report.totals.items()]
    if forms and beside:
        columns.append(("closed form", "left", False))
        for line, key in zip(rows, report.totals, strict=True):
            line.append(forms.get(key, ""))
    add_table(page, columns, rows)
    if forms and not beside:
        page.print()
        for key in report.totals:
            if key in forms:
                page.print(f"{key}: {forms[key]}")


def _grid(page: Page, report: Report) -> None:
    """One row per combination. Where the columns do not fit beside each other, one block per combination."""
    columns = report.columns()
    rows = [[cell(row.get(column)) for column in columns] for row in report.rows]
    widths = [max([len(column), *(len(row[i]) for row in rows)]) for i, column in enumerate(columns)]
    if sum(widths) + 2 * len(widths) <= page.width:
        add_table(page, [(column, "right", False) for column in columns], rows)
    else:
        for row in rows:
            head = ", ".join(f"{column}={row[columns.index(column)]}" for column in report.grid)
            page.print(head, style="bold")
            block = [
                [column, row[i], reading(column, report.rows[rows.index(row)].get(column))]
                for i, column in enumerate(columns)
                if column not in report.grid
            ]
            add_table(
                page,
                [("  total", "left", False), ("value", "right", False), ("", "left", True)],
                [["  " + r[0], *r[1:]] for r in block],
            )
            page.print()
    if report.formulas:
        page.print()
        for key, value in report.formulas.items():
            page.print(f"{key}: {form(value)}")


def _closed_forms(page: Page, report: Report) -> None:
    """Totals, then each component's or op's three closed forms, then the crossovers."""
    for key, value in report.formulas.items():
        page.print(f"{key} = {form(value)}")
    page.print()
    units = (("flops", "FLOPs forward"), ("parameters", "parameters"), ("bytes", "bytes kept (and weights)"))
    for key, words in units:
        rows = [[row["path"], form(row["count"]), form(row[key])] for row in report.rows if row[key].expr != 0]
        add_table(page, [(words, "left", False), ("count", "right", True), ("each", "left", False)], rows)
        page.print()
    for each in report.extra["crossovers"]:
        at = (
            "is not there at any N"
            if each["length"] is None
            else f"equals the rest of a layer at N = {form(each['length'])}"
        )
        page.print(f"crossover, {each['what']}: the score square {at}")


def _walk(page: Page, report: Report) -> None:
    """One block of lines per step."""
    for index, row in enumerate(report.rows, 1):
        page.print(f"{index}. {row['path']}", style="bold")
        page.print(f"   {row['what']}")
        page.print(f"   {row['shapes']}")
        numbers = "flops_each" in row
        if numbers:
            page.print(f"   {row['shapes_here']}")
        if row["flops_formula"].expr != 0:
            here = f" = {row['flops_each']:,}" if numbers else ""
            page.print(f"   FLOPs: {form(row['flops_formula'])}{here}")
        if row["bytes_formula"].expr != 0:
            here = f" = {row['bytes_each']:,}" if numbers else ""
            page.print(f"   keeps {row['keeps']}: {form(row['bytes_formula'])}{here} bytes")
    for remark in report.extra.get("remarks", ()):
        page.print()
        page.print(f"Remark: {remark}", style="yellow")
