"""Recomputation as a transform of the graph: a region keeps its inputs, and runs forward once more before its backward.

``full``: each layer is a region, 2bNd bytes kept of it (Chen et al. 2016, arXiv:1604.06174; ``every``: one
layer in so many). ``selective``: the attention core, from QKᵀ to PV, 34bNd of 34bNd + 5bN²h (Korthikanti et al. 2022,
arXiv:2205.05198, section 5). A fused kernel keeps no square, so ``selective`` leaves it as it is. ``save``: each layer
is a region that also keeps the outputs of chosen ops and does not run those again (PyTorch's selective activation
checkpointing, torch.utils.checkpoint.create_selective_checkpoint_contexts). ``ops``: chosen ops are regions whose
outputs are not kept either, whoever needs them; what they are made from is (Megatron-Core's ``recompute_modules`` with
outputs discarded).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tfcost.errors import InputError, UnknownName
from tfcost.graph import Graph, Op, Saved, Size, Tensor, div, saved_tensors
from tfcost.liveness import inside_kernels

CORE_START, CORE_END = "scores", "weighted_sum"


class Region(NamedTuple):
    """Ops ``start`` to ``stop`` of a graph, run again ``copies`` times in all, from ``inputs``.

    ``saved`` are outputs that are kept besides, of the ops at ``done``, which do not run again. ``discards``: the
    region's outputs are not kept for others.
    """

    start: int
    stop: int
    copies: Size
    inputs: tuple[Tensor, ...]
    saved: tuple[Tensor, ...] = ()
    done: frozenset[int] = frozenset()
    discards: bool = False

    @property
    def again(self) -> list[int]:
        """The places of the ops that run again."""
        return [index for index in range(self.start, self.stop) if index not in self.done]


def regions(graph: Graph, mode: str, every: int = 1, chosen: tuple[str, ...] = ()) -> list[Region]:
    """What is run again. ``every`` must divide the number of layers; ``chosen`` are names of ops in the layers."""
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
    elif mode == "save":
        return _saving(graph, places(graph, mode, chosen))
    elif mode == "ops":
        return _discarding(graph, places(graph, mode, chosen))
    return [Region(start, stop, copies, _inputs(graph.ops[start:stop])) for start, stop, copies in spans]


def places(graph: Graph, mode: str, chosen: Iterable[str]) -> set[int]:
    """Where the ops of these names stand: a layer's op (``softmax``), its path (``mlp/dropout``), the block it is in
    (``mlp``), or else its kind (``gelu``). A fused kernel's inner steps come with it."""
    inner = inside_kernels(graph.ops)
    found: set[int] = set()
    known: set[str] = set()
    for name in chosen:
        matched: set[int] = set()
        of_kind: set[int] = set()
        for repeat in graph.repeats:
            for index in range(repeat.start, repeat.stop):
                op = graph.ops[index]
                path = op.path.removeprefix(repeat.path + "/")
                known |= {path.rpartition("/")[2], path.partition("/")[0]} if index not in inner else set()
                if f"/{path}/".endswith(f"/{name}/") or path.startswith(name + "/"):
                    matched.add(index)
                elif op.kind == name:
                    of_kind.add(index)
        matched = matched or of_kind
        if matched and matched <= inner:
            raise InputError(f"--recompute {mode}:{name}: a step inside a fused kernel; name the kernel, or use eager")
        if not matched:
            raise UnknownName(f"--recompute {mode}: op", name, sorted(known))
        found |= matched
    kernels = [index for index in found if graph.ops[index].kind == "fused_attention"]
    return found | {place for place in inner for index in kernels if _same_block(graph, place, index)}


def _same_block(graph: Graph, one: int, other: int) -> bool:
    return graph.ops[one].path.rpartition("/")[0] == graph.ops[other].path.rpartition("/")[0]


def _saving(graph: Graph, chosen: set[int]) -> list[Region]:
    """Each layer, with the outputs of the chosen ops kept: what they return, and what they make for their backward."""
    found, inner = [], inside_kernels(graph.ops)
    for repeat in graph.repeats:
        ops, done = graph.ops[repeat.start : repeat.stop], chosen & set(range(repeat.start, repeat.stop))
        # A layer's output is the next one's input, which is kept as such.
        saved = [
            tensor for index in sorted(done - inner) for tensor in made_by(graph.ops[index])
            if tensor is not repeat.left
        ]  # fmt: skip
        found.append(Region(repeat.start, repeat.stop, ops[0].copies, _inputs(ops), tuple(saved), frozenset(done)))
    return found


def made_by(op: Op) -> list[Tensor]:
    """The tensors that an op makes: its output, and masks and statistics that it keeps."""
    return [op.output, *[t for t in op.saves if t is not op.output and t.path.startswith(op.path + "/")]]


def _discarding(graph: Graph, chosen: set[int]) -> list[Region]:
    """The chosen ops that somebody's backward needs, directly or through another of them."""
    needed: set[int] = set()
    _frontiers(graph, chosen, needed)
    inner = inside_kernels(graph.ops)
    needed |= {i for i in chosen & inner if any(_same_block(graph, i, other) for other in needed)}
    return [
        Region(index, index + 1, graph.ops[index].copies, _inputs([graph.ops[index]]), discards=True)
        for index in sorted(needed)
    ]


def _frontiers(graph: Graph, chosen: set[int], needed: set[int]) -> list[tuple[Tensor, ...]]:
    """What each op keeps where the chosen ops' results are made again: what those are made from, step by step.

    The places of those that somebody needs are added to ``needed``.
    """
    made = {id(tensor): index for index in sorted(chosen) for tensor in made_by(graph.ops[index])}

    def sources(tensor: Tensor) -> list[Tensor]:
        if id(tensor) not in made:
            return [tensor]
        index = made[id(tensor)]
        needed.add(index)
        return [source for each in graph.ops[index].inputs if not each.role for source in sources(each)]

    return [tuple(dict.fromkeys(source for each in op.saves for source in sources(each))) for op in graph.ops]


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
    """The ops of a graph whose regions keep their inputs alone, and what they are told to."""
    ops = list(graph.ops)
    discarded = {region.start for region in found if region.discards}
    if discarded:
        saves = _frontiers(graph, discarded, set())
        return [_keeping(op, kept) for op, kept in zip(ops, saves, strict=True)]
    for region in found:
        for index in range(region.start, region.stop):
            ops[index] = _keeping(ops[index], region.inputs + region.saved if index == region.start else ())
    return ops


def _keeping(op: Op, saves: tuple[Tensor, ...]) -> Op:
    return Op(
        op.kind, op.path, op.inputs, op.output, op.forward, op.backward, op.weights, saves, op.copies, op.causal,
        op.recompute, op.workspace,
    )  # fmt: skip


def made_again(graph: Graph, found: list[Region]) -> list[tuple[Tensor, int, int]]:
    """Tensors that are made again, each with the places of the first and the last op whose backward needs it.

    A region that does not discard makes all of them when its last op's backward begins. An op whose output is
    discarded runs when somebody needs that.
    """
    spans: dict[int, tuple[Tensor, int, int]] = {}
    discarding = {region.start for region in found if region.discards}
    made = {id(tensor) for index in discarding for tensor in made_by(graph.ops[index])}
    last: dict[int, int] = {}  # the last op that needs a tensor, itself or to make another from it
    for index in reversed(range(len(graph.ops) if discarding else 0)):
        op = graph.ops[index]
        for tensor in op.saves:
            if id(tensor) in made:
                last.setdefault(id(tensor), index)
                spans[id(tensor)] = (tensor, index, index)
        if index in discarding:
            until = max(last.get(id(tensor), index) for tensor in made_by(op))
            for source in op.inputs:
                last[id(source)] = max(until, last.get(id(source), until))
    spans = {key: (tensor, first, last[key]) for key, (tensor, first, _) in spans.items()}
    for region in found:
        if not region.discards:
            for index in reversed(range(region.start, region.stop)):
                for tensor in graph.ops[index].saves:
                    spans[id(tensor)] = (tensor, index, region.stop - 1)
    return list(spans.values())
