"""The rows of a report: priced ops, parameters or kept tensors, grouped by total, component, op or layer.

The same folds run on ints and on symbols, so nothing here compares sizes: what belongs together is told by paths and
repetitions, or the closed forms would be grouped otherwise than the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tfcost.errors import InputError
from tfcost.graph import Graph, Repeat, Saved, Size

if TYPE_CHECKING:
    from tfcost.analysis import Analysis

BY = ("total", "component", "op", "layer")
MAX_LAYER_ROWS = 10_000


class Item(NamedTuple):
    """Something at a path that the model has ``copies`` times, with its figures for one of them.

    ``repeat`` is the repetition each of whose runs has one of its own; empty for what is there once, or is shared.
    """

    path: str
    copies: Size
    figures: dict[str, Size]
    note: dict[str, Any]
    repeat: str = ""


def repeat_of(graph: Graph, path: str) -> Repeat | None:
    """The innermost repetition that a path stands in."""
    inside = [repeat for repeat in graph.repeats if path.startswith(repeat.path + "/")]
    return max(inside, key=lambda repeat: len(repeat.path), default=None)


def items(analysis: Analysis, command: str) -> list[Item]:
    """What the rows of a command sum: priced ops, parameters, or tensors at the end of a forward pass."""
    graph = analysis.graph

    def own(path: str, shared: bool = False) -> str:
        repeat = repeat_of(graph, path)
        return "" if repeat is None or shared else repeat.path

    if command == "params":
        shared = {repeat.path for repeat in graph.repeats if repeat.shares_weights}
        return [
            Item(
                w.path, w.copies, {"parameters": w.numel}, {"shape": list(w.shape)}, own(w.path, own(w.path) in shared)
            )
            for w in analysis.weights
        ]
    if command == "flops":
        lines = analysis.lines(analysis.options.convention, analysis.options.causal == "half")
        return [
            Item(line.path, line.copies, {"macs": line.macs, "flops": line.forward}, {}, own(line.path))
            for line in lines
            if not (isinstance(line.forward, int) and line.forward == 0)
        ]
    layers, head = analysis.split_saved()
    kept = [
        Item(
            f"{saved.op.path}/{_leaf(saved)}",
            saved.copies,
            {"bytes": saved.tensor.bytes},
            {"tensor": saved.tensor.path, "shape": list(saved.tensor.shape), "itemsize": saved.tensor.itemsize},
            # From outside (an encoder's output), or with a first copy that stands elsewhere: not each layer's own.
            own(saved.tensor.path, saved.copies is not saved.tensor.copies) if _inside(graph, saved) else "",
        )
        for saved in (*layers, *head)
    ]
    static = analysis.whole.static
    return [
        *kept,
        *[
            Item(name, 1, {"bytes": size}, {})
            for name, size in static.items()
            if name == "weights" or size != 0  # what is zero is zero on symbols too
        ],
    ]


def _inside(graph: Graph, saved: Saved) -> bool:
    """Whether a tensor and the op that keeps it stand in the same repetition."""
    return repeat_of(graph, saved.tensor.path) is repeat_of(graph, saved.op.path)


def _leaf(saved: Saved) -> str:
    """How a row names a tensor beside the op that keeps it: by what made it, or ``output`` where the op itself did."""
    return "output" if saved.tensor.path == saved.op.path else saved.tensor.path.rpartition("/")[2]


def component(graph: Graph, path: str) -> str:
    """The block that a path belongs to: one step below the repetition or the stack that it stands in."""
    repeat = repeat_of(graph, path)
    prefix = "" if repeat is None else repeat.path
    if not prefix:
        prefix = next((stack for stack in ("encoder", "decoder") if path.startswith(stack + "/")), "")
    rest = path[len(prefix) + 1 :] if prefix else path
    step = rest.partition("/")[0]
    return f"{prefix}/{step}" if prefix else step


def rows(analysis: Analysis, command: str, by: str) -> list[dict[str, Any]]:
    """The rows of a report. They sum to the command's total."""
    found = items(analysis, command)
    if by == "op":
        return [_row(item.path, [item], item.note) for item in found]
    if by == "layer":
        return _layer_rows(analysis, found)
    key: Callable[[str], str] = (
        (lambda path: component(analysis.graph, path)) if by == "component" else (lambda _: "total")
    )
    groups: dict[str, list[Item]] = {}
    for item in found:
        groups.setdefault(key(item.path), []).append(item)
    return [_row(name, group, {}) for name, group in groups.items()]


def layer_groups(analysis: Analysis, found: list[Item]) -> list[tuple[str, Size, list[Item]]]:
    """Items grouped for ``by="layer"``: (path, how many such rows, the items of one), in the order of the model.

    What the layers share is created once: it stands in a row of its own, not in the first layer's.
    """
    times = {repeat.path: repeat.times for repeat in analysis.graph.repeats}
    groups: dict[str, tuple[Size, list[Item]]] = {}
    for item in found:
        repeat = repeat_of(analysis.graph, item.path)
        if item.repeat:
            groups.setdefault(item.repeat, (times[item.repeat], []))[1].append(item._replace(copies=1))
        elif repeat is None:
            groups.setdefault(component(analysis.graph, item.path), (1, []))[1].append(item)
        else:
            groups.setdefault(f"{repeat.path}/shared", (1, []))[1].append(item)
    return [(path, count, group) for path, (count, group) in groups.items()]


def _layer_rows(analysis: Analysis, found: list[Item]) -> list[dict[str, Any]]:
    if (count := sum(repeat.times for repeat in analysis.graph.repeats)) > MAX_LAYER_ROWS:
        raise InputError(f"--by layer would print {count:,} rows; at most {MAX_LAYER_ROWS:,}: use --by component")
    repeated = {repeat.path for repeat in analysis.graph.repeats}
    return [
        _row(f"{path}/{index}", [item._replace(repeat="") for item in group], {})
        if path in repeated
        else _row(path, group, {})
        for path, times, group in layer_groups(analysis, found)
        for index in range(times)
    ]


def _row(path: str, group: list[Item], note: Mapping[str, Any]) -> dict[str, Any]:
    """One row: figures of one copy (``..._each``) and of all, where the items repeat together; else counted as one."""
    together = len(group) == 1 or (group[0].repeat != "" and all(item.repeat == group[0].repeat for item in group))
    row: dict[str, Any] = {"path": path, "count": group[0].copies if together else 1}
    names = list(group[0].figures)
    for name in names:
        parts = [(1 if together else item.copies, item.figures[name]) for item in group]
        row[f"{name}_each"] = None if any([part is None for _, part in parts]) else sum([n * part for n, part in parts])
    row[names[-1]] = row["count"] * row[f"{names[-1]}_each"]
    return row | dict(note)
