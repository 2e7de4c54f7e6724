"""Mixtures of experts: against a module written by hand, published active counts, and a user's case."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from measured import FP32, agree

import tfcost
from tfcost import experts
from tfcost.config import complete
from tfcost.errors import ConfigError, InputError
from tfcost.graph import Graph
from tfcost.hf import from_hf
from tfcost.models import Model
from tfcost.notation import symbol
from tfcost.symbols import closed_form

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402


class Mixture(nn.Module):
    """Router, top k, experts one after another, and a shared one with a gate of its own."""

    def __init__(self, count: int, chosen: int, gated: bool, router: str, bias: bool, shared: int) -> None:
        super().__init__()
        d, f = 6, 7
        self.chosen, self.router_kind, self.gated = chosen, router, gated
        self.router = nn.Linear(d, count, bias)
        names = ("gate", "up", "down") if gated else ("up", "down")
        shapes = {"gate": (d, f), "up": (d, f), "down": (f, d)}
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shapes[name], bias) for name in names}) for _ in range(count)
        )
        self.shared = None
        if shared:
            shapes |= {"gate": (d, shared), "up": (d, shared), "down": (shared, d), "weight": (d, 1)}
            self.shared = nn.ModuleDict({name: nn.Linear(*shape, False) for name, shape in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, x.shape[-1])
        logits = self.router(tokens)
        if self.router_kind == "chosen":
            values, index = logits.topk(self.chosen)
            weights = values.softmax(-1)
        else:
            scores = logits.sigmoid() if self.router_kind == "sigmoid" else logits.softmax(-1)
            weights, index = scores.topk(self.chosen)
        # As one buffer: slots in the order of the experts, so that each tensor is one for all of them.
        order = index.flatten().argsort(stable=True)
        rows = tokens[order // self.chosen]
        counts = index.flatten().bincount(minlength=len(self.experts)).tolist()
        out = self.each("down", self.inner(rows, counts), counts)
        out = out * weights.flatten()[order][:, None]
        # Back in the order of the tokens and summed; index_add would keep its source for no more than its shape.
        mixed = out[order.argsort()].view(len(tokens), self.chosen, -1).sum(1)
        if self.shared is not None:
            own = self.shared["down"](nn.functional.silu(self.shared["gate"](tokens)) * self.shared["up"](tokens))
            mixed = mixed + own * self.shared["weight"](tokens).sigmoid()
        return mixed.view(x.shape)

    def each(self, name: str, rows: Tensor, counts: list[int]) -> Tensor:
        parts = zip(self.experts, rows.split(counts), strict=True)
        return torch.cat([expert[name](part) for expert, part in parts])

    def inner(self, rows: Tensor, counts: list[int]) -> Tensor:
        if not self.gated:
            return nn.functional.gelu(self.each("up", rows, counts))
        return nn.functional.silu(self.each("gate", rows, counts)) * self.each("up", rows, counts)


@pytest.mark.torch
@pytest.mark.parametrize("router", ["softmax", "sigmoid", "chosen"])
@pytest.mark.parametrize(("gated", "bias", "shared"), [(True, False, 0), (True, False, 5), (False, True, 0)])
def test_a_mixture_is_what_a_module_by_hand_computes_and_keeps(
    router: str, gated: bool, bias: bool, shared: int
) -> None:
    torch.manual_seed(0)
    fields = {
        "hidden": 6, "heads": 1, "layers": 1, "experts": 5, "experts_per_token": 2, "expert_hidden": 7,
        "router": router, "ffn": "glu" if gated else "mlp", "activation": "silu" if gated else "gelu",
        "expert_bias": bias,
        "router_bias": bias, "shared_expert_hidden": shared, "shared_expert_gate": bool(shared), "dropout": 0.0,
        "ffn_bias": False,
    }  # fmt: skip
    cfg = complete(fields)
    module = Mixture(5, 2, gated, router, bias, shared)
    agree(lambda g, x: experts.mixture(g, x, cfg), module, (3, 11, 6))


def model(**keys: Any) -> Model:
    return Model("", from_hf(keys).fields)


def test_gpt_oss_is_the_users_case() -> None:
    """User case T03: 6 times the parameters in use beyond the input embedding, and keys within the windows."""
    for layers, count, wanted, active in ((24, 32, 24_141_260_160, 3_608_307_264), (36, 128, 34_534_221_696, None)):
        oss = model(model_type="gpt_oss", num_hidden_layers=layers, num_local_experts=count)
        totals = tfcost.analyze(oss, seq_len=4096, convention="palm-no-input-embedding").totals
        assert totals["train_flops_per_token"] == wanted
        assert active is None or totals["active_non_input_embedding_parameters"] == active


def test_closed_forms_have_all_experts_in_parameters_and_the_chosen_ones_in_flops() -> None:
    fields = {"experts": 8, "experts_per_token": 2, "ffn": "glu", "bias": False, "norm": "rmsnorm", "expert_hidden": 96}
    b, n, d, e, k, w, layers, h, v = [symbol(name) for name in ("b", "N", "d", "E", "k", "d_e", "l", "h", "V")]
    routed = 6 * b * n * k * d * w + 2 * b * n * d * e
    form = closed_form(None, "forward_flops", **fields)
    assert sympy.expand(form - layers * (8 * b * n * d**2 + 4 * b * n**2 * d + routed) - 2 * b * n * d * v) == 0
    form = closed_form(None, "parameters", **fields)
    assert sympy.expand(form - layers * (4 * d**2 + d * e + 3 * e * d * w + 2 * d) - v * d) == 0
    form = closed_form(None, "active_parameters", **fields)
    assert sympy.expand(form - layers * (4 * d**2 + d * e + 3 * k * d * w + 2 * d) - v * d) == 0
    # Kept: a layer of attention and its norm; the second norm's input; the router's input and softmax; per slot the
    # token, three inner tensors and their product, what comes out, and its weight; the mask of the dropout after them.
    form = closed_form(None, "activation_bytes", **fields)
    kept = 11 * b * n * d + 5 * b * n**2 * h + 4 * b * n * d + 2 * b * n * d + 2 * b * n * e
    kept += 2 * b * n * k * (2 * d + 4 * w + 1) + b * n * d
    assert sympy.expand(form - layers * kept) == 0


def test_a_capacity_factor_sets_the_slots() -> None:
    """Switch, section 2.2: each expert has (tokens k / E) c slots, filled or not."""
    fields = {"hidden": 16, "heads": 2, "layers": 1, "experts": 8, "experts_per_token": 2, "batch": 2, "seq_len": 64}
    served = tfcost.analyze(**fields, by="op").rows
    padded = tfcost.analyze(**fields, by="op", capacity_factor=1.25).rows
    experts_of = [sum(row["flops"] for row in rows if "/experts/" in row["path"]) for rows in (served, padded)]
    assert experts_of[1] * 4 == experts_of[0] * 5
    report = tfcost.analyze(**fields, capacity_factor="1.25")
    assert "capacity factor 1.25" in report.assumptions["routing"]
    with pytest.raises(InputError, match=r"is 45\.7143 slots for each of --experts 7"):
        tfcost.analyze(**{**fields, "experts": 7}, capacity_factor=1.25)


@pytest.mark.parametrize("factor", [0, "x", -1, "", True, "1e3", "1.2.3"])
def test_a_factor_that_is_none_is_refused(factor: Any) -> None:
    with pytest.raises(InputError, match=r"--capacity-factor must be a positive number"):
        tfcost.analyze(hidden=16, heads=2, layers=1, experts=2, capacity_factor=factor)


def test_more_chosen_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match=r"^--experts-per-token 3 is more than --experts 2$"):
        tfcost.analyze(hidden=16, heads=2, layers=1, experts=2, experts_per_token=3)
    with pytest.raises(ConfigError, match=r"^num_experts_per_tok 9 is more than num_local_experts 8$"):
        from_hf({"model_type": "mixtral", "num_experts_per_tok": 9})
    with pytest.raises(ConfigError, match=r"^ffn_config\.moe_top_k 5 is more than ffn_config\.moe_num_experts 4$"):
        from_hf({"model_type": "dbrx", "ffn_config": {"moe_top_k": 5}})
    with pytest.raises(ConfigError, match=r"^num_experts_per_tok is null or missing"):
        from_hf({"model_type": "deepseek_v2"})
    with pytest.raises(InputError, match=r"^--experts-per-token needs --experts"):
        tfcost.analyze("gpt2", experts_per_token=2)


def test_layers_are_dense_or_sparse_with_or_without_a_window() -> None:
    """Two rules at once, counted layer by layer here."""
    config = {
        "model_type": "qwen2_moe", "num_hidden_layers": 11, "use_sliding_window": True, "sliding_window": 8,
        "max_window_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3], "hidden_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 4,
    }  # fmt: skip
    cfg = complete(from_hf(config).fields)
    local = [index % 2 == 0 and index < 7 for index in range(11)]
    sparse = [(index + 1) % 2 == 0 and index != 3 for index in range(11)]
    assert cfg.local_layers == sum(local)
    assert cfg.dense_layers == 11 - sum(sparse)
    assert cfg.local_dense_layers == sum(a and not b for a, b in zip(local, sparse, strict=True))
    report = tfcost.analyze(Model("", from_hf(config).fields), seq_len=32, by="op")
    times = {row["path"].partition("/")[0]: row["count"] for row in report.rows if row["path"].endswith("/query")}
    assert sum(times.values()) == 11
    assert times["local_dense_layer"] == cfg.local_dense_layers


def test_a_shallower_model_follows_its_rule() -> None:
    deepseek = model(model_type="deepseek_v3")
    assert deepseek.config().dense_layers == 3
    assert deepseek.config(layers=10).dense_layers == 3
    assert deepseek.config(layers=2).experts is None
    assert model(model_type="qwen3_moe", num_local_experts=0).config().experts is None


def test_slots_are_built_in_any_size() -> None:
    g = Graph(FP32)
    cfg = complete({"hidden": 4, "heads": 1, "layers": 1, "experts": 3, "experts_per_token": 2})
    out = experts.mixture(g, g.tensor("x", ("b", "n", "d"), (10**12, 10**12, 4)), cfg)
    assert out.shape == (10**12, 10**12, 4)
    assert next(op for op in g.ops if op.path == "experts/up").forward.macs == 2 * 10**24 * 4 * 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"n_group": 3}, "n_routed_experts 8 does not divide by n_group 3"),
     ({"n_group": 2, "topk_group": 3}, "topk_group 3 is more than n_group 2")],
)  # fmt: skip
def test_groups_of_experts_that_the_router_cannot_form(changes: dict[str, Any], words: str) -> None:
    """DeepSeek-V3's router views the scores as groups (modeling_deepseek_v3.py); V2's does where it is told to."""
    config = {"n_routed_experts": 8, "num_experts_per_tok": 2, **changes}
    with pytest.raises(ConfigError, match=words):
        from_hf({"model_type": "deepseek_v3", **config})
    with pytest.raises(ConfigError, match=words):
        from_hf({"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", **config})
    from_hf({"model_type": "deepseek_v2", "topk_method": "greedy", **config})
