"""DiT: one layer against a module by hand, the paper's table, and a user's case."""

from __future__ import annotations

from typing import Any

import pytest
from measured import agree
from torch import Tensor, nn

import tfcost
from tfcost import diffusion, ops
from tfcost.blocks import Run
from tfcost.config import complete
from tfcost.graph import Graph

torch = pytest.importorskip("torch")


class Norm(torch.autograd.Function):
    """A LayerNorm without parameters that keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return nn.functional.layer_norm(x, x.shape[-1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = nn.functional.layer_norm(x, x.shape[-1:])
        return torch.autograd.grad(out, x, gradient)[0]


class Layer(nn.Module):
    """adaLN-Zero: six vectors of the condition shift, scale and gate both branches."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Linear(8, 48)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = x.mean(1, keepdim=True)
        parts = self.vectors(nn.functional.silu(state)).chunk(6, -1)
        x = x + parts[2] * self.attend(Norm.apply(x) * (1 + parts[1]) + parts[0])
        inner = Norm.apply(x) * (1 + parts[4]) + parts[3]
        return x + parts[5] * self.down(nn.functional.gelu(self.up(inner)))

    def attend(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 2, 4)
        query, key, value = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        weights = (query @ key.transpose(2, 3)).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).reshape(x.shape))


@pytest.mark.torch
def test_a_layer_is_what_a_module_by_hand_computes_and_keeps() -> None:
    cfg = complete({
        "family": "diffusion", "arch": "encoder", "hidden": 8, "heads": 2, "layers": 1, "dropout": 0.0, "labels": 3,
        "norm_affine": False, "image_size": 4, "patch_size": 1, "output_channels": 3,
    })  # fmt: skip

    def block(g: Graph, x: Any) -> None:
        diffusion.layer(g, x, cfg, Run(2, 5), ops.mean_tokens(g, "state", x, 5))

    agree(block, Layer(), (2, 5, 8))


def test_dit_xl_2_is_the_users_case() -> None:
    """User case F05: MACs of the blocks."""
    rows = tfcost.analyze("dit-xl-2", attention="eager", by="op").rows
    assert sum(row["count"] * row["macs_each"] for row in rows if row["path"].startswith("layer/")) == 118_602_989_568
    totals = tfcost.analyze("dit-xl-2", attention="eager").totals
    assert abs(totals["forward_macs"] - 118_602_989_568) <= 0.005 * 118_602_989_568
    assert totals["parameters"] == 675_129_632


@pytest.mark.parametrize(
    ("name", "gmacs", "millions"),
    [("dit-s-2", 6.06, 33), ("dit-b-2", 23.01, 130), ("dit-l-2", 80.71, 458), ("dit-xl-2", 118.64, 675),
     ("dit-xl-4", 29.05, 675)],
)  # fmt: skip
def test_the_papers_table(name: str, gmacs: float, millions: int) -> None:
    """Table 4, whose Gflops are MACs, with what its counter adds for norms."""
    totals = tfcost.analyze(name, attention="eager").totals
    assert abs(totals["forward_macs"] / 1e9 - gmacs) <= 0.001 * gmacs
    assert abs(totals["parameters"] / 1e6 - millions) <= 0.6


def test_closed_forms_substitute_to_the_numbers() -> None:
    report = tfcost.analyze("dit-b-2", batch=3, attention="eager", formula=True)
    keys = ["forward_flops", "train_flops", "parameters", "trainable_parameters", "activation_bytes"]
    for key, form in report.closed.totals(keys).items():
        assert form.subs(report.closed.values) == report.totals[key], key
