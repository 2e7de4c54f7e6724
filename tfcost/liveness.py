"""What is alive step by step inside one layer: its forward without backward, and its backward with gradients.

Exact sums over the ops of a graph on ints; which is largest has no closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

from tfcost.graph import Op, Tensor
from tfcost.ops import FP32_BYTES


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
    """Bytes alive at one step of a backward: kept tensors, gradients of activations, and of weights; at which op."""

    kept: int = 0
    temporary: int = 0
    gradients: int = 0
    path: str = ""

    @property
    def total(self) -> int:
        """Their sum."""
        return self.kept + self.temporary + self.gradients


class Kept:
    """What is kept until the backward of the first op that keeps it has run: bytes by that op's place (``ends``)."""

    def __init__(self) -> None:
        self.since: dict[int, int] = {}
        self.ends: dict[int, int] = {}

    def add(self, tensor: Tensor, place: int, size: int) -> None:
        """A tensor that the op at ``place`` keeps; only its first keeper counts."""
        if id(tensor) not in self.since:
            self.since[id(tensor)] = place
            self.ends[place] = self.ends.get(place, 0) + size


class Buffers:
    """The gradients of activations that are alive: one buffer per tensor, which the inputs of a sum share."""

    def __init__(self) -> None:
        self.total = 0
        self._of: dict[int, list[int]] = {}  # by tensor: [bytes, tensors that share it]

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._of

    def put(self, tensor: Tensor, size: int) -> None:
        """A new gradient of a tensor that has none yet."""
        self._of[id(tensor)] = [size, 1]
        self.total += size

    def share(self, tensor: Tensor, other: Tensor) -> None:
        """The gradient of ``other`` is that of ``tensor`` too."""
        shared = self._of[id(other)]
        shared[1] += 1
        self._of[id(tensor)] = shared

    def drop(self, tensor: Tensor) -> None:
        """The gradient has been used."""
        shared = self._of.pop(id(tensor), None)
        if shared is not None:
            shared[1] -= 1
            if shared[1] == 0:
                self.total -= shared[0]

    def rename(self, old: Tensor, new: Tensor) -> None:
        """The gradient of ``old`` is that of ``new``: the same tensor, by its name in another place of the graph."""
        if id(old) in self._of:
            self._of[id(new)] = self._of.pop(id(old))

    def sole(self, tensor: Tensor) -> bool:
        """Whether the tensor shares its gradient with none."""
        return self._of[id(tensor)][1] == 1


class Backward(NamedTuple):
    """How a backward runs: bytes of weight gradients per op, whether they stay until all are there (else they go at
    once), and whether gradients are summed in the buffer of the first."""

    gradient: Callable[[Tensor], int]
    accumulate: bool = True
    sums_in_place: bool = True

    def walk(
        self,
        ops: Sequence[Op],
        ends: Mapping[int, int],
        again: Mapping[int, int],
        buffers: Buffers,
        done: Container[int],
    ) -> Alive:
        """The moment at which most is alive while backward runs through ``ops``; ``buffers`` are left as they are then.

        ``ends`` are the bytes kept until the backward of an op has run, by its place; ``again`` what a recomputed
        region holds while its backward is at a place; ``done`` the ids of weights whose gradients are there before.
        """
        inner = inside_kernels(ops)
        kept = sum(ends.values())
        peak, weights = Alive(), 0
        for index in reversed(range(len(ops))):
            op, ending = ops[index], ends.get(index, 0)
            if index in inner or op.kind == "unused":
                kept -= ending
                continue
            if op.output not in buffers and op.output.grad and not op.output.role:
                buffers.put(op.output, op.output.bytes)
            summed, again_here = 0, 0
            for weight in op.weights:
                size = self.gradient(weight)
                if id(weight) in done:
                    summed, again_here = summed + size, max(again_here, size)
                elif self.accumulate:
                    weights += size
                else:
                    summed += size
            incoming, shares, sums = op.output in buffers, [], []
            fresh = 0
            for tensor in dict.fromkeys(op.inputs):
                if tensor.role or not tensor.grad:
                    continue
                if incoming and op.kind in ("add", "select") and tensor.bytes == op.output.bytes:
                    shares.append(tensor)
                elif tensor in buffers:
                    fresh += tensor.bytes
                    sums.append(tensor)
                else:
                    buffers.put(tensor, tensor.bytes)
            held = kept + again.get(index, 0)
            # Where the steps are in the input's own type, the first step's gradient is summed at once.
            early = sums[0].bytes if op.workspace and sums and sums[0].itemsize == FP32_BYTES else 0
            alive = Alive(held, buffers.total + fresh + op.workspace - early, weights + summed, op.path)
            peak = max(peak, alive, key=lambda each: each.total)
            for tensor in shares:
                if tensor in buffers:
                    sums.append(tensor)
                else:
                    buffers.share(tensor, op.output)
            passed = any(tensor in shares for tensor in sums)  # then what came in is one of the summands
            if not passed:
                buffers.drop(op.output)
            kept -= ending
            for tensor in sums:
                if not (self.sums_in_place and buffers.sole(tensor)):
                    alive = Alive(held - ending, buffers.total + fresh + tensor.bytes, weights + summed, op.path)
                    peak = max(peak, alive, key=lambda each: each.total)
                    buffers.drop(tensor)
                    buffers.put(tensor, tensor.bytes)
                fresh -= tensor.bytes if tensor not in shares else 0
            if passed:
                buffers.drop(op.output)
            if again_here and not self.sums_in_place:
                alive = Alive(held - ending, buffers.total, weights + summed + again_here, op.path)
                peak = max(peak, alive, key=lambda each: each.total)
        return peak
