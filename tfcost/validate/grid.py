"""The standard grid of ``tfcost validate``: what the reference can be, in combinations that meet each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import prod
from typing import Any

from tfcost.point import point_of
from tfcost.validate.compare import Case


def grid(count: int) -> Iterator[Case]:
    """The standard grid: ``count`` of its combinations, evenly spread, the same ones every time.

    The whole is the product of the choices below. A stride that shares no factor with any of them meets every value,
    and every pair of values, early.
    """
    sizes = ((2, 16, 12, 32, 4, 2), (1, 13, 7, 24, 3, 1), (3, 8, 11, 64, 4, 3))
    dropouts = (
        (0.0, 0.0, 0.0, 0.0),
        (0.1, 0.1, 0.0, 0.1),
        (0.1, 0.0, 0.0, 0.0),
        (0.0, 0.1, 0.0, 0.0),
        (0.1, 0.1, 0.1, 0.0),
    )
    choices: tuple[tuple[Any, ...], ...] = (
        sizes,
        ("decoder", "encoder", "encoder-decoder"),
        ("gelu", "relu", "silu"),
        ("mlp", "glu"),
        ("layernorm", "rmsnorm"),
        (True, False),
        (True, False),
        dropouts,
        ("bf16", "fp32", "fp16"),
        ("eager", "flash", "math"),
        (False, True),
        ("sinusoidal", "learned", "rotary", "none"),
        (True, False),
    )
    total = prod(len(each) for each in choices)
    stride = 104_729  # a prime, so coprime to the lengths above, whose factors are 2, 3 and 5
    every = (_unravel(index * stride % total, choices) for index in range(total))
    return islice((_case(index, *picked) for index, picked in enumerate(every)), count)


def _unravel(index: int, choices: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
    picked = []
    for each in choices:
        index, rest = divmod(index, len(each))
        picked.append(each[rest])
    return tuple(picked)


def _case(
    index: int,
    sizes: tuple[int, ...],
    arch: str,
    activation: str,
    ffn: str,
    norm: str,
    pre_norm: bool,
    bias: bool,
    dropouts: tuple[float, ...],
    dtype: str,
    attention: str,
    grouped: bool,
    positions: str,
    tied: bool,
) -> Case:
    batch, length, source, hidden, heads, layers = sizes
    residual, weights, inner, embedding = dropouts
    two = arch == "encoder-decoder"
    point = point_of(
        None,
        batch=batch,
        seq_len=length,
        src_len=source if two else None,
        attention=attention,
        arch=arch,
        hidden=hidden,
        heads=heads,
        kv_heads=1 if grouped else heads,
        layers=layers,
        vocab=None if positions == "none" else 40 + index % 7,
        ffn_hidden=4 * hidden + index % 3,
        activation=activation,
        ffn=ffn,
        norm=norm,
        pre_norm=pre_norm,
        final_norm=index % 2 == 0,
        bias=bias,
        tied=tied,
        positions=positions,
        max_positions=24,
        dropout=residual,
        attention_dropout=weights,
        ffn_dropout=inner,
        embedding_dropout=embedding,
        dtype=dtype,
    )
    fvcore = attention == "eager" and dtype == "fp32" and residual == 0  # the others would trace the same again
    return Case(point.analysis.cfg, point.analysis.run, dtype, fvcore)
