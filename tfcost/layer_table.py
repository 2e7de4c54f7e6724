"""Kinds of layers beside each other, as in table 1 of Vaswani et al. 2017, arXiv:1706.03762, with exact figures.

Per layer of width d over N tokens: forward FLOPs, parameters, bytes kept for backward, the operations that must run one
after another, the longest path between two tokens, and the lengths at which two kinds cost the same.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

import sympy
from sympy import Expr

from tfcost.errors import InputError
from tfcost.models import Model
from tfcost.notation import plain, symbol
from tfcost.point import assumptions_of, point_of
from tfcost.report import Report
from tfcost.symbols import ClosedForms, beyond_windows

N, K, W = symbol("N"), symbol("k"), symbol("w")
LOG = sympy.ceiling(sympy.log(N) / sympy.log(K))

HEAD_WIDTH = 64
"""Width of a head where none is stated, as in the paper's models (section 3.2.2)."""


class Growth(NamedTuple):
    """How a kind of layer grows: its work, the operations one after another, and the steps between two tokens."""

    work: Expr
    sequential: Expr
    path: Expr


D, ONE = symbol("d"), sympy.Integer(1)
GROWTH = {
    "transformer": Growth(N**2 * D, ONE, ONE),
    "attention": Growth(N**2 * D, ONE, ONE),
    "restricted": Growth(N * W * D, ONE, N / W),
    "rnn": Growth(N * D**2, N, N),
    "lstm": Growth(N * D**2, N, N),
    "gru": Growth(N * D**2, N, N),
    "conv": Growth(N * K * D**2, ONE, LOG),  # the path is that of dilated ones, N/k of those that are not
}
"""The orders of growth of the paper's table 1: of attention the square alone, without projections and feed-forward."""

FIGURES = ("forward_flops", "parameters", "activation_bytes")


def compare_layers(specs: list[tuple[str, Model, dict[str, Any]]], **given: Any) -> Report:
    """Figures, closed forms and crossings of kinds of layers; ``specs`` are names, models and what-ifs."""
    if given.get("seq_len") is None:
        given["seq_len"] = 512
    hidden = given.get("hidden")
    if hidden is None:
        raise InputError("missing -d/--hidden, the width of the layers")
    if given.get("heads") is None and hidden % HEAD_WIDTH == 0:
        given["heads"] = hidden // HEAD_WIDTH
    rows: list[dict[str, Any]] = []
    forms: dict[str, dict[str, Expr]] = {}
    values: dict[Any, int] = {}
    first: Any = None
    points: list[tuple[str, Any]] = []
    for name, model, what_if in specs:
        kind = name.partition(":")[0].partition(" ")[0].lower()
        fields = {key: value for key, value in {**given, **what_if, "layers": 1}.items() if fits(kind, key)}
        if kind == "restricted":
            if fields.get("window") is None:
                raise InputError("restricted attention needs --window, the keys that a query sees")
            fields["attention"] = "flash"  # the eager kernel computes the whole square
        point = point_of(model, **fields)
        first = first or point
        points.append((kind, point.analysis.cfg))
        closed = ClosedForms(point.analysis.cfg, point.analysis.run, point.analysis.options, "flops", "total")
        found = {key: form.subs(symbol("l"), 1) for key, form in closed.totals(FIGURES).items()}
        growth = GROWTH[kind]
        values |= closed.values
        forms[name] = {"order": GROWTH[kind].work, **found}
        row: dict[str, Any] = {"layer": name, "order_of_work": plain(growth.work)}
        for key in FIGURES:
            row |= {key: point.analysis.totals()[key], f"{key}_formula": plain(found[key])}
        for key, form in (("sequential_operations", growth.sequential), ("maximum_path_length", growth.path)):
            here = form.subs({letter: sympy.Integer(size) for letter, size in closed.values.items()})
            row |= {key: int(sympy.ceiling(here)), f"{key}_formula": plain(form)}
        rows.append(row)
    assumptions = assumptions_of(first.analysis)
    models = {name: {**model.stated, **what_if} for name, model, what_if in specs}
    inputs = {"batch": first.analysis.run.batch, "seq_len": first.analysis.run.seq_len, "hidden": hidden}
    inputs |= {field: value for field in SHOWN if (value := _shared(field, points)) is not None}
    return Report(
        "compare", {"models": models}, inputs, assumptions, {}, lambda: rows, None, (), ["layer"],
        {"crossovers": list(crossings(forms, values))},
    )  # fmt: skip


SHOWN = ("heads", "window", "kernel")
"""Sizes that the closed forms of some kinds have beside N and d."""


def _shared(field: str, points: list[tuple[str, Any]]) -> Any:
    """The value of a field in all layers that have it; None where none has it, or each its own."""
    values = {getattr(cfg, field) for kind, cfg in points if fits(kind, field)} - {None}
    return values.pop() if len(values) == 1 else None


def fits(kind: str, key: str) -> bool:
    """Whether a flag says something of a kind of layer."""
    only: dict[str, tuple[str, ...]] = {
        "heads": ("transformer", "attention", "restricted"), "ffn_hidden": ("transformer",),
        "window": ("restricted",), "kernel": ("conv",), "gate_biases": ("rnn", "lstm", "gru"),
        "attention": ("transformer", "attention"),
    }  # fmt: skip
    return kind in only.get(key, (kind,))


UNITS = {
    "order": "the orders of work", "forward_flops": "forward FLOPs", "activation_bytes": "bytes kept for backward",
}  # fmt: skip


def crossings(forms: dict[str, dict[str, Expr]], values: dict[Any, int]) -> list[dict[str, Any]]:
    """For each pair of kinds: the length at which their figures are equal, and which costs less below or everywhere."""
    found = []
    for key, unit in UNITS.items():
        for one, other in combinations(forms, 2):
            difference = sympy.expand(sympy.cancel((forms[one][key] - forms[other][key]) / N))
            if difference == 0:
                continue
            length = _root(difference)
            at = None if length is None else length.subs(values)
            if at is None or not at >= 1:
                length = at = None
            near, far = [_sign(difference.subs({**values, N: each})) for each in (1, FAR)]
            cheaper = {-1: one, 0: "", 1: other}
            found.append({
                "what": f"{unit}, {one} and {other}", "less_below": cheaper[near], "less_beyond": cheaper[far],
                "length": None if length is None else plain(length),
                "at": None if at is None else int(at) if at.is_Integer else float(at),
            })  # fmt: skip
    return found


def _root(difference: Expr) -> Expr | None:
    """Where a difference that is linear in N is zero; None where it is constant."""
    difference = beyond_windows(difference)
    slope, constant = difference.coeff(N, 1), difference.coeff(N, 0)
    return None if slope == 0 or constant == 0 else sympy.cancel(-constant / slope)


FAR = 10**30
"""Beyond every crossing of layers that fit on this planet."""


def _sign(difference: Expr) -> int:
    return int(sympy.sign(difference))
