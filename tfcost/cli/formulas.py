"""``tfcost formula`` and ``explain``: closed forms without numbers, and a walk through one layer."""

from __future__ import annotations

from typing import Any

from tfcost.cli.options import COUNTING, MODEL_FLAGS, OUTPUT, PASS, ROWS, STORAGE, AppFor, Flag, command_app
from tfcost.cli.output import emit
from tfcost.config import as_dict
from tfcost.errors import InputError
from tfcost.models import load
from tfcost.point import assumptions_of, point_of
from tfcost.report import Report

FLAGS = (*PASS, *MODEL_FLAGS, *COUNTING, *STORAGE, *[flag for flag in ROWS if flag.keyword == "by"], *OUTPUT)

LENGTHS = ("batch", "seq_len", "src_len", "frames")
"""What a closed form holds for any of."""

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
    from tfcost.crossings import against_the_full_square
    from tfcost.notation import plain
    from tfcost.symbols import closed_forms, crossovers

    keywords = single(values, FLAGS)
    for length in LENGTHS:
        keywords.pop(length, None)  # a closed form holds for every b and N
    source = None if model is None else load(model)
    forms = closed_forms(source, **keywords)
    by = keywords.get("by", "component")
    if by == "layer":
        raise InputError("--by layer has no closed form of its own; use component or op")
    # A weight or a kept tensor may have another count than its op (shared layers): then it has a row of its own.
    rows: dict[tuple[str, Any], dict[str, Any]] = {}
    for command, figure in QUANTITIES.items():
        for row in forms.analysis.rows(command, by):
            path = row["path"]
            if by == "op" and command != "flops" and "/" in path:
                path = path.rpartition("/")[0]  # a parameter or a kept tensor stands one step below its op
            zeros = dict.fromkeys(QUANTITIES.values(), 0)
            entry = rows.setdefault((path, row["count"]), {"path": path, "count": row["count"], **zeros})
            entry[figure] += row[f"{figure}_each"]
    table = [{key: value if key == "path" else plain(value) for key, value in row.items()} for row in rows.values()]
    two = " (T = S = N)" if forms.analysis.run.src_len is not None else ""
    crossing = [
        {"what": each.what + two, "against": each.against,
         "length": None if each.length is None else plain(each.length),
         "at": None if each.length is None else _number(each.length, forms.values)}
        for each in (*crossovers(forms), *against_the_full_square(forms))
    ]  # fmt: skip
    assumptions = assumptions_of(forms.analysis)
    name = None if source is None else source.name
    return Report(
        "formula", {"name": name} | {key: _plain(value) for key, value in as_dict(forms.analysis.cfg).items()}, {},
        assumptions, {}, lambda: table, lambda: forms, (), (), {"crossovers": crossing, "ranges": by_range(forms)},
    )  # fmt: skip


def by_range(forms: Any) -> list[dict[str, Any]]:
    """The totals that a window bounds, per range of lengths (:func:`tfcost.symbols.ranges`)."""
    from tfcost.notation import plain
    from tfcost.symbols import ranges

    found: dict[str, dict[str, Any]] = {}
    for key, value in forms.totals().items():
        for where, expression in ranges(value).items():
            found.setdefault(where, {})[key] = plain(expression)
    return [{"where": where, "formulas": formulas} for where, formulas in found.items()]


def _number(length: Any, values: dict[Any, Any]) -> int | float | None:
    """A length at the sizes of a model; None where some of them have no value."""
    value = length.subs({letter: size for letter, size in values.items() if isinstance(size, int)})
    return None if value.free_symbols else int(value) if value.is_Integer else float(value)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def explain(model: str | None, values: dict[str, Any]) -> Report:
    """One layer, step by step, with the symbols and (where sizes are given) the numbers."""
    from tfcost.explain import remarks, steps, sums
    from tfcost.symbols import closed_forms

    keywords = single(values, FLAGS)
    keywords.pop("by", None)
    source = None if model is None else load(model)
    structure = {key: value for key, value in keywords.items() if key not in LENGTHS}
    forms = closed_forms(source, **structure)
    symbolic = steps(forms.analysis)
    rows = [_symbolic(step) for step in symbolic]
    layers = [_symbolic(layer) for layer in sums(forms.analysis, symbolic)]
    described = source is None or not source.from_config
    if described and not {"hidden", "heads"} <= keywords.keys() and not (source and "hidden" in keywords):
        return Report(
            "explain", {"name": None}, {}, assumptions_of(forms.analysis), {}, lambda: rows, None, (), (),
            {"layers": layers},
        )  # fmt: skip
    if described:
        keywords.setdefault("layers", 1)
    point = point_of(source, **keywords)
    numeric = steps(point.analysis)
    for row, step in zip(rows, numeric, strict=True):
        row |= {"shapes_here": step["shapes"]} | {key: step[key] for key in FIGURES if key in step}
    for layer, numbers in zip(layers, sums(point.analysis, numeric), strict=True):
        layer |= numbers
    report = point.report("explain", "op", False)
    return Report(
        "explain", report.model, report.inputs, report.assumptions, {}, lambda: rows, None, report.warnings, (),
        {"layers": layers, "remarks": remarks(point.analysis.cfg, point.analysis.run.seq_len)},
    )  # fmt: skip


FIGURES = {"flops_each": "flops_formula", "bytes_each": "bytes_formula", "bytes_once": "bytes_once_formula"}
"""The figures of a step, and the keys of their closed forms."""


def _symbolic(step: dict[str, Any]) -> dict[str, Any]:
    """A step with its figures as closed forms."""
    from tfcost.notation import plain

    return {FIGURES.get(key, key): plain(value) if key in FIGURES else value for key, value in step.items()}


ACTIONS = {"formula": formula, "explain": explain}

HELP = {
    "formula": "Closed forms: totals, per component or op, and the length where attention overtakes the rest.",
    "explain": "Walk through one layer: shapes, FLOPs and what is kept for backward, with symbols and numbers.",
}


def app(name: str) -> AppFor:
    """The app of one of the commands."""
    return command_app(name, HELP[name], FLAGS, lambda model, values: emit(ACTIONS[name](model, values), values))
