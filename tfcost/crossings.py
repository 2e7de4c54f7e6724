"""Where costs cross: attention that does less than the full square against attention that does it all."""

from __future__ import annotations

from typing import Any

import sympy
from sympy import Expr

from tfcost.analysis import Analysis
from tfcost.notation import symbol
from tfcost.symbols import ClosedForms, Crossover, beyond_windows

FULL: dict[str, Any] = {
    "attention_kind": "softmax", "features": None, "hashes": None, "buckets": None, "chunk_length": None,
    "window": None, "local_layers": None, "local_dense_layers": 0,
}  # fmt: skip
"""The fields that leave the full square."""


def against_the_full_square(forms: ClosedForms) -> list[Crossover]:
    """From which N on windows, hashing or random features cost less than the same model's full square.

    Of FLOPs, in all layers: those of the full square are aN² + bN, those of the other cN² + dN beyond its window, and
    they are equal at N = (d - b)/(a - c). A window under a kernel that computes the whole square saves nothing.
    """
    cfg, run = forms.analysis.cfg, forms.analysis.run
    if cfg.attention_kind not in ("linear", "lsh") and cfg.window is None:
        return []
    full = Analysis(cfg._replace(**FULL), run, forms.analysis.options)
    n = symbol("N")
    same = {symbol("T"): n, symbol("S"): n}
    own, other = [beyond_windows(forward(each)).subs(same) for each in (forms.analysis, full)]
    difference = sympy.expand(other - own)
    square, linear = difference.coeff(n, 2), difference.coeff(n, 1)
    length = None if square == 0 else sympy.cancel(-linear / square)
    return [Crossover("forward FLOPs", length, "the full square")]


def forward(analysis: Analysis) -> Expr:
    """Forward FLOPs as an expression."""
    return sympy.expand(sympy.sympify(analysis.flops["forward_flops"]))
