"""The instruments: one function each, from a running module to what it computed, kept or allocated.

Every function takes a module and its inputs and returns exact integers, by the dotted name of the submodule that did
it. None of them knows a formula; :mod:`tfcost.validate.compare` sets their figures beside the graph's.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tfcost.errors import InputError, MissingExtra

Inputs = Sequence[Any]


class Flops(NamedTuple):
    """FLOPs as PyTorch's own counter counts them: of matmuls and convolutions, two per multiply-accumulate."""

    forward: int
    backward: int
    by_module: dict[str, int]


class Macs(NamedTuple):
    """MACs as fvcore counts them, forward; ``unsupported`` are the ops that it met and could not count."""

    total: int
    by_module: dict[str, int]
    unsupported: dict[str, int]


class Kept(NamedTuple):
    """A storage that autograd keeps for backward, and the first module that kept it."""

    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


def parameters(module: nn.Module) -> dict[str, int]:
    """Parameters by the module that owns them, shared ones once."""
    counts: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        owner = name.rpartition(".")[0]
        counts[owner] = counts.get(owner, 0) + parameter.numel()
    return counts


@contextmanager
def _eager_math() -> Iterator[None]:
    """Without the encoder fast path, a fused op that no counter has a formula for."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _loss(output: Any) -> Tensor:
    """A scalar to differentiate: the sum, whose gradient is one everywhere and which keeps nothing."""
    first = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(first, Tensor):
        raise InputError(f"the module returns {type(first).__name__}, not a tensor")
    return first.sum()


def torch_flops(module: nn.Module, inputs: Inputs) -> Flops:
    """``torch.utils.flop_counter.FlopCounterMode`` over a forward and a backward pass.

    ``by_module`` is the forward pass, each module without its children. fp16 and bf16 count like fp32.
    """
    with _eager_math():
        forward = FlopCounterMode(display=False)
        with forward:
            output = module(*inputs)
        backward = FlopCounterMode(display=False)
        with backward:
            torch.autograd.backward(_loss(output))
    module.zero_grad(set_to_none=True)
    inclusive = {name: sum(counts.values()) for name, counts in forward.get_flop_counts().items()}
    root = type(module).__name__
    whole = {name.removeprefix(root).removeprefix("."): flops for name, flops in inclusive.items() if name != "Global"}
    return Flops(forward.get_total_flops(), backward.get_total_flops(), _without_children(whole))


def _without_children(inclusive: dict[str, int]) -> dict[str, int]:
    """Counts that include a module's children, without them."""
    own = Counter(inclusive)
    for name, count in inclusive.items():
        if name:
            parent = name.rpartition(".")[0]
            while parent and parent not in inclusive:
                parent = parent.rpartition(".")[0]
            own[parent] -= count
    return {name: count for name, count in own.items() if count}


def fvcore_macs(module: nn.Module, inputs: Inputs) -> Macs:
    """``fvcore.nn.FlopCountAnalysis`` over a forward pass: multiply-accumulates, LayerNorm at five per element.

    The module is traced in eval mode: dropout computes nothing that fvcore counts. Ops without a handler are returned
    by name and number, never counted as zero in silence. Raises :class:`MissingExtra` without fvcore.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it uses torch.jit, which newer PyTorch deprecates
            from fvcore.nn import FlopCountAnalysis
    except ImportError:
        raise MissingExtra("fvcore is not installed: pip install '.[torch]' in tfcost's folder") from None
    training = module.training
    module.eval()
    try:
        with _eager_math(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer's, about Python values; the unsupported ops are returned
            logging.getLogger("fvcore.nn.jit_analysis").setLevel(logging.ERROR)
            analysis = FlopCountAnalysis(module, tuple(inputs))
            analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
            total = int(analysis.total())
            inclusive = {name: int(count) for name, count in analysis.by_module().items()}
            unsupported = dict(analysis.unsupported_ops())
    finally:
        module.train(training)
    return Macs(total, _without_children(inclusive), unsupported)


@contextmanager
def _module_stack(module: nn.Module) -> Iterator[list[str]]:
    """The dotted names of the modules whose forward is running, innermost last."""
    stack: list[str] = []
    handles = []
    for name, child in module.named_modules():

        def enter(_: nn.Module, __: Any, name: str = name) -> None:
            stack.append(name)

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            stack.pop()

        handles.append(child.register_forward_pre_hook(enter))
        handles.append(child.register_forward_hook(leave, always_call=True))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def saved_activations(module: nn.Module, inputs: Inputs) -> list[Kept]:
    """What autograd keeps between forward and backward, by ``saved_tensors_hooks``: each storage once, in full.

    Storages, not tensors: a view keeps its whole buffer. Left out: parameters and buffers, which are there anyway, and
    the integer ids of an embedding.
    """
    # The storage's own address, not its data's: a fake tensor has no data.
    owned = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, Kept] = {}
    alive: list[Tensor] = []  # a freed storage's address could come again

    with _module_stack(module) as stack:

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in owned and key not in kept and _is_activation(tensor):
                shape = tuple(int(size) for size in tensor.shape)
                kept[key] = Kept(stack[-1] if stack else "", shape, tensor.dtype, int(storage.nbytes()))
            alive.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = module(*inputs)
    del output
    return list(kept.values())


def _is_activation(tensor: Tensor) -> bool:
    """Everything but the ids of tokens and positions, which are int64 with at least one axis (a seed has none)."""
    return tensor.dtype != torch.int64 or tensor.dim() == 0


def step_peak(module: nn.Module, inputs: Inputs, loss: Callable[[Tensor], Tensor]) -> int:
    """The most bytes alive at once in a forward and a backward pass, by PyTorch's ``MemTracker``, between any two ops.

    Parameters, activations and gradients; the inputs and the loss itself (and the count that its mean divides by) are
    left out. The output of the module is held until backward is done. Gradients of a tensor with several readers are
    summed out of place while PyTorch is being watched by any dispatch mode, so here too.
    """
    from tfcost.tracing.torch_private import memory_tracker

    tracker = memory_tracker()
    tracker.track_external(module, *inputs)
    with tracker:
        output = module(*inputs)
        torch.autograd.backward(loss(output))
    peak = int(sum(each["Total"] for each in tracker.get_tracker_snapshot("peak").values()))
    return peak - sum(int(each.nbytes) for each in inputs)


class Memory(NamedTuple):
    """Bytes on a GPU around one training step, less what was allocated before it; ``requested`` has no rounding.

    ``forward``: after the forward pass, its output included; ``forward_requested`` the same as asked for.
    ``forward_peak``, ``backward_peak``, ``step_peak``: the largest within each phase.
    """

    forward: int
    forward_requested: int
    forward_peak: int
    backward_peak: int
    step_peak: int


def cuda_memory(step: Callable[[], Tensor], optimise: Callable[[], None], *, warm_up: int = 2) -> Memory:
    """``torch.cuda`` memory statistics around forward, backward and optimizer step.

    ``step`` runs a forward pass and returns the loss. Warm-up steps first make what the first step alone allocates
    (workspaces, optimizer states); then caches are emptied, the device synchronised and the baseline subtracted.
    Raises :class:`InputError` where no GPU is found.
    """
    if not torch.cuda.is_available():
        raise InputError("--torch-device cuda: no GPU was found; --torch-device cpu needs none")
    for _ in range(warm_up):
        torch.autograd.backward(step())
        optimise()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    base_requested = _requested()
    torch.cuda.reset_peak_memory_stats()
    loss = step()
    torch.cuda.synchronize()
    forward = torch.cuda.memory_allocated() - base
    requested = _requested() - base_requested
    forward_peak = torch.cuda.max_memory_allocated() - base
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.backward(loss)
    torch.cuda.synchronize()
    backward_peak = torch.cuda.max_memory_allocated() - base
    torch.cuda.reset_peak_memory_stats()
    optimise()
    torch.cuda.synchronize()
    return Memory(forward, requested, forward_peak, backward_peak, torch.cuda.max_memory_allocated() - base)


def _requested() -> int:
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])
