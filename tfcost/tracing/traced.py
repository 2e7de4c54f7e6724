"""A recorded program as the graph that tfcost prices everything by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from tfcost.convention import FLOPS_PER_MAC
from tfcost.graph import Graph, Op, Size, Tensor, Work
from tfcost.tracing.program import Recorded
from tfcost.tracing.records import OpRecord, SavedRecord
from tfcost.tracing.repeats import group_of


class TracedOp(Op):
    """An op of a traced program: also the bytes that it moves, and what of it has no price.

    ``read`` and ``written`` are bytes of the forward op, ``backward_read`` and ``backward_written`` of its gradient's.
    """

    __slots__ = ("backward_read", "backward_written", "component", "read", "unpriced", "written")

    def __init__(self, record: OpRecord, name: str, copies: Size, output: Tensor, inputs: tuple[Tensor, ...]) -> None:
        # QKᵀ and PV are the products of two activations; the conventions know them by this kind.
        kind = "scores" if record.macs and record.square else record.name
        super().__init__(
            kind, name, inputs, output, Work(record.macs, record.elements), Work(record.backward_macs), (), (), copies,
            None, Work(record.recompute),
        )  # fmt: skip
        self.component = group_of(record.path).replace(".", "/")
        self.read = record.read
        self.written = record.written
        self.backward_read = record.backward_read
        self.backward_written = record.backward_written
        self.unpriced: Counter[str] = Counter()


class Traced(Graph):
    """The graph of a traced program; its ops are :class:`TracedOp` s, equal ones of equal layers together.

    ``kept`` are its saved tensors with the op that keeps each, ``unpriced`` the ops without a price, by name.
    """

    def __init__(self, recorded: Recorded, value: Callable[[Size], Size]) -> None:
        super().__init__()
        self.recorded = recorded
        self.unpriced: Counter[str] = Counter()
        self.traced: list[TracedOp] = []
        self.kept: list[tuple[str, SavedRecord, Tensor]] = []
        self.value = value
        self._add_ops(recorded.ops)
        self.unpriced = Counter({name: self.value(times) for name, times in self.unpriced.items()})
        self._add_saved(recorded.saved)

    def _add_ops(self, records: Iterable[OpRecord]) -> None:
        groups: dict[Any, list[OpRecord]] = {}
        for record in records:
            if record.empty:
                continue
            for name, times in record.unpriced.items():
                self.unpriced[name] += times * record.copies
            key = (
                group_of(record.path), record.name, record.shapes, record.out_shape, record.macs, record.backward_macs,
                record.recompute, record.read, record.written, record.backward_read, record.backward_written,
                tuple(record.unpriced.items()),
            )  # fmt: skip
            groups.setdefault(key, []).append(record)
        used: Counter[str] = Counter()
        for group in groups.values():
            record = group[0]
            base = f"{group_of(record.path).replace('.', '/')}/{record.name}".lstrip("/")
            used[base] += 1
            path = base if used[base] == 1 else f"{base}_{used[base]}"
            copies = sum(each.copies for each in group)
            inputs = tuple(self._tensor(f"{path}/input", shape, copies) for shape in record.shapes)
            op = TracedOp(record, path, copies, self._tensor(path, record.out_shape, copies), inputs)
            op.forward = Work(self.value(op.forward.macs), self.value(op.forward.elements))
            op.backward = Work(self.value(op.backward.macs))
            op.recompute = Work(self.value(op.recompute.macs))
            for field in ("read", "written", "backward_read", "backward_written"):
                setattr(op, field, self.value(getattr(op, field)))
            op.unpriced = record.unpriced
            self.ops.append(op)
            self.traced.append(op)

    def _tensor(self, path: str, shape: tuple[Size, ...], copies: Size) -> Tensor:
        sizes = tuple(self.value(each) for each in shape)
        return Tensor(path, tuple(str(index) for index in range(len(sizes))), sizes, 1, copies)

    def _add_saved(self, records: Iterable[SavedRecord]) -> None:
        groups: dict[Any, list[SavedRecord]] = {}
        for record in records:
            key = (group_of(record.path), record.op, record.shape, record.dtype, record.bytes, record.floating)
            groups.setdefault(key, []).append(record)
        for group in groups.values():
            record = group[0]
            where = f"{group_of(record.path).replace('.', '/')}/{record.op}".lstrip("/")
            copies = sum(each.copies for each in group)
            shape = tuple(self.value(each) for each in record.shape)
            axes = tuple(str(index) for index in range(len(shape)))
            # A view keeps its whole storage: the bytes are the storage's, whatever the view's shape.
            tensor = Tensor(where, axes, shape, 0, copies)
            self.kept.append((where, record, tensor))

    # Folds.

    def total(self, figure: Callable[[TracedOp], Size]) -> Size:
        """The sum of a figure over all ops, each as often as it runs."""
        groups: dict[Any, Size] = {}
        for op in self.traced:
            each = figure(op)
            groups[each] = groups.get(each, 0) + op.copies
        return self.value(sum([each * times for each, times in groups.items()]))

    def saved_bytes(self, floating: bool) -> Size:
        """Bytes kept for backward: of activations, masks and statistics, or of integer ids."""
        return self.value(
            sum([tensor.copies * self.value(r.bytes) for _, r, tensor in self.kept if r.floating == floating])
        )

    def flops(self) -> dict[str, Size]:
        """FLOPs by the document's convention: two per multiply-accumulate, nothing else."""
        forward = self.total(lambda op: FLOPS_PER_MAC * op.forward.macs)
        backward = self.total(lambda op: FLOPS_PER_MAC * op.backward.macs)
        return {
            "forward_flops": forward,
            "backward_flops": backward,
            "train_flops": forward + backward,
            "recompute_flops": 0,
            "hardware_flops": forward + backward,
            "attention_flops": self.total(lambda op: FLOPS_PER_MAC * op.forward.macs if op.kind == "scores" else 0),
            "flash_recompute_flops": self.total(lambda op: FLOPS_PER_MAC * op.recompute.macs),
        }

    def memory(self) -> dict[str, Size]:
        """Bytes kept for backward, of weights and of buffers; and bytes that the ops read and write."""
        weights = [w for w in self.recorded.weights if not w.buffer]
        return {
            "activation_bytes": self.saved_bytes(True),
            "id_bytes": self.saved_bytes(False),
            "weight_bytes": self.value(sum([w.bytes for w in weights])),
            "buffer_bytes": self.value(sum([w.bytes for w in self.recorded.weights if w.buffer])),
            "forward_read_bytes": self.total(lambda op: op.read),
            "forward_written_bytes": self.total(lambda op: op.written),
            "backward_read_bytes": self.total(lambda op: op.backward_read),
            "backward_written_bytes": self.total(lambda op: op.backward_written),
        }

    def parameters(self) -> Size:
        """Parameters, shared ones once."""
        return self.value(sum([w.numel for w in self.recorded.weights if not w.buffer]))
