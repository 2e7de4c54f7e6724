"""Layers that are the same are traced once.

Two modules run the same program when they have the same class, parameters and buffers of the same shapes, the same
plain attributes, and submodules of which the same holds; where a number among the attributes differs, when the forward
pass never looked at it (a layer's index); and when they are called alike: arguments of equal shapes, types and
gradients, other arguments equal. Then the second call adds what the first recorded, and returns tensors of the same
shapes, connected to autograd, without running. A module of which any of this cannot be shown runs in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfcost.tracing.recorder import Recorder
from tfcost.tracing.records import Frame, SavedRecord
from tfcost.tracing.results import size_of
from tfcost.tracing.torch_private import fake_empty, storage_key, torch, tree_flatten, tree_unflatten

PLAIN = (bool, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
HOOKS = (
    "_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
INNER = frozenset((*HOOKS, "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "forward"))


class Watched:
    """An integer attribute that notices being looked at; it passes for an int wherever Python lets it."""

    def __init__(self, value: int, seen: Callable[[], None]) -> None:
        self._value, self._seen = value, seen

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int

    def __index__(self) -> int:
        self._seen()
        return self._value

    __int__ = __trunc__ = __index__

    def __hash__(self) -> int:
        return hash(self.__index__())

    def __bool__(self) -> bool:
        return bool(self.__index__())

    def __float__(self) -> float:
        return float(self.__index__())

    def __str__(self) -> str:
        return str(self.__index__())

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(self.__index__(), spec)


def _forward(name: str) -> Any:
    def method(self: Watched, *others: Any) -> Any:
        return getattr(self.__index__(), name)(*[o.__index__() if type(o) is Watched else o for o in others])

    return method


for _name in (
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ "
    "__rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __abs__ __and__ __or__"
).split():
    setattr(Watched, _name, _forward(_name))


class Signature(NamedTuple):
    """What decides a module's program: a number for everything that must be equal, and the integers apart."""

    fixed: int
    integers: tuple[tuple[str, int], ...]


class Unknown(Exception):
    """A module has an attribute of which equality cannot be shown."""


class Signatures:
    """The signatures of modules and all that is in them; :class:`Unknown` where a part has an unknown meaning.

    Each module's is part of all that are around it, so that it is found once, and equal ones have one number.
    """

    def __init__(self) -> None:
        self._known: dict[int, Signature] = {}
        self._numbers: dict[Any, int] = {}

    def of(self, module: Any) -> Signature:
        """The signature of a module."""
        found = self._known.get(id(module))
        if found is None:
            integers: list[tuple[str, int]] = []
            fixed = _fixed(module, integers, self.of)
            number = self._numbers.setdefault(fixed, len(self._numbers))
            found = self._known[id(module)] = Signature(number, tuple(integers))
        return found


def _fixed(module: Any, integers: list[tuple[str, int]], of: Callable[[Any], Signature]) -> Any:
    if any(getattr(module, hooks, None) for hooks in HOOKS[:4]) or "forward" in module.__dict__:
        raise Unknown
    attributes = []
    for name, value in module.__dict__.items():
        if name in INNER or value is None or (isinstance(value, dict) and not value):
            continue
        if type(value) is int:
            integers.append((f".{name}", value))
        else:
            attributes.append((name, _plain(value)))
    tensors = [
        (name, None if tensor is None else (tuple(map(size_of, tensor.shape)), tensor.dtype, tensor.requires_grad))
        for group in (module._parameters, module._buffers)
        for name, tensor in group.items()
    ]
    children: list[tuple[str, Any]] = []
    for name, child in module._modules.items():
        inner = None if child is None else of(child)
        children.append((name, None if inner is None else inner.fixed))
        integers += [(f".{name}{path}", value) for path, value in inner.integers] if inner is not None else []
    return type(module), tuple(attributes), tuple(tensors), tuple(children)


def _plain(value: Any) -> Any:
    """Something equal for equal attributes: values by value, functions and shared objects by identity."""
    if isinstance(value, int):
        return ("int", int(value))
    if isinstance(value, PLAIN):
        return (type(value).__name__, value)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_plain, value))
    if isinstance(value, dict):
        return ("dict", *[(_plain(key), _plain(each)) for key, each in value.items()])
    if isinstance(value, (set, frozenset)):
        return ("set", frozenset(map(_plain, value)))
    if isinstance(value, torch.Tensor):
        raise Unknown
    if hasattr(value, "node"):  # a symbolic size
        return ("size", size_of(value))
    return ("object", id(value))


def group_of(path: str) -> str:
    """A module's name without the numbers in it: the places that layers of one stack share."""
    return ".".join(part for part in path.split(".") if not part.isdigit())


ANOTHER = -1
"""Stands for a storage that a replayed call inside a frame made and kept."""


class Call(NamedTuple):
    """A call that was recorded: whose it was, its frame, its arguments' storages, and its outputs."""

    module: int
    frame: Frame
    arguments: list[int]
    outputs: list[Any]
    spec: Any
    passed: list[int | None]
    saved: list[tuple[str, int, SavedRecord]]
    needs_grad: list[bool]


class _Replay(torch.autograd.Function):
    """Stands for a layer in the autograd graph: outputs and gradients of the right shapes, computed from nothing."""

    @staticmethod
    def forward(ctx: Any, replay: Any, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)  # an output that nobody uses has no gradient
        ctx.replay = replay
        ctx.shapes = [(tuple(each.shape), None, each.dtype, each.device) for each in inputs]
        outputs = replay.make()
        ctx.mark_non_differentiable(*[o for o, needs in zip(outputs, replay.needs_grad, strict=True) if not needs])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.replay.gradients(ctx.shapes, ctx.needs_input_grad[1:])


class _Returned:
    """The outputs of one replayed call."""

    def __init__(self, repeats: Repeats, call: Call) -> None:
        self._repeats = repeats
        self._outputs = [each for each, passed in zip(call.outputs, call.passed, strict=True) if passed is None]
        self.needs_grad = [n for n, passed in zip(call.needs_grad, call.passed, strict=True) if passed is None]

    def make(self) -> list[Any]:
        return [fake_empty(*output) for output in self._outputs]

    def gradients(self, shapes: list[Any], needed: tuple[bool, ...]) -> list[Any]:
        self._repeats.went_backward += 1
        return [fake_empty(*shape) if need else None for shape, need in zip(shapes, needed, strict=True)]


class Repeats:
    """Runs each module of a program, or counts it again where it is proved to be one that ran before."""

    def __init__(self, named: Sequence[tuple[str, Any]], recorder: Recorder) -> None:
        self.recorder = recorder
        self.went_backward = 0
        self.expected_backward = 0
        self.replays = 0
        self._calls: dict[int, list[tuple[dict[str, int], Any, Call]]] = {}
        self._looked_at: set[tuple[int, str]] = set()
        self._differing: dict[int, set[str]] = {}
        self._known = self._signatures(named)

    def _signatures(self, named: Sequence[tuple[str, Any]]) -> dict[int, tuple[int, dict[str, int]]]:
        """For each module inside a list of layers: a number that equal signatures share, and its integers."""
        lists = (torch.nn.ModuleList, torch.nn.Sequential)
        inside: set[str] = set()
        numbers: dict[Any, int] = {}
        members: dict[int, list[dict[str, int]]] = {}
        found: dict[int, tuple[int, dict[str, int]]] = {}
        signatures = Signatures()
        listed = {name for name, each in named if isinstance(each, lists)}
        for name, each in named:
            around = name.rpartition(".")[0]
            if not name or not (around in inside or around in listed):
                continue
            inside.add(name)
            if isinstance(each, (torch.nn.ModuleList, torch.nn.ModuleDict)):
                continue
            if next(each.children(), None) is None:
                continue
            try:
                fixed, integers = signatures.of(each)
                number = numbers.setdefault((group_of(name), fixed, tuple(path for path, _ in integers)), len(numbers))
            except (Unknown, TypeError):
                continue
            found[id(each)] = (number, dict(integers))
            members.setdefault(number, []).append(found[id(each)][1])
        for number, every in members.items():
            self._differing[number] = {path for path in every[0] if len({each[path] for each in every}) > 1}
        return found

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module's forward, or what stands for it."""
        known = self._known.get(id(module))
        if known is None or self.recorder.in_backward or self.recorder.muted:
            return forward(*args, **kwargs)
        number, integers = known
        leaves, _ = tree_flatten((args, kwargs))
        asked = self._asked(leaves)
        if asked is None:
            return forward(*args, **kwargs)
        for others, given, call in self._calls.get(number, ()):
            if given == asked and not any(
                integers[path] != others[path] and (number, path) in self._looked_at for path in self._differing[number]
            ):
                self.replays += 1
                if torch.is_grad_enabled():
                    self.recorder.sum_again(list(module.parameters()))
                return self._replay(call, leaves)
        return self._first(module, known, asked, forward, args, kwargs, leaves)

    def _asked(self, leaves: list[Any]) -> Any:
        """What must be equal in two calls; None where equality cannot be shown."""
        order: dict[int, int] = {}
        asked: list[Any] = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                shape = tuple(map(size_of, leaf.shape)), tuple(map(size_of, leaf.stride()))
                same = order.setdefault(storage_key(leaf), len(order))
                owned = storage_key(leaf) in self.recorder.owned
                asked.append((*shape, leaf.dtype, str(leaf.device), leaf.requires_grad, same, owned))
            elif isinstance(leaf, (int, *PLAIN)):
                asked.append((type(leaf).__name__, leaf))
            elif hasattr(leaf, "node"):
                asked.append(("size", size_of(leaf)))
            else:
                return None
        return tuple(asked)

    def _first(
        self, module: Any, known: tuple[int, dict[str, int]], asked: Any, forward: Any, args: Any, kwargs: Any,
        leaves: list[Any],
    ) -> Any:  # fmt: skip
        """Run a module and note what it does."""
        number, integers = known
        recorder = self.recorder
        frame = recorder.open_frame()
        undo = self._watch(module, number)
        try:
            out = forward(*args, **kwargs)
        finally:
            for owner, name, value in undo:
                owner.__dict__[name] = value
            recorder.close_frame(frame)
        outputs, spec = tree_flatten(out)
        if not all(isinstance(o, torch.Tensor) or o is None for o in outputs):
            return out
        arguments = [storage_key(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
        passed: list[int | None] = []
        for each in outputs:
            same = [i for i, leaf in enumerate(leaves) if leaf is each]
            if not same and each is not None and storage_key(each) in arguments:
                return out  # a view of an argument: its identity would be lost
            passed.append(same[0] if same else None if each is not None else -1)
        described = [_description(o) for o in outputs]
        made = [storage_key(o) if o is not None else 0 for o in outputs]
        saved: list[tuple[str, int, SavedRecord]] = []
        for storage, record, first in frame.saved:
            # What came in or goes out is another tensor in another call, whoever kept it first here.
            if storage in arguments:
                saved.append(("argument", arguments.index(storage), record))
            elif storage in made:
                saved.append(("output", made.index(storage), record))
            elif first and (storage == ANOTHER or recorder.born_inside(storage, frame)):
                saved.append(("inside", 0, record))
        needs = [o is not None and o.requires_grad for o in outputs]
        call = Call(id(module), frame, arguments, described, spec, passed, saved, needs)
        self._calls.setdefault(number, []).append((integers, asked, call))
        return out

    def _watch(self, module: Any, number: int) -> list[tuple[Any, str, Any]]:
        """Put a :class:`Watched` in the place of each integer in which the twins of a module differ."""
        undo: list[tuple[Any, str, Any]] = []
        for path in self._differing[number]:
            owner, _, attribute = path[1:].rpartition(".")
            each = module.get_submodule(owner)
            value = each.__dict__[attribute]
            undo.append((each, attribute, value))

            def seen(path: str = path, value: Any = value) -> None:
                self._looked_at.add((number, path))
                if type(value) is Watched:
                    value._seen()

            each.__dict__[attribute] = Watched(value._value if type(value) is Watched else value, seen)
        return undo

    def _replay(self, call: Call, leaves: list[Any]) -> Any:
        """Count a call again and return what stands for its outputs."""
        recorder = self.recorder
        for record, times in call.frame.ops.items():
            record.copies += times
            for frame in recorder.frames:
                frame.ops[record] += times
        returned = _Returned(self, call)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        outputs: list[Any] = []
        fresh: list[Any] = []
        if returned.needs_grad:
            inputs = list({id(t): t for t in tensors if t.requires_grad}.values())  # one gradient for each
            if any(returned.needs_grad) and not inputs:
                with recorder.mute():
                    inputs = [torch.empty((), requires_grad=True)]
            self.expected_backward += any(returned.needs_grad)
            with recorder.mute():
                apply: Callable[..., Any] = _Replay.apply
                fresh = list(apply(returned, *inputs) if any(returned.needs_grad) else returned.make())
        recorder.born(fresh)
        for passed in call.passed:
            outputs.append(fresh.pop(0) if passed is None else None if passed == -1 else leaves[passed])
        for kind, index, kept in call.saved:
            if kind == "inside":
                kept.copies += 1
                for frame in recorder.frames:
                    frame.saved.append((ANOTHER, kept, True))
            else:
                self._save_again(leaves[index] if kind == "argument" else outputs[index], kept)
        return tree_unflatten(outputs, call.spec)

    def _save_again(self, tensor: Any, record: SavedRecord) -> None:
        """A tensor from outside that this call keeps as ``record`` was kept, if nothing kept it before."""

        def make() -> SavedRecord:
            made = self.recorder._saved(tensor)
            made.path, made.op, made.shape, made.number = record.path, record.op, record.shape, record.number
            return made

        self.recorder.save(storage_key(tensor), make, tensor)


def _description(output: Any) -> Any:
    return None if output is None else (tuple(output.shape), tuple(output.stride()), output.dtype, output.device)
