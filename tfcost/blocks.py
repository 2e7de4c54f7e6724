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
from tfcost.errors import InputError
from tfcost.graph import Graph, Size, Tensor, Work, div
from tfcost.implementation import Implementation


class Run(NamedTuple):
    """One pass: b sequences of N tokens (and S source tokens), and the attention kernel.

    ``attention``: ``"eager"`` and ``"math"`` keep the score square, ``"flash"`` recomputes it in backward and visits
    only a window's keys. ``context`` tokens came before: their keys and values are in a cache (decoding).
    """

    batch: Size
    seq_len: Size
    src_len: Size | None = None
    attention: str = "eager"
    context: Size = 0


def attention(
    g: Graph,
    name: str,
    x: Tensor,
    source: Tensor,
    cfg: ModelConfig,
    run: Run,
    *,
    values: Tensor | None = None,
    causal: bool = False,
    window: Size | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Multi-head attention of ``x`` (b n d) to ``source`` (b m d; the same tensor in self-attention).

    Grouped heads (GQA, MQA) project fewer keys and values; the scores do not change: QKᵀ and PV are b h N M d_k MACs
    each, h the *query* heads. FLOPs for d = h d_k, M = N: 6bNd² + 2bN²d + 2bN²d + 2bNd². Keeps 11bNd + 5bN²h bytes.
    ``values`` is read instead of ``source`` for V. A projection is as wide as what it reads (MobileBERT's bottleneck).
    """
    heads_kv, width = cfg.kv_heads, cfg.head_dim
    group = div(cfg.heads, heads_kv, "-h/--heads", "--kv-heads")
    bias = cfg.attention_bias
    values = source if values is None else values
    with g.scope(name):
        query = ops.linear(
            g, "query", "b n d, d h g k -> b n h g k", x, (x.shape[-1], heads_kv, group, width), bias
        )  # fmt: skip
        key = ops.linear(g, "key", "b m d, d h k -> b m h k", source, (source.shape[-1], heads_kv, width), bias)
        value = ops.linear(g, "value", "b m d, d h k -> b m h k", values, (values.shape[-1], heads_kv, width), bias)
        if cfg.qk_norm:
            query = ops.norm(g, "query_norm", query, cfg.qk_norm, cfg.qk_norm == "layernorm")
            key = ops.norm(g, "key_norm", key, cfg.qk_norm, cfg.qk_norm == "layernorm")
        # Positions of two sequences have no distance to each other: cross-attention does not rotate.
        if cfg.positions == "rotary" and x is source:
            table = None
            if g.implementation.rotary_table:
                table = g.tensor("rotary_table", ("n", "k"), (x.shape[1], width), grad=False)
            query, key = ops.rotary(g, "rotary_query", query, table), ops.rotary(g, "rotary_key", key, table)
        if run.context != 0 and x is source and causal:
            key, value = ops.cached(g, "key_cache", key, run.context), ops.cached(g, "value_cache", value, run.context)
        heads = _attend(g, query, key, value, cfg, run, causal, window, position_bias)
        d = x.shape[-1]
        out = ops.linear(
            g, "output", "b n h g k, h g k d -> b n d", heads, (heads_kv, group, width, d), cfg.attention_output_bias
        )
        return ops.dropout(g, "output_dropout", out, cfg.attention_output_dropout)


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
    """softmax(QKᵀ/√d_k + M) V, M = 0 or -inf, by the kernel that runs: see :func:`kernel`.

    Eager and math compute and keep the full square whatever the mask or window, as PyTorch does. Flash visits
    ``least(m, window)`` keys per query, and keeps no score.
    """
    runs = kernel(run.attention, cfg, g.implementation, g.itemsize)
    if runs in ("flash", "efficient"):
        visited = None if window is None else ("m", window)
        out = _square(g, query, key, value, cfg, causal, position_bias, keep=False, window=visited)
        macs = next(op.forward.macs for op in reversed(g.ops) if op.kind == "scores")
        return ops.fused_attention(g, runs, query, key, value, out, Work(macs))
    if runs == "eager":
        return _square(g, query, key, value, cfg, causal, position_bias)
    batch, _, kv_heads, group, width = query.shape
    repeated = (batch, key.shape[1], kv_heads, group, width)
    with g.elements_of(ops.FP32_BYTES):
        q = ops.cast(g, "fp32_query", query, query.axes, query.shape)
        k = ops.cast(g, "fp32_key", key, ("b", "m", "h", "g", "k"), repeated)
        v = ops.cast(g, "fp32_value", value, ("b", "m", "h", "g", "k"), repeated)
        out = _square(g, q, k, v, cfg, causal, position_bias, mask_itemsize=g.implementation.math_mask_itemsize)
    return ops.cast(g, "attended", out, out.axes, out.shape)


def kernel(attention: str, cfg: ModelConfig, implementation: Implementation, itemsize: Size) -> str:
    """The kernel that runs where ``attention`` was asked for: ``eager``, ``flash``, ``efficient`` or ``math``.

    A flash kernel without dropout (a CPU's) leaves a model that has attention dropout to the math kernel. A GPU's takes
    neither fp32 (the memory-efficient kernel runs, or with grouped heads, which that has not, math) nor heads wider
    than 256 or not a multiple of 8, which PyTorch pads: those raise :class:`InputError`. In the document's accounting
    flash is flash, and math is eager.
    """
    if attention == "flash" and cfg.attention_dropout and not implementation.fused_dropout:
        return "math"
    if attention == "flash" and implementation.semantics == "cuda":
        if itemsize == ops.FP32_BYTES:
            return "efficient" if cfg.kv_heads == cfg.heads else "math"
        if isinstance(cfg.head_dim, int) and (cfg.head_dim % 8 or cfg.head_dim > 256):
            raise InputError(
                f"--head-dim {cfg.head_dim}: a GPU's flash kernel takes multiples of 8 up to 256, and PyTorch pads or "
                "falls back, which the reference does not model; use --attention eager or --implementation document"
            )
    return "eager" if attention == "math" and not implementation.math_in_fp32 else attention


def _square(
    g: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cfg: ModelConfig,
    causal: bool,
    position_bias: Tensor | None,
    keep: bool = True,
    window: tuple[str, Size] | None = None,
    mask_itemsize: Size = ops.MASK_BYTES,
) -> Tensor:
    """The score square, step by step; ``keep=False`` inside a fused kernel, which keeps none of it."""
    keys = " ".join(key.axes)
    scores = ops.contract(
        g, "scores", f"b n h g k, {keys} -> b h g n m", query, key, kind="scores", keep=keep, causal=causal,
        window=window,
    )  # fmt: skip
    if cfg.attention_softcap:
        scores = ops.activation(g, "softcap", scores, "tanh", keep=keep)
    if position_bias is not None:
        scores = ops.add(g, "position_bias", scores, position_bias)
    weights = ops.softmax(g, "softmax", scores, keep=keep)
    weights = ops.dropout(g, "dropout", weights, cfg.attention_dropout, keep, mask_itemsize)
    return ops.contract(
        g, "weighted_sum", f"b h g n m, {keys} -> b n h g k", weights, value, kind="weighted_sum", keep=keep,
        causal=causal, window=window,
    )  # fmt: skip


def feed_forward(g: Graph, name: str, x: Tensor, cfg: ModelConfig) -> Tensor:
    """Two matrices around an activation, or the gated three (GLU, Shazeer 2020, arXiv:2002.05202).

    ``down(act(up x))``, 8bNd² + 8bNd² FLOPs for d_ff = 4d, keeping 19bNd bytes; gated ``down(act(gate x) * up x)``.
    """
    d, f, bias = x.shape[-1], cfg.ffn_hidden, cfg.ffn_bias
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
        return ops.dropout(g, "output_dropout", out, cfg.ffn_output_dropout)


def norm(g: Graph, name: str, x: Tensor, cfg: ModelConfig) -> Tensor:
    """The model's norm over the last axis: 2d parameters (LayerNorm), d (RMSNorm, or no bias), or none."""
    return ops.norm(g, name, x, cfg.norm, cfg.norm_bias, affine=cfg.norm_affine)


def residual(g: Graph, name: str, x: Tensor, cfg: ModelConfig, branch: Callable[[Tensor], Tensor]) -> Tensor:
    """A residual branch and its norm: pre-norm ``x + f(norm x)``, post-norm ``norm(x + f(x))``.

    With ``sandwich_norm`` what the branch returns is normed too, before it is added (Gemma 2, arXiv:2408.00118).
    """
    out = branch(norm(g, f"{name}_norm", x, cfg) if cfg.pre_norm else x)
    if cfg.sandwich_norm:
        out = norm(g, f"{name}_output_norm", out, cfg)
    out = ops.add(g, f"{name}_residual", x, out)
    return out if cfg.pre_norm else norm(g, f"{name}_norm", out, cfg)


Branch = Callable[[Tensor], Tensor]


def parallel(g: Graph, x: Tensor, cfg: ModelConfig, attend: Branch, feed: Branch) -> Tensor:
    """``x + attention(norm x) + mlp(norm x)``, by one norm for both branches or one each.

    Wang & Komatsuzaki 2021 (GPT-J), one norm; Black et al. 2022 (GPT-NeoX), arXiv:2204.06745, two.
    """
    inner = norm(g, "attention_norm", x, cfg)
    out = attend(inner)
    mlp = feed(inner if cfg.parallel_norms == 1 else norm(g, "mlp_norm", x, cfg))
    out = ops.dropout(g, "branch_dropout", ops.add(g, "branch_sum", out, mlp), cfg.parallel_dropout)
    return ops.add(g, "residual", x, out)


def bottleneck(g: Graph, name: str, x: Tensor, cfg: ModelConfig) -> Tensor:
    """A projection from d to the bottleneck's width t, and a norm: dt + t parameters and the norm's."""
    with g.scope(name):
        out = ops.linear(g, "dense", "b n d, d t -> b n t", x, (cfg.hidden, cfg.bottleneck))
        return norm(g, "norm", out, cfg)


def bottleneck_layer(g: Graph, x: Tensor, cfg: ModelConfig, run: Run) -> Tensor:
    """MobileBERT's layer (Sun et al. 2020, arXiv:2004.02984, figure 1): width t inside, width d outside.

    Queries and keys come from a projection that they share or from the layer's input, values from the layer's input,
    or all three from the input projection.
    """
    with g.scope("bottleneck"):
        inner = bottleneck(g, "input", x, cfg)
        query = inner if cfg.bottleneck_values else x
        if cfg.bottleneck_queries and cfg.bottleneck_values:
            ops.unused(g, "attention", g.weights_of(lambda: bottleneck(g, "attention", x, cfg)))
        elif cfg.bottleneck_queries:
            query = bottleneck(g, "attention", x, cfg)
    values = inner if cfg.bottleneck_values else x
    inner = residual(
        g, "attention", inner, cfg, lambda _: attention(g, "attention", query, query, cfg, run, values=values)
    )
    inner = feed_forwards(g, inner, cfg)
    with g.scope("bottleneck"):
        out = ops.linear(g, "output", "b n t, t d -> b n d", inner, (cfg.bottleneck, cfg.hidden))
        out = ops.dropout(g, "output_dropout", out, cfg.dropout)
        return norm(g, "norm", ops.add(g, "residual", out, x), cfg)


def feed_forwards(g: Graph, x: Tensor, cfg: ModelConfig) -> Tensor:
    """The layer's feed-forward, or several one after another; only the last has dropout on what it returns."""

    def feed(name: str, y: Tensor, inner: ModelConfig) -> Tensor:
        return residual(g, name, y, cfg, lambda z: feed_forward(g, name, z, inner))

    for index in range(1, cfg.ffn_count):
        x = feed(f"mlp_{index}", x, cfg._replace(ffn_output_dropout=0.0))
    return feed("mlp", x, cfg)


def layer(
    g: Graph,
    x: Tensor,
    cfg: ModelConfig,
    run: Run,
    *,
    causal: bool,
    window: Size | None = None,
    memory: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Self-attention, cross-attention to ``memory`` where there is one, and a feed-forward, each a residual branch.

    Forward 24bNd² + 4bN²d FLOPs, 12d² + 13d parameters, 34bNd + 5bN²h bytes kept; with cross-attention to S tokens
    28bTd² + 4bSd² + 4bT²d + 4bTSd FLOPs and 16d² + 19d parameters. A model that can attend to an encoder and has none
    here (``cross_attention`` without ``memory``) has those weights all the same.
    """
    if cfg.bottleneck is not None:
        return bottleneck_layer(g, x, cfg, run)

    def attend(y: Tensor) -> Tensor:
        return attention(
            g, "attention", y, y, cfg, run, causal=causal, window=window, position_bias=position_bias
        )  # fmt: skip

    def attend_across(y: Tensor) -> Tensor:
        return attention(g, "cross_attention", y, y if memory is None else memory, cfg, run)

    if cfg.parallel:
        return parallel(g, x, cfg, attend, lambda y: feed_forward(g, "mlp", y, cfg))
    x = residual(g, "attention", x, cfg, attend)
    if memory is not None:
        x = residual(g, "cross_attention", x, cfg, attend_across)
    elif cfg.cross_attention:
        weights = g.weights_of(lambda: residual(g, "cross_attention", x, cfg, attend_across))
        ops.unused(g, "cross_attention", weights)
    return feed_forwards(g, x, cfg)
