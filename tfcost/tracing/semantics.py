"""What a GPU runs, on a PyTorch that has none: dropout, norms and fused attention as their CUDA ops.

A CPU's dropout keeps its mask in the activations' type, its LayerNorm keeps statistics in it, its RMSNorm is a dozen
steps, and its flash kernel is another op. Under ``cuda`` semantics they are replaced by what a GPU runs:
``native_dropout`` (a one-byte mask), fp32 statistics, one fused RMSNorm, and the flash or memory-efficient kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tfcost.tracing.torch_private import TorchDispatchMode, torch, unread_masks

HALF = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256
"""The widest head of the flash kernel (torch, sdp_utils.cpp)."""


class Semantics:
    """Whose kernels are traced: ``device`` cpu or cuda, ``attention`` eager, flash or math."""

    def __init__(self, device: str, attention: str) -> None:
        self.device = device
        self.attention = attention
        self.notes: list[str] = []

    def result(self, name: str, out: Any) -> Any:
        """An op's result as the GPU's kernel has it: LayerNorm's statistics are fp32."""
        if self.device == "cuda" and name == "aten.native_layer_norm":
            y, mean, rstd = out
            return y, mean.to(torch.float32), rstd.to(torch.float32)
        return out

    def results(self) -> Any:
        """A mode in which ops give :meth:`result` where nothing records them."""
        return _Results(self)

    @contextmanager
    def functions(self, recorder: Any) -> Iterator[None]:
        """While inside, the functions that differ between devices are the GPU's."""
        with ExitStack() as stack:
            stack.enter_context(unread_masks(self.note))
            if self.attention == "math":
                stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
            if self.device == "cuda":
                stack.enter_context(_Functions(self))
            yield

    def note(self, text: str) -> None:
        """Something that was assumed."""
        if text not in self.notes:
            self.notes.append(text)


class _Results(TorchDispatchMode):  # type: ignore[misc]  # the base has no types
    """Gives each op's result as the semantics have it."""

    def __init__(self, semantics: Semantics) -> None:
        super().__init__()
        self.semantics = semantics

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.semantics.result(str(getattr(func, "overloadpacket", func)), func(*args, **(kwargs or {})))


class _Functions(torch.overrides.TorchFunctionMode):
    """Calls the GPU's ops in the place of functions that choose by device."""

    def __init__(self, semantics: Semantics) -> None:
        super().__init__()
        self.semantics = semantics
        self.table: dict[Any, Callable[..., Any]] = {
            torch.dropout: _dropout,
            torch.nn.functional.dropout: _dropout,
            torch.rms_norm: _rms_norm,
            torch.nn.functional.rms_norm: _rms_norm,
        }
        if semantics.attention == "flash":
            self.table[torch.nn.functional.scaled_dot_product_attention] = _attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = self.table.get(func, func)
        return replaced(*args, **(kwargs or {}))


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return torch.ops.aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """The kernel that a GPU chooses: flash without a mask in half precision, else the memory-efficient one."""
    aten = torch.ops.aten
    width = query.shape[-1]
    flash = attn_mask is None and query.dtype in HALF and width == value.shape[-1] and width <= FLASH_HEAD_DIM
    if enable_gqa and not flash:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    if flash:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    grads = torch.is_grad_enabled()
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, grads, dropout_p, is_causal, scale=scale
    )[0]
