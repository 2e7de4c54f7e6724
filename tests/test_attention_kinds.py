"""Attention that is not the full square: FAVOR+ and LSH against modules written by hand, and where costs cross."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
from measured import agree
from torch import Tensor, nn

import tfcost
from tfcost import blocks
from tfcost.blocks import Run
from tfcost.config import complete
from tfcost.crossings import against_the_full_square
from tfcost.errors import InputError
from tfcost.graph import Graph
from tfcost.notation import symbol
from tfcost.symbols import closed_form, closed_forms

torch = pytest.importorskip("torch")

b, N, d, h, m, w = [symbol(name) for name in ("b", "N", "d", "h", "m", "w")]
r, n_b, n_c = [symbol(name) for name in ("r", "n_b", "n_c")]


# --- FAVOR+ ---------------------------------------------------------------------------------------------------------


class PrefixSums(torch.autograd.Function):
    """Causal linear attention that keeps what it reads: sums of outer products up to each token are made again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return _prefix(query, key, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            out = _prefix(*inputs)
        return torch.autograd.grad(out, inputs, gradient)


def _prefix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    sums = torch.einsum("bhnr,bhnk->bhnrk", key, value).cumsum(2)
    return torch.einsum("bhngr,bhnrk->bhngk", query.unflatten(2, (-1, 2)), sums).flatten(2, 3)


class Favor(nn.Module):
    """Performer's attention with positive features; four query heads to two key heads."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.query, self.key, self.value = nn.Linear(8, 12), nn.Linear(8, 6), nn.Linear(8, 6)
        self.output = nn.Linear(12, 8)
        self.register_buffer("directions", torch.randn(3, 5))

    def features(self, x: Tensor) -> Tensor:
        return torch.exp(x @ self.directions - (x * x).sum(-1, keepdim=True) / 2 - math.log(5) / 2)

    def forward(self, x: Tensor) -> Tensor:
        # Heads first, as products want it: then no operand is copied.
        rows, length, _ = x.shape
        query = self.query(x).view(rows, length, 2, 2, 3).permute(0, 2, 1, 3, 4).reshape(rows, 2, -1, 3)
        query = self.features(query)
        key, value = (layer(x).view(rows, length, 2, 3).transpose(1, 2) for layer in (self.key, self.value))
        key, value = self.features(key.contiguous()), value.contiguous()
        if self.causal:
            grouped = query.view(rows, 2, length, 2, 5)
            norm = (grouped * key.cumsum(2)[..., None, :]).sum(-1).view(rows, 2, -1, 1)
            out = PrefixSums.apply(query, key, value)
        else:
            norm = query @ key.sum(2)[..., None]
            out = query @ (key.transpose(2, 3) @ value)
        out = (out / norm).view(rows, 2, length, 2, 3).transpose(1, 2)
        return self.output(out.reshape(rows, length, -1))


FAVOR = {"hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 3, "layers": 1, "attention_kind": "linear", "features": 5}


@pytest.mark.torch
def test_linear_attention_is_what_a_module_by_hand_computes_and_keeps() -> None:
    cfg = complete({**FAVOR, "dropout": 0.0})
    agree(lambda g, x: blocks.attention(g, "attention", x, x, cfg, Run(2, 7)), Favor(False), (2, 7, 8))


@pytest.mark.torch
def test_causal_linear_attention_keeps_no_sum_of_each_token() -> None:
    """What it keeps is measured; PyTorch's counter sees the products of the sums as element by element."""
    from measured import FP32, kept_by

    cfg = complete({**FAVOR, "dropout": 0.0})
    g = Graph(FP32)
    x = g.tensor("x", ("b", "n", "d"), (2, 7, 8))
    blocks.attention(g, "attention", x, x, cfg, Run(2, 7), causal=True)
    both = complete({**FAVOR, "dropout": 0.0})
    other = Graph(FP32)
    y = other.tensor("x", ("b", "n", "d"), (2, 7, 8))
    blocks.attention(other, "attention", y, y, both, Run(2, 7))
    for part in ("forward", "backward"):
        assert sum(getattr(op, part).macs for op in g.ops) == sum(getattr(op, part).macs for op in other.ops)
    kept_by(g, Favor(True), (2, 7, 8))


def test_the_closed_form_of_linear_attention() -> None:
    shape = {"attention_kind": "linear", "features": 9, "head": False, "layers": 1}
    form = closed_form(None, "attention_flops", **shape).subs(symbol("l"), 1)
    assert sympy.expand(form - b * N * h * 2 * m * (2 * d / h + 2 * d / h + 1)) == 0
    assert sympy.Poly(form, N).degree() == 1


# --- LSH ------------------------------------------------------------------------------------------------------------


class Unit(torch.autograd.Function):
    """Vectors of length one; keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return nn.functional.normalize(x, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = nn.functional.normalize(x, dim=-1)
        return torch.autograd.grad(out, x, gradient)[0]


class Weights(torch.autograd.Function):
    """Softmax, and the logarithm of its sum, whose gradient is the softmax: keeps that alone."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> tuple[Tensor, Tensor]:
        weights, logits = scores.softmax(-1), scores.logsumexp(-1)
        ctx.save_for_backward(weights)
        return weights, logits

    @staticmethod
    def backward(ctx: Any, of_weights: Tensor, of_logits: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        inner = (of_weights * weights).sum(-1, keepdim=True)
        return weights * (of_weights - inner + of_logits[..., None])


class Hashed(nn.Module):
    """Reformer's attention: one projection for queries and keys, rounds of hashing, chunks that see the one before."""

    def __init__(self, rounds: int, buckets: int, chunk: int) -> None:
        super().__init__()
        self.rounds, self.chunk = rounds, chunk
        self.shared, self.value, self.output = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)
        self.register_buffer("directions", torch.randn(3, rounds * buckets // 2))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        shared = self.shared(x).view(rows, length, 2, 3).transpose(1, 2)
        value = self.value(x).view(rows, length, 2, 3).transpose(1, 2)
        with torch.no_grad():
            turned = (shared @ self.directions).view(rows, 2, length, self.rounds, -1)
            buckets = torch.cat((turned, -turned), -1).argmax(-1).transpose(2, 3)
            order = buckets.argsort(dim=-1, stable=True)  # b h r n
        query = self.arranged(shared, order)
        key = self.beside(Unit.apply(query))
        value = self.beside(self.arranged(value, order))
        weights, logits = Weights.apply(query @ key.transpose(-1, -2))
        out = weights @ value
        back = order.argsort(-1)
        where = (*torch.meshgrid(*map(torch.arange, back.shape[:3]), indexing="ij"),)
        where = (*(each[..., None] for each in where), back)
        out = out.flatten(3, 4)[where]
        if self.rounds > 1:
            logits = logits.flatten(3, 4)[where]
            out = out * logits.softmax(2)[..., None]
        out = out.sum(2)
        return self.output(out.transpose(1, 2).reshape(rows, length, -1))

    def arranged(self, x: Tensor, order: Tensor) -> Tensor:
        rows, heads = torch.meshgrid(*map(torch.arange, x.shape[:2]), indexing="ij")
        out = x[rows[..., None, None], heads[..., None, None], order].contiguous()
        return out.unflatten(3, (-1, self.chunk))

    def beside(self, x: Tensor) -> Tensor:
        return torch.cat((x.roll(1, 3), x), 4)


@pytest.mark.torch
@pytest.mark.parametrize("rounds", [1, 3])
def test_hashed_attention_is_what_a_module_by_hand_computes_and_keeps(rounds: int) -> None:
    cfg = complete({
        "hidden": 8, "heads": 2, "head_dim": 3, "layers": 1, "attention_kind": "lsh", "hashes": rounds, "buckets": 6,
        "chunk_length": 4, "dropout": 0.0,
    })  # fmt: skip
    agree(
        lambda g, x: blocks.attention(g, "attention", x, x, cfg, Run(2, 12)), Hashed(rounds, 6, 4), (2, 12, 8)
    )  # fmt: skip


LSH = {"attention_kind": "lsh", "hashes": 4, "buckets": 8, "chunk_length": 16, "hidden": 32, "heads": 4, "layers": 2}


def test_the_closed_form_of_hashed_attention() -> None:
    form = closed_form(None, "attention_flops", **LSH).subs(symbol("l"), 1)
    hashing = 2 * b * N * r * d * n_b / 2
    assert sympy.expand(form - hashing - 2 * 2 * b * N * r * 2 * n_c * d) == 0
    parameters = closed_form(None, "parameters", **LSH, vocab=None, head=False)
    assert parameters.coeff(symbol("l")).coeff(d, 2) == 3 + 8


def test_a_sort_is_comparisons_and_no_flops() -> None:
    """r N⌈log₂ N⌉ of them per head and sequence, in the unit of their own."""
    totals = tfcost.analyze(**LSH, seq_len=1024, batch=3).totals
    assert totals["sort_comparisons"] == 2 * 3 * 4 * 4 * 1024 * 10
    assert tfcost.analyze(**LSH, seq_len=1040).totals["sort_comparisons"] == 2 * 4 * 4 * 1040 * 11
    form = closed_forms(None, **LSH).totals(["sort_comparisons"])["sort_comparisons"]
    assert form.subs({symbol("l"): 2, b: 3, h: 4, r: 4, N: 1024}) == totals["sort_comparisons"]
    assert "sort_comparisons" not in tfcost.analyze("gpt2").totals


# --- Crossings ------------------------------------------------------------------------------------------------------


def crossing(model: str | None = None, **fields: Any) -> Any:
    return [each.length for each in against_the_full_square(closed_forms(model, **fields))]


def test_what_replaces_the_square_is_cheaper_from_some_length_on() -> None:
    """4N²d against 2mN(4d + h), and against N r d(n_b + 8n_c) without a key projection of 2Nd²."""
    assert crossing(attention_kind="linear", features=9) == [sympy.cancel(2 * m + m * h / (2 * d))]
    (length,) = crossing(**LSH)
    assert sympy.expand(length - (r * n_b / 4 + 2 * r * n_c - d / 2)) == 0
    assert crossing("mistral-7b") == [w]
    assert crossing("mistral-7b", attention="eager") == [None]
    assert crossing("gemma-2-2b") == [w]
    assert crossing("gpt2") == []


@pytest.mark.parametrize("length", [64, 128, 256])
def test_the_crossing_is_where_the_figures_are_equal(length: int) -> None:
    """m = 60 features, d = 64, h = 8: 2m + mh/(2d) = 123.75."""
    shape = {"hidden": 64, "heads": 8, "layers": 1, "seq_len": length, "arch": "encoder"}
    square = tfcost.analyze(**shape).totals["forward_flops"]
    linear = tfcost.analyze(**shape, attention_kind="linear", features=60).totals["forward_flops"]
    assert (linear < square) == (length > 123.75)


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_kind": "linear"}, "--attention-kind linear needs --features"),
        ({"attention_kind": "lsh", "hashes": 2}, "--attention-kind lsh needs --buckets, --chunk-length"),
        ({"features": 3}, "--features needs --attention-kind linear"),
        ({"kv_rank": 3}, "--kv-rank needs --attention-kind latent"),
        ({**LSH, "seq_len": 100}, "-N/--seq-len 100 does not divide by --chunk-length 16"),
        ({**LSH, "buckets": 7, "seq_len": 96}, "--buckets 7 does not divide by 2"),
        ({**LSH, "window": 4, "seq_len": 96}, "lsh is self-attention without --window"),
        ({**LSH, "kv_heads": 2, "seq_len": 96}, "as many key as query heads"),
        ({"attention_kind": "linear", "features": 3, "window": 4}, "linear has no scores"),
        ({"attention_kind": "hashed"}, "--attention-kind must be one of softmax, latent, linear, lsh"),
    ],
)
def test_what_does_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tfcost.analyze(**{"hidden": 32, "heads": 4, "layers": 1, **fields})
