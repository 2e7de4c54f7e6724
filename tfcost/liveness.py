"""What is alive step by step inside one layer: its forward without backward, and its backward with gradients.

Exact sums over the ops of a graph on ints; which is largest has no closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tfcost.graph import Op, Tensor


def inside_kernels(ops: Sequence[Op]) -> set[int]:
    """The places of ops whose outputs never stand in memory: those that a fused kernel does in one go."""
    found: set[int] = set()
    for index, op in enumerate(ops):
        if op.kind == "fused_attention":
            start = next(i for i in range(index, -1, -1) if ops[i].path.endswith("/scores"))
            found.update(range(start, index))
    return found


def forward_peak(ops: Sequence[Op]) -> int:
    """The most bytes of activations alive at once in a forward pass that keeps nothing for a backward."""
    inner = inside_kernels(ops)
    steps = [op for index, op in enumerate(ops) if index not in inner]
    if not steps:
        return 0
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for index, op in enumerate(steps):
        views = op.kind in ("cache", "unused")  # a cache is counted as one
        for tensor in op.inputs:
            if not tensor.role:
                first.setdefault(id(tensor), 0)
                last[id(tensor)] = index
                sizes.setdefault(id(tensor), tensor.bytes)
        if not op.output.role:
            first.setdefault(id(op.output), index)
            last[id(op.output)] = index
            sizes.setdefault(id(op.output), 0 if views else op.output.bytes)
    last[id(steps[-1].output)] = len(steps)
    return max(
        sum(size for key, size in sizes.items() if first[key] <= index <= last[key]) for index in range(len(steps))
    )


class Alive(NamedTuple):
    """Bytes alive at one step of a backward: kept tensors, gradients of activations, and of weights."""

    kept: int = 0
    temporary: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        """Their sum."""
        return self.kept + self.temporary + self.gradients


def backward_peak(
    ops: Sequence[Op],
    keeps: Sequence[tuple[Tensor, ...]],
    again: Mapping[int, Sequence[tuple[Tensor, int]]],
    own: Callable[[Tensor], bool],
    gradient: Callable[[Op], int],
    accumulate: bool,
) -> tuple[Alive, int]:
    """The moment of a layer's backward at which most is alive, and what the layer keeps until its backward begins.

    ``keeps`` are the tensors that each op keeps; ``again`` those that a recomputed region holds while its backward is
    at an op, each with the first op that keeps it; ``own`` says which count as the layer's; ``gradient`` the bytes of
    weight gradients of an op, which stay (``accumulate``) or go at once.
    """
    inner = inside_kernels(ops)
    needed: dict[int, tuple[Tensor, int]] = {}
    for index, saves in enumerate(keeps):
        for tensor in saves:
            if own(tensor):
                needed.setdefault(id(tensor), (tensor, index))
    # What is needed from an op on is alive until backward has passed that op: summed once, then taken off step by step.
    ends: dict[int, int] = {}
    kept = 0
    for tensor, since in needed.values():
        size = tensor.bytes
        kept += size
        ends[since] = ends.get(since, 0) + size
    boundary = kept
    # Gradients of activations: each tensor's buffer as [bytes, tensors that share it]; a sum's inputs share one.
    buffers: dict[int, list[int]] = {id(ops[-1].output): [ops[-1].output.bytes, 1]}
    temporary = ops[-1].output.bytes
    peak, weights = Alive(), 0
    for index in reversed(range(len(ops))):
        kept -= ends.get(index + 1, 0)
        if index in inner:
            continue
        op = ops[index]
        here = gradient(op) if op.weights else 0
        weights = weights + here if accumulate else here
        incoming = buffers.get(id(op.output))
        for tensor in op.inputs:
            if tensor.role or not tensor.grad or id(tensor) in buffers:
                continue
            size = tensor.bytes
            if incoming is not None and op.kind in ("add", "select") and size == op.output.bytes:
                incoming[1] += 1
                buffers[id(tensor)] = incoming
            else:
                temporary += size
                buffers[id(tensor)] = [size, 1]
        held = kept
        for tensor, since in again.get(index, ()):
            # A tensor that stands in both is one.
            if since <= index and not (id(tensor) in needed and needed[id(tensor)][1] <= index):
                held += tensor.bytes
        if held + temporary + weights > peak.total:
            peak = Alive(held, temporary, weights)
        if incoming is not None:
            del buffers[id(op.output)]
            incoming[1] -= 1
            if incoming[1] == 0:
                temporary -= incoming[0]
    return peak, boundary
