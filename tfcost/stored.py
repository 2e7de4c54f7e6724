"""What is stored for each weight: itself (perhaps quantised), its gradient, master copy, optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from tfcost.graph import ADAPTER, Graph, Size, Tensor, div, round_up
from tfcost.ops import EXPERT_AXIS
from tfcost.policy import BLOCK_8BIT, FP32, MIN_8BIT, OWN, PAGED_FROM, QUANTIZED, RECIPES, Quantized, Running

SCALE = 4
"""Bytes of an fp32 scale."""


class Stored(NamedTuple):
    """Bytes of one copy of a weight by category. ``gradient`` is there between its backward and the step, and ``paged``
    on the host."""

    weight: Size = 0
    gradient: Size = 0
    main_gradient: Size = 0
    master: Size = 0
    optimizer: Size = 0
    paged: Size = 0


def itself(size: Size) -> Size:
    """A size as it is."""
    return size


def below(size: Size, bound: int, at: Callable[[Size], Size]) -> bool:
    """Whether a size is below a bound. A closed form holds on the side that its point is on (``at``), or, where it has
    none, for sizes that are large."""
    value = at(size)
    return isinstance(value, int) and value < bound


VECTORS = ("bias", "sinks")
"""Weights over head axes that PyTorch holds as vectors."""


def dims(weight: Tensor) -> tuple[Size, ...]:
    """A weight's shape as PyTorch has it, input features before output ones: head axes (h, g, k) are one side.

    Experts (x) are stacked: (experts, in, out), and their biases (experts, out).
    """
    if weight.axes[:1] == EXPERT_AXIS:
        return weight.shape if len(weight.shape) < 3 else (*weight.shape[:2], prod(weight.shape[2:]))
    if len(weight.shape) < 2 or weight.path.rpartition("/")[2] in VECTORS:
        return (weight.numel,)
    heads = [size for axis, size in zip(weight.axes, weight.shape, strict=True) if axis in ("h", "g", "k")]
    rest = [size for axis, size in zip(weight.axes, weight.shape, strict=True) if axis not in ("h", "g", "k")]
    if len(heads) > 1:
        return (prod(heads), prod(rest)) if weight.axes[0] in ("h", "g", "k") else (prod(rest), prod(heads))
    return weight.shape[0], prod(weight.shape[1:])


def is_matrix(graph: Graph, weight: Tensor) -> bool:
    """Whether a weight is a linear layer's inside the layers: what Muon orthogonalises, and bitsandbytes quantises.

    Experts' matrices are, though transformers 5 stacks them in a tensor that bitsandbytes would not replace.
    """
    inside = any([weight.path.startswith(repeat.path + "/") for repeat in graph.repeats])
    least = 3 if weight.axes[:1] == EXPERT_AXIS else 2
    return inside and weight.role in ("weight", ADAPTER) and len(dims(weight)) >= least


def stored(
    graph: Graph, weight: Tensor, running: Running, itemsize: Size, at: Callable[[Size], Size] = itself
) -> Stored:
    """What is stored for one copy of a weight where it is run like this; ``itemsize`` is that of ``--dtype``.

    ``at`` gives a symbolic size's value where it has one.
    """
    recipe, count = RECIPES[running.recipe], weight.numel
    trains = running.mode == "train"
    own = itemsize if not trains or recipe.weight == OWN else recipe.weight
    if running.quantize and weight.role == "weight" and is_matrix(graph, weight):
        return Stored(quantized(weight, QUANTIZED[running.quantize]))
    if not trains or not weight.grad:
        return Stored(count * itemsize)
    states: Size = 0
    paged: Size = 0
    others = recipe.other_states
    if recipe.matrix_states != others and is_matrix(graph, weight):
        others = recipe.matrix_states
    for size in (*recipe.states, *others):
        states += count * (own if size == OWN else size)
    if recipe.states_8bit:
        values, scales = eight_bit(count, below(count, MIN_8BIT, at))
        if recipe.paged and not below(count, PAGED_FROM, at):
            paged, values = recipe.states_8bit * values, 0
        states += recipe.states_8bit * (values + scales)
    if recipe.factored:
        # Two means for a matrix, one of every element for a vector. In fp32 as transformers' Adafactor has them;
        # torch.optim's have the weight's dtype, which differs where that is no fp32.
        shape = dims(weight)
        states += SCALE * (count if len(shape) == 1 else prod(shape[:-2]) * sum(shape[-2:]))
    gradient = own if recipe.gradient == OWN else recipe.gradient
    return Stored(count * own, count * gradient, count * recipe.main_gradient, count * recipe.master, states, paged)


def eight_bit(count: Size, small: bool) -> tuple[Size, Size]:
    """Bytes of the values and of the scales of one 8-bit state: a byte per element, and an fp32 scale per block; the
    state of a ``small`` tensor is in fp32."""
    if small:
        return FP32 * count, 0
    return count, SCALE * div(round_up(count, BLOCK_8BIT), BLOCK_8BIT, "elements", "block")


def quantized(weight: Tensor, rule: Quantized) -> Size:
    """Bytes of a quantised weight with its scales and tables: 0.5625 per element (nf4), 0.5159 (nf4-dq) and constants.

    Each expert's matrix is one.
    """
    *stacked, come_in, out = dims(weight)
    return prod(stacked) * matrix(come_in * out, out, rule)


def matrix(count: Size, rows: Size, rule: Quantized) -> Size:
    """Bytes of a quantised matrix of ``count`` elements and ``rows`` output features."""
    values = div(round_up(count * rule.bits, 8), 8, "bits", "byte") + rule.tables
    if rule.block < 0:
        return values + SCALE
    if rule.block == 0:
        return values + SCALE * rows
    blocks = div(round_up(count, rule.block), rule.block, "elements", "block")
    if not rule.double:
        return values + SCALE * blocks
    # One byte per scale, an fp32 scale per block of those, and their mean, which is taken off before.
    return values + blocks + SCALE * div(round_up(blocks, rule.double), rule.double, "scales", "block") + SCALE
