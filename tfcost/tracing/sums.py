"""Sums of gradients: a tensor that k ops read gets k gradients, which autograd adds up as they come, k - 1 times.

A layer that is counted again adds to the gradients of what it reads from outside as well (the input of a residual
stream, an encoder's output, a table that all layers share), and has gradients from outside added to those of what it
returns. Sums are therefore counted by level: whatever comes from one run of a layer is one gradient to those outside of
it, all that comes from outside is one to those inside, and a sum belongs to the level at which two meet, as often as
that runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tfcost.graph import Size

if TYPE_CHECKING:
    from tfcost.tracing.recorder import Recorder
    from tfcost.tracing.records import Frame, OpRecord


class Sums:
    """Watches the nodes of an autograd graph during its backward pass, and records what autograd itself adds."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.running = -1
        """The number of the node that has finished, while autograd hands on its gradients; -1 before the first."""
        self._arrived: set[tuple[Frame | None, Any, int]] = set()
        self._so_far: dict[tuple[Any, int], Size] = {}
        self._nodes: dict[Any, tuple[Any, ...]] = {}

    def watch(self, outputs: Iterable[Any]) -> None:
        """Put a hook on every node below some outputs; each output gets one gradient to begin with."""
        todo = []
        for output in outputs:
            self._arrived.add((None, output.grad_fn, output.output_nr))
            todo.append(output.grad_fn)
        while todo:
            node = todo.pop()
            if node is None or node in self._nodes:
                continue
            # The nodes are held: a number of a node that is gone would be another's.
            self._nodes[node] = edges = node.next_functions
            if edges:
                node.register_hook(self._hook(node, edges))
            todo += [target for target, _ in edges]

    def _hook(self, node: Any, edges: tuple[Any, ...]) -> Any:
        number = node._sequence_nr()

        def finished(gradients: tuple[Any, ...], _: Any) -> None:
            self.running = number
            for gradient, (target, place) in zip(gradients, edges, strict=False):
                if gradient is not None and target is not None:
                    self._arrives(number, target, place, gradient)

        return finished

    def _arrives(self, number: int, target: Any, place: int, gradient: Any) -> None:
        """A gradient of ``target`` on its way out of the frames of its maker and into those of its target.

        Where it is the first it goes on; where another went before, it is added to that.
        """
        recorder = self.recorder
        inside, around = recorder.frames_of(number), recorder.frames_of(target._sequence_nr())
        touched = recorder.touched(gradient)
        common = next((each for each in inside if each in around), None)
        out = [each for each in inside if each not in around]
        into = [each for each in reversed(around) if each not in inside]
        levels: list[Frame | None] = [*out, common, *into]
        for level in levels:
            key = (level, target, place)
            if key in self._arrived:
                own = level is (inside[0] if inside else None)
                record = recorder.record_numbered(number) if own else recorder.record_between(level)
                self._add(record, target, place, touched, recorder.touched(gradient, whole=True))
                return
            self._arrived.add(key)
        self._so_far.setdefault((target, place), touched)

    def _add(self, record: OpRecord, target: Any, place: int, touched: Size, whole: Size) -> None:
        record.backward_read += self._so_far.get((target, place), whole) + touched
        record.backward_written += whole
        self._so_far[target, place] = whole
