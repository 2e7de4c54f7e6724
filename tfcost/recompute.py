"""Recomputation as a transform of the graph: a region keeps its inputs, and runs forward once more before its backward.

``full``: each layer is a region, 2bNd bytes kept of it (Chen et al. 2016, arXiv:1604.06174; ``every``: one
layer in so many). ``selective``: the attention core, from QKᵀ to PV, 34bNd of 34bNd + 5bN²h (Korthikanti et al. 2022,
arXiv:2205.05198, section 5). A fused kernel keeps no square, so ``selective`` leaves it as it is.
"""

from __future__ import annotations

from typing import NamedTuple

from tfcost.graph import Graph, Op, Saved, Size, Tensor, div, saved_tensors

CORE_START, CORE_END = "scores", "weighted_sum"


class Region(NamedTuple):
    """Ops ``start`` to ``stop`` of a graph, run again ``copies`` times in all, from ``inputs``."""

    start: int
    stop: int
    copies: Size
    inputs: tuple[Tensor, ...]


def regions(graph: Graph, mode: str, every: int = 1) -> list[Region]:
    """What is run again. ``every`` must divide the number of layers."""
    spans: list[tuple[int, int, Size]] = []
    if mode == "full":
        for repeat in graph.repeats:
            copies = graph.ops[repeat.start].copies
            spans.append((repeat.start, repeat.stop, div(copies, every, "layers", "--recompute every-")))
    elif mode == "selective":
        begin = 0
        for index, op in enumerate(graph.ops):
            if op.kind == CORE_START:
                begin = index
            elif op.kind == CORE_END and op.saves:  # a fused kernel's products keep nothing themselves
                spans.append((begin, index + 1, op.copies))
    return [Region(start, stop, copies, _inputs(graph.ops[start:stop])) for start, stop, copies in spans]


def _inputs(ops: list[Op]) -> tuple[Tensor, ...]:
    """The activations from outside that some ops read."""
    made = {id(op.output) for op in ops}
    read: dict[int, Tensor] = {}
    for op in ops:
        for tensor in op.inputs:
            if id(tensor) not in made and not tensor.role:
                read.setdefault(id(tensor), tensor)
    return tuple(read.values())


def kept(graph: Graph, found: list[Region], every: int = 1) -> list[Saved]:
    """The tensors kept for backward where those regions are run again."""
    plain = saved_tensors(graph)
    if not found:
        return plain
    again = Graph(graph.itemsize, graph.implementation)
    again.ops = keeping(graph, found)
    real = {id(copy): op for copy, op in zip(again.ops, graph.ops, strict=True)}
    regional = [saved._replace(op=real[id(saved.op)]) for saved in saved_tensors(again)]
    if every == 1:
        return regional
    # Of each so-many layers one keeps its inputs alone, the others what they always keep.
    with_it = {id(saved.tensor): saved for saved in regional}
    merged = []
    for saved in plain:
        if id(saved.tensor) not in with_it:
            saved = saved._replace(copies=saved.copies - div(saved.copies, every, "layers", "--recompute every-"))
        merged.append(saved)
    before = {id(saved.tensor) for saved in plain}
    new = [saved for saved in regional if id(saved.tensor) not in before]
    return [*merged, *[s._replace(copies=div(s.copies, every, "layers", "--recompute every-")) for s in new]]


def keeping(graph: Graph, found: list[Region]) -> list[Op]:
    """The ops of a graph whose regions keep their inputs alone."""
    ops = list(graph.ops)
    for region in found:
        for index in range(region.start, region.stop):
            ops[index] = _keeping(ops[index], region.inputs if index == region.start else ())
    return ops


def _keeping(op: Op, saves: tuple[Tensor, ...]) -> Op:
    return Op(
        op.kind, op.path, op.inputs, op.output, op.forward, op.backward, op.weights, saves, op.copies, op.causal,
        op.recompute, op.workspace,
    )  # fmt: skip
