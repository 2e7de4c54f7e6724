"""The op graph: a program as operators over named axes, built on plain arithmetic.

An axis size is a Python int or a symbolic expression; nothing here (nor in :mod:`tfcost.ops`, :mod:`tfcost.blocks` and
:mod:`tfcost.families`) knows which. Built on ints the graph gives exact numbers; built on symbols, closed forms. The
only operations are ``+``, ``-``, ``*``, powers with a fixed exponent, and the three functions below: :func:`div`,
:func:`least` and :func:`round_up`.

A tensor, weights included, is counted once, where it is created. Work is counted in multiply-accumulates and in
elements touched, never in FLOPs: the factor 2 lives in :mod:`tfcost.convention`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import singledispatch
from math import prod
from typing import Any, NamedTuple, TypeAlias

from tfcost.errors import GraphError, InputError
from tfcost.implementation import DOCUMENT, Implementation

Size: TypeAlias = Any
"""The size of an axis: an int, or an expression that has ``+ - * **`` (sympy's, in practice)."""


def div(a: Size, b: Size, a_name: str, b_name: str) -> Size:
    """``a / b``, exactly. On ints a remainder is an :class:`InputError` that names both axes."""
    if isinstance(a, int) and isinstance(b, int):
        quotient, rest = divmod(a, b)
        if rest:
            raise InputError(f"{a_name} {a} does not divide by {b_name} {b}")
        return quotient
    return operator.truediv(a, b)  # symbolic division is exact; the int / int case has returned above


@singledispatch
def least(a: Size, b: Size) -> Size:
    """The smaller of two sizes (windows, capacities). :mod:`tfcost.symbols` registers the symbolic case."""
    if isinstance(a, int) and isinstance(b, int):
        return a if a <= b else b
    if isinstance(a, int):
        return least(b, a)
    raise GraphError(f"least() has no rule for {type(a).__name__}")


@singledispatch
def round_up(a: Size, multiple: int) -> Size:
    """The smallest multiple of ``multiple`` that is not below ``a`` (kernels that pad). Symbolic: as :func:`least`."""
    if isinstance(a, int):
        return a + -a % multiple
    raise GraphError(f"round_up() has no rule for {type(a).__name__}")


@singledispatch
def doublings(n: Size) -> Size:
    """How often one doubles to reach ``n``: ⌈log₂ n⌉ (a sort's depth). :mod:`tfcost.symbols` has the symbolic case."""
    if isinstance(n, int):
        return (n - 1).bit_length()
    raise GraphError(f"doublings() has no rule for {type(n).__name__}")


class Work(NamedTuple):
    """What an op does, before a convention prices it: multiply-accumulates, and elements touched one by one.

    The elements of a sort (an op of that kind) are its comparisons, a unit of their own, which no convention prices.
    """

    macs: Size = 0
    elements: Size = 0


NO_WORK = Work()

ADAPTER = "adapter"
"""The role of a low-rank adapter's matrices."""


class Tensor:
    """A tensor: created once, counted once, by identity.

    ``axes`` are the axis letters of its einsum (``b n d``), ``shape`` their sizes, ``itemsize`` bytes per element,
    ``copies`` how many such tensors the whole model has (one per repeated layer), ``grad`` whether backward computes
    its gradient. ``role`` is empty for an activation; a parameter has ``"weight"``, ``"embedding"``, ``"head"``
    or ``"adapter"``.
    ``first`` is set on the input of a repeated block: the tensor that is that input in the first repetition.
    """

    __slots__ = ("axes", "copies", "first", "grad", "itemsize", "path", "role", "shape")

    def __init__(
        self,
        path: str,
        axes: tuple[str, ...],
        shape: tuple[Size, ...],
        itemsize: Size,
        copies: Size,
        grad: bool = True,
        role: str = "",
        first: Tensor | None = None,
    ) -> None:
        self.path = path
        self.axes = axes
        self.shape = shape
        self.itemsize = itemsize
        self.copies = copies
        self.grad = grad
        self.role = role
        self.first = first

    @property
    def numel(self) -> Size:
        """Elements of one copy."""
        return prod(self.shape)

    @property
    def bytes(self) -> Size:
        """Bytes of one copy."""
        return prod(self.shape) * self.itemsize

    def __repr__(self) -> str:
        axes = " ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))
        return f"Tensor({self.path}: {axes}, {self.itemsize} B, x{self.copies})"


class Op:
    """One operator: its work forward and backward, its parameters, and the tensors it keeps for backward.

    ``copies`` is how often the model runs it. ``causal`` is None, or, for a product over the score square of a causal
    model, the index points of which it needs exactly half. ``recompute`` is work that a fused kernel's backward does
    again beyond the gradients; ``workspace`` the bytes that a backward in several steps has alive at once, beyond what
    is kept and the gradients that come in and go out.
    """

    __slots__ = (
        "backward", "causal", "copies", "forward", "inputs", "kind", "output", "path", "recompute", "saves", "weights",
        "workspace",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        path: str,
        inputs: tuple[Tensor, ...],
        output: Tensor,
        forward: Work,
        backward: Work,
        weights: tuple[Tensor, ...],
        saves: tuple[Tensor, ...],
        copies: Size,
        causal: Size | None = None,
        recompute: Work = NO_WORK,
        workspace: Size = 0,
    ) -> None:
        self.kind = kind
        self.path = path
        self.inputs = inputs
        self.output = output
        self.forward = forward
        self.backward = backward
        self.weights = weights
        self.saves = saves
        self.copies = copies
        self.causal = causal
        self.recompute = recompute
        self.workspace = workspace

    def __repr__(self) -> str:
        return f"Op({self.kind} {self.path} x{self.copies})"


class Adapters(NamedTuple):
    """Which weights train where not all do: low-rank adapters of the linear layers named ``targets``; rank 0: none,
    and what follows the last layer trains. ``dropout`` is of each adapter's own input.
    """

    rank: Size = 0
    targets: tuple[str, ...] = ()
    dropout: float = 0.0


class Repeat(NamedTuple):
    """A block that the model runs ``times`` times: its path and where its ops stand in ``Graph.ops``.

    ``shares_weights``: fewer sets of weights exist than runs (ALBERT). ``entered`` and ``left`` are what the body reads
    and returns, ``output`` what follows the last run.
    """

    path: str
    times: Size
    start: int
    stop: int
    shares_weights: bool
    entered: Tensor
    left: Tensor
    output: Tensor


class Scope:
    """An open scope of a graph. A class, since ``contextlib``'s generators took an eighth of the time of a build."""

    __slots__ = ("graph", "name", "outer")

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph, self.name, self.outer = graph, name, ""

    def __enter__(self) -> None:
        self.outer = self.graph.prefix
        self.graph.prefix = f"{self.outer}{self.name}/"

    def __exit__(self, *_: object) -> None:
        self.graph.prefix = self.outer


class Graph:
    """Ops in the order in which they run, with the scopes and repetitions that they stand in.

    ``itemsize`` is the bytes of an activation or weight element, ``implementation`` what its kernels keep,
    ``head_start`` where the ops of head and loss begin, ``labels`` how many tokens of a sequence they read where not
    all, ``adapters`` what trains where not all weights do.
    Paths are unique: a second op of the same path
    raises :class:`GraphError`, since a report could not tell the two apart.
    """

    def __init__(
        self, itemsize: Size = 2, implementation: Implementation = DOCUMENT, adapters: Adapters | None = None
    ) -> None:
        self.itemsize = itemsize
        self.implementation = implementation
        self.adapters = adapters
        self.adapted: set[str] = set()
        self.ops: list[Op] = []
        self.repeats: list[Repeat] = []
        self.head_start: int | None = None
        self.labels: Size | None = None
        self.copies: Size = 1
        self.weight_copies: Size = 1
        self.prefix = ""
        self._paths: set[str] = set()

    def path(self, name: str) -> str:
        """The full path of ``name`` in the scope that is open."""
        return self.prefix + name

    def tensor(
        self, name: str, axes: tuple[str, ...], shape: tuple[Size, ...], itemsize: Size = None, grad: bool = True
    ) -> Tensor:
        """An activation, created here. Its element has the graph's size unless ``itemsize`` says otherwise."""
        size = self.itemsize if itemsize is None else itemsize
        return Tensor(self.prefix + name, axes, shape, size, self.copies, grad)

    def weight(
        self, name: str, axes: tuple[str, ...], shape: tuple[Size, ...], role: str = "weight", grad: bool = True
    ) -> Tensor:
        """A parameter, created here; a frozen one without ``grad``, or where ``adapters`` freeze it.

        Inside a repetition that shares its weights it has fewer copies than its op.
        """
        trains = self.adapters is None or role == ADAPTER or (self.adapters.rank == 0 and self.head_start is not None)
        return Tensor(self.prefix + name, axes, shape, self.itemsize, self.weight_copies, grad and trains, role)

    @property
    def through_embeddings(self) -> bool:
        """Whether an embedding's output has a gradient though its table has none: adapters further on need it."""
        return self.adapters is not None and self.adapters.rank != 0

    def add(
        self,
        kind: str,
        name: str,
        inputs: tuple[Tensor, ...],
        output: Tensor,
        forward: Work = NO_WORK,
        backward: Work = NO_WORK,
        weights: tuple[Tensor, ...] = (),
        saves: tuple[Tensor, ...] = (),
        causal: Size | None = None,
        recompute: Work = NO_WORK,
        workspace: Size = 0,
    ) -> Tensor:
        """Append an op and return its output. Where that has no gradient, nothing is kept."""
        path = self.prefix + name
        if path in self._paths:
            raise GraphError(f"two ops have the path {path!r}")
        self._paths.add(path)
        saves = saves if output.grad else ()
        self.ops.append(
            Op(kind, path, inputs, output, forward, backward, weights, saves, self.copies, causal, recompute, workspace)
        )
        return output

    def weights_of(self, build: Callable[[], object]) -> tuple[Tensor, ...]:
        """The weights of the ops that ``build`` adds, without the ops: a block that a model has but does not run."""
        start = len(self.ops)
        build()
        built = self.ops[start:]
        del self.ops[start:]
        self._paths.difference_update([op.path for op in built])
        return tuple(weights_of(built))

    @contextmanager
    def elements_of(self, itemsize: Size) -> Iterator[None]:
        """Activations created inside have elements of this many bytes (an upcast)."""
        outer = self.itemsize
        self.itemsize = itemsize
        try:
            yield
        finally:
            self.itemsize = outer

    def scope(self, name: str) -> Scope:
        """Ops added inside (``with g.scope("attention"):``) have ``name/`` before their names."""
        return Scope(self, name)

    def repeat(
        self,
        name: str,
        times: Size,
        carry: Tensor,
        body: Callable[[Tensor], Tensor],
        weight_copies: Size | None = None,
    ) -> Tensor:
        """Run ``body`` ``times`` times, each on the output of the one before, and return the last output.

        The body is built once. Its input is a fresh tensor of ``times`` copies (every layer's input is a tensor of its
        own), and the last output another. Tensors from outside that the body reads keep their own count, so an encoder
        output that all decoder layers read is counted once. With ``weight_copies`` the repetitions share weights:
        that many distinct sets exist (ALBERT).
        """
        copies, weights = self.copies, self.weight_copies
        start = len(self.ops)
        with self.scope(name):
            self.copies = copies * times
            self.weight_copies = weights * (times if weight_copies is None else weight_copies)
            entered = self.tensor("input", carry.axes, carry.shape, carry.itemsize, carry.grad)
            entered.first = carry
            left = body(entered)
            self.copies, self.weight_copies = copies, weights
            if left.shape != entered.shape:
                raise GraphError(f"{self.path('')} enters with {entered.shape} and leaves with {left.shape}")
            if any(kept is left for op in self.ops[start:] for kept in op.saves):
                # It would be the next repetition's input under a second name, and be counted twice.
                raise GraphError(f"{self.path('')} keeps its own output")
            output = self.tensor("output", left.axes, left.shape, left.itemsize, left.grad)
            shares = weight_copies is not None
            self.repeats.append(Repeat(self.prefix[:-1], times, start, len(self.ops), shares, entered, left, output))
            return output


def weights_of(ops: Iterable[Op]) -> list[Tensor]:
    """The distinct parameters of some ops, in the order of their first use."""
    seen: dict[int, Tensor] = {}
    for op in ops:
        for weight in op.weights:
            seen.setdefault(id(weight), weight)
    return list(seen.values())


class Saved(NamedTuple):
    """A tensor kept for backward: the op that keeps it first, the tensor, and how many of it there are."""

    op: Op
    tensor: Tensor
    copies: Size


def saved_tensors(graph: Graph) -> list[Saved]:
    """The distinct tensors that a graph keeps for backward, each with the first op that keeps it.

    The input of a repeated block's first repetition is the tensor before the block: where both are kept, one copy
    of the two is left out.
    """
    seen: dict[int, Saved] = {}
    for op in graph.ops:
        for kept in op.saves:
            if id(kept) not in seen:
                seen[id(kept)] = Saved(op, kept, kept.copies)
    for key, saved in seen.items():
        first = saved.tensor.first
        if first is not None and id(first) in seen:
            seen[key] = saved._replace(copies=saved.copies - first.copies)
    return list(seen.values())
