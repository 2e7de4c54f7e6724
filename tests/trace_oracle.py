"""What a concrete run says: PyTorch's FLOP counter and saved-tensor hooks on real tensors, nothing of the tracer's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Measured(NamedTuple):
    """One concrete run: FLOPs forward and backward, bytes kept (floating point and masks), parameters."""

    forward: int
    backward: int
    kept: int
    parameters: int


def inputs_of(config: Any, sizes: Mapping[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random inputs of a class, by the kind of its model."""
    b = sizes["b"]

    def ids(length: int, vocab: int = 90) -> torch.Tensor:
        return torch.randint(3, vocab, (b, length))

    kind = config.model_type
    if kind in ("vit", "swin", "dinov2"):
        return {"pixel_values": torch.randn(b, 3, config.image_size, config.image_size, dtype=dtype)}
    if kind == "clip":
        side = config.vision_config.image_size
        return {"input_ids": ids(sizes["N"]), "pixel_values": torch.randn(b, 3, side, side, dtype=dtype)}
    if kind == "whisper":
        frames = torch.randn(b, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype)
        return {"input_features": frames, "decoder_input_ids": ids(sizes["N"])}
    if config.is_encoder_decoder:
        return {"input_ids": ids(sizes["S"]), "decoder_input_ids": ids(sizes["T"])}
    return {"input_ids": ids(sizes["N"])}


def _flash(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    b, h, n, k = query
    return 2 * b * h * n * key[2] * (k + value[3])


def _flash_backward(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return 2 * _flash(query, key, value)


CPU_FLASH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
}
"""PyTorch's counter has no formula for a CPU's flash kernel: QKᵀ and PV, each gradient's product twice."""


def measure(module: Any, inputs: Mapping[str, Any] | tuple[Any, ...], train: bool = True) -> Measured:
    """Run a module forward and (in training) backward from the sum of all its outputs."""
    torch.manual_seed(0)
    module.train(train)
    owned = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers()) if t.numel()}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        mask = tensor.dtype in (torch.bool, torch.uint8)
        if storage.data_ptr() not in owned and (tensor.is_floating_point() or mask):
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    forward, backward = [FlopCounterMode(display=False, custom_mapping=CPU_FLASH) for _ in range(2)]
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    if not train:
        args = tuple(each.detach() for each in args)  # the counter wants a graph below whatever needs a gradient
    with torch.set_grad_enabled(train), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), forward:
        out = module(*args, **kwargs)
    if train:
        leaves = torch.utils._pytree.tree_leaves(out)
        loss = sum(leaf.sum() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        with backward:
            torch.autograd.backward(loss)
    module.zero_grad(set_to_none=True)
    parameters = sum(p.numel() for p in module.parameters())
    return Measured(forward.get_total_flops(), backward.get_total_flops(), sum(kept.values()), parameters)


class Traffic(TorchDispatchMode):  # type: ignore[misc]
    """Adds up the bytes of the tensors that every op but views reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.read += sum(map(real_bytes, tensors_in((args, kwargs))))
            self.written += sum(map(real_bytes, tensors_in(out)))
        return out


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def real_bytes(tensor: torch.Tensor) -> int:
    """Bytes that are there: an axis along which a tensor is only repeated has stride 0."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return math.prod(sizes) * tensor.itemsize


def traffic(module: Any, inputs: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Bytes that the ops of a forward and a backward pass (from a gradient of each output) read and write."""
    module.train()
    with Traffic() as forward:
        out = module(**inputs)
    outputs = [each for each in tensors_in(out) if each.requires_grad]
    gradients = [torch.ones_like(each) for each in outputs]
    with Traffic() as backward:
        torch.autograd.backward(outputs, gradients)
    return forward.read, forward.written, backward.read, backward.written
