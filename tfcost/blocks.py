"""Attention, feed-forward and the layer around them, as compositions of :mod:`tfcost.ops`.

Axis letters: b batch, n query tokens, m key tokens, d hidden, h key/value heads, g query heads per key/value head,
k head_dim, f ffn, e embedding, v vocabulary. Heads are projected straight onto their axes (``b n d, d h g k -> b n h g
k``), since a view that makes a new tensor would break the counting by identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tfcost import ops
from tfcost.config import ModelConfig
from tfcost.graph import Graph, Size, Tensor, Work, div


class Run(NamedTuple):
    """One pass: b sequences of N tokens (and S source tokens), and the attention kernel.

    ``attention``: ``"eager"`` and ``"math"`` keep the score square, ``"flash"`` recomputes it in backward and visits
    only a window's keys.
    """

    batch: Size
    seq_len: Size
    src_len: Size | None = None
    attention: str = "eager"


def attention(
    g: Graph,
    name: str,
    x: Tensor,
    source: Tensor,
    cfg: ModelConfig,
    run: Run,
    *,
    causal: bool = False,
    window: Size | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Multi-head attention of ``x`` (b n d) to ``source`` (b m d; the same tensor in self-attention).

    Grouped heads (GQA, MQA) project fewer keys and values; the scores do not change: QKᵀ and PV are b h N M d_k MACs
    each, h the *query* heads. FLOPs for d = h d_k, M = N: 6bNd² + 2bN²d + 2bN²d + 2bNd². Keeps 11bNd + 5bN²h bytes.
    """
    d, heads_kv, width = cfg.hidden, cfg.kv_heads, cfg.head_dim
    group = div(cfg.heads, heads_kv, "-h/--heads", "--kv-heads")
    bias = cfg.attention_bias
    with g.scope(name):
        query = ops.linear(g, "query", "b n d, d h g k -> b n h g k", x, (d, heads_kv, group, width), bias)
        key = ops.linear(g, "key", "b m d, d h k -> b m h k", source, (d, heads_kv, width), bias)
        value = ops.linear(g, "value", "b m d, d h k -> b m h k", source, (d, heads_kv, width), bias)
        if cfg.positions == "rotary":
            query, key = ops.rotary(g, "rotary_query", query), ops.rotary(g, "rotary_key", key)
        heads = _attend(g, query, key, value, cfg, run, causal, window, position_bias)
        out = ops.linear(
            g, "output", "b n h g k, h g k d -> b n d", heads, (heads_kv, group, width, d), cfg.attention_output_bias
        )
        return ops.dropout(g, "output_dropout", out, cfg.dropout)


def _attend(
    g: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cfg: ModelConfig,
    run: Run,
    causal: bool,
    window: Size | None,
    position_bias: Tensor | None,
) -> Tensor:
    """softmax(QKᵀ/√d_k + M) V, M = 0 or -inf, by the kernel of ``run``.

    Eager computes and keeps the full square whatever the mask or window, as PyTorch does. Flash visits
    ``least(m, window)`` keys per query.
    """
    eager = run.attention != "flash"
    visited = ("m", window) if window is not None and not eager else None
    scores = ops.contract(
        g, "scores", "b n h g k, b m h k -> b h g n m", query, key, kind="scores", keep=eager, causal=causal, window=visited
    )
    macs = g.ops[-1].forward.macs
    if position_bias is not None:
        scores = ops.add(g, "position_bias", scores, position_bias)
    weights = ops.softmax(g, "softmax", scores, keep=eager)
    weights = ops.dropout(g, "dropout", weights, cfg.attention_dropout, keep=eager)
    out = ops.contract(
        g, "weighted_sum", "b h g n m, b m h k -> b n h g k", weights, value, kind="weighted_sum", keep=eager,
        causal=causal, window=visited,
    )  # fmt: skip
    return out if eager else ops.fused_attention(g, "flash", query, key, value, out, Work(macs))


def feed_forward(g: Graph, name: str, x: Tensor, cfg: ModelConfig) -> Tensor:
    """Two matrices around an activation, or the gated three (GLU, Shazeer 2020, arXiv:2002.05202).

    ``down(act(up x))``, 8bNd² + 8bNd² FLOPs for d_ff = 4d, keeping 19bNd bytes; gated ``down(act(gate x) * up x)``.
    """
    d, f, bias = cfg.hidden, cfg.ffn_hidden, cfg.ffn_bias
    with g.scope(name):
        if cfg.ffn == "glu":
            gate = ops.linear(g, "gate", "b n d, d f -> b n f", x, (d, f), bias)
            gate = ops.activation(g, "activation", gate, cfg.activation)
            inner = ops.linear(g, "up", "b n d, d f -> b n f", x, (d, f), bias)
            inner = ops.multiply(g, "product", gate, inner)
        else:
            inner = ops.linear(g, "up", "b n d, d f -> b n f", x, (d, f), bias)
            inner = ops.activation(g, "activation", inner, cfg.activation)
        inner = ops.dropout(g, "dropout", inner, cfg.ffn_dropout)
        out = ops.linear(g, "down", "b n f, f d -> b n d", inner, (f, d), bias)
        return ops.dropout(g, "output_dropout", out, cfg.dropout)


def norm(g: Graph, name: str, x: Tensor, cfg: ModelConfig) -> Tensor:
    """The model's norm over the hidden axis: 2d parameters (LayerNorm), d (RMSNorm, or no bias)."""
    return ops.norm(g, name, x, cfg.norm, cfg.norm_bias)


def residual(g: Graph, name: str, x: Tensor, cfg: ModelConfig, branch: Callable[[Tensor], Tensor]) -> Tensor:
    """A residual branch and its norm: pre-norm ``x + f(norm x)``, post-norm ``norm(x + f(x))``."""
    inner = norm(g, f"{name}_norm", x, cfg) if cfg.pre_norm else x
    out = ops.add(g, f"{name}_residual", x, branch(inner))
    return out if cfg.pre_norm else norm(g, f"{name}_norm", out, cfg)


def layer(
    g: Graph,
    x: Tensor,
    cfg: ModelConfig,
    run: Run,
    *,
    causal: bool,
    memory: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Self-attention, cross-attention to ``memory`` where there is one, and a feed-forward, each a residual branch.

    Forward 24bNd² + 4bN²d FLOPs, 12d² + 13d parameters, 34bNd + 5bN²h bytes kept; with cross-attention to S tokens
    28bTd² + 4bSd² + 4bT²d + 4bTSd FLOPs and 16d² + 19d parameters.
    """
    x = residual(
        g, "attention", x, cfg,
        lambda y: attention(g, "attention", y, y, cfg, run, causal=causal, position_bias=position_bias),
    )  # fmt: skip
    if memory is not None:
        x = residual(
            g, "cross_attention", x, cfg, lambda y: attention(g, "cross_attention", y, memory, cfg, run)
        )
    return residual(g, "mlp", x, cfg, lambda y: feed_forward(g, "mlp", y, cfg))
