"""Every interface of PyTorch that is not public, in this one file.

Fake tensors, symbolic sizes and dispatch modes carry no promise of stability. They were tried on the versions in
:data:`SUPPORTED`; where one of them is missing, importing this module raises one line that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tfcost.errors import InputError, MissingExtra

SUPPORTED = "2.11 to 2.14"
"""The versions of PyTorch with these interfaces; 2.13 (CPU) and 2.14 (CUDA) are tested."""

try:
    import torch
except ImportError:
    raise MissingExtra("trace needs torch: pip install '.[torch]' in tfcost's folder") from None

try:
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as _DynamicOutputShape
    from torch.fx.experimental.sym_node import SymNode
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        GuardOnDataDependentSymNode,
        ShapeEnv,
        StatelessSymbolicContext,
    )
    from torch.utils import _python_dispatch
    from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
    from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

    TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode
    TorchFunctionMode: Any = torch.overrides.TorchFunctionMode
    _sequence_number: Callable[[], int] = vars(torch.autograd)["_get_sequence_nr"]
    _current_node: Callable[[], Any] = torch._C._current_autograd_node
except (ImportError, AttributeError, KeyError) as error:
    raise InputError(
        f"trace uses private interfaces of PyTorch {SUPPORTED}; this is {torch.__version__}, and {error}"
    ) from None

__all__ = [
    "CeilDiv", "CleanDiv", "DataDependentOutputException", "FakeTensor", "FakeTensorMode", "FloorDiv", "Max", "Min",
    "Mod", "PythonMod", "ShapeEnv", "TorchDispatchMode", "TorchFunctionMode", "as_fake_tensor", "cached_arithmetic",
    "cannot_follow", "check_cuda", "current_node", "fake_mode", "forward_number", "is_composite", "memory_tracker",
    "sizes", "storage_key", "torch", "tree_flatten", "tree_map", "tree_unflatten",
]  # fmt: skip


def fake_mode(symbolic: bool) -> FakeTensorMode:
    """A mode in which tensors have shapes and no data; with ``symbolic``, shapes that may be expressions."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None, allow_non_fake_inputs=True)
    if symbolic:
        # Equal layers run once, so that few ops come twice: keys of symbolic shapes cost more than they save.
        mode.cache_enabled = False
    return mode


def sizes(mode: FakeTensorMode, hints: list[int]) -> list[Any]:
    """Symbolic sizes whose values in this run are ``hints``: they decide branches, and are kept as guards."""
    dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(hints))
    tensor = torch.empty(hints, device="meta")
    return list(mode.from_tensor(tensor, symbolic_context=dynamic).shape)


def as_fake_tensor(tensor: torch.Tensor) -> Any:
    """A fake tensor like this one, of the fake mode that is active."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode.from_tensor(tensor, static_shapes=True)


def check_cuda() -> None:
    """Raise unless this PyTorch has CUDA kernels; a GPU is not needed for fake tensors."""
    if torch.version.cuda is None:
        raise InputError(
            f"--torch-device cuda needs a CUDA build of PyTorch; this is {torch.__version__}. "
            "--semantics cuda (the default) traces a GPU's kernels on any build"
        )


def memory_tracker() -> Any:
    """PyTorch's own tracker of memory by category, without the hooks by which it tells modules apart.

    Those hold the gradient of one input of a module until those of all are there, which no training step does: with
    them the peak of an attention layer is up to a score square too high.
    """
    try:
        from torch.distributed._tools.mem_tracker import MemTracker
    except ImportError as error:
        raise InputError(f"--peak uses torch.distributed._tools.MemTracker, which this build lacks: {error}") from None

    class Tracker(MemTracker):  # type: ignore[misc, no-untyped-call, unused-ignore]
        def __enter__(self) -> Any:
            super().__enter__()
            tracked = vars(vars(self)["_mod_tracker"])
            tracked["_fw_pre_handle"].remove()
            tracked["_fw_post_handle"].remove()
            return self

    return Tracker()


def forward_number() -> int:
    """The number of the autograd node whose forward is running: it saves its inputs before the op runs."""
    return _sequence_number() - 1


def current_node() -> Any:
    """The autograd node whose backward is running; None in a forward pass."""
    return _current_node()


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage: equal for views. Valid while the storage is alive."""
    return int(tensor.untyped_storage()._cdata)


def is_composite(func: Any) -> bool:
    """Whether an op has no kernel of its own, only a decomposition into others."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def cannot_follow(error: BaseException) -> str:
    """Why symbolic shapes (or fake tensors) cannot follow a program, in a few words; empty for any other error."""
    if isinstance(error, DataDependentOutputException):
        return f"the value of a tensor decides something ({error.func})"
    if isinstance(error, _DynamicOutputShape):
        return f"the values of a tensor decide a shape ({error.func})"
    if isinstance(error, GuardOnDataDependentSymNode):
        return "a shape that depends on values decides something"
    text = str(error)
    if (
        "concrete integers" in text
        or "SymIntArrayRef" in text
        or "SymInt" in text
        or "symbolic" in text.lower()
        or "dispatch_on_subclass" in text
    ):
        return text.strip().splitlines()[0].rpartition(": ")[2]
    return ""


_BINARY = (
    "add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "floordiv", "int_floordiv", "mod", "sym_min", "sym_max",
    "and_", "or_",
)  # fmt: skip


@contextmanager
def cached_arithmetic() -> Iterator[None]:
    """Arithmetic of symbolic sizes computed once per pair of operands: it more than halves the time of a trace.

    A node of a symbolic size never changes, so that the same operation on equal expressions of one trace may return
    the node that it returned before; and a question that was answered (and left its guard) has the same answer again.
    Sizes of different traces never meet: the tables live as long as the context.
    """
    nodes: dict[tuple[Any, ...], Any] = {}
    answers: dict[tuple[Any, ...], Any] = {}
    constants: dict[Any, int | None] = {}
    node: Any = SymNode
    environment: Any = ShapeEnv

    def operation(name: str, original: Any) -> Any:
        def method(self: Any, other: Any) -> Any:
            key = (name, self._expr, other._expr, self.pytype, other.pytype, id(self.shape_env))
            found = nodes.get(key)
            if found is None:
                found = nodes[key] = original(self, other)
            return found

        return method

    def wrapping(original: Any) -> Any:
        def wrap_int(self: Any, number: int) -> Any:
            key = (number, id(self.shape_env))
            found = nodes.get(key)
            if found is None:
                found = nodes[key] = original(self, number)
            return found

        return wrap_int

    def expression(original: Any) -> Any:
        def expr(self: Any) -> Any:
            plain = self.shape_env is None or self.shape_env._replacements_version_counter == 0
            return self._expr if plain else original.fget(self)

        return property(expr)

    def constant(original: Any) -> Any:
        def maybe_as_int(self: Any) -> int | None:
            found = self.expr
            if found not in constants:
                constants[found] = original(self)
            return constants[found]

        return maybe_as_int

    def answer(original: Any) -> Any:
        def evaluate_sym_node(self: Any, asked: Any, *args: Any, **kwargs: Any) -> Any:
            key = (id(self), asked._expr, asked.pytype, args, tuple(kwargs.items()))
            if key not in answers:
                answers[key] = original(self, asked, *args, **kwargs)
            return answers[key]

        return evaluate_sym_node

    changes: list[tuple[Any, str, Callable[[Any], Any]]] = [
        *[(node, name, lambda original, name=name: operation(name, original)) for name in _BINARY],
        (node, "wrap_int", wrapping), (node, "expr", expression), (node, "maybe_as_int", constant),
        (environment, "evaluate_sym_node", answer),
    ]  # fmt: skip
    originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in changes if name in owner.__dict__]
    try:
        for owner, name, change in changes:
            if name in owner.__dict__:
                setattr(owner, name, change(owner.__dict__[name]))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
