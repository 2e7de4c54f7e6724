"""Latent attention, attention sinks and norms of queries and keys against modules written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from measured import Norm, agree, turn

import tfcost
from tfcost import blocks
from tfcost.blocks import Run
from tfcost.config import complete
from tfcost.errors import ConfigError, InputError
from tfcost.graph import Graph
from tfcost.hf import from_hf
from tfcost.models import Model
from tfcost.notation import symbol
from tfcost.symbols import closed_form

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

b, N, d, h, d_k = [symbol(name) for name in ("b", "N", "d", "h", "d_k")]
d_q, d_c, d_r, d_v = [symbol(name) for name in ("d_q", "d_c", "d_r", "d_v")]

LATENT = {
    "hidden": 10, "heads": 3, "layers": 1, "attention_kind": "latent", "kv_rank": 4, "rope_dim": 2, "head_dim": 7,
    "value_dim": 3, "bias": False, "dropout": 0.0, "positions": "rotary",
}  # fmt: skip


class Latent(nn.Module):
    """DeepSeek-V2, arXiv:2405.04434, section 2.1.2, with the weights apart that its code has side by side."""

    def __init__(self, rank: int | None, absorbed: bool, bias: bool) -> None:
        super().__init__()
        self.absorbed = absorbed
        width, heads = 10, 3
        if rank is None:
            self.query: nn.Module = nn.Linear(width, heads * 7, False)
        else:
            self.query = nn.Sequential(nn.Linear(width, rank, bias), Norm(rank), nn.Linear(rank, heads * 7, False))
        self.compress = nn.Linear(width, 4, bias)
        self.norm = Norm(4)
        self.turned = nn.Linear(width, 2, bias)
        self.up_key = nn.Parameter(torch.randn(4, heads, 5))
        self.up_value = nn.Parameter(torch.randn(4, heads, 3))
        self.output = nn.Linear(heads * 3, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query = self.query(x).view(rows, length, 3, 7)
        latent = self.norm(self.compress(x))
        turned = turn(self.turned(x))
        if self.absorbed:
            still = torch.einsum("bnhk,rhk->bnhr", query[..., :5].clone(), self.up_key)
            query = torch.cat((still, turn(query[..., 5:])), -1)
            key = torch.cat((latent, turned), -1)
            query = query.transpose(1, 2).reshape(rows, 3 * length, -1)  # one square for all heads: no copy of a key
            weights = (query @ key.transpose(1, 2)).softmax(-1)
            out = (weights @ latent).view(rows, 3, length, -1)
            out = torch.einsum("bhnr,rhk->bnhk", out, self.up_value)
        else:
            query = turn(query)
            key = torch.einsum("bmr,rhk->bmhk", latent, self.up_key)
            key = torch.cat((key, turned[:, :, None].expand(-1, -1, 3, -1)), -1)
            value = torch.einsum("bmr,rhk->bmhk", latent, self.up_value)
            weights = torch.einsum("bnhk,bmhk->bhnm", query, key).softmax(-1)
            out = torch.einsum("bhnm,bmhk->bnhk", weights, value)
        return self.output(out.reshape(rows, length, -1))


@pytest.mark.torch
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [None, 5])
@pytest.mark.parametrize("absorbed", [False, True])
def test_latent_attention_is_what_a_module_by_hand_computes_and_keeps(
    absorbed: bool, rank: int | None, bias: bool
) -> None:
    cfg = complete({**LATENT, "absorbed": absorbed, "query_rank": rank, "attention_bias": bias,
                    "attention_output_bias": bias})  # fmt: skip
    agree(lambda g, x: blocks.attention(g, "attention", x, x, cfg, Run(2, 9)), Latent(rank, absorbed, bias), (2, 9, 10))


class Sinks(nn.Module):
    """A score per head that leads nowhere, two query heads to a key head, and norms of queries and keys."""

    def __init__(self, norms: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 12), nn.Linear(8, 6), nn.Linear(8, 6)
        self.norms = nn.ModuleList([Norm(3), Norm(3)]) if norms else None
        self.sinks = nn.Parameter(torch.randn(4))
        self.output = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key = self.query(x).view(rows, length, 4, 3), self.key(x).view(rows, length, 2, 3)
        value = self.value(x).view(rows, length, 2, 3)
        if self.norms is not None:
            query, key = self.norms[0](query), self.norms[1](key)
        query = query.view(rows, length, 2, 2, 3).permute(0, 2, 3, 1, 4).reshape(rows, 2, 2 * length, 3)
        scores = query @ key.permute(0, 2, 3, 1)
        sinks = self.sinks.view(2, 2, 1).expand(rows, 2, 2, length).reshape(rows, 2, 2 * length, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        out = (weights @ value.transpose(1, 2)).view(rows, 2, 2, length, 3)
        return self.output(out.permute(0, 3, 1, 2, 4).reshape(rows, length, -1))


@pytest.mark.torch
@pytest.mark.parametrize("norms", [False, True])
def test_sinks_and_norms_of_queries_and_keys(norms: bool) -> None:
    cfg = complete({
        "hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 3, "layers": 1, "dropout": 0.0, "attention_sinks": True,
        "qk_norm": "rmsnorm" if norms else "",
    })  # fmt: skip

    def block(g: Graph, x: Any) -> None:
        blocks.attention(g, "attention", x, x, cfg, Run(2, 7))

    g = Graph(4)
    block(g, g.tensor("x", ("b", "n", "d"), (2, 7, 8)))
    # The weight of the sink is a column of its own here; in the module it is the last of the softmax's output.
    columns = [kept for op in g.ops for kept in op.saves if kept.path.endswith("sink_weights")]
    assert [column.numel for column in columns] == [2 * 4 * 7]
    agree(block, Sinks(norms), (2, 7, 8), together={"softmax", "sink_weights"})


def test_closed_forms_of_both_ways() -> None:
    shape = {"attention_kind": "latent", "query_rank": 24, "kv_rank": 16, "rope_dim": 4, "head_dim": 12, "bias": False,
             "value_dim": 8, "hidden": 64, "heads": 6, "layers": 1, "ffn_hidden": 1, "head": False}  # fmt: skip
    tokens, still = b * N, d_k - d_r
    common = tokens * (d * d_q + d_q * h * d_k + d * (d_c + d_r) + d_c * h * (still + d_v) + h * d_v * d)
    square = {False: tokens * N * h * (d_k + d_v), True: tokens * N * h * (2 * d_c + d_r)}
    for absorbed, expected in square.items():
        form = closed_form(None, "forward_flops", absorbed=absorbed, **shape)
        ffn = 4 * tokens * d * symbol("d_ff")
        assert sympy.expand(form.subs(symbol("l"), 1) - 2 * (common + expected) - ffn) == 0
    counts = [tfcost.analyze(None, absorbed=absorbed, **shape).totals["parameters"] for absorbed in (False, True)]
    assert counts[0] == counts[1]


def test_what_latent_attention_needs() -> None:
    with pytest.raises(InputError, match=r"^--attention-kind latent needs --kv-rank, --rope-dim$"):
        tfcost.analyze(hidden=8, heads=2, layers=1, attention_kind="latent")
    with pytest.raises(InputError, match=r"^--rope-dim 9 is more than --head-dim 4$"):
        tfcost.analyze(hidden=8, heads=2, layers=1, attention_kind="latent", kv_rank=4, rope_dim=9)
    with pytest.raises(ConfigError, match=r"^num_key_value_heads 2 is not supported"):
        from_hf({"model_type": "deepseek_v3", "num_key_value_heads": 2})
    for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"):
        with pytest.raises(ConfigError, match=f"^{key} must be a positive integer, not null$"):
            from_hf({"model_type": "deepseek_v3", key: None})
    with pytest.raises(ConfigError, match=r"moe_layer_freq 2 is not supported"):
        from_hf({"model_type": "deepseek_v3", "moe_layer_freq": 2})


def test_flash_keeps_keys_of_their_own_width() -> None:
    """Queries and keys of d_n + d_r, values and output of d_v, and a log-sum-exp."""
    model = Model("", from_hf({"model_type": "deepseek_v3", "num_hidden_layers": 1, "first_k_dense_replace": 1}).fields)
    rows = tfcost.analyze(model, command="memory", seq_len=64, by="op", attention="flash").rows
    kept = {row["path"].rpartition("/")[2]: row["bytes"] for row in rows if "/attention/flash/" in row["path"]}
    assert kept == {
        "rotary_query": 2 * 64 * 128 * 192, "key": 2 * 64 * 128 * 192, "expand_value": 2 * 64 * 128 * 128,
        "weighted_sum": 2 * 64 * 128 * 128, "log_sum_exp": 4 * 64 * 128,
    }  # fmt: skip
