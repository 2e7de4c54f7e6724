"""Watching a program run: every op that PyTorch dispatches, the module that it runs in, and what autograd keeps.

A forward op and the ops of its gradient meet in one :class:`OpRecord`: autograd numbers the node of a forward op, and
the same number is the current node's when its backward runs. So a backward product belongs to the module and the op
whose gradient it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

from tfcost.graph import Size
from tfcost.tracing.formulas import FORMULAS, Macs, Spec
from tfcost.tracing.products_none import has_no_product
from tfcost.tracing.records import Chosen, Frame, OpRecord, SavedRecord
from tfcost.tracing.results import Results, size_of
from tfcost.tracing.sums import Sums
from tfcost.tracing.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    current_node,
    forward_number,
    is_composite,
    storage_key,
    torch,
    tree_map,
)

ACCUMULATE = 2**63
"""Sequence numbers from here on are those of nodes that no forward op made (they add up a parameter's gradient)."""


WORKSPACE = ("aten.mkldnn_rnn_layer", "aten._cudnn_rnn")
"""Ops that keep a workspace whose size only their real kernel knows."""


CHOOSING = ("aten.nonzero", "aten.masked_select", "aten.index", "aten._unique2", "aten.unique_dim")
"""Ops that choose elements by their values, so that no shape says how many."""


NO_PRODUCT = Macs(0)
DEVICE = torch.ops.prim.device.default


def tensors_of(values: Any) -> list[Any]:
    """The tensors in some arguments or results, also those in a program's own dataclasses."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        parts: Iterable[Any] = values
    elif isinstance(values, dict):
        parts = values.values()
    elif is_dataclass(values) and not isinstance(values, type):
        parts = [getattr(values, field.name) for field in fields(values)]
    else:
        return []
    return [tensor for value in parts for tensor in tensors_of(value)]


class Recorder(TorchDispatchMode):  # type: ignore[misc]  # the base has no types
    """Records ops below autograd. ``path()`` is the module that is running; ``replace`` may change an op's result."""

    def __init__(self, replace: Callable[[str, Any], Any] | None = None, results: Results | None = None) -> None:
        super().__init__()
        self.ops: list[OpRecord] = []
        self.saved: list[SavedRecord] = []
        self.frames: list[Frame] = []
        self.sums = Sums(self)
        self.used: set[int] = set()
        self.owned: set[int] = set()
        self.bounds: list[tuple[Size, int, str]] = []
        self.chosen: dict[Any, Chosen] = {}
        self.muted = False
        self.in_backward = False
        self._replace = replace
        self._results = results
        self._stack: list[str] = []
        self._closed: list[Frame] = []
        self._around: dict[int, list[Frame]] = {}
        self._outermost: OpRecord | None = None
        self._by_number: dict[int, OpRecord] = {}
        self._seen_saved: set[int] = set()
        self._births: dict[int, int] = {}
        self._alive: list[Any] = []  # storages are compared by address, so none may be freed while we look
        self._upper: dict[int, Size] = {}
        self._names: dict[Any, tuple[str, bool]] = {}
        self._priceless: dict[Any, bool] = {}
        self._bytes: dict[Any, Size] = {}

    # Where the program is.

    def path(self) -> str:
        """The dotted name of the module whose forward is running."""
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Ops recorded inside belong to this module."""
        self._stack.append(name)
        try:
            yield
        finally:
            self._stack.pop()

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Ops run inside are not part of the program."""
        before, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = before

    def own(self, modules: Iterable[Any]) -> None:
        """Parameters and buffers are there anyway: keeping them costs nothing."""
        of_all = [(*each._parameters.values(), *each._buffers.values()) for each in modules]
        for tensor in {id(each): each for tensors in of_all for each in tensors if each is not None}.values():
            self.owned.add(storage_key(tensor))
            self._alive.append(tensor.untyped_storage())

    # What it does.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked so often that the way down to the fake mode would cost a tenth
        if self.muted or func is DEVICE:
            return func(*args, **kwargs)
        name, composite = self._facts(func)
        if composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name == "aten.native_dropout" and args[2]:
            # Its decomposition draws random numbers, of which only the shapes are wanted.
            out = (torch.empty_like(args[0]), torch.empty_like(args[0], dtype=torch.bool))
        else:
            out = func(*args, **kwargs) if self._results is None else self._results.run(func, args, kwargs)
        if self._replace is not None:
            out = self._replace(name, out)
        self._record(name, func, args, kwargs, out)
        return out

    def _facts(self, func: Any) -> tuple[str, bool]:
        """An op's name, and whether it is only a composition of others (seen whole under ``inference_mode``)."""
        found = self._names.get(func)
        if found is None:
            name = str(func._overloadpacket) if hasattr(func, "_overloadpacket") else str(func)
            composite = name not in FORMULAS and hasattr(func, "decompose") and is_composite(func)
            found = self._names[func] = (name, composite)
        return found

    def _record(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outputs = [out] if isinstance(out, torch.Tensor) else tensors_of(out)
        self.born(outputs)
        self._watch_positions(name, args, outputs)
        if name in CHOOSING:
            self._choose(name, args, outputs)
        if getattr(func, "is_view", False):
            if not self.in_backward:
                self._record_of(name)  # it moves nothing, but its gradient may
            return
        inputs = tensors_of((args, kwargs))
        work = self._work_of(name, func, args, out)
        read = sum([self.touched(tensor) for tensor in inputs])
        written = sum([self.touched(tensor) for tensor in outputs])
        if self.in_backward and self._between_nodes():
            return
        record = self._record_of(name)
        if self.in_backward:
            record.backward_read += read
            record.backward_written += written
            if work is None:
                record.unpriced[name] += 1
            else:
                record.backward_macs += work.macs
                record.recompute += work.recompute
            return
        self.used.update([key for key in map(storage_key, inputs) if key in self.owned])
        record.read, record.written = read, written
        record.shapes = tuple([_shape(tensor) for tensor in inputs])
        if outputs:
            record.out_shape = _shape(outputs[0])
            record.elements = prod(record.out_shape)
        if name in WORKSPACE and torch.is_grad_enabled():
            record.unpriced[f"{name} (workspace kept for backward)"] += 1
        if work is None:
            record.unpriced[name] += 1
        else:
            record.macs = work.macs
            if not isinstance(work.macs, int) or work.macs:
                # Of two activations, or inside a fused kernel: QKᵀ and PV, in a Transformer.
                record.square = work.square or not any(storage_key(each) in self.owned for each in inputs)

    def _work_of(self, name: str, func: Any, args: Any, out: Any) -> Macs | None:
        """An op's products; None where it has no price."""
        formula = FORMULAS.get(name)
        if formula is not None:
            return formula(*tree_map(_spec, (args, out)))
        known = self._priceless.get(func)
        if known is None:
            known = hasattr(func, "tags") and has_no_product(name, func, torch.Tag.pointwise)
            self._priceless[func] = known
        return NO_PRODUCT if known else None

    def _between_nodes(self) -> bool:
        """Whether autograd itself is at work: it adds gradients up, which :class:`Sums` counts, or hands them over.

        A real run takes a parameter's gradient over as it is; here somebody still holds it, and it is copied.
        """
        node = current_node()
        if node is None:
            return False
        number = int(node._sequence_nr())
        return number >= ACCUMULATE or number == self.sums.running

    def _record_of(self, name: str) -> OpRecord:
        """A new record for a forward op; for a backward op, that of the forward op whose gradient it makes."""
        if self.in_backward:
            node = current_node()
            return self.record_numbered(ACCUMULATE if node is None else node._sequence_nr())
        record = OpRecord(self.path(), name.partition(".")[2])
        self.ops.append(record)
        self._by_number.setdefault(forward_number(), record)
        for frame in self.frames:
            frame.ops[record] += 1
        return record

    def record_numbered(self, number: int) -> OpRecord:
        """The record of the forward op with this number; that of the frame where no op has it."""
        found = self._by_number.get(number)
        if found is None:
            inside = self.frames_of(number)
            found = self._by_number[number] = self.record_between(inside[0] if inside else None)
        return found

    def record_between(self, frame: Frame | None) -> OpRecord:
        """What the backward of a frame, or of the whole program, does that is no single op's."""
        if frame is not None:
            return frame.between
        if self._outermost is None:
            self._outermost = OpRecord("", "gradient")
            self.ops.append(self._outermost)
        return self._outermost

    def touched(self, tensor: Any, whole: bool = False) -> Size:
        """The bytes that are really there: an axis along which a tensor is only repeated (stride 0) is read once.

        With ``whole``, those of a tensor of this shape in which nothing is repeated.
        """
        sizes = tuple([
            size_of(size)
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            if whole or not (isinstance(stride, int) and stride == 0)
        ])  # fmt: skip
        key = (sizes, tensor.dtype)
        found = self._bytes.get(key)
        if found is None:
            found = self._bytes[key] = prod(sizes) * int(tensor.itemsize)
        return found

    # Positions: the rows of a table that are looked up must exist, so a table bounds the length.

    def _watch_positions(self, name: str, args: Any, outputs: Sequence[Any]) -> None:
        """Follow ``arange`` through views and sums to the table whose rows it picks."""
        if not outputs:
            return
        key = storage_key(outputs[0])
        if name == "aten.arange":
            numbers = [size_of(each) for each in args if not isinstance(each, float)]
            self._upper[key] = numbers[1] if len(numbers) > 1 else numbers[0]
        elif name == "aten.embedding" and storage_key(args[1]) in self._upper:
            rows = args[0].shape[0]
            if isinstance(rows, int):
                self.bounds.append((self._upper[storage_key(args[1])], rows, self.path()))
        elif (
            name in ("aten.add", "aten._to_copy", "aten.clone")
            and isinstance(args[0], torch.Tensor)
            and (below := self._upper.get(storage_key(args[0]))) is not None
        ):
            if name != "aten.add":
                self._upper[key] = below
            elif isinstance(args[1], int):
                self._upper[key] = below + args[1]

    def _choose(self, name: str, args: Any, outputs: Sequence[Any]) -> None:
        """Note sizes that values decide, and the most that they can be: all elements of what is chosen from."""
        symbols = {each for tensor in outputs for size in _shape(tensor) for each in getattr(size, "free_symbols", ())}
        masks = [each for each in tensors_of(args[1:]) if each.dtype == torch.bool] if name == "aten.index" else []
        most = prod(_shape(masks[0] if masks else args[0]))
        known: set[Any] = getattr(most, "free_symbols", set())
        for each in sorted(symbols - known, key=str):
            if str(each).startswith("u"):
                self.chosen.setdefault(each, Chosen(f"u_{len(self.chosen) + 1}", most, name, self.path()))

    # What it keeps.

    def keep(self, tensor: Any) -> Any:
        """The pack hook of ``saved_tensors_hooks``."""
        if not self.muted and not self.in_backward:
            self.save(storage_key(tensor), lambda: self._saved(tensor), tensor)
        return tensor

    def _saved(self, tensor: Any) -> SavedRecord:
        floating = tensor.is_floating_point() or tensor.dtype in (torch.bool, torch.uint8)
        whole = size_of(tensor.untyped_storage().nbytes())
        return SavedRecord(self.path(), forward_number(), _shape(tensor), dtype_name(tensor.dtype), whole, floating)

    def save(self, key: int, make: Callable[[], SavedRecord], tensor: Any = None) -> None:
        """Count a storage once, unless it is a parameter's or a buffer's."""
        if key in self.owned:
            return
        first = key not in self._seen_saved
        if not first and not self.frames:
            return
        made = make()
        if first:
            self._seen_saved.add(key)
            if tensor is not None:
                self._alive.append(tensor.untyped_storage())
            self.saved.append(made)
        for frame in self.frames:
            frame.saved.append((key, made, first))

    def born(self, tensors: Sequence[Any]) -> None:
        """Note when a storage was first seen."""
        for tensor in tensors:
            key = storage_key(tensor)
            if key not in self._births:
                self._births[key] = len(self._alive)
                self._alive.append(tensor.untyped_storage())

    def sum_again(self, tensors: Sequence[Any]) -> None:
        """Parameters that one more call uses: the gradients of those that were used before are summed once more."""
        record = OpRecord(self.path(), "gradient")
        for tensor in tensors:
            if tensor.requires_grad and storage_key(tensor) in self.used:
                record.backward_read += 2 * self.touched(tensor)
                record.backward_written += self.touched(tensor)
        self.used.update(map(storage_key, tensors))
        if record.empty:
            return
        self.ops.append(record)
        for frame in self.frames:
            frame.ops[record] += 1

    def born_inside(self, key: int, frame: Frame) -> bool:
        """Whether a storage was made during a frame."""
        return self._births.get(key, -1) >= frame.born

    def open_frame(self) -> Frame:
        """Begin to note what is recorded, for :mod:`tfcost.tracing.repeats`."""
        frame = Frame(self.path(), len(self._alive), forward_number() + 1)
        self.frames.append(frame)
        self.ops.append(frame.between)
        for each in self.frames:
            each.ops[frame.between] += 1
        return frame

    def close_frame(self, frame: Frame) -> None:
        """Note no more."""
        self.frames.remove(frame)
        frame.end = forward_number() + 1
        self._closed.append(frame)

    def frames_of(self, number: int) -> list[Frame]:
        """The frames in whose forward a node was made, the innermost first; in backward, when all are closed."""
        found = self._around.get(number)
        if found is None:
            # Inner frames are closed before outer ones.
            found = self._around[number] = [each for each in self._closed if each.first <= number < each.end]
        return found

    def name_saved(self) -> None:
        """Say for each kept storage which op keeps it; the op runs after its inputs are kept, so only now is it known.

        An autograd function of the program's own has no op of its number: it keeps under the module's name alone.
        """
        for saved in self.saved:
            if not saved.op:
                record = self._by_number.get(saved.number)
                saved.op = record.name if record is not None and record.path == saved.path else "function"


def _shape(tensor: Any) -> tuple[Size, ...]:
    return tuple([size_of(each) for each in tensor.shape])


def _spec(leaf: Any) -> Any:
    return Spec(_shape(leaf), leaf.itemsize, dtype_name(leaf.dtype)) if isinstance(leaf, torch.Tensor) else leaf


def dtype_name(dtype: Any) -> str:
    """``torch.bfloat16`` as tfcost writes it."""
    name = str(dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}.get(name, name)
