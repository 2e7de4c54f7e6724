"""The op graph's laws, held against what they say: counts by identity, fresh carries, unique paths, plain arithmetic.

The core files are also read as syntax trees: nothing in them divides, compares sizes or imports an algebra.
"""

import ast
from itertools import product
from pathlib import Path

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from strategies import QUICK

import tfcost
import tfcost.symbols  # registers the symbolic case of least()
from tfcost import ops
from tfcost.errors import GraphError, InputError
from tfcost.graph import Graph, Tensor, Work, div, least, round_up, saved_tensors, weights_of

CORE = (
    "graph.py", "ops.py", "blocks.py", "families.py", "heads.py", "experts.py", "latent.py", "linear_attention.py",
    "hashing.py", "images.py", "towers.py", "diffusion.py", "speech.py", "recurrent.py",
)  # fmt: skip  # fmt: skip
PACKAGE = Path(tfcost.__file__).parent


# --- The core is plain arithmetic -----------------------------------------------------------------------------------


def impurities(source: str) -> list[str]:
    """What a core file must not hold: true or floor division, ``min`` and ``max``, and imports of an algebra."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
            found.append(f"{node.lineno}: {'/' if isinstance(node.op, ast.Div) else '//'}")
        elif isinstance(node, ast.Name) and node.id in ("min", "max"):
            found.append(f"{node.lineno}: {node.id}")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            heavy = [name for name in names if name.partition(".")[0] in ("sympy", "numpy", "torch")]
            found += [f"{node.lineno}: import {name}" for name in heavy]
    return found


@pytest.mark.parametrize("name", CORE)
def test_core_files_hold_only_plain_arithmetic(name):
    assert impurities((PACKAGE / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "x = a / b", "x = a // b", "x /= b", "x //= b", "x = min(a, b)", "x = max(a, b)", "f = max", "import sympy",
        "import numpy as np", "from torch import nn", "from sympy.core import Expr",
        "def f():\n    import numpy.linalg",
    ],
)  # fmt: skip
def test_the_purity_test_can_fail(line):
    assert len(impurities(line)) == 1


def test_the_purity_test_does_not_fail_on_what_is_allowed():
    allowed = 'x = a * b ** 2 - div(a, b, "a", "b") + least(a, b)\n"a / b and min(a, b) in words"\nminimum = 1'
    assert impurities(allowed) == []


# --- Sizes ----------------------------------------------------------------------------------------------------------


@QUICK
@given(st.integers(1, 10**40), st.integers(1, 10**40))
def test_div_undoes_multiplication_at_any_size(quotient, divisor):
    assert div(quotient * divisor, divisor, "a", "b") == quotient


@QUICK
@given(st.integers(1, 10**6), st.integers(2, 10**6), st.data())
def test_div_with_a_remainder_names_both_axes_and_values(quotient, divisor, data):
    dividend = quotient * divisor + data.draw(st.integers(1, divisor - 1))
    with pytest.raises(InputError) as caught:
        div(dividend, divisor, "-d/--hidden", "-h/--heads")
    for part in ("-d/--hidden", str(dividend), "-h/--heads", str(divisor)):
        assert part in str(caught.value)


def test_div_on_symbols_is_exact():
    d, h = sympy.symbols("d h", positive=True, integer=True)
    assert div(d, h, "d", "h") * h == d
    assert div(d, 3, "d", "3") == d * sympy.Rational(1, 3)


@QUICK
@given(st.integers(1, 10**30), st.integers(1, 10**30))
def test_least_is_the_smaller_on_ints_and_on_symbols(a, b):
    n, w = sympy.symbols("N w", positive=True, integer=True)
    smaller = sorted((a, b))[0]
    assert least(a, b) == smaller
    assert least(n, w).subs({n: a, w: b}) == smaller
    assert least(n, b).subs(n, a) == smaller
    assert least(a, w).subs(w, b) == smaller


def test_least_refuses_what_it_has_no_rule_for():
    with pytest.raises(GraphError, match="str"):
        least("a", "b")


# --- Tensors and ops ------------------------------------------------------------------------------------------------


@QUICK
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from((1, 2, 4)))
def test_numel_and_bytes_count_every_element(shape, itemsize):
    tensor = Tensor("x", tuple("abcd"[: len(shape)]), tuple(shape), itemsize, 1)
    elements = sum(1 for _ in product(*map(range, shape)))
    assert tensor.numel == elements
    assert tensor.bytes == sum(itemsize for _ in range(elements))


def test_a_tensor_and_an_op_say_what_they_are():
    g = Graph()
    x = g.tensor("x", ("b", "d"), (2, 3))
    g.add("copy", "y", (x,), x)
    assert repr(x) == "Tensor(x: b=2 d=3, 2 B, x1)"
    assert repr(g.ops[0]) == "Op(copy y x1)"


def test_two_ops_of_one_path_raise():
    g = Graph()
    x = g.tensor("x", ("b",), (2,))
    g.add("copy", "y", (x,), x)
    with pytest.raises(GraphError, match="'y'"):
        g.add("copy", "y", (x,), x)


def test_equal_names_in_different_scopes_are_different_paths():
    g = Graph()
    x = g.tensor("x", ("b",), (2,))
    for scope in ("left", "right"):
        with g.scope(scope), g.scope("inner"):
            g.add("copy", "y", (x,), x)
    assert [op.path for op in g.ops] == ["left/inner/y", "right/inner/y"]


def test_a_scope_that_is_opened_twice_still_refuses_a_duplicate():
    g = Graph()
    x = g.tensor("x", ("b",), (2,))
    with g.scope("s"):
        g.add("copy", "y", (x,), x)
    with g.scope("s"), pytest.raises(GraphError, match="'s/y'"):
        g.add("copy", "y", (x,), x)


def test_a_scope_closes_when_its_body_raises():
    g = Graph()
    with pytest.raises(RuntimeError), g.scope("s"):
        raise RuntimeError
    assert g.path("x") == "x"


def test_an_element_has_the_graphs_size_unless_it_says_otherwise():
    g = Graph(itemsize=4)
    assert g.tensor("x", ("b",), (3,)).bytes == 12
    assert g.tensor("mask", ("b",), (3,), 1).bytes == 3
    assert g.weight("w", ("d",), (5,)).bytes == 20


# --- Repetition -----------------------------------------------------------------------------------------------------


def _keep(g, name, x):
    """An op that keeps its input and passes on a tensor of its own."""
    return g.add("keep", name, (x,), g.tensor(name, x.axes, x.shape), Work(7), saves=(x,))


@QUICK
@given(st.integers(1, 50), st.integers(1, 50))
def test_a_loop_carried_tensor_counts_once_per_repetition(outer, inner):
    g = Graph(1)
    x = g.tensor("x", ("d",), (10,))
    left = g.repeat("outer", outer, x, lambda y: g.repeat("inner", inner, y, lambda z: _keep(g, "op", z)))
    assert [saved.copies for saved in saved_tensors(g)] == [outer * inner]
    assert [op.copies for op in g.ops] == [outer * inner]
    assert left.copies == 1
    assert left is not x


def test_the_carry_is_a_fresh_tensor_with_the_old_ones_shape_and_gradient():
    g = Graph()
    x = g.tensor("x", ("b", "d"), (2, 3), 4, grad=False)
    entered = []

    def body(y):
        entered.append(y)
        return g.tensor("out", y.axes, y.shape, y.itemsize, y.grad)

    g.repeat("layer", 5, x, body)
    (carry,) = entered
    assert carry is not x
    assert (carry.axes, carry.shape, carry.itemsize, carry.grad) == (x.axes, x.shape, x.itemsize, x.grad)
    assert (x.copies, carry.copies) == (1, 5)
    assert carry.path == "layer/input"


def test_the_body_is_built_once_however_often_it_runs():
    g = Graph()
    calls = []

    def body(y):
        calls.append(y)
        return _keep(g, "op", y)

    g.repeat("layer", 10**12, g.tensor("x", ("d",), (3,)), body)
    assert len(calls) == 1
    assert g.ops[0].copies == 10**12


def test_a_tensor_from_outside_counts_once_whatever_reads_it():
    g = Graph(1)
    x = g.tensor("x", ("d",), (10,))
    outside = g.tensor("memory", ("d",), (100,))

    def body(y):
        z = _keep(g, "op", y)
        g.add("read", "read", (outside,), z, saves=(outside,))
        return z

    g.repeat("layer", 6, x, body)
    assert sum(saved.copies * saved.tensor.bytes for saved in saved_tensors(g)) == 6 * 10 + 100


def test_the_first_repetitions_input_is_the_tensor_before_the_block():
    """The same memory under two names: kept before the block and by the block, it is there l times, not l + 1."""
    g = Graph(1)
    x = g.tensor("x", ("d",), (10,))
    g.add("keep", "before", (x,), x, saves=(x,))
    g.repeat("layer", 6, x, lambda y: _keep(g, "op", y))
    assert sum(saved.copies * saved.tensor.bytes for saved in saved_tensors(g)) == 6 * 10


def test_a_tensor_that_two_ops_keep_counts_once_and_equal_tensors_count_twice():
    g = Graph(1)
    x, twin = (g.tensor("x", ("d",), (10,)) for _ in range(2))
    for index in range(3):
        g.add("keep", f"a{index}", (x,), x, saves=(x, x))
    g.add("keep", "b", (twin,), twin, saves=(twin,))
    assert [saved.tensor for saved in saved_tensors(g)] == [x, twin]
    assert saved_tensors(g)[0].op.path == "a0"


@QUICK
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_repetitions_that_share_weights_have_fewer_of_them_than_runs(outer, inner, sets):
    g = Graph()

    def body(y):
        return ops.linear(g, "linear", "b d, d f -> b f", y, (3, 3))

    x = g.tensor("x", ("b", "d"), (2, 3))
    g.repeat("outer", outer, x, lambda y: g.repeat("inner", inner, y, body, weight_copies=sets))
    assert {weight.copies for weight in weights_of(g.ops)} == {outer * sets}
    assert g.ops[0].copies == outer * inner
    assert g.weight("after", ("d",), (3,)).copies == 1


def test_a_shared_weight_is_listed_once():
    g = Graph()
    table = g.weight("table", ("v", "d"), (5, 3), "embedding")
    x = ops.embedding(g, "token", ("b", "d"), (2, 3), table)
    ops.contract(g, "head", "b d, v d -> b v", x, table)
    assert weights_of(g.ops) == [table]


def test_a_body_that_changes_the_shape_raises():
    g = Graph()
    with pytest.raises(GraphError, match="layer"):
        g.repeat("layer", 2, g.tensor("x", ("d",), (3,)), lambda y: g.tensor("y", ("d",), (4,)))


def test_a_body_that_keeps_its_own_output_raises():
    """The next repetition's input is that output: kept under both names it would count twice."""
    g = Graph()
    with pytest.raises(GraphError, match="layer"):
        g.repeat("layer", 2, g.tensor("x", ("d",), (3,)), lambda y: ops.softmax(g, "softmax", y))


def test_a_repetition_says_where_its_ops_stand():
    g = Graph()
    x = _keep(g, "before", g.tensor("x", ("d",), (3,)))
    x = g.repeat("layer", 4, x, lambda y: _keep(g, "b", _keep(g, "a", y)))
    _keep(g, "after", x)
    (repeat,) = g.repeats
    assert (repeat.path, repeat.times) == ("layer", 4)
    assert [op.path for op in g.ops[repeat.start : repeat.stop]] == ["layer/a", "layer/b"]


# --- Padding, and weights of a block that is not run ----------------------------------------------------------------


@QUICK
@given(st.integers(1, 10**20), st.integers(1, 64))
def test_round_up_is_the_first_multiple_that_is_not_below(size, multiple):
    n = sympy.Symbol("N", positive=True, integer=True)
    rounded = round_up(size, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - size < multiple
    assert round_up(n, multiple).subs(n, size) == rounded


def test_round_up_refuses_what_it_has_no_rule_for():
    with pytest.raises(GraphError, match="str"):
        round_up("a", 8)


def test_the_weights_of_a_block_can_be_had_without_its_ops():
    """Built, listed and taken back: no op, no path and no saved tensor stays."""
    g = Graph()
    x = g.tensor("x", ("b", "d"), (2, 3))
    _keep(g, "before", x)
    weights = g.weights_of(lambda: ops.linear(g, "block", "b d, d f -> b f", x, (3, 5)))
    assert [weight.numel for weight in weights] == [15, 5]
    assert [op.path for op in g.ops] == ["before"]
    ops.linear(g, "block", "b d, d f -> b f", x, (3, 5))  # the path is free again
