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
"""The versions of PyTorch with these interfaces; 2.13 (CPU) and 2.14.1 (CUDA) are tested."""

try:
    import torch
except ImportError:
    raise MissingExtra("trace needs torch: pip install '.[torch]' in tfcost's folder") from None

try:
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as _DynamicOutputShape
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager as in_kernel
    from torch._subclasses.fake_tensor import unset_fake_temporarily as outside_fake
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
    "CAPABILITY", "CeilDiv", "CleanDiv", "DataDependentOutputException", "FakeTensor", "FakeTensorMode", "FloorDiv",
    "Max", "Min", "Mod", "PythonMod", "ShapeEnv", "TorchDispatchMode", "TorchFunctionMode", "active_fake_mode",
    "as_fake_tensor", "assumed_gpu", "cached_arithmetic", "cannot_follow", "check_cuda", "current_node", "fake_empty",
    "fake_like", "fake_mode", "fake_view", "forward_number", "is_composite", "memory_tracker", "outside_fake",
    "sizes", "storage_key", "torch", "tree_flatten", "tree_map", "tree_unflatten", "unread_masks",
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
    return active_fake_mode().from_tensor(tensor, static_shapes=True)


def active_fake_mode() -> Any:
    """The fake mode that is active."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def fake_like(tensor: torch.Tensor, mode: Any, device: torch.device) -> Any:
    """A tensor on meta, called a fake one of ``device``; a parameter stays one. To be made outside the mode."""
    made: Any = FakeTensor(mode, tensor.data, device)
    if isinstance(tensor, torch.nn.Parameter):
        made.requires_grad_(tensor.requires_grad)
        made._is_param = True  # what isinstance(..., Parameter) asks
    return made


def fake_empty(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """``torch.empty_strided`` of a fake tensor, past every mode: unseen by any, and in a tenth of the time.

    Without a stride it is contiguous.
    """
    mode = active_fake_mode()
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        if stride is None:
            made = torch.empty(shape, dtype=dtype, device="meta")
        else:
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, made, device)


def fake_view(tensor: Any, shape: Any, stride: Any, offset: Any, device: torch.device) -> Any:
    """``torch.as_strided`` of a fake tensor, past every mode."""
    mode = active_fake_mode()
    with in_kernel(mode), torch._C.DisableTorchFunction():
        made = torch.ops.aten.as_strided.default(tensor, shape, stride, offset)
    return FakeTensor(mode, made, device)


def check_cuda() -> None:
    """Raise unless this PyTorch has CUDA kernels; a GPU is not needed for fake tensors."""
    if torch.version.cuda is None:
        raise InputError(
            f"--torch-device cuda needs a CUDA build of PyTorch; this is {torch.__version__}. "
            "--semantics cuda (the default) traces a GPU's kernels on any build"
        )


@contextmanager
def unread_masks(note: Callable[[str], None]) -> Iterator[None]:
    """nn.Transformer reads its masks to choose a path; here they have no values, and what is assumed is noted.

    A square mask is taken for a causal one unless the caller says otherwise. Padding is not taken out: sequences fill
    their rows.
    """
    from torch.nn.modules import transformer

    owners: dict[str, Any] = {"_detect_is_causal_mask": transformer, "_nested_tensor_from_mask_left_aligned": torch}
    before = {name: getattr(owner, name) for name, owner in owners.items() if hasattr(owner, name)}

    def is_causal(mask: Any, said: bool | None = None, size: int | None = None) -> bool:
        if said is not None or mask is None:
            return bool(said)
        square = bool(mask.shape[-1] == mask.shape[-2])
        if square:
            note("the values of a square mask decide whether nn.Transformer takes it for a causal one: it is one here")
        return square

    def left_aligned(tokens: Any, mask: Any) -> bool:
        note("nn.TransformerEncoder takes padding out by the values of its mask: sequences fill their rows here")
        return False

    replaced = {"_detect_is_causal_mask": is_causal, "_nested_tensor_from_mask_left_aligned": left_aligned}
    try:
        for name in before:
            setattr(owners[name], name, replaced[name])
        yield
    finally:
        for name, original in before.items():
            setattr(owners[name], name, original)


CAPABILITY = (9, 0)
"""Of the GPU that a program on fake CUDA tensors is told of where there is none: Hopper's."""


@contextmanager
def assumed_gpu() -> Iterator[None]:
    """Without a GPU, programs that ask for its compute capability hear :data:`CAPABILITY`."""
    cuda: Any = torch.cuda
    if cuda.is_available():
        yield
        return
    before = cuda.get_device_capability
    cuda.get_device_capability = lambda device=None: CAPABILITY
    try:
        yield
    finally:
        cuda.get_device_capability = before


class _NoHook:
    """Stands for the hook on a parameter that has no gradient to hook into."""

    def remove(self) -> None:
        """There is none."""


def memory_tracker() -> Any:
    """PyTorch's own tracker of memory by category, without the hooks by which it tells modules apart.

    Those hold the gradient of one input of a module until those of all are there, which no training step does: with
    them the peak of an attention layer is up to a score square too high. The hooks on parameters, which tell gradients
    from temporaries, come with ``track_external``; the base fails on frozen parameters, which are left without.
    """
    try:
        from torch.distributed._tools import mem_tracker
    except ImportError as error:
        raise InputError(f"--peak uses torch.distributed._tools.MemTracker, which this build lacks: {error}") from None
    base: Any = mem_tracker.MemTracker

    class Tracker(base):  # type: ignore[misc]  # the base has no types
        def __enter__(self) -> Any:
            super().__enter__()
            tracked = vars(vars(self)["_mod_tracker"])
            tracked["_fw_pre_handle"].remove()
            tracked["_fw_post_handle"].remove()
            return self

        def _track_module_params_and_buffers(self, module: Any, install_grad_hooks: bool = True) -> Any:
            for parameter in module.parameters():
                if not parameter.requires_grad:
                    self._param_to_grad_hook_handles[parameter] = (_NoHook(), _NoHook())
            return super()._track_module_params_and_buffers(module, True)

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
    name = func.name()
    # Questions of TorchScript (aten::size) have no kernels at all, and the dispatcher does not know them.
    known = torch._C._dispatch_has_kernel(name)
    return bool(known and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


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


_MAGIC = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "floordiv", "mod")


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
    size: Any = torch.SymInt
    environment: Any = ShapeEnv

    def operation(name: str, original: Any) -> Any:
        def method(self: Any, other: Any) -> Any:
            key = (name, self._expr, other._expr, self.pytype, other.pytype, id(self.shape_env))
            found = nodes.get(key)
            if found is None:
                found = nodes[key] = original(self, other)
            return found

        return method

    def magic(name: str, original: Any) -> Any:
        def method(self: Any, other: Any) -> Any:
            kind = type(other)
            if kind is not int and kind is not size:
                return original(self, other)
            mine = self.node
            key = (name, mine._expr, other if kind is int else other.node._expr, kind, id(mine.shape_env))
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
        *[
            (size, name, lambda original, name=name: magic(name, original))
            for each in _MAGIC
            for name in (f"__{each}__", f"__r{each}__")
        ],
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
