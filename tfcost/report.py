"""A :class:`Report` and its machine-readable forms: JSON, CSV, Markdown and LaTeX. Integers are raw; keys say units.

The schema, ``tfcost.report/1``, is described in the README; a change of it, or of any number, is a line in the change
log.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

SCHEMA = "tfcost.report/1"

FIGURE = {"flops": ("flops", "FLOPs"), "params": ("parameters", "parameters"), "memory": ("bytes", "bytes")}
"""The figure that the rows of a command sum: its key, and its unit in a table's header."""


class Report:
    """What a command found: the resolved ``model``, ``inputs``, ``assumptions``, ``totals`` and ``rows``.

    ``rows`` sum to the command's total: ``flops = count * flops_each``. Rows and closed forms are made when first asked
    for. ``grid`` names the inputs that were lists: then each row is one combination with its totals. ``extra`` holds
    further keys of a command's own.
    """

    def __init__(
        self,
        command: str,
        model: Mapping[str, Any],
        inputs: Mapping[str, Any],
        assumptions: Mapping[str, Any],
        totals: Mapping[str, Any],
        rows: Callable[[], list[dict[str, Any]]],
        closed: Callable[[], Any] | None = None,
        warnings: Sequence[str] = (),
        grid: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.command = command
        self.model = dict(model)
        self.inputs = dict(inputs)
        self.assumptions = dict(assumptions)
        self.totals = dict(totals)
        self.warnings = list(warnings)
        self.grid = list(grid)
        self._rows = rows
        self.closed_forms = closed
        self.extra = dict(extra or {})

    @cached_property
    def closed(self) -> Any:
        """The closed forms (:class:`tfcost.symbols.ClosedForms`), or None where they were not asked for."""
        return None if self.closed_forms is None else self.closed_forms()

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows, each with its closed form where formulas were asked for."""
        rows = self._rows()
        if self.closed is not None and self.command in FIGURE and not self.grid:
            for row, formula in zip(rows, self.closed.row_formulas(rows), strict=True):
                row["formula"] = formula
        return rows

    @cached_property
    def formulas(self) -> dict[str, Any]:
        """The closed form of each total, as text that Python and sympy read (:class:`tfcost.symbols.Formula`)."""
        if self.closed is None:
            return {}
        wanted = self.rows[0] if self.grid else self.totals or None
        return dict(self.closed.formulas(wanted))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, ints, floats and strings, in the shape of ``tfcost.report/1``."""
        shape: dict[str, Any] = {
            "schema": SCHEMA, "command": self.command, "model": self.model, "inputs": self.inputs,
            "assumptions": self.assumptions, "totals": self.totals,
        }  # fmt: skip
        if self.grid:
            shape["grid"] = self.grid
        if self.formulas:
            shape["formulas"] = self.formulas
        return shape | self.extra | {"rows": self.rows}

    def to_json(self) -> str:
        """JSON with integers in full, however large."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def columns(self) -> list[str]:
        """The columns of the rows: those of any row, in order of first appearance."""
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def cells(self, row: Mapping[str, Any]) -> list[str]:
        """A row's cells as text: integers in full and bare, shapes as ``1x1024x768``, what a row lacks empty."""
        return [_cell(row.get(column)) for column in self.columns()]

    def to_csv(self) -> str:
        """One row per path (or per grid point), numeric cells, units in the header."""
        import csv
        import io

        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns())
        writer.writerows(self.cells(row) for row in self.rows)
        return out.getvalue()

    def to_markdown(self) -> str:
        """The rows and the totals as Markdown tables, with the assumptions below."""
        right = ["---" if _is_text(self.rows, column) else "---:" for column in self.columns()]
        cells = [[_code(row.get(column)) for column in self.columns()] for row in self.rows]
        lines = [_pipe(self.columns()), _pipe(right), *map(_pipe, cells), ""]
        if self.totals:
            lines += [_pipe(["total", "value", *(["formula"] if self.formulas else [])])]
            lines += [_pipe(["---", "---:", *(["---"] if self.formulas else [])])]
            for key, value in self.totals.items():
                lines.append(_pipe([key, _cell(value), *([_code(self.formulas.get(key))] if self.formulas else [])]))
            lines.append("")
        return "\n".join([*lines, assumptions_line(self), ""])

    def to_latex(self) -> str:
        """The rows as a LaTeX ``tabular`` (booktabs), formulas in math mode."""
        columns = self.columns()
        layout = "".join("l" if _is_text(self.rows, column) else "r" for column in columns)
        lines = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", _latex_row(columns), r"\midrule"]
        for row in self.rows:
            cells = [
                f"${value.written('latex')}$"
                if value is not None and hasattr(value, "written")
                else _latex(_cell(value))
                for value in map(row.get, columns)
            ]
            lines.append(" & ".join(cells) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", "% " + assumptions_line(self), ""])

    def render(self, form: str) -> str:
        """The report in one of the machine-readable formats: json, csv, markdown or latex."""
        return {
            "json": self.to_json, "csv": self.to_csv, "markdown": self.to_markdown, "latex": self.to_latex,
        }[form]().rstrip("\n")  # fmt: skip


def assumptions_line(report: Report) -> str:
    """What was assumed, in one line: what is counted, implementation, attention kernel, dtype, causal."""
    given = report.assumptions
    parts = []
    if report.command in ("flops", "analyze", "formula", "explain"):
        parts += [f"counts {given['counts']}", f"leaves out {given['leaves_out']}", f"convention {given['convention']}"]
        parts.append(f"causal {given['causal']}")
    if report.command != "params":
        parts += [
            f"implementation {given['implementation']}",
            f"attention {given['attention']}",
            f"dtype {given['dtype']}",
        ]
    if "vocabulary" in given:
        parts.append(f"vocabulary {given['vocabulary']}")
    if given["ignored_keys"]:
        parts.append("ignored keys " + ", ".join(given["ignored_keys"]))
    return "Assumptions: " + "; ".join(parts) if parts else "Assumptions: every parameter that the model trains"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return "x".join(str(each) for each in value)
    return str(value)


def _code(value: Any) -> str:
    """A Markdown cell; a closed form is code, or its ``*`` would be read as emphasis."""
    text = _cell(value)
    return f"`{text}`" if value is not None and hasattr(value, "written") else text


def _is_text(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    return any(isinstance(row.get(column), (str, list)) for row in rows)


def _pipe(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _latex(text: str) -> str:
    special = {
        "\\": r"\textbackslash{}",
        "_": r"\_",
        "&": r"\&",
        "%": r"\%",
        "#": r"\#",
        "$": r"\$",
        "^": r"\^{}",
        "{": r"\{",
        "}": r"\}",
    }
    return "".join(special.get(char, char) for char in text)


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(_latex(cell) for cell in cells) + r" \\"
