"""Attention by random features, linear in N: FAVOR+ of the Performer.

Choromanski et al. 2021, arXiv:2009.14794, sections 2.2 to 2.4. Axis letters beyond those of :mod:`tfcost.blocks`: r
random features.
"""

from __future__ import annotations

from tfcost import blocks, ops
from tfcost.blocks import Run, Square
from tfcost.config import ModelConfig
from tfcost.errors import InputError
from tfcost.graph import Graph, Size, Tensor, Work


def heads(g: Graph, x: Tensor, source: Tensor, values: Tensor, cfg: ModelConfig, run: Run, square: Square) -> Tensor:
    """Q'(K'ᵀV) over Q'(K'ᵀ1), Q' and K' of m positive features each: bNh·2m(2d_k + 2d_v + 1) FLOPs, whatever N is.

    There is no score square, and so no kernel, no window and no dropout of its weights. Causal attention sums K'ᵀV up
    to each token: the same products; its kernel keeps what it reads rather than N sums of m x d_v.
    """
    if square.window is not None or square.position_bias is not None or cfg.attention_sinks:
        raise InputError("--attention-kind linear has no scores: no --window, no bias of positions, no sinks")
    query, key, value = blocks.project_heads(g, x, source, values, cfg)
    query, key = features(g, "query_features", query, cfg), features(g, "key_features", key, cfg)
    if square.causal:
        total = sum_tokens(g, "key_sum", key, key.axes, key.shape)
        norm = ops.contract(g, "normaliser", "b n h g r, b n h r -> b n h g", query, total, kind="mixing")
        out = prefix_sums(g, "prefix_sums", query, key, value)
    else:
        total = sum_tokens(g, "key_sum", key, ("b", "h", "r"), (key.shape[0], *key.shape[2:]))
        norm = ops.contract(g, "normaliser", "b n h g r, b h r -> b n h g", query, total, kind="mixing")
        summary = ops.contract(g, "key_values", "b m h r, b m h k -> b h r k", key, value, kind="mixing")
        out = ops.contract(g, "read", "b n h g r, b h r k -> b n h g k", query, summary, kind="mixing")
    with g.scope("normalised"):
        return ops.multiply(g, "quotient", out, norm)  # as a product's, a quotient's gradients need both


def features(g: Graph, name: str, x: Tensor, cfg: ModelConfig) -> Tensor:
    """exp(ωᵀx - |x|²/2 - log(m)/2) for m random directions ω, drawn once and not trained: 2m d_k FLOPs per vector.

    Backward has one product: ω needs no gradient. Keeps x, of which the square is taken, and the features.
    """
    with g.scope(name):
        out = g.tensor("projection", (*x.axes[:-1], "r"), (*x.shape[:-1], cfg.features), grad=x.grad)
        macs = x.numel * cfg.features
        g.add("mixing", "projection", (x,), out, Work(macs), Work(macs))
        less = g.tensor("less_square", out.axes, out.shape, grad=x.grad)
        work = Work(0, x.numel + out.numel)
        g.add("multiply", "less_square", (out, x), less, work, work, (), (x,))
        return ops.squash(g, "exp", less, "exp")


def sum_tokens(g: Graph, name: str, x: Tensor, axes: tuple[str, ...], shape: tuple[Size, ...]) -> Tensor:
    """The sum over all tokens, or up to each: its gradient needs nothing."""
    work = Work(0, x.numel)
    return g.add("add", name, (x,), g.tensor(name, axes, shape, grad=x.grad), work, work)


def prefix_sums(g: Graph, name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each query's product with the sum of K'ᵀV up to it: the products of the two contractions that it fuses.

    Backward makes the sums again, which is no gradient.
    """
    out = g.tensor(name, (*query.axes[:-1], value.axes[-1]), (*query.shape[:-1], value.shape[-1]))
    summed, read = key.numel * value.shape[-1], query.numel * value.shape[-1]
    forward, backward = Work(summed + read), Work(2 * (summed + read))
    saves = (query, key, value)
    return g.add("mixing", name, saves, out, forward, backward, (), saves, None, Work(summed))
