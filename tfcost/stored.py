"""What is stored for each weight: itself (perhaps quantised), its gradient, master copy, optimizer state."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from tfcost.graph import ADAPTER, Graph, Size, Tensor, div, round_up
from tfcost.ops import EXPERT_AXIS
from tfcost.policy import BLOCK_8BIT, FP32, MIN_8BIT, OWN, QUANTIZED, RECIPES, Quantized, Running

SCALE = 4
"""Bytes of an fp32 scale."""


class Stored(NamedTuple):
    """Bytes of one copy of a weight by category. ``gradient`` is there between its backward and the step."""

    weight: Size = 0
    gradient: Size = 0
    main_gradient: Size = 0
    master: Size = 0
    optimizer: Size = 0


def sides(weight: Tensor) -> tuple[Size, Size]:
    """Rows and columns of a weight as the matrix that it is in PyTorch: input features, output features.

    Head axes (h, g, k) are one side; elsewhere the first axis comes in. Experts (x) are that many matrices: the sides
    of one.
    """
    if weight.axes[:1] == EXPERT_AXIS:
        return weight.shape[1], prod(weight.shape[2:])
    heads = [size for axis, size in zip(weight.axes, weight.shape, strict=True) if axis in ("h", "g", "k")]
    rest = [size for axis, size in zip(weight.axes, weight.shape, strict=True) if axis not in ("h", "g", "k")]
    if len(heads) > 1:
        return (prod(heads), prod(rest)) if weight.axes[0] in ("h", "g", "k") else (prod(rest), prod(heads))
    return weight.shape[0], prod(weight.shape[1:])


def is_matrix(graph: Graph, weight: Tensor) -> bool:
    """Whether a weight is a linear layer's inside the layers: what Muon orthogonalises, and bitsandbytes quantises."""
    inside = any([weight.path.startswith(repeat.path + "/") for repeat in graph.repeats])
    return inside and weight.role in ("weight", ADAPTER) and len(weight.axes) > 1


def stored(graph: Graph, weight: Tensor, running: Running, itemsize: Size) -> Stored:
    """What is stored for one copy of a weight where it is run like this; ``itemsize`` is that of ``--dtype``."""
    recipe, count = RECIPES[running.recipe], weight.numel
    trains = running.mode == "train"
    own = itemsize if not trains or recipe.weight == OWN else recipe.weight
    if running.quantize and weight.role == "weight" and is_matrix(graph, weight):
        return Stored(quantized(weight, QUANTIZED[running.quantize]))
    if not trains or not weight.grad:
        return Stored(count * itemsize)
    states: Size = 0
    others = recipe.other_states
    if recipe.matrix_states != others and is_matrix(graph, weight):
        others = recipe.matrix_states
    for size in (*recipe.states, *others):
        states += count * (own if size == OWN else size)
    if recipe.states_8bit:
        states += recipe.states_8bit * eight_bit(count)
    if recipe.factored:
        # Torch's and transformers' rule: two means for a matrix, one of every element for a vector, always in fp32.
        experts = weight.shape[0] if weight.axes[:1] == EXPERT_AXIS else 1
        states += SCALE * (experts * sum(sides(weight)) if len(weight.axes) > 1 else count)
    gradient = own if recipe.gradient == OWN else recipe.gradient
    return Stored(count * own, count * gradient, count * recipe.main_gradient, count * recipe.master, states)


def eight_bit(count: Size) -> Size:
    """Bytes of one 8-bit state: a byte per element and an fp32 scale per block; a small tensor's is in fp32."""
    if isinstance(count, int) and count < MIN_8BIT:
        return FP32 * count
    return count + SCALE * div(round_up(count, BLOCK_8BIT), BLOCK_8BIT, "elements", "block")


def quantized(weight: Tensor, rule: Quantized) -> Size:
    """Bytes of a quantised weight, its scales included: 0.5625 per element (nf4), 0.5158 (nf4-dq) and an offset."""
    count, bits = weight.numel, rule.bits
    values = div(round_up(count * bits, 8), 8, "bits", "byte")
    if rule.block < 0:
        return values + SCALE
    if rule.block == 0:
        experts = weight.shape[0] if weight.axes[:1] == EXPERT_AXIS else 1
        return values + SCALE * experts * sides(weight)[1]
    blocks = div(round_up(count, rule.block), rule.block, "elements", "block")
    if not rule.double:
        return values + SCALE * blocks
    # One byte per scale, an fp32 scale per block of those, and their mean, which is taken off before.
    return values + blocks + SCALE * div(round_up(blocks, rule.double), rule.double, "scales", "block") + SCALE
