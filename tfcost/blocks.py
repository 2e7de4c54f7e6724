"""Attention, feed-forward and the layer around them, as compositions of :mod:`tfcost.ops`.

Axis letters: b batch, n query tokens, m key tokens, d hidden, h key/value heads, g query heads per key/value head,
k head_dim, f ffn, e embedding, v vocabulary. Heads are projected straight onto their axes (``b n d, d h g k -> b n h g
k``), since a view that makes a new tensor would break the counting by identity.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from tfcost import ops
from tfcost.config import ModelConfig
from tfcost.errors import InputError
from tfcost.graph import Graph, Size, Tensor, div
from tfcost.implementation import Implementation


class Run(NamedTuple):
    """One pass: b sequences of N tokens (and S source tokens, or F frames of sound), and the attention kernel.

    ``attention``: ``"eager"`` and ``"math"`` keep the score square, ``"flash"`` recomputes it in backward and visits
    only a window's keys. ``context`` tokens came before: their keys and values are in a cache (decoding). ``labels``
    tokens of each sequence have a label, and only those reach the language-model head (None: all do).
    """

    batch: Size
    seq_len: Size
    src_len: Size | None = None
    attention: str = "eager"
    frames: Size | None = None
    context: Size = 0
    labels: Size | None = None


class Square(NamedTuple):
    """What the score square of one attention is: causal or not, its window, and what is added to the scores."""

    causal: bool
    window: Size | None
    position_bias: Tensor | None


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

    The heads are made by the function of the model's kind (:data:`ATTENTION_KINDS`), and mixed by one projection.
    FLOPs for softmax, d = h d_k, M = N: 6bNd² + 2bN²d + 2bN²d + 2bNd². Keeps 11bNd + 5bN²h bytes.
    ``values`` is read instead of ``source`` for V. A projection is as wide as what it reads (MobileBERT's bottleneck).
    """
    square = Square(causal, window, position_bias)
    with g.scope(name):
        heads = heads_of(cfg.attention_kind)(g, x, source, source if values is None else values, cfg, run, square)
        d = x.shape[-1]
        out = ops.linear(
            g, "output", "b n h g k, h g k d -> b n d", heads, (*heads.shape[2:], d), cfg.attention_output_bias
        )
        return ops.dropout(g, "output_dropout", out, cfg.attention_output_dropout)


Heads = Callable[[Graph, Tensor, Tensor, Tensor, ModelConfig, Run, Square], Tensor]
"""``heads(g, x, source, values, cfg, run, square)``: what each head brings from the source, b n h g k."""


def softmax_heads(
    g: Graph, x: Tensor, source: Tensor, values: Tensor, cfg: ModelConfig, run: Run, square: Square
) -> Tensor:
    """softmax(QKᵀ/√d_k) V (Vaswani et al. 2017, arXiv:1706.03762).

    Grouped heads (GQA, MQA) project fewer keys and values; the scores do not change: QKᵀ and PV are b h N M d_k MACs
    each, h the *query* heads.
    """
    query, key, value = project_heads(g, x, source, values, cfg)
    if run.context != 0 and x is source and square.causal:
        key, value = ops.cached(g, "key_cache", key, run.context), ops.cached(g, "value_cache", value, run.context)
    return attend(g, query, key, value, cfg, run, square)


def project_heads(
    g: Graph, x: Tensor, source: Tensor, values: Tensor, cfg: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries b n h g k, and keys and values b m h k, normed and turned where the model does so."""
    heads_kv, width = cfg.kv_heads, cfg.head_dim
    group = div(cfg.heads, heads_kv, "-h/--heads", "--kv-heads")
    bias = cfg.attention_bias
    query = ops.linear(g, "query", "b n d, d h g k -> b n h g k", x, (x.shape[-1], heads_kv, group, width), bias)
    shape = (source.shape[-1], heads_kv, width)
    key = ops.linear(g, "key", "b m d, d h k -> b m h k", source, shape, bias and cfg.key_bias)
    value = ops.linear(g, "value", "b m d, d h k -> b m h k", values, (values.shape[-1], heads_kv, width), bias)
    if cfg.qk_norm:
        query = ops.norm(g, "query_norm", query, cfg.qk_norm, cfg.qk_norm == "layernorm")
        key = ops.norm(g, "key_norm", key, cfg.qk_norm, cfg.qk_norm == "layernorm")
    if cfg.positions == "rotary" and x is source:  # positions of two sequences have no distance to each other
        table = None
        if g.implementation.rotary_table:
            table = g.tensor("rotary_table", ("n", "k"), (x.shape[1], width), grad=False)
        query, key = ops.rotary(g, "rotary_query", query, table), ops.rotary(g, "rotary_key", key, table)
    return query, key, value


ATTENTION_KINDS: dict[str, Heads | str] = {
    "softmax": softmax_heads,
    "latent": "tfcost.latent",
    "linear": "tfcost.linear_attention",
    "lsh": "tfcost.hashing",
}
"""The function that makes the heads of each kind of attention, or the module that has it, as ``heads``."""


def heads_of(kind: str) -> Heads:
    """The function of a kind; its module is imported when a model first has it."""
    found = ATTENTION_KINDS[kind]
    if isinstance(found, str):
        found = ATTENTION_KINDS[kind] = import_module(found).heads
    return found


def attend(g: Graph, query: Tensor, key: Tensor, value: Tensor, cfg: ModelConfig, run: Run, square: Square) -> Tensor:
    """softmax(QKᵀ/√d_k + M) V, M = 0 or -inf, by the kernel that runs: see :func:`kernel`.

    Eager and math compute and keep the full square whatever the mask or window, as PyTorch does. Flash visits
    ``least(m, window)`` keys per query, and keeps no score.
    """
    runs = kernel(run.attention, cfg, g.implementation, g.itemsize)
    if runs in ("flash", "efficient"):
        visited = None if square.window is None else ("n", "m", square.window)
        out = _square(g, query, key, value, cfg, square, keep=False, window=visited)
        scores = next(op for op in reversed(g.ops) if op.path.endswith("/scores"))
        return ops.fused_attention(g, runs, query, key, value, out, scores)
    if runs == "eager":
        return _square(g, query, key, value, cfg, square)
    batch, _, kv_heads, group, _ = query.shape
    with g.elements_of(ops.FP32_BYTES):
        q = ops.cast(g, "fp32_query", query, query.axes, query.shape)
        k, v = [
            ops.cast(
                g, f"fp32_{name}", each, ("b", "m", "h", "g", "k"),
                (batch, each.shape[1], kv_heads, group, each.shape[-1]),
            )
            for name, each in (("key", key), ("value", value))
        ]  # fmt: skip
        out = _square(g, q, k, v, cfg, square, mask_itemsize=g.implementation.math_mask_itemsize)
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


KEY_AXES = {3: "b m k", 4: "b m h k", 5: "b m h g k"}
"""Axes of keys and of values that all heads share, that a group of heads shares, and that each head has."""


def _square(
    g: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cfg: ModelConfig,
    square: Square,
    keep: bool = True,
    window: tuple[str, str, Size] | None = None,
    mask_itemsize: Size = ops.MASK_BYTES,
) -> Tensor:
    """The score square, step by step; ``keep=False`` inside a fused kernel, which keeps none of it."""
    keys = KEY_AXES[len(key.axes)]
    kind = "baddbmm" if cfg.scores_with_bias else "scores"
    causal = square.causal
    scores = ops.contract(
        g, "scores", f"b n h g k, {keys} -> b h g n m", query, key, kind=kind, keep=keep, causal=causal,
        window=window,
    )  # fmt: skip
    if cfg.attention_softcap:
        scores = ops.activation(g, "softcap", scores, "tanh", keep=keep)
    if square.position_bias is not None:
        scores = ops.add(g, "position_bias", scores, square.position_bias)
    sinks = None
    if cfg.attention_sinks:
        sinks = g.weight("sinks", ("h", "g"), query.shape[2:4])
    weights = ops.softmax(g, "softmax", scores, keep, sinks)
    weights = ops.dropout(g, "dropout", weights, cfg.attention_dropout, keep, mask_itemsize)
    return ops.contract(
        g, "weighted_sum", f"b h g n m, {keys} -> b n h g k", weights, value, kind="weighted_sum", keep=keep,
        causal=causal, window=window,
    )  # fmt: skip


def feed_forward(g: Graph, name: str, x: Tensor, cfg: ModelConfig) -> Tensor:
    """Two matrices around an activation, or the gated three (GLU, Shazeer 2020, arXiv:2002.05202).

    ``down(act(up x))``, 8bNd² + 8bNd² FLOPs for d_ff = 4d, keeping 19bNd bytes; gated ``down(act(gate x) * up x)``.
    """
    return feed_forward_of(g, name, x, cfg, cfg.ffn_hidden)


def feed_forward_of(g: Graph, name: str, x: Tensor, cfg: ModelConfig, f: Size) -> Tensor:
    """:func:`feed_forward` of a stated width."""
    d, bias = x.shape[-1], cfg.ffn_bias
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
    if cfg.layer_scale:
        out = ops.scale(g, f"{name}_scale", out)
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


def transform(g: Graph, name: str, x: Tensor, cfg: ModelConfig) -> Tensor:
    """What a layer does to each token on its own: the feed-forward, or a mixture of experts in its place."""
    if cfg.experts is None:
        return feed_forward(g, name, x, cfg)
    from tfcost.experts import mixture

    return mixture(g, x, cfg)


def feed_forwards(g: Graph, x: Tensor, cfg: ModelConfig) -> Tensor:
    """The layer's feed-forward, or several one after another; only the last has dropout on what it returns."""

    def feed(name: str, y: Tensor, inner: ModelConfig) -> Tensor:
        return residual(g, name, y, cfg, lambda z: transform(g, name, z, inner))

    if cfg.ffn_count == 0:
        return x
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

    def attend_itself(y: Tensor) -> Tensor:
        return attention(
            g, "attention", y, y, cfg, run, causal=causal, window=window, position_bias=position_bias
        )  # fmt: skip

    def attend_across(y: Tensor) -> Tensor:
        return attention(g, "cross_attention", y, y if memory is None else memory, cfg, run)

    if cfg.parallel:
        return parallel(g, x, cfg, attend_itself, lambda y: transform(g, "mlp", y, cfg))
    x = residual(g, "attention", x, cfg, attend_itself)
    if memory is not None:
        x = residual(g, "cross_attention", x, cfg, attend_across)
    elif cfg.cross_attention:
        weights = g.weights_of(lambda: residual(g, "cross_attention", x, cfg, attend_across))
        ops.unused(g, "cross_attention", weights)
    return feed_forwards(g, x, cfg)
