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
from tfcost.graph import ADAPTER, NO_WORK, Graph, Size, Tensor, Work, least, round_up

MASK_BYTES = 1
"""A dropout mask is a bool tensor: one byte per element (torch.native_dropout; Korthikanti et al. 2022, 4.1)."""

FP32_BYTES = 4


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
    window: tuple[str, Size] | None = None,
) -> Tensor:
    """An einsum of two operands, ``contract(g, "up", "b n d, d f -> b n f", x, w)``, with an optional bias.

    MACs forward: the product of all axis sizes; backward: as many again for each operand that has a gradient. Keeps
    each operand whose partner has a gradient (``keep=False``: a fused kernel, which keeps nothing here). ``window``
    names an axis and how much of it a fused kernel visits per point of the others; ``causal`` that half of the square
    is masked: half of it is N²/2 products, or N·w where a window of w < N/2 is less than that. The axes bind by
    position, so the spec may rename an axis; sizes that disagree raise :class:`GraphError` with the spec and both
    shapes.
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
        axis, visited = window
        whole = sizes.pop(axis)
        others = prod(sizes.values())
        macs = others * least(whole, visited)
        square = others * least(whole, 2 * visited) if causal else None
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
    return low_rank(g, name, spec, x, shape, out, g.adapters.rank)


def low_rank(g: Graph, name: str, spec: str, x: Tensor, shape: tuple[Size, ...], out: Tensor, rank: Size) -> Tensor:
    """A low-rank adapter beside a linear layer, ``out + B A x`` (Hu et al. 2021, arXiv:2106.09685, section 4.1).

    r (d_in + d_out) parameters and 2bNr (d_in + d_out) FLOPs; A's gradient needs x, B's the r-wide product.
    """
    x_axes, w_axes, out_axes = _axes(spec)
    sizes = dict(zip(w_axes, shape, strict=True))
    entering = tuple([axis for axis in w_axes if axis in x_axes])
    leaving = tuple([axis for axis in w_axes if axis not in x_axes])
    with g.scope(f"{name}_lora"):
        down = g.weight("a", (*entering, "r"), (*[sizes[axis] for axis in entering], rank), ADAPTER)
        up = g.weight("b", ("r", *leaving), (rank, *[sizes[axis] for axis in leaving]), ADAPTER)
        through = " ".join([*[axis for axis in x_axes if axis not in entering], "r"])
        inner = contract(g, "down", f"{' '.join(x_axes)}, {' '.join(down.axes)} -> {through}", x, down, kind="linear")
        outer = contract(g, "up", f"{through}, {' '.join(up.axes)} -> {' '.join(out_axes)}", inner, up, kind="linear")
        return add(g, "sum", out, outer)


def embedding(g: Graph, name: str, axes: tuple[str, ...], shape: tuple[Size, ...], table: Tensor) -> Tensor:
    """Rows of a table, looked up by integer ids: no multiplications; keeps only the ids, which are not counted."""
    out = g.tensor(name, axes, shape, grad=table.grad or g.through_embeddings)
    return g.add("embedding", name, (), out, weights=(table,))


def _pointwise(
    g: Graph,
    kind: str,
    name: str,
    x: Tensor,
    inputs: tuple[Tensor, ...],
    saves: tuple[Tensor, ...] = (),
    weights: tuple[Tensor, ...] = (),
) -> Tensor:
    out = g.tensor(name, x.axes, x.shape, grad=any([t.grad for t in inputs]))
    work = Work(0, out.numel)
    return g.add(kind, name, inputs, out, work, work if out.grad else NO_WORK, weights, saves)


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
        saves = _norm_keeps(g, x, kind, axes) if g.implementation.statistics else (x,)
    return _pointwise(g, kind, name, x, (x,), saves, weights)


def _norm_keeps(g: Graph, x: Tensor, kind: str, axes: int) -> tuple[Tensor, ...]:
    """The input and a statistic or two of each row: 2bNd + 8bN (LayerNorm, fp32 statistics), 2bNd + 4bN (RMSNorm).

    Where RMSNorm is no kernel of its own: the fp32 input, the normed fp32 values and 1/rms, 8bNd + 4bN.
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
    return wide, g.tensor("normed", x.axes, x.shape, FP32_BYTES), inverse


def softmax(g: Graph, name: str, x: Tensor, keep: bool = True) -> Tensor:
    """Softmax over the last axis; its gradient needs its *output*, which it keeps."""
    out = g.tensor(name, x.axes, x.shape, grad=x.grad)
    work = Work(0, out.numel)
    return g.add("softmax", name, (x,), out, work, work, (), (out,) if keep else ())


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


def fused_attention(g: Graph, name: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scores: Work) -> Tensor:
    """What a flash kernel keeps: Q, K, V, its output, and one fp32 log-sum-exp per query and head.

    Dao et al. 2022, arXiv:2205.14135: backward recomputes the scores from Q and K, ``scores`` MACs, which is neither
    model nor (by the field's usage) hardware FLOPs; so that work is reported in a row of its own. The dropout mask is
    drawn again from the same random state rather than kept. ``name`` is the kernel's: "flash" or "efficient".
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
    return g.add("fused_attention", name, (q, k, v), out, saves=saves, recompute=scores)


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
