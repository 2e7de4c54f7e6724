"""Every operator, once: what it computes, what its backward computes, and what it keeps for it.

A contraction is an einsum over named axes: one multiply-accumulate per point of its index space. The gradient of each
operand is another contraction over the same space, and needs the *other* operand: so an operand is kept exactly when
the other one has a gradient. Linear layers, QKᵀ and PV are all :func:`contract`.

What is kept here is the document's accounting (matmul operands, activation inputs, softmax outputs, one-byte dropout
masks, norm inputs; no statistics), after Korthikanti et al. 2022, arXiv:2205.05198, section 4.
"""

from __future__ import annotations

from functools import cache
from math import prod

from tfcost.errors import GraphError
from tfcost.graph import ADAPTER, NO_WORK, Adapters, Graph, Op, Size, Tensor, Work, least, round_up

MASK_BYTES = 1
"""A dropout mask is a bool tensor: one byte per element (torch.native_dropout; Korthikanti et al. 2022, 4.1)."""

FP32_BYTES = 4

EXPERT_AXIS = ("x",)
"""How the axes of a weight begin that has one part per expert."""


@cache
def _axes(spec: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """``"b n d, d f -> b n f"`` as the axes of the two operands and of the output."""
    left, arrow, right = spec.partition("->")
    first, comma, second = left.partition(",")
    parts = tuple(first.split()), tuple(second.split()), tuple(right.split())
    if not (arrow and comma and all(parts)) or not set(parts[2]) <= {*parts[0], *parts[1]}:
        raise GraphError(f"not a contraction of two operands: {spec!r}")
    return parts


def contract(
    g: Graph,
    name: str,
    spec: str,
    a: Tensor,
    b: Tensor,
    *,
    kind: str = "matmul",
    bias: Tensor | None = None,
    keep: bool = True,
    causal: bool = False,
    window: tuple[str, str, Size] | None = None,
) -> Tensor:
    """An einsum of two operands, ``contract(g, "up", "b n d, d f -> b n f", x, w)``, with an optional bias.

    MACs forward: the product of all axis sizes; backward: as many again for each operand that has a gradient. Keeps
    each operand whose partner has a gradient (``keep=False``: a fused kernel, which keeps nothing here). ``window``
    names the axes of queries and keys and how many keys w a fused kernel visits per query: min(N, w). ``causal`` says
    that half of the square is masked: N²/2 products stay, and under a window the band of w below the diagonal,
    Nw - w²/2 (N²/2 at w = N). The axes bind by position, so the spec may rename an axis; sizes that disagree raise
    :class:`GraphError` with the spec and both shapes.
    """
    a_axes, b_axes, out_axes = _axes(spec)
    if len(a_axes) != len(a.shape) or len(b_axes) != len(b.shape):
        raise GraphError(f"{g.path(name)}: {spec!r} does not fit shapes {a.shape} and {b.shape}")
    sizes = dict(zip(a_axes, a.shape, strict=True))
    for axis, size in zip(b_axes, b.shape, strict=True):
        if sizes.setdefault(axis, size) != size:
            raise GraphError(f"{g.path(name)}: {spec!r} has two sizes for {axis}, in {a.shape} and {b.shape}")
    out = g.tensor(name, out_axes, tuple([sizes[axis] for axis in out_axes]), grad=a.grad or b.grad)
    square = None
    if window is None:
        macs = prod(sizes.values())
        square = macs if causal else None
    else:
        queries, keys, width = window
        length, visited = sizes.pop(queries), least(sizes.pop(keys), width)
        others = prod(sizes.values())
        macs = others * length * visited
        square = others * visited * (2 * length - visited) if causal else None
    gradients = a.grad + b.grad
    saves: tuple[Tensor, ...] = ()
    if keep:
        if b.grad and not a.role:
            saves = (a,)
        if a.grad and not b.role:
            saves += (b,)
    weights = tuple([t for t in (a, b, bias) if t is not None and t.role])
    elements = 0 if bias is None else out.numel  # one addition per output element
    forward, backward = Work(macs, elements), Work(gradients * macs, elements)
    return g.add(kind, name, (a, b), out, forward, backward, weights, saves, square)


def linear(
    g: Graph, name: str, spec: str, x: Tensor, shape: tuple[Size, ...], bias: bool = True, role: str = "weight"
) -> Tensor:
    """A contraction with a weight of this shape that is created here, and a bias over its output axes.

    The document's ``Nd(d-1)`` additions hold without a bias only for ``d - 1`` per output; with one it is ``d``
    multiplications and ``d`` additions, 2Nd² for a square weight.
    """
    x_axes, w_axes, out_axes = _axes(spec)
    with g.scope(name):
        weight = g.weight("weight", w_axes, shape, role)
        if bias:
            sizes = dict(zip(w_axes, shape, strict=True))
            axes = tuple([axis for axis in out_axes if axis not in x_axes])
            offset = g.weight("bias", axes, tuple([sizes[axis] for axis in axes]), role)
    out = contract(g, name, spec, x, weight, kind="linear", bias=offset if bias else None)
    if g.adapters is None or name not in g.adapters.targets:
        return out
    g.adapted.add(name)
    return low_rank(g, name, spec, x, shape, out, g.adapters)


LOW_RANK = "a"
"""The axis of an adapter's rank, which no other tensor has (r is the rank of latent attention)."""


def low_rank(
    g: Graph, name: str, spec: str, x: Tensor, shape: tuple[Size, ...], out: Tensor, adapters: Adapters
) -> Tensor:
    """A low-rank adapter beside a linear layer, ``out + B A x`` (Hu et al. 2021, arXiv:2106.09685, section 4.1).

    r (d_in + d_out) parameters and 2bNr (d_in + d_out) FLOPs; A's gradient needs x, B's the r-wide product. With
    dropout each adapter has an input of its own, and keeps it and its mask: 3 bytes per element of x in 16 bits.
    """
    rank = adapters.rank
    x_axes, w_axes, out_axes = _axes(spec)
    sizes = dict(zip(w_axes, shape, strict=True))
    entering = tuple([axis for axis in w_axes if axis in x_axes])
    leaving = tuple([axis for axis in w_axes if axis not in x_axes])
    with g.scope(f"{name}_lora"):
        down = g.weight("a", (*entering, LOW_RANK), (*[sizes[axis] for axis in entering], rank), ADAPTER)
        up = g.weight("b", (LOW_RANK, *leaving), (rank, *[sizes[axis] for axis in leaving]), ADAPTER)
        through = " ".join([*[axis for axis in x_axes if axis not in entering], LOW_RANK])
        x = dropout(g, "dropout", x, adapters.dropout)
        inner = contract(g, "down", f"{' '.join(x_axes)}, {' '.join(down.axes)} -> {through}", x, down, kind="linear")
        outer = contract(g, "up", f"{through}, {' '.join(up.axes)} -> {' '.join(out_axes)}", inner, up, kind="linear")
        return add(g, "sum", out, outer)


def convolution(g: Graph, name: str, x: Tensor, positions: Size, taps: Size, width: Size, bias: bool = True) -> Tensor:
    """A convolution over tokens (b n c): each output position is a product of ``taps`` inputs with a weight.

    MACs: positions · taps · c · width, padding included; backward once for the weight, and once more where the input
    needs a gradient. Keeps the input.
    """
    channels = x.shape[-1]
    with g.scope(name):
        weights: tuple[Tensor, ...] = (g.weight("weight", ("k", "c", "d"), (taps, channels, width)),)
        if bias:
            weights += (g.weight("bias", ("d",), (width,)),)
    out = g.tensor(name, ("b", "n", "d"), (x.shape[0], positions, width))
    macs, elements = x.shape[0] * positions * taps * channels * width, out.numel if bias else 0
    backward = Work((1 + x.grad) * macs, elements)
    return g.add("convolution", name, (x, weights[0]), out, Work(macs, elements), backward, weights, (x,))


def prepend(g: Graph, name: str, x: Tensor, count: Size) -> Tensor:
    """Learned tokens before those of ``x``, the same for every sequence: a copy, of which nothing is kept."""
    with g.scope(name):
        tokens = g.weight("token", ("t", "d"), (count, x.shape[-1]), "embedding")
    out = g.tensor(name, x.axes, (x.shape[0], x.shape[1] + count, *x.shape[2:]))
    return g.add("embedding", name, (x,), out, weights=(tokens,))


def whole_table(g: Graph, name: str, table: Tensor) -> Tensor:
    """A table as it is, added to every sequence: nothing is looked up, and nothing kept."""
    return g.add("embedding", name, (), g.tensor(name, table.axes, table.shape), weights=(table,))


def rearrange(g: Graph, name: str, x: Tensor, axes: tuple[str, ...], shape: tuple[Size, ...]) -> Tensor:
    """The elements of ``x`` in another order and shape, padded or cropped: a copy, of which nothing is kept."""
    return g.add("select", name, (x,), g.tensor(name, axes, shape, grad=x.grad))


def scale(g: Graph, name: str, x: Tensor) -> Tensor:
    """``x`` times a learned factor per coordinate (LayerScale, Touvron et al. 2021, arXiv:2103.17239): keeps ``x``."""
    with g.scope(name):
        weight = g.weight("weight", x.axes[-1:], x.shape[-1:])
    return _pointwise(g, "multiply", name, x, (x, weight), (x,), (weight,))


def mean_tokens(g: Graph, name: str, x: Tensor, tokens: Size) -> Tensor:
    """The mean of the last ``tokens`` tokens of each sequence: its gradient needs nothing."""
    out = g.tensor(name, x.axes, (x.shape[0], 1, *x.shape[2:]), grad=x.grad)
    work = Work(0, x.shape[0] * tokens * x.shape[-1])
    return g.add("add", name, (x,), out, work, work)


def expert_linear(
    g: Graph, name: str, spec: str, x: Tensor, experts: Size, shape: tuple[Size, ...], bias: bool = False
) -> Tensor:
    """A linear layer of which there are several: each row of ``x`` is multiplied by the weight of its own expert.

    The index space is that of one linear layer over all rows, ``slots d f``, however the rows spread; the weight has
    the experts as one more axis, x.
    """
    x_axes, w_axes, out_axes = _axes(spec)
    rows, width = x.shape[0], shape[-1]
    with g.scope(name):
        weights: tuple[Tensor, ...] = (g.weight("weight", EXPERT_AXIS + w_axes, (experts, *shape)),)
        if bias:
            weights += (g.weight("bias", EXPERT_AXIS + w_axes[-1:], (experts, width)),)
    if x.shape[-1] != shape[0] or x_axes[-1] != w_axes[0]:
        raise GraphError(f"{g.path(name)}: {spec!r} does not fit shapes {x.shape} and {shape}")
    out = g.tensor(name, out_axes, (rows, width))
    macs, elements = rows * shape[0] * width, out.numel if bias else 0
    gradients = 1 + x.grad
    forward, backward = Work(macs, elements), Work(gradients * macs, elements)
    return g.add("linear", name, (x, weights[0]), out, forward, backward, weights, (x,))


def dispatch(g: Graph, name: str, x: Tensor, slots: Size) -> Tensor:
    """Each token's vector (b n d), copied to the slots of its experts (s d). Keeps only where they went."""
    out = g.tensor(name, ("s", "d"), (slots, x.shape[-1]), grad=x.grad)
    return g.add("select", name, (x,), out)


def combine(g: Graph, name: str, slots: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """Each slot's vector (s d) times its weight, summed per token: a product, whose gradients need both factors.

    The weights (b n t) are copied to the slots, as the vectors were.
    """
    with g.scope(name):
        spread = g.tensor("slot_weights", slots.axes[:1], slots.shape[:1], grad=weights.grad)
    out = g.tensor(name, like.axes, like.shape)
    work = Work(0, slots.numel)
    return g.add("multiply", name, (slots, weights), out, work, work, (), (slots, spread))


def choose(g: Graph, name: str, x: Tensor, count: Size) -> Tensor:
    """The ``count`` largest along the last axis (t). Keeps only which they are."""
    out = g.tensor(name, (*x.axes[:-1], "t"), (*x.shape[:-1], count), grad=x.grad)
    return g.add("select", name, (x,), out)


def part(g: Graph, name: str, x: Tensor, width: Size) -> Tensor:
    """Some of the last axis: a view."""
    return g.add("select", name, (x,), g.tensor(name, x.axes, (*x.shape[:-1], width), grad=x.grad))


def join(g: Graph, name: str, a: Tensor, b: Tensor) -> Tensor:
    """``a`` and ``b`` (which may lack axes of a's) side by side along the last axis: a copy, not kept."""
    out = g.tensor(name, a.axes, (*a.shape[:-1], a.shape[-1] + b.shape[-1]), grad=a.grad or b.grad)
    return g.add("select", name, (a, b), out)


def embedding(
    g: Graph, name: str, axes: tuple[str, ...], shape: tuple[Size, ...], table: Tensor, workspace: Size = 0
) -> Tensor:
    """Rows of a table, looked up by integer ids: no multiplications; keeps only the ids, which are not counted."""
    out = g.tensor(name, axes, shape, grad=table.grad or g.through_embeddings)
    return g.add("embedding", name, (), out, weights=(table,), workspace=workspace)


def _pointwise(
    g: Graph,
    kind: str,
    name: str,
    x: Tensor,
    inputs: tuple[Tensor, ...],
    saves: tuple[Tensor, ...] = (),
    weights: tuple[Tensor, ...] = (),
    workspace: Size = 0,
) -> Tensor:
    out = g.tensor(name, x.axes, x.shape, grad=any([t.grad for t in inputs]))
    work = Work(0, out.numel)
    backward = work if out.grad else NO_WORK
    return g.add(kind, name, inputs, out, work, backward, weights, saves, workspace=workspace)


def norm(g: Graph, name: str, x: Tensor, kind: str, bias: bool = True, axes: int = 1, affine: bool = True) -> Tensor:
    """LayerNorm or RMSNorm over the last ``axes`` axes, with a scale and (LayerNorm) a bias per element of them.

    ``kind`` is ``"layernorm"`` or ``"rmsnorm"``; keeps its input, and what the implementation adds.
    ``"scale_shift"`` is MobileBERT's NoNorm, a per-element scale and bias without statistics.
    """
    with g.scope(name):
        shape = x.axes[-axes:], x.shape[-axes:]
        weights: tuple[Tensor, ...] = (g.weight("weight", *shape),) if affine else ()
        if bias and affine:
            weights += (g.weight("bias", *shape),)
        scaled = any([weight.grad for weight in weights[:1]])
        saves = _norm_keeps(g, x, kind, axes, scaled) if g.implementation.statistics else (x,)
    workspace: Size = 0
    if len(saves) == 3 and kind == "rmsnorm":
        # Steps in fp32 (CPU): when most is alive, five tensors of the input's size in place of both gradients and of
        # the normed values and 1/rms, which are gone by then.
        workspace = 5 * FP32_BYTES * x.numel - saves[1].bytes - saves[2].bytes - 2 * x.bytes
    return _pointwise(g, kind, name, x, (x,), saves, weights, workspace)


def _norm_keeps(g: Graph, x: Tensor, kind: str, axes: int, scaled: bool) -> tuple[Tensor, ...]:
    """The input and a statistic or two of each row: 2bNd + 8bN (LayerNorm, fp32 statistics), 2bNd + 4bN (RMSNorm).

    Where RMSNorm is no kernel of its own: the fp32 input, the normed fp32 values (for the gradient of a scale, where
    that is trained: ``scaled``) and 1/rms, 8bNd + 4bN.
    """
    rules = g.implementation
    rows = x.axes[:-axes], x.shape[:-axes]
    if kind == "layernorm":
        width = rules.statistics_itemsize
        return x, g.tensor("mean", *rows, width, grad=False), g.tensor("inverse_deviation", *rows, width, grad=False)
    if kind != "rmsnorm":
        return (x,)
    inverse = g.tensor("inverse_rms", *rows, FP32_BYTES, grad=False)
    if rules.fused_rmsnorm:
        return x, inverse
    wide = x if x.itemsize == FP32_BYTES else g.tensor("fp32_input", x.axes, x.shape, FP32_BYTES)
    return (wide, g.tensor("normed", x.axes, x.shape, FP32_BYTES), inverse) if scaled else (wide, inverse)


def softmax(g: Graph, name: str, x: Tensor, keep: bool = True, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the last axis; its gradient needs its *output*, which it keeps.

    ``sinks`` is a learned score more per row (one per head; gpt-oss, arXiv:2508.10925, section 2.2): its weight is
    kept with the others, M + 1 per row, and multiplies nothing.
    """
    out = g.tensor(name, x.axes, x.shape, grad=x.grad)
    if sinks is None:
        work = Work(0, out.numel)
        return g.add("softmax", name, (x,), out, work, work, (), (out,) if keep else ())
    with g.scope(name):
        column = g.tensor("sink_weights", x.axes[:-1], x.shape[:-1])
    work = Work(0, out.numel + column.numel)
    return g.add("softmax", name, (x, sinks), out, work, work, (sinks,), (out, column) if keep else ())


def dropout(g: Graph, name: str, x: Tensor, p: float, keep: bool = True, mask_itemsize: Size = MASK_BYTES) -> Tensor:
    """Dropout with probability ``p``: keeps its mask, one byte per element. With ``p == 0`` there is no op at all."""
    if p == 0:
        return x
    with g.scope(name):
        mask = g.tensor("mask", x.axes, x.shape, mask_itemsize, grad=False)
    return _pointwise(g, "dropout", name, x, (x,), (mask,) if keep else ())


def activation(g: Graph, name: str, x: Tensor, kind: str, keep: bool = True) -> Tensor:
    """GELU, ReLU, SiLU ...: keeps its input, whatever the function. (PyTorch's ReLU keeps its output instead.)"""
    if keep and kind == "relu" and g.implementation.relu_output:
        out = g.tensor(name, x.axes, x.shape, grad=x.grad)
        work = Work(0, out.numel)
        return g.add(kind, name, (x,), out, work, work if out.grad else NO_WORK, (), (out,))
    return _pointwise(g, kind, name, x, (x,), (x,) if keep else ())


def squash(g: Graph, name: str, x: Tensor, kind: str) -> Tensor:
    """A sigmoid or tanh of a gate or router: its gradient needs its *output*, which it keeps, as softmax does."""
    out = g.tensor(name, x.axes, x.shape, grad=x.grad)
    work = Work(0, out.numel)
    return g.add(kind, name, (x,), out, work, work if out.grad else NO_WORK, (), (out,))


def add(g: Graph, name: str, a: Tensor, b: Tensor) -> Tensor:
    """``a + b`` (b may broadcast): the gradient of a sum needs neither, so nothing is kept."""
    return _pointwise(g, "add", name, a, (a, b))


def multiply(g: Graph, name: str, a: Tensor, b: Tensor) -> Tensor:
    """``a * b`` element by element: each gradient needs the other factor, so both are kept."""
    return _pointwise(g, "multiply", name, a, (a, b), (a, b))


def rotary(g: Graph, name: str, x: Tensor, table: Tensor | None = None) -> Tensor:
    """Rotates pairs of a head's coordinates by angles that depend on the position (Su et al. 2021, arXiv:2104.09864).

    Linear in ``x``: its gradient needs the angles only (``table``, where the implementation keeps one).
    """
    return _pointwise(g, "rotary", name, x, (x,), () if table is None else (table,))


def cast(g: Graph, name: str, x: Tensor, axes: tuple[str, ...], shape: tuple[Size, ...]) -> Tensor:
    """A copy with the graph's present element size, perhaps along more axes (heads repeated). Keeps nothing."""
    return g.add("cast", name, (x,), g.tensor(name, axes, shape, grad=x.grad))


def cached(g: Graph, name: str, x: Tensor, tokens: Size) -> Tensor:
    """Keys or values joined to those of ``tokens`` earlier tokens, in the cache: (b, tokens + m, h, k)."""
    out = g.tensor(name, x.axes, (x.shape[0], tokens + x.shape[1], *x.shape[2:]), grad=x.grad)
    return g.add("cache", name, (x,), out)


def unused(g: Graph, name: str, weights: tuple[Tensor, ...]) -> None:
    """Weights that the model has and that this pass does not use: no work, nothing kept."""
    g.add("unused", name, (), g.tensor(name, (), ()), weights=weights)


def join_tokens(g: Graph, name: str, x: Tensor, tokens: Size) -> Tensor:
    """Each token's vector joined with its neighbours', ``tokens`` in all (MobileBERT's trigrams): a copy, not kept."""
    out = g.tensor(name, x.axes, (*x.shape[:-1], tokens * x.shape[-1]), grad=x.grad)
    return g.add("select", name, (x,), out)


def join_weights(g: Graph, name: str, a: Tensor, b: Tensor) -> Tensor:
    """Two weights side by side, joined anew in each pass (MobileBERT's head): a tensor that a product then keeps."""
    out = g.tensor(name, a.axes, (*a.shape[:-1], a.shape[-1] + b.shape[-1]))
    return g.add("select", name, (a, b), out, weights=(a, b))


def gather_tokens(g: Graph, name: str, x: Tensor, tokens: Size) -> Tensor:
    """The first ``tokens`` tokens of each sequence (a pooler reads one). Keeps nothing: a view."""
    out = g.tensor(name, x.axes, (x.shape[0], tokens, *x.shape[2:]), grad=x.grad)
    return g.add("select", name, (x,), out)


def select_tokens(g: Graph, name: str, x: Tensor, tokens: Size) -> Tensor:
    """``tokens`` vectors of each sequence, wherever they stand: a copy. Keeps only where they stood."""
    out = g.tensor(name, x.axes, (x.shape[0], tokens, *x.shape[2:]), grad=x.grad)
    return g.add("select", name, (x,), out)


def fused_attention(g: Graph, name: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scores: Op) -> Tensor:
    """What a flash kernel keeps: Q, K, V, its output, and one fp32 log-sum-exp per query and head.

    Dao et al. 2022, arXiv:2205.14135: backward recomputes the scores from Q and K, the work of the op ``scores``. That
    is neither model nor (by the field's usage) hardware FLOPs, so it is reported in a row of its own. The dropout mask
    is drawn again from the same random state rather than kept. ``name`` is the kernel's: "flash" or "efficient".
    """
    rules = g.implementation
    with g.scope(name):
        axes, rows = q.axes[:-1], q.shape[:-1]
        state = rules.rng_state_bytes
        if name == "efficient":
            rows, state = (rows[0], round_up(rows[1], EFFICIENT_ROWS), *rows[2:]), EFFICIENT_STATE
        saves: tuple[Tensor, ...] = (q, k, v, out, g.tensor("log_sum_exp", axes, rows, FP32_BYTES, grad=False))
        if state:
            saves += (g.tensor("random_state", ("r",), (state,), 1, grad=False),)
    return g.add(
        "fused_attention", name, (q, k, v), out, saves=saves, causal=scores.causal, recompute=Work(scores.forward.macs)
    )  # fmt: skip


EFFICIENT_ROWS = 32
"""The memory-efficient kernel pads the rows of its log-sum-exp (kAlignLSE, ATen/native/transformers/cuda)."""

EFFICIENT_STATE = 16
"""Its random state: seed and offset, 8 bytes each."""


def cross_entropy(g: Graph, name: str, logits: Tensor) -> Tensor:
    """Cross-entropy of logits: the logits stay alive, and softmax over V is computed and kept in fp32."""
    with g.scope(name):
        copy = g.tensor("fp32_log_probabilities", logits.axes, logits.shape, FP32_BYTES, grad=True)
        out = g.tensor("value", logits.axes[:-1], logits.shape[:-1], FP32_BYTES, logits.grad)
    work = Work(0, logits.numel)
    return g.add("cross_entropy", name, (logits,), out, work, work, (), (logits, copy))
