"""One block of a model beside a PyTorch module that was written by hand: parameters, FLOPs and kept bytes, exactly.

The modules keep what the document's accounting keeps. Where PyTorch's own kernels keep more (the statistics of a norm,
the angles of rotary positions), they use the two stand-ins below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from tfcost.graph import Graph, saved_tensors, weights_of
from tfcost.graph import Tensor as Node
from tfcost.validate.counters import saved_activations, torch_flops

torch.set_num_threads(1)

FP32 = 4


class _KeepsItsInput(torch.autograd.Function):
    """A norm whose backward makes the statistics again: it keeps its input and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.rms_norm(x, x.shape[-1:], weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            out = nn.functional.rms_norm(x, x.shape[-1:], weight)
        return torch.autograd.grad(out, (x, weight), gradient)


class Norm(nn.Module):
    """RMSNorm that keeps its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return _KeepsItsInput.apply(x, self.weight)


def turn(x: Tensor) -> Tensor:
    """In place of rotary positions: a copy, linear, that keeps nothing."""
    return x.roll(1, -1)


def agree(
    block: Callable[[Graph, Node], object],
    module: nn.Module,
    shape: tuple[int, ...],
    axes: tuple[str, ...] = ("b", "n", "d"),
    grad: bool = True,
    together: Collection[str] = (),
) -> None:
    """A block on a tensor of this shape, and the module on numbers: the same parameters, FLOPs and kept bytes.

    ``together`` names tensors that the module keeps as one.
    """
    g = Graph(FP32)
    block(g, g.tensor("x", axes, shape, grad=grad))
    inputs = (torch.randn(shape).requires_grad_(grad),)
    assert sum(w.numel for w in weights_of(g.ops)) == sum(p.numel() for p in module.parameters())
    measured = torch_flops(module, inputs)
    assert sum(2 * op.forward.macs for op in g.ops) == measured.forward
    assert sum(2 * op.backward.macs for op in g.ops) == measured.backward
    kept_by(g, module, shape, grad, together)


def kept_by(
    g: Graph, module: nn.Module, shape: tuple[int, ...], grad: bool = True, together: Collection[str] = ()
) -> None:
    """A graph and a module keep the same tensors for backward, by their sizes."""
    sizes = {saved.tensor.path: saved.copies * saved.tensor.bytes for saved in saved_tensors(g)}
    joined = [sizes.pop(path) for path in list(sizes) if path.rpartition("/")[2] in together]
    found = sorted(size for size in [*sizes.values(), sum(joined)] if size)
    assert found == sorted(kept.bytes for kept in saved_activations(module, (torch.randn(shape).requires_grad_(grad),)))
