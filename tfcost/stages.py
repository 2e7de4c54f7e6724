"""The closed forms of models whose stages differ (Swin)."""

from __future__ import annotations

import sympy
from sympy import Expr

from tfcost.config import ModelConfig, Stage


def symbolic_stages(cfg: ModelConfig, d: Expr, h: Expr, n: Expr) -> tuple[Stage, ...]:
    """The stages of a Swin in N (patches of the first), d, h and w, where windows cover every grid without padding.

    Where they do not, the tokens are the numbers that they are; so are widths and heads that do not double.
    """
    first = cfg.stages[0]
    whole = all(each.covered == each.tokens == first.tokens / 4**i for i, each in enumerate(cfg.stages))
    doubled = all(each.heads == first.heads * 2**i for i, each in enumerate(cfg.stages))
    wide = all(each.ffn_hidden == cfg.ffn_ratio * each.hidden for each in cfg.stages)
    stages = []
    for index, stage in enumerate(cfg.stages):
        tokens, width = n / 4**index, d * 2**index
        stages.append(
            Stage(
                stage.layers,
                h * 2**index if doubled else stage.heads,
                width,
                sympy.nsimplify(cfg.ffn_ratio) * width if wide else stage.ffn_hidden,
                tokens if whole else stage.tokens,
                tokens if whole else stage.covered,
            )
        )
    return tuple(stages)
