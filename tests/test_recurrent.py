"""RNN, LSTM, GRU and convolutions against torch.nn and loops written by hand; kinds of layers side by side."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from torch import Tensor, nn

import tfcost
from tfcost.blocks import Run
from tfcost.errors import InputError
from tfcost.families import build
from tfcost.graph import saved_tensors, weights_of
from tfcost.models import load
from tfcost.notation import symbol
from tfcost.side_by_side import compare
from tfcost.symbols import closed_form
from tfcost.validate.counters import saved_activations, torch_flops

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

b, N, d, h, k, layers = [symbol(name) for name in ("b", "N", "d", "h", "k", "l")]
FP32 = 4
CELLS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class Cells(nn.Module):
    """A stack of cells as loops over steps, which keep what the formulas need and nothing twice."""

    def __init__(self, kind: str, depth: int, width: int) -> None:
        super().__init__()
        gates = {"rnn": 1, "lstm": 4, "gru": 3}[kind]
        self.kind, self.width = kind, width
        self.inputs = nn.ModuleList(nn.Linear(width, gates * width) for _ in range(depth))
        self.states = nn.ModuleList(nn.Linear(width, gates * width, False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        steps = list(x.unbind(1))
        for inner, state in zip(self.inputs, self.states, strict=True):
            held, cell = torch.zeros(len(x), self.width), torch.zeros(len(x), self.width)
            for index, step in enumerate(steps):
                held, cell = self.step(inner(step), state(held), held, cell)
                steps[index] = held
        return torch.stack(steps, 1)

    def step(self, inner: Tensor, state: Tensor, held: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "rnn":
            return (inner + state).tanh(), cell
        if self.kind == "lstm":
            summed = inner + state
            gates = summed[:, : 3 * self.width].sigmoid()
            read, forget, write = gates.chunk(3, 1)
            cell = forget * cell + read * summed[:, 3 * self.width :].tanh()
            return write * cell.tanh(), cell
        gates = (inner[:, : 2 * self.width] + state[:, : 2 * self.width]).sigmoid()
        reset, update = gates.chunk(2, 1)
        candidate = state[:, 2 * self.width :].clone()  # of its own, not with the gates that nobody reads again
        new = (inner[:, 2 * self.width :] + reset * candidate).tanh()
        return torch.lerp(new, held, update), cell


def graph_of(name: str, depth: int, width: int, rows: int, steps: int, **fields: Any) -> Any:
    cfg = load(name).config(hidden=width, layers=depth, **fields)
    return build(cfg, Run(rows, steps), FP32)


@pytest.mark.torch
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("depth", [1, 3])
def test_cells_are_what_a_loop_computes_and_keeps(kind: str, depth: int) -> None:
    rows, steps, width = 2, 7, 5
    g, module = graph_of(kind, depth, width, rows, steps), Cells(kind, depth, width)
    inputs = (torch.randn(rows, steps, width, requires_grad=True),)
    assert sum(w.numel * w.copies for w in weights_of(g.ops)) == sum(p.numel() for p in module.parameters())
    measured = torch_flops(module, inputs)
    assert sum(2 * op.forward.macs * op.copies for op in g.ops) == measured.forward
    # The state before the first step is zero and needs no gradient: one product less in the loop.
    first = depth * 2 * rows * width * {"rnn": 1, "lstm": 4, "gru": 3}[kind] * width
    assert sum(2 * op.backward.macs * op.copies for op in g.ops) == measured.backward + first
    kept = sum(each.bytes for each in saved_activations(module, inputs))
    # The input is one storage; states are kept from the zero before the first step to the last but one.
    assert sum(saved.tensor.bytes * saved.copies for saved in saved_tensors(g)) == kept


@pytest.mark.parametrize("kind", CELLS)
def test_two_biases_are_those_of_torch_nn(kind: str) -> None:
    module = CELLS[kind](12, 12, num_layers=3)
    counted = tfcost.analyze(kind, hidden=12, layers=3, gate_biases=2).totals["parameters"]
    assert counted == sum(p.numel() for p in module.parameters())
    plain = CELLS[kind](12, 12, num_layers=3, bias=False)
    counted = tfcost.analyze(kind, hidden=12, layers=3, bias=False).totals["parameters"]
    assert counted == sum(p.numel() for p in plain.parameters())


def test_closed_forms_of_the_vanilla_cells() -> None:
    gates = {"rnn": (1, 4), "lstm": (4, 16), "gru": (3, 12)}
    for kind, (count, bytes_kept) in gates.items():
        form = closed_form(kind, "forward_flops", head=False)
        assert sympy.expand(form - layers * 4 * count * b * N * d**2) == 0
        form = closed_form(kind, "parameters") - symbol("V") * d
        assert sympy.expand(form - layers * count * (2 * d**2 + d)) == 0
        kept = tfcost.analyze(kind, hidden=8, layers=1, batch=3, seq_len=5).totals["activation_bytes"]
        assert kept == bytes_kept * 3 * 5 * 8 + (2 * 3 * 8 if kind == "rnn" else 0)


@pytest.mark.torch
def test_a_convolution_is_torchs() -> None:
    g = graph_of("conv", 2, 6, 2, 9, kernel=5)
    module = nn.Sequential(nn.Conv1d(6, 6, 5, padding=2), nn.GELU(), nn.Conv1d(6, 6, 5, padding=2), nn.GELU())
    inputs = (torch.randn(2, 6, 9, requires_grad=True),)
    assert sum(w.numel * w.copies for w in weights_of(g.ops)) == sum(p.numel() for p in module.parameters())
    measured = torch_flops(module, inputs)
    assert sum(2 * op.forward.macs * op.copies for op in g.ops) == measured.forward
    assert sum(2 * op.backward.macs * op.copies for op in g.ops) == measured.backward
    kept = sum(each.bytes for each in saved_activations(module, inputs))
    assert sum(saved.tensor.bytes * saved.copies for saved in saved_tensors(g)) == kept


def test_a_recurrent_model_has_embeddings_and_logits_like_others() -> None:
    totals = tfcost.analyze("lstm", hidden=64, layers=2, vocab=100, seq_len=32, tied=False).totals
    assert totals["parameters"] == 2 * (8 * 64**2 + 4 * 64) + 2 * 100 * 64
    assert totals["forward_flops"] == 2 * 16 * 32 * 64**2 + 2 * 32 * 64 * 100


# --- Side by side ---------------------------------------------------------------------------------------------------


def by_layer(*specs: str, **given: Any) -> dict[str, dict[str, Any]]:
    return {row["layer"]: row for row in compare(list(specs), **given).rows}


def test_the_documents_comparison() -> None:
    rows = by_layer("transformer", "lstm", "gru", "conv", seq_len=512, hidden=512)
    n, width = 512, 512
    assert rows["transformer"]["forward_flops"] == 24 * n * width**2 + 4 * n**2 * width
    assert rows["transformer"]["activation_bytes"] == 34 * n * width + 5 * n**2 * 8
    assert [rows[name]["forward_flops"] for name in ("lstm", "gru", "conv")] == [
        16 * n * width**2, 12 * n * width**2, 2 * 3 * n * width**2,
    ]  # fmt: skip
    assert [row["parameters"] for row in rows.values()] == [
        12 * width**2 + 13 * width, 8 * width**2 + 4 * width, 6 * width**2 + 3 * width, 3 * width**2 + width,
    ]  # fmt: skip
    assert [row["sequential_operations"] for row in rows.values()] == [1, 512, 512, 1]
    # 3^6 = 729 is the first power of three that spans 512 tokens.
    assert [row["maximum_path_length"] for row in rows.values()] == [1, 512, 512, 6]
    assert rows["conv"]["maximum_path_length_formula"].written() == "⌈log_k N⌉"
    assert [row["order_of_work"].expr for row in rows.values()] == [N**2 * d, N * d**2, N * d**2, k * N * d**2]


def test_where_the_curves_cross() -> None:
    report = compare(["attention", "restricted", "lstm", "gru", "rnn"], seq_len=512, hidden=512, window=64)
    found = {each["what"]: each for each in report.extra["crossovers"]}
    lengths = {what: each["length"] and each["length"].expr for what, each in found.items()}
    assert lengths["the orders of work, attention and lstm"] == d
    assert lengths["forward FLOPs, attention and lstm"] == 2 * d
    assert lengths["forward FLOPs, attention and gru"] == d
    assert lengths["forward FLOPs, attention and rnn"] is None
    assert lengths["forward FLOPs, attention and restricted"] == symbol("w")
    assert found["forward FLOPs, attention and lstm"]["at"] == 1024
    assert found["forward FLOPs, attention and lstm"]["less_below"] == "attention"
    assert found["forward FLOPs, attention and restricted"]["less_below"] == ""
    assert lengths["bytes kept for backward, attention and lstm"] == 3 * d / (5 * h)
    rows = {row["layer"]: row for row in report.rows}
    assert rows["restricted"]["maximum_path_length"] == 8
    # At the crossing both cost the same.
    here = by_layer("attention", "lstm", seq_len=1024, hidden=512)
    assert here["attention"]["forward_flops"] == here["lstm"]["forward_flops"]


def test_a_wide_kernel_costs_more_than_a_short_square() -> None:
    """24d + 4N against 2kd: N = (k - 12)d/2."""
    report = compare(["transformer", "conv:kernel=15"], seq_len=512, hidden=512)
    (found,) = [each for each in report.extra["crossovers"] if each["what"].startswith("forward FLOPs")]
    assert sympy.expand(found["length"].expr - (k - 12) * d / 2) == 0
    assert found["at"] == 768


def test_layers_are_compared_with_layers() -> None:
    with pytest.raises(InputError, match="are compared with each other, not with models"):
        compare(["lstm", "gpt2"], hidden=64)
    with pytest.raises(InputError, match="missing -d/--hidden"):
        compare(["lstm", "gru"])
    with pytest.raises(InputError, match="restricted attention needs --window"):
        compare(["lstm", "restricted"], hidden=64)
    with pytest.raises(InputError, match=r"-d/--hidden 100 does not divide|missing -h/--heads"):
        compare(["transformer", "lstm"], hidden=100)
