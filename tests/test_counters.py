"""Each instrument against a module small enough to count by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tfcost.errors import InputError
from tfcost.validate import counters

pytestmark = pytest.mark.torch


def test_parameters_by_owner_and_shared_ones_once():
    module = nn.Module()
    module.a, module.b = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)
    module.b.weight = module.a.weight
    assert counters.parameters(module) == {"a": 3 * 5 + 5}


def test_torch_flops_of_a_linear_layer():
    b, n, i, o = 2, 3, 5, 7
    module = nn.Sequential(nn.Linear(i, o), nn.ReLU())
    found = counters.torch_flops(module, (torch.randn(b, n, i, requires_grad=True),))
    assert found.forward == 2 * b * n * i * o
    assert found.backward == 2 * found.forward  # the input needs a gradient, and so does the weight
    assert found.by_module == {"0": found.forward}
    without = counters.torch_flops(module, (torch.randn(b, n, i),))
    assert without.backward == without.forward  # the weight's gradient only


def test_torch_flops_leaves_no_gradients_behind():
    module = nn.Linear(3, 4)
    counters.torch_flops(module, (torch.randn(2, 3),))
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_module_that_returns_no_tensor_is_named():
    class Strange(nn.Module):
        def forward(self, x):
            return "text"

    with pytest.raises(InputError, match="str"):
        counters.torch_flops(Strange(), (torch.randn(2, 3),))


def test_fvcore_counts_macs_and_names_what_it_cannot():
    b, i, o = 4, 5, 7
    module = nn.Sequential(nn.Linear(i, o), nn.LayerNorm(o), nn.Softmax(-1)).train()
    found = counters.fvcore_macs(module, (torch.randn(b, i),))
    assert found.total == b * i * o + 5 * b * o
    assert found.by_module == {"0": b * i * o, "1": 5 * b * o}
    assert found.unsupported == {"aten::softmax": 1}
    assert module.training  # traced in eval mode, and put back


def test_fvcore_names_fused_attention():
    class Attention(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    found = counters.fvcore_macs(Attention(), (torch.randn(1, 2, 3, 4),))
    assert found.total == 0
    assert "aten::scaled_dot_product_attention" in found.unsupported


def test_neither_counter_meets_the_encoder_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    d, n, f = 8, 5, 16
    found = counters.fvcore_macs(layer, (torch.randn(1, n, d),))
    assert "aten::_transformer_encoder_layer_fwd" not in found.unsupported
    linear = counters.torch_flops(layer, (torch.randn(1, n, d),))
    assert linear.forward >= 2 * n * (4 * d * d + 2 * d * f)
    assert torch.backends.mha.get_fastpath_enabled()


def test_saved_activations_are_storages_each_once():
    b, i, o = 2, 3, 5

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(i, o), nn.Linear(i, o)

        def forward(self, x):
            return torch.sigmoid(self.one(x) + self.two(x))

    found = counters.saved_activations(Twice(), (torch.randn(b, i, requires_grad=True),))
    # The input that both layers share, once; sigmoid's output. No weight, no bias.
    assert [(each.module, each.bytes) for each in found] == [("one", 4 * b * i), ("", 4 * b * o)]


def test_a_view_keeps_its_whole_buffer():
    class Slice(nn.Module):
        def forward(self, x):
            return torch.sigmoid(x)[:, :1].exp()

    x = torch.randn(4, 100, requires_grad=True)
    kept = counters.saved_activations(Slice(), (x,))
    assert sum(each.bytes for each in kept) == 4 * 4 * 100 + 4 * 4  # sigmoid's output in full, exp's own


def test_ids_are_not_counted_and_masks_are():
    module = nn.Sequential(nn.Embedding(11, 8))
    assert counters.saved_activations(module, (torch.randint(11, (2, 3)),)) == []

    class Drop(nn.Module):
        def forward(self, x):
            return torch.native_dropout(x, 0.5, True)[0]

    kept = counters.saved_activations(Drop(), (torch.randn(2, 3, requires_grad=True),))
    assert [(each.dtype, each.bytes) for each in kept] == [(torch.bool, 6)]


def test_gpu_memory_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="no GPU was found"):
        counters.cuda_memory(lambda: torch.zeros(()), lambda: None)


def test_gpu_memory_is_differences_of_the_allocators_figures(monkeypatch):
    """The arithmetic, on a made-up allocator: baseline 1000, forward to 1500 by a peak of 1700, and so on."""
    now = {"allocated": 1000, "requested": 900, "peak": 0}
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(cuda, name, lambda: None)
    monkeypatch.setattr(cuda, "memory_allocated", lambda: now["allocated"])
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda: now["peak"])
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda: now.update(peak=now["allocated"]))
    monkeypatch.setattr(cuda, "memory_stats", lambda: {"requested_bytes.all.current": now["requested"]})

    class Loss:
        requires_grad = True

    def step():
        now.update(allocated=1500, requested=1350, peak=1700)
        return Loss()

    monkeypatch.setattr(torch.autograd, "backward", lambda loss: now.update(allocated=1200, peak=1900))

    def optimise():
        now.update(allocated=1000, requested=900, peak=1250)

    found = counters.cuda_memory(step, optimise)
    assert found == counters.Memory(
        forward=500, forward_requested=450, forward_peak=700, backward_peak=900, step_peak=250
    )
