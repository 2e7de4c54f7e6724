"""``tfcost formula`` and ``explain``: closed forms without numbers, and a walk through one layer."""

from __future__ import annotations

from typing import Any

import typer

from tfcost.analysis import Analysis, point_of
from tfcost.cli.options import COUNTING, OUTPUT, PASS, ROWS, STORAGE, STRUCTURE, Flag, command_app
from tfcost.cli.output import emit
from tfcost.errors import InputError
from tfcost.models import load
from tfcost.report import Report

FLAGS = (*PASS, *STRUCTURE, *COUNTING, *STORAGE, *[flag for flag in ROWS if flag.keyword == "by"], *OUTPUT)

QUANTITIES = {"flops": "flops", "params": "parameters", "memory": "bytes"}


def single(values: dict[str, Any], flags: tuple[Flag, ...]) -> dict[str, Any]:
    """The keywords of one point: a list of sizes has no one answer here."""
    keywords = {key: value for key, value in values.items() if key not in {flag.keyword for flag in OUTPUT}}
    for flag in flags:
        if flag.kind == "counts" and flag.keyword in keywords:
            if len(keywords[flag.keyword]) > 1:
                raise InputError(f"{flag.label} takes one value here, not a list")
            keywords[flag.keyword] = keywords[flag.keyword][0]
    return keywords


def formula(model: str | None, values: dict[str, Any]) -> Report:
    """The closed forms: totals, per component or op, and the crossovers."""
    from tfcost.symbols import closed_forms, crossovers, plain

    keywords = single(values, FLAGS)
    for length in ("batch", "seq_len", "src_len", "implementation"):
        keywords.pop(length, None)  # a closed form holds for every b and N
    source = None if model is None else load(model)
    forms = closed_forms(source, **keywords)
    by = keywords.get("by", "component")
    if by == "layer":
        raise InputError("--by layer has no closed form of its own; use component or op")
    rows: dict[str, dict[str, Any]] = {}
    for command, figure in QUANTITIES.items():
        for row in forms.analysis.rows(command, by):
            # A parameter or a kept tensor stands one step below its op.
            path = (
                row["path"].rpartition("/")[0]
                if by == "op" and command != "flops" and "/" in row["path"]
                else row["path"]
            )
            entry = rows.setdefault(
                path, {"path": path, "count": row["count"], **dict.fromkeys(QUANTITIES.values(), 0)}
            )
            entry[figure] += row[f"{figure}_each"]
    table = [{key: value if key == "path" else plain(value) for key, value in row.items()} for row in rows.values()]
    crossing = [
        {"what": each.what, "length": None if each.length is None else plain(each.length)} for each in crossovers(forms)
    ]
    assumptions = assumed(forms.analysis, keywords)
    name = None if source is None else source.name
    return Report(
        "formula", {"name": name} | {key: _plain(value) for key, value in forms.analysis.cfg._asdict().items()}, {},
        assumptions, {}, lambda: table, lambda: forms, (), (), {"crossovers": crossing},
    )  # fmt: skip


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def assumed(analysis: Analysis, keywords: dict[str, Any]) -> dict[str, Any]:
    """The assumptions of a report that no single point stands behind."""
    convention = analysis.options.convention
    return {
        "convention": convention.name, "implementation": "document", "attention": analysis.run.attention,
        "dtype": keywords.get("dtype", "bf16"), "causal": keywords.get("causal", "full"),
        "counts": convention.counts, "leaves_out": convention.leaves_out, "ignored_keys": [],
    }  # fmt: skip


def explain(model: str | None, values: dict[str, Any]) -> Report:
    """One layer, step by step, with the symbols and (where sizes are given) the numbers."""
    from tfcost.explain import remarks, steps
    from tfcost.symbols import closed_forms, plain

    keywords = single(values, FLAGS)
    keywords.pop("by", None)
    source = None if model is None else load(model)
    structure = {
        key: value for key, value in keywords.items() if key not in ("batch", "seq_len", "src_len", "implementation")
    }
    forms = closed_forms(source, **structure)
    symbolic = steps(forms.analysis)
    rows = [
        {"path": step["path"], "what": step["what"], "shapes": step["shapes"], "keeps": step["keeps"],
         "flops_formula": plain(step["flops_each"]), "bytes_formula": plain(step["bytes_each"])}
        for step in symbolic
    ]  # fmt: skip
    if source is None and not {"hidden", "heads"} <= keywords.keys():
        return Report("explain", {"name": None}, {}, assumed(forms.analysis, keywords), {}, lambda: rows)
    if source is None:
        keywords.setdefault("layers", 1)
    point = point_of(source, **keywords)
    for row, step in zip(rows, steps(point.analysis), strict=True):
        row |= {"shapes_here": step["shapes"], "flops_each": step["flops_each"], "bytes_each": step["bytes_each"]}
    report = point.report("explain", "op", False)
    return Report(
        "explain", report.model, report.inputs, report.assumptions, {}, lambda: rows, None, report.warnings, (),
        {"remarks": remarks(point.analysis.cfg, point.analysis.run.seq_len)},
    )  # fmt: skip


ACTIONS = {"formula": formula, "explain": explain}

HELP = {
    "formula": "Closed forms: totals, per component or op, and the length where attention overtakes the rest.",
    "explain": "Walk through one layer: shapes, FLOPs and what is kept for backward, with symbols and numbers.",
}


def app(name: str) -> typer.Typer:
    """The app of one of the commands."""
    return command_app(name, HELP[name], FLAGS, lambda model, values: emit(ACTIONS[name](model, values), values))
