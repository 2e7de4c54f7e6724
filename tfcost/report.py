"""A :class:`Report` and its machine-readable forms: JSON, CSV, Markdown and LaTeX. Integers are raw; keys say units.

The schema, ``tfcost.report/1``, is described in the README; a change of it, or of any number, is a line in the change
log.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    def letters(self) -> dict[str, int]:
        """What the letters of the closed forms stand for here, in the order of products: ``{"b": 1, "N": 1024}``.

        A letter whose size was a list has no one value.
        """
        if self.closed is None:
            return {}
        from tfcost.notation import LETTERS

        texts = [*self.formulas.values(), *(value for row in self.rows for value in row.values())]
        used = {str(letter) for value in texts if hasattr(value, "written") for letter in value.expr.free_symbols}
        used -= {letter for key in self.grid for letter in GRID_LETTERS.get(key, ())}
        values = {str(letter): value for letter, value in self.closed.values.items() if isinstance(value, int)}
        order = dict.fromkeys([*LETTERS, *values])
        return {letter: values[letter] for letter in order if letter in used & values.keys()}

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
            shape |= {"formulas": self.formulas, "letters": self.letters}
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

    def tables(self) -> list[tuple[list[str], list[list[Any]]]]:
        """What Markdown and LaTeX show: the rows, and the totals with their closed forms, as (header, cells)."""
        tables = [(self.columns(), [[row.get(column) for column in self.columns()] for row in self.rows])]
        if self.totals:
            forms = [[self.formulas.get(key)] if self.formulas else [] for key in self.totals]
            lines = [[key, value, *form] for (key, value), form in zip(self.totals.items(), forms, strict=True)]
            tables.append((["total", "value", *(["formula"] if self.formulas else [])], lines))
        elif self.formulas:
            tables.append((["total", "formula"], [[key, form] for key, form in self.formulas.items()]))
        return tables

    def to_markdown(self) -> str:
        """The rows and the totals as Markdown tables, with the notes and assumptions below."""
        blocks = []
        for header, lines in self.tables():
            right = ["---" if _is_text([line[i] for line in lines]) else "---:" for i in range(len(header))]
            blocks.append("\n".join([_pipe(header), _pipe(right), *[_pipe(map(_code, line)) for line in lines]]))
        return "\n\n".join([*blocks, *notes(self), assumptions_line(self)])

    def to_latex(self) -> str:
        """The rows and the totals as LaTeX ``tabular`` s (booktabs), closed forms in math mode."""
        blocks = []
        for header, lines in self.tables():
            layout = "".join("l" if _is_text([line[i] for line in lines]) else "r" for i in range(len(header)))
            body = [" & ".join(map(_math, line)) + r" \\" for line in lines]
            head = " & ".join(map(_latex, header)) + r" \\"
            opening = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", head, r"\midrule"]
            blocks.append("\n".join([*opening, *body, r"\bottomrule", r"\end{tabular}"]))
        return "\n\n".join([*blocks, "\n".join(f"% {line}" for line in [*notes(self), assumptions_line(self)])])

    def render(self, form: str) -> str:
        """The report in one of the machine-readable formats: json, csv, markdown or latex."""
        return {
            "json": self.to_json, "csv": self.to_csv, "markdown": self.to_markdown, "latex": self.to_latex,
        }[form]().rstrip("\n")  # fmt: skip


GRID_LETTERS = {
    "batch": ("b",), "seq_len": ("N", "T"), "src_len": ("S",), "hidden": ("d",), "heads": ("h",), "layers": ("l",),
    "vocab": ("V",), "kv_heads": ("h_kv",), "head_dim": ("d_k",), "ffn_hidden": ("d_ff",), "max_positions": ("N_max",),
    "encoder_layers": ("l", "l_enc"), "decoder_layers": ("l", "l_dec"), "src_vocab": ("V_src",), "experts": ("E",),
    "experts_per_token": ("k",), "expert_hidden": ("d_e",), "shared_expert_hidden": ("d_s",), "query_rank": ("d_q",),
    "kv_rank": ("d_c",), "rope_dim": ("d_r",), "value_dim": ("d_v",),
}  # fmt: skip
"""The letters that a listed size takes, which then have no one value."""


def notes(report: Report) -> list[str]:
    """What stands below the tables: a walk's sums, crossovers, remarks, and the letters' values."""
    lines = []
    for layer in report.extra.get("layers", ()):
        figures = []
        for figure, unit in (("flops", "FLOPs"), ("bytes", "bytes kept")):
            here = f" = {layer[f'{figure}_each']:,}" if f"{figure}_each" in layer else ""
            figures.append(f"{layer[f'{figure}_formula'].written()}{here} {unit}")
        lines.append(f"{layer['path']} in all: {', '.join(figures)}")
    for each in report.extra.get("crossovers", ()):
        lines.append(f"Crossover of {each['what']}: {crossover(each)}")
    lines += [f"Remark: {remark}" for remark in report.extra.get("remarks", ())]
    if report.letters:
        lines.append(", ".join(f"{letter}={value:,}" for letter, value in report.letters.items()))
    return lines


def crossover(each: Mapping[str, Any]) -> str:
    """Where the score square costs as much as the rest of a layer, or what replaces it as much as it, in words."""
    full = each.get("against") == "the full square"
    if "less_beyond" in each and each["length"] is None:
        return f"none, {each['less_beyond']} has less at every length"
    if each["length"] is None:
        return "none, the full square is computed all the same" if full else "none, nothing in a layer grows as N²"
    at = "" if each["at"] is None else f" = {each['at']:,.1f}".removesuffix(".0")
    where = f"at N = {each['length'].written()}{at}"
    if "less_beyond" in each:
        return f"equal {where}, {each['less_below'] or 'neither'} has less below and {each['less_beyond']} beyond"
    if full:
        return f"the full square costs as much {where}, and more beyond"
    return f"the score square equals the rest of a layer {where}"


WHOLE = "what is stored per weight, kept for backward, and gradients; leaves out token ids, workspaces, fragmentation"
COUNTED = {
    "params": "every parameter that the model trains, shared ones once",
    "memory": WHOLE,
    "kv": "keys and values of every layer that attends to what was generated",
    "fit": WHOLE,
}


def assumptions_line(report: Report) -> str:
    """What was assumed, in one line: what is counted, implementation, attention kernel, dtype, causal."""
    given = report.assumptions
    if not given:
        return ""
    if report.command in COUNTED:
        parts = [f"counts {COUNTED[report.command]}"]
    elif report.command == "conventions":
        parts = []
    else:
        parts = [f"counts {given['counts']}", f"leaves out {given['leaves_out']}", f"convention {given['convention']}"]
    if report.command in RUN_SHOWN:
        parts += [f"{key} {_words(value)}" for key, value in given["running"].items()]
    if report.command == "kv":
        parts += [f"dtype {given['dtype']}"]
    elif report.command != "params":
        shown = ("implementation", "semantics", "attention", "dtype", "causal")
        parts += [f"{key} {given[key]}" for key in shown if given[key]]
        if given["kernel"] == "math" != given["attention"]:
            parts.append("the math kernel runs: this flash kernel has no dropout")
    parts += [f"{key} {given[key]}" for key in ("routing", "vocabulary", "window") if key in given]
    if "stored_dtype" in given and report.command != "params":
        parts.append(f"the config's dtype {given['stored_dtype']}")
    if given["ignored_keys"]:
        parts.append("ignored keys " + ", ".join(given["ignored_keys"]))
    return "Assumptions: " + "; ".join(parts)


RUN_SHOWN = ("memory", "fit", "kv")


def _words(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return "x".join(str(each) for each in value)
    return str(value)


def _code(value: Any) -> str:
    """A Markdown cell; a closed form is code, as the documents write it."""
    return f"`{value.written()}`" if hasattr(value, "written") else _cell(value)


def _is_text(column: Sequence[Any]) -> bool:
    return any(isinstance(value, (str, list)) for value in column)


def _pipe(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "_": r"\_", "&": r"\&", "%": r"\%", "#": r"\#", "$": r"\$", "^": r"\^{}", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "<": r"$<$", ">": r"$>$", "|": r"$|$", "*": r"$*$", "√": r"$\surd$",
    "ᵀ": r"$^{T}$", "²": r"$^{2}$", "³": r"$^{3}$", "·": r"$\cdot$",
})  # fmt: skip


def _latex(text: str) -> str:
    return text.translate(LATEX).replace("-$>$", r"$\to$")


def _math(value: Any) -> str:
    return f"${value.written('latex')}$" if hasattr(value, "written") else _latex(_cell(value))
