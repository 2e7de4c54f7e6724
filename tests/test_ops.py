"""Every operator against its definition: index points counted one by one, and what its derivative needs.

A contraction is run here as loops over its index space; its gradients as further loops. Which operands a gradient
reads is not assumed but found: an operand is needed where changing it changes the gradient.
"""

from itertools import product

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from strategies import QUICK

import tfcost.symbols  # noqa: F401  registers the symbolic case of least()
from tfcost import ops
from tfcost.errors import GraphError
from tfcost.graph import Graph, Tensor

SPECS = (
    "b n d, d f -> b n f",
    "b n d, d h g k -> b n h g k",
    "b n h g k, b m h k -> b h g n m",
    "b h g n m, b m h k -> b n h g k",
    "b n h g k, h g k d -> b n d",
    "b n d, v d -> b n v",
    "a, a -> a",
    "a, b -> a b",
)


def split(spec):
    left, out = spec.split("->")
    first, second = left.split(",")
    return first.split(), second.split(), out.split()


def einsum(spec, sizes, a, b, visited=lambda point: True):
    """The contraction as loops: the output as a dict, and how many multiply-accumulates it took."""
    a_axes, b_axes, out_axes = split(spec)
    axes = list(dict.fromkeys(a_axes + b_axes))
    out, macs = {}, 0
    for values in product(*(range(sizes[axis]) for axis in axes)):
        point = dict(zip(axes, values, strict=True))
        if not visited(point):
            continue
        at = tuple(point[axis] for axis in out_axes)
        left, right = tuple(point[axis] for axis in a_axes), tuple(point[axis] for axis in b_axes)
        out[at] = out.get(at, 0) + a[left] * b[right]
        macs += 1
    return out, macs


def values(axes, sizes, start):
    """A tensor of distinct numbers."""
    return {at: start + i for i, at in enumerate(product(*(range(sizes[axis]) for axis in axes)))}


@st.composite
def contractions(draw):
    spec = draw(st.sampled_from(SPECS))
    a_axes, b_axes, _ = split(spec)
    sizes = {axis: draw(st.integers(1, 3)) for axis in dict.fromkeys(a_axes + b_axes)}
    return spec, sizes


def operands(g, spec, sizes, a_grad=True, b_grad=True):
    a_axes, b_axes, _ = split(spec)
    return tuple(
        g.tensor(name, tuple(axes), tuple(sizes[axis] for axis in axes), grad=grad)
        for name, axes, grad in (("a", a_axes, a_grad), ("b", b_axes, b_grad))
    )


@QUICK
@given(contractions())
def test_macs_forward_are_the_index_points(drawn):
    spec, sizes = drawn
    a_axes, b_axes, out_axes = split(spec)
    result, macs = einsum(spec, sizes, values(a_axes, sizes, 1), values(b_axes, sizes, 100))
    g = Graph()
    out = ops.contract(g, "c", spec, *operands(g, spec, sizes))
    (op,) = g.ops
    assert op.forward.macs == macs
    assert out.axes == tuple(out_axes)
    assert out.numel == len(result)


@QUICK
@given(contractions(), st.booleans(), st.booleans())
def test_macs_backward_are_the_index_points_of_each_gradient(drawn, a_grad, b_grad):
    """dA is the contraction of dOut with B over the same space, dB that of A with dOut."""
    spec, sizes = drawn
    a_axes, b_axes, out_axes = split(spec)
    left, right, out = (" ".join(axes) for axes in (a_axes, b_axes, out_axes))
    upstream, a, b = values(out_axes, sizes, 5), values(a_axes, sizes, 1), values(b_axes, sizes, 100)
    macs = 0
    if a_grad:
        macs += einsum(f"{out}, {right} -> {left}", sizes, upstream, b)[1]
    if b_grad:
        macs += einsum(f"{left}, {out} -> {right}", sizes, a, upstream)[1]
    g = Graph()
    ops.contract(g, "c", spec, *operands(g, spec, sizes, a_grad, b_grad))
    assert g.ops[0].backward.macs == macs
    assert g.ops[0].output.grad == (a_grad or b_grad)


def gradients(spec, sizes, a, b, a_grad, b_grad):
    """The gradients that are asked for, of the sum of the output, as one comparable value."""
    a_axes, b_axes, out_axes = split(spec)
    left, right, out = (" ".join(axes) for axes in (a_axes, b_axes, out_axes))
    upstream = values(out_axes, sizes, 1)
    da = einsum(f"{out}, {right} -> {left}", sizes, upstream, b)[0] if a_grad else None
    db = einsum(f"{left}, {out} -> {right}", sizes, a, upstream)[0] if b_grad else None
    return da, db


@QUICK
@given(contractions(), st.booleans(), st.booleans())
def test_an_operand_is_kept_exactly_when_a_gradient_reads_it(drawn, a_grad, b_grad):
    spec, sizes = drawn
    a_axes, b_axes, _ = split(spec)
    a, b = values(a_axes, sizes, 1), values(b_axes, sizes, 100)
    before = gradients(spec, sizes, a, b, a_grad, b_grad)
    moved = {
        "a": gradients(spec, sizes, {at: 2 * value for at, value in a.items()}, b, a_grad, b_grad),
        "b": gradients(spec, sizes, a, {at: 2 * value for at, value in b.items()}, a_grad, b_grad),
    }
    needed = {name for name, after in moved.items() if after != before}
    g = Graph()
    ops.contract(g, "c", spec, *operands(g, spec, sizes, a_grad, b_grad))
    assert {tensor.path for tensor in g.ops[0].saves} == needed


@pytest.mark.parametrize("role", ["weight", "embedding", "head"])
def test_a_parameter_is_never_a_saved_activation(role):
    g = Graph()
    x = g.tensor("x", ("b", "d"), (2, 3))
    w = g.weight("w", ("d", "f"), (3, 5), role)
    ops.contract(g, "c", "b d, d f -> b f", x, w)
    ops.contract(g, "flipped", "d f, b d -> b f", w, x)
    assert all(op.saves == (x,) and op.weights == (w,) for op in g.ops)


def test_a_frozen_input_saves_for_the_weight_and_costs_one_gradient():
    """A ViT's patch projection: backward is one product, not two."""
    g = Graph()
    x = g.tensor("x", ("b", "d"), (2, 3), grad=False)
    out = ops.linear(g, "projection", "b d, d f -> b f", x, (3, 5))
    (op,) = g.ops
    assert (op.forward.macs, op.backward.macs) == (30, 30)
    assert op.saves == (x,)
    assert out.grad


def test_a_fused_kernel_keeps_nothing_at_its_products():
    g = Graph()
    spec = "b n d, b m d -> b n m"
    ops.contract(g, "c", spec, *operands(g, spec, {"b": 1, "n": 2, "m": 3, "d": 4}), keep=False)
    assert g.ops[0].saves == ()
    assert g.ops[0].forward.macs == 24


# --- Windows and causal masks ---------------------------------------------------------------------------------------


@QUICK
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 10), st.integers(1, 3))
def test_a_window_visits_at_most_w_keys_of_each_query(n, m, w, d):
    """A kernel that reads a block of w keys per query (or all keys where there are fewer)."""
    spec, sizes = "n d, m d -> n m", {"n": n, "m": m, "d": d}
    _, macs = einsum(spec, sizes, values("nd", sizes, 1), values("md", sizes, 1), lambda point: point["m"] < w)
    g = Graph()
    ops.contract(g, "c", spec, *operands(g, spec, sizes), window=("n", "m", w))
    assert (g.ops[0].forward.macs, g.ops[0].backward.macs) == (macs, 2 * macs)
    assert g.ops[0].output.numel == n * m


def test_a_windows_closed_form_is_given_per_range():
    b, n, w, d = sympy.symbols("b N w d", positive=True, integer=True)
    g = Graph()
    spec = "b n d, b m d -> b n m"
    ops.contract(g, "c", spec, *operands(g, spec, {"b": b, "n": n, "m": n, "d": d}), window=("n", "m", w))
    macs = g.ops[0].forward.macs
    assert macs - b * n * d * sympy.Min(n, w) == 0
    longer, shorter = sympy.Symbol("j", positive=True), sympy.Symbol("k", positive=True)
    assert sympy.expand(macs.subs(w, n + longer) - b * n * n * d) == 0  # N <= w: the square
    assert sympy.expand(macs.subs(n, w + shorter) - b * (w + shorter) * w * d) == 0  # N > w: a band


def test_causal_counts_exactly_half_of_the_square():
    """N²/2 products at 2 FLOPs each are N² FLOPs, an integer for odd N too."""
    g = Graph()
    spec = "b n d, b m d -> b n m"
    ops.contract(g, "c", spec, *operands(g, spec, {"b": 2, "n": 7, "m": 7, "d": 3}), causal=True)
    assert g.ops[0].causal == 2 * 7 * 7 * 3


@QUICK
@given(st.integers(1, 40), st.integers(1, 60))
def test_half_a_causal_window_is_the_band_below_the_diagonal(n, w):
    """The visible pairs, counted one by one, with those on the two edges by half: as N²/2 counts the diagonal."""
    g = Graph()
    spec = "n d, m d -> n m"
    ops.contract(g, "c", spec, *operands(g, spec, {"n": n, "m": n, "d": 1}), causal=True, window=("n", "m", w))
    band = w if w <= n else n
    twice = 0
    for query in range(n):
        for key in range(query + 1):
            if query - key <= band:
                twice += 1 if query - key in (0, band) else 2
    # The corners of the band's edges are halves of halves: the diagonal is n long, the other edge n - w.
    assert g.ops[0].causal == twice
    if w >= n:
        assert g.ops[0].causal == n * n


def test_a_product_that_is_not_causal_has_no_half():
    g = Graph()
    spec = "n d, m d -> n m"
    ops.contract(g, "c", spec, *operands(g, spec, {"n": 4, "m": 5, "d": 1}))
    assert g.ops[0].causal is None


# --- What contract refuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["a b", "a b -> c", "a, b", "a, b ->", ", b -> b", "a, -> a", "a b, b c -> a d", "a -> a", ""]
)
def test_a_malformed_spec_is_a_graph_error_that_shows_it(spec):
    g = Graph()
    x = g.tensor("x", ("a",), (2,))
    with pytest.raises(GraphError, match="contraction"):
        ops.contract(g, "c", spec, x, x)
    assert g.ops == []


def test_sizes_that_disagree_show_the_spec_and_both_shapes():
    g = Graph()
    with g.scope("layer"), pytest.raises(GraphError) as caught:
        ops.contract(g, "c", "b d, d f -> b f", g.tensor("x", ("b", "d"), (2, 3)), g.tensor("w", ("d", "f"), (4, 5)))
    for part in ("layer/c", "b d, d f -> b f", "for d", "(2, 3)", "(4, 5)"):
        assert part in str(caught.value)


@pytest.mark.parametrize("shapes", [((2,), (3, 5)), ((2, 3), (3,)), ((2, 3, 4), (3, 5))])
def test_a_spec_with_another_number_of_axes_is_refused(shapes):
    g = Graph()
    a, b = (g.tensor(name, tuple("xyz"[: len(shape)]), shape) for name, shape in zip("ab", shapes, strict=True))
    with pytest.raises(GraphError, match="does not fit"):
        ops.contract(g, "c", "b d, d f -> b f", a, b)


# --- Linear layers and embeddings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_has_d_in_d_out_weights_and_a_bias_per_output(bias):
    g = Graph()
    x = g.tensor("x", ("b", "n", "d"), (2, 3, 5))
    ops.linear(g, "up", "b n d, d f -> b n f", x, (5, 7), bias)
    (op,) = g.ops
    assert [weight.numel for weight in op.weights] == [35] + bias * [7]
    assert [weight.path for weight in op.weights] == ["up/weight"] + bias * ["up/bias"]
    assert op.forward == (2 * 3 * 5 * 7, bias * 2 * 3 * 7)
    assert op.saves == (x,)


def test_a_bias_lies_on_all_head_axes_of_a_projection_and_on_the_width_of_a_merge():
    g = Graph()
    x = g.tensor("x", ("b", "n", "d"), (2, 3, 20))
    heads = ops.linear(g, "query", "b n d, d h g k -> b n h g k", x, (20, 2, 3, 5))
    ops.linear(g, "output", "b n h g k, h g k d -> b n d", heads, (2, 3, 5, 20))
    assert [op.weights[1].shape for op in g.ops] == [(2, 3, 5), (20,)]


def test_an_embedding_lookup_multiplies_nothing_and_keeps_nothing():
    g = Graph()
    table = g.weight("table", ("v", "d"), (11, 3), "embedding")
    out = ops.embedding(g, "token", ("b", "n", "d"), (2, 5, 3), table)
    (op,) = g.ops
    assert (op.forward, op.backward, op.saves, op.weights) == ((0, 0), (0, 0), (), (table,))
    assert (out.shape, out.grad) == ((2, 5, 3), True)


# --- Pointwise operators --------------------------------------------------------------------------------------------


def _input(g, grad=True) -> Tensor:
    return g.tensor("x", ("b", "n", "d"), (2, 3, 5), grad=grad)


@pytest.mark.parametrize(("kind", "bias", "parameters"), [("layernorm", True, 10), ("layernorm", False, 5),
                                                          ("rmsnorm", False, 5)])  # fmt: skip
def test_a_norm_keeps_its_input_and_has_a_scale_and_a_bias_over_the_width(kind, bias, parameters):
    g = Graph()
    x = _input(g)
    ops.norm(g, "norm", x, kind, bias)
    (op,) = g.ops
    assert op.saves == (x,)
    assert sum(weight.numel for weight in op.weights) == parameters
    assert (op.forward, op.backward, op.kind) == ((0, 30), (0, 30), kind)


def test_a_norm_over_two_axes_scales_both_and_one_without_affine_none():
    g = Graph()
    ops.norm(g, "both", _input(g), "layernorm", axes=2)
    ops.norm(g, "plain", _input(g), "layernorm", affine=False)
    assert [sum(weight.numel for weight in op.weights) for op in g.ops] == [30, 0]


def test_softmax_keeps_its_output():
    g = Graph()
    out = ops.softmax(g, "softmax", _input(g))
    assert g.ops[0].saves == (out,)
    ops.softmax(g, "fused", out, keep=False)
    assert g.ops[1].saves == ()


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_dropout_keeps_a_mask_of_one_byte_per_element_in_every_precision(itemsize):
    g = Graph(itemsize)
    ops.dropout(g, "dropout", _input(g), 0.1)
    (mask,) = g.ops[0].saves
    assert mask.bytes == 30
    assert mask.path == "dropout/mask"


def test_without_dropout_there_is_no_op():
    g = Graph()
    x = _input(g)
    assert ops.dropout(g, "dropout", x, 0.0) is x
    assert g.ops == []


@pytest.mark.parametrize("kind", ["gelu", "relu", "silu", "tanh"])
def test_an_activation_keeps_its_input(kind):
    g = Graph()
    x = _input(g)
    ops.activation(g, "activation", x, kind)
    assert (g.ops[0].saves, g.ops[0].kind) == ((x,), kind)


def test_a_sum_keeps_nothing_and_a_product_both_factors():
    g = Graph()
    x, y = _input(g), _input(g)
    ops.add(g, "sum", x, y)
    ops.multiply(g, "product", x, y)
    assert [op.saves for op in g.ops] == [(), (x, y)]


def test_rotation_keeps_nothing_and_has_no_parameters():
    g = Graph()
    out = ops.rotary(g, "rotary", _input(g))
    assert (g.ops[0].saves, g.ops[0].weights, out.shape) == ((), (), (2, 3, 5))


@pytest.mark.parametrize("apply", [
    lambda g, x: ops.norm(g, "op", x, "layernorm"), lambda g, x: ops.softmax(g, "op", x),
    lambda g, x: ops.activation(g, "op", x, "gelu"), lambda g, x: ops.add(g, "op", x, x),
    lambda g, x: ops.rotary(g, "op", x), lambda g, x: ops.dropout(g, "op", x, 0.5),
])  # fmt: skip
def test_pointwise_work_is_one_touch_per_element_and_no_multiplication(apply):
    g = Graph()
    apply(g, _input(g))
    assert g.ops[0].forward == (0, 30)


def test_a_pooler_reads_one_token_of_each_sequence():
    g = Graph()
    out = ops.gather_tokens(g, "first", _input(g), 1)
    assert (out.shape, g.ops[0].saves) == ((2, 1, 5), ())


def test_flash_attention_keeps_its_inputs_its_output_and_one_fp32_number_per_query_and_head():
    g = Graph(2)
    q = g.tensor("q", tuple("bnhgk"), (2, 3, 2, 2, 5))
    k, v = (g.tensor(name, tuple("bmhk"), (2, 7, 2, 5)) for name in "kv")
    out = g.tensor("out", tuple("bnhgk"), (2, 3, 2, 2, 5))
    scores = ops.contract(g, "scores", "b n h g k, b m h k -> b h g n m", q, k, kind="scores", keep=False)
    (made,) = g.ops
    assert ops.fused_attention(g, "flash", q, k, v, out, made) is out
    assert scores.numel == 2 * 2 * 2 * 3 * 7
    _, op = g.ops
    assert op.saves[:4] == (q, k, v, out)
    assert op.saves[4].bytes == 4 * 2 * 3 * (2 * 2)
    assert (op.forward.macs, op.recompute.macs) == (0, 2 * 2 * 2 * 3 * 7 * 5)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_cross_entropy_keeps_the_logits_and_an_fp32_copy(itemsize):
    g = Graph(itemsize)
    logits = g.tensor("logits", ("b", "n", "v"), (2, 3, 11))
    ops.cross_entropy(g, "loss", logits)
    assert [tensor.bytes for tensor in g.ops[0].saves] == [66 * itemsize, 66 * 4]


# --- Operators that single families need ----------------------------------------------------------------------------


@QUICK
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_a_convolutions_macs_are_its_products_one_by_one(batch, tokens, channels, width, taps, stride):
    """Padded by ``taps`` on both sides, so that every position has all of its taps."""
    positions, macs = 0, 0
    for _ in range(batch):
        for start in range(0, tokens + taps, stride):
            positions += 1
            for _ in product(range(start, start + taps), range(channels), range(width)):
                macs += 1
    g = Graph()
    x = g.tensor("x", tuple("bnc"), (batch, tokens, channels))
    each = positions // batch
    out = ops.convolution(g, "conv", x, each, taps, width)
    (op,) = g.ops
    assert (op.forward.macs, op.backward.macs) == (macs, 2 * macs)
    assert out.shape == (batch, each, width)
    assert [weight.numel for weight in op.weights] == [taps * channels * width, width]
    assert op.saves == (x,)


def test_a_convolution_of_an_image_has_one_gradient():
    g = Graph()
    pixels = g.tensor("x", tuple("bnc"), (2, 9, 3), grad=False)
    ops.convolution(g, "patches", pixels, 4, 2, 5, bias=False)
    assert (g.ops[0].forward.macs, g.ops[0].backward.macs) == (2 * 4 * 2 * 3 * 5, 2 * 4 * 2 * 3 * 5)
    assert len(g.ops[0].weights) == 1


@QUICK
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_experts_multiply_each_slot_by_one_matrix_however_the_slots_spread(chosen, d, f, grad):
    """``chosen`` is the expert of each slot, of four; every expert has its weights whether it is chosen or not."""
    macs = 0
    for _expert in chosen:
        for _ in product(range(d), range(f)):
            macs += 1
    g = Graph()
    x = g.tensor("x", tuple("sd"), (len(chosen), d), grad=grad)
    out = ops.expert_linear(g, "up", "s d, d f -> s f", x, 4, (d, f), bias=True)
    (op,) = g.ops
    assert (op.forward.macs, op.backward.macs) == (macs, (1 + grad) * macs)
    assert [weight.numel for weight in op.weights] == [4 * d * f, 4 * f]
    assert (out.shape, op.saves) == ((len(chosen), f), (x,))


def test_experts_of_another_width_are_refused():
    g = Graph()
    with pytest.raises(GraphError, match="up"):
        ops.expert_linear(g, "up", "s d, d f -> s f", g.tensor("x", tuple("sd"), (6, 4)), 2, (5, 7))


def test_slots_are_copied_and_combined_by_their_weights():
    """The product of slots and weights keeps both factors; the choice keeps which, which is not counted."""
    g = Graph(2)
    x = _input(g)
    slots = ops.dispatch(g, "dispatch", x, 12)
    weights = ops.choose(g, "choose", g.tensor("scores", tuple("bne"), (2, 3, 8)), 2)
    out = ops.combine(g, "combine", slots, weights, x)
    assert [op.saves for op in g.ops[:2]] == [(), ()]
    assert (slots.shape, weights.shape, out.shape) == ((12, 5), (2, 3, 2), x.shape)
    assert [tensor.bytes for tensor in g.ops[2].saves] == [2 * 12 * 5, 2 * 12]
    assert g.ops[2].forward == (0, 60)


def test_a_sink_is_a_learned_score_whose_weight_is_kept_with_the_row():
    g = Graph(2)
    scores = g.tensor("scores", tuple("bhnm"), (2, 3, 5, 7))
    sinks = g.weight("sinks", ("h",), (3,))
    ops.softmax(g, "softmax", scores, sinks=sinks)
    ops.softmax(g, "fused", scores, keep=False, sinks=sinks)
    assert sum(tensor.bytes for tensor in g.ops[0].saves) == 2 * 2 * 3 * 5 * (7 + 1)
    assert g.ops[0].forward == (0, 2 * 3 * 5 * (7 + 1))
    assert g.ops[1].saves == ()
    assert all(op.weights == (sinks,) for op in g.ops)


def test_a_squash_keeps_its_output():
    g = Graph()
    out = ops.squash(g, "gate", _input(g), "sigmoid")
    assert g.ops[0].saves == (out,)


def test_a_learned_scale_keeps_its_input():
    g = Graph()
    x = _input(g)
    ops.scale(g, "scale", x)
    assert (g.ops[0].saves, [weight.numel for weight in g.ops[0].weights]) == ((x,), [5])


COPIES = {
    "join_tokens": (lambda g, x: ops.join_tokens(g, "op", x, 3), (2, 3, 15)),
    "part": (lambda g, x: ops.part(g, "op", x, 2), (2, 3, 2)),
    "join": (lambda g, x: ops.join(g, "op", x, x), (2, 3, 10)),
    "rearrange": (lambda g, x: ops.rearrange(g, "op", x, tuple("bd"), (2, 15)), (2, 15)),
    "prepend": (lambda g, x: ops.prepend(g, "op", x, 1), (2, 4, 5)),
    "mean_tokens": (lambda g, x: ops.mean_tokens(g, "op", x, 3), (2, 1, 5)),
    "cast": (lambda g, x: ops.cast(g, "op", x, x.axes, x.shape), (2, 3, 5)),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_multiplies_nothing_and_keeps_nothing(name):
    g = Graph()
    apply, shape = COPIES[name]
    out = apply(g, _input(g))
    assert out.shape == shape
    assert (g.ops[0].forward.macs, g.ops[0].backward.macs, g.ops[0].saves) == (0, 0, ())


def test_weights_joined_for_a_product_are_a_tensor_that_it_keeps():
    """MobileBERT's head: the table's E columns and d - E of its own, joined anew in each pass."""
    g = Graph(2)
    table, rest = g.weight("table", tuple("vd"), (11, 3), "embedding"), g.weight("rest", tuple("vd"), (11, 2), "head")
    joined = ops.join_weights(g, "joined", table, rest)
    x = _input(g)
    ops.contract(g, "head", "b n d, v d -> b n v", x, joined)
    assert joined.shape == (11, 5)
    assert g.ops[0].weights == (table, rest)
    assert g.ops[1].saves == (x, joined)
    assert g.ops[1].weights == ()


def test_weights_that_a_pass_does_not_use_are_there_all_the_same():
    g = Graph()
    weight = g.weight("w", tuple("df"), (3, 5))
    ops.unused(g, "spare", (weight,))
    assert g.ops[0].weights == (weight,)
    assert (g.ops[0].forward, g.ops[0].saves) == ((0, 0), ())


def test_a_table_that_is_added_whole_is_no_activation():
    g = Graph()
    table = g.weight("table", tuple("nd"), (7, 5), "embedding")
    out = ops.whole_table(g, "positions", table)
    assert (out.shape, g.ops[0].weights, g.ops[0].saves) == ((7, 5), (table,), ())
