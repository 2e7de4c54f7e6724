"""Decoders with a mixture of experts: Mixtral, Qwen's, DeepSeek's (with latent attention), gpt-oss, Granite's, DBRX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfcost.errors import ConfigError
from tfcost.layer_kinds import MAX_LAYERS
from tfcost.model_types.llama import ATTENTION_DROPOUT, LLAMA, LLAMA_LIKE, MISTRAL, QWEN2
from tfcost.model_types.spec import (
    LM_HEAD,
    NO_HEAD,
    ROPE,
    Key,
    ModelType,
    Nested,
    activation,
    decoder_heads,
    flag,
    names,
    probability,
    size,
)  # fmt: skip
from tfcost.model_types.windows import shortest, state_layer_types

ROUTING = names("output_router_logits router_aux_loss_coef router_jitter_noise norm_topk_prob")
"""How a router is trained, and what its weights sum to: no figure depends on it."""


def _check_chosen(values: Mapping[str, Any], chosen: str, experts: str) -> None:
    """The class takes the top k of the experts: they must be as many."""
    if values[chosen] is None:
        raise ConfigError(f"{chosen} is null or missing, and the class has no default for it")
    if values[chosen] > values[experts]:
        raise ConfigError(f"{chosen} {values[chosen]} is more than {experts} {values[experts]}")


def _mixtral(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _check_chosen(values, "num_experts_per_tok", "num_local_experts")
    if "attention_bias" in values:
        stated["attention_output_bias"] = values["attention_bias"]


def _sparse_layers(values: Mapping[str, Any], stated: dict[str, Any], experts: str) -> None:
    """Qwen's rule: every so many layers have experts, except those that are named."""
    layers, step, named = values["num_hidden_layers"], values["decoder_sparse_step"], values["mlp_only_layers"] or []
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in named):
        raise ConfigError("mlp_only_layers must be an array of layer numbers")
    if values[experts] == 0:
        for field in ("experts", "experts_per_token", "expert_hidden", "shared_expert_hidden", "shared_expert_gate"):
            stated.pop(field, None)
        return
    _check_chosen(values, "num_experts_per_tok", experts)
    if max(step, layers) > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers and decoder_sparse_step must be at most {MAX_LAYERS:,} here")
    pattern = "D" * (step - 1) + "E"
    if any(0 <= each < layers for each in named):
        whole = (pattern * (layers // step + 1))[:layers]
        pattern = shortest("".join("D" if index in named else kind for index, kind in enumerate(whole)))
    stated["expert_rule"] = (0, "", pattern)


def _qwen2_moe(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _sparse_layers(values, stated, "num_experts")
    if not values["use_sliding_window"]:
        stated["window"] = None
    elif values["sliding_window"] == 0:
        raise ConfigError("sliding_window must be a positive integer or null, not 0, where use_sliding_window is true")
    if values["layer_types"] is not None:
        state_layer_types(values, stated, "G")
    elif stated["window"] is not None:
        # Every other one of the first layers (Qwen2MoeConfig.__post_init__), unlike Qwen2's last ones.
        stated["window_rule"] = (values["max_window_layers"], "LG", "G")


def _qwen3_moe(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _sparse_layers(values, stated, "num_local_experts")
    stated["attention_output_bias"] = values["attention_bias"]
    if not values["use_sliding_window"]:
        stated["window"] = None


def _deepseek(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _check_chosen(values, "num_experts_per_tok", "n_routed_experts")
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if kv_heads not in (None, heads):
        raise ConfigError(
            f"num_key_value_heads {kv_heads} is not supported: latent attention has num_attention_heads, {heads}"
        )
    still, turned = values["qk_nope_head_dim"], values["qk_rope_head_dim"]
    stated |= {"head_dim": still + turned, "attention_output_bias": values["attention_bias"]}
    # A feed-forward of the shared experts is as wide as all of them.
    stated["shared_expert_hidden"] = values["n_shared_experts"] * values["moe_intermediate_size"]
    dense = values["first_k_dense_replace"]
    if dense is None:
        raise ConfigError("first_k_dense_replace must be an integer of at least 0, not null")
    stated["expert_rule"] = (dense, "D", "E")
    if values.get("topk_method", "greedy") not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"topk_method {values['topk_method']!r} is not greedy or group_limited_greedy")
    if values.get("topk_method") != "greedy":
        _check_groups(values["n_routed_experts"], values["n_group"], values["topk_group"])


def _check_groups(experts: int, groups: int | None, chosen: int | None) -> None:
    """A router that first takes the best of some groups of experts: as many in each, and no more than there are."""
    if groups is not None and experts % groups:
        raise ConfigError(f"n_routed_experts {experts} does not divide by n_group {groups}")
    if groups is not None and chosen is not None and chosen > groups:
        raise ConfigError(f"topk_group {chosen} is more than n_group {groups}")


def _gpt_oss(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _mixtral(values, stated)
    state_layer_types(values, stated, "LG")


def _dbrx(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _check_chosen(values, "ffn_config.moe_top_k", "ffn_config.moe_num_experts")


MIXTRAL = MISTRAL._replace(
    keys={
        **MISTRAL.keys,
        "sliding_window": size("window", None),
        "num_experts_per_tok": size("experts_per_token", 2),
        "num_local_experts": size("experts", 8),
    },
    architectures=decoder_heads("Mixtral"),
    aliases={"num_experts": "num_local_experts"},
    inert=LLAMA.inert | ROUTING,
    finish=_mixtral,
)

QWEN2_MOE = QWEN2._replace(
    keys={
        **{name: key for name, key in QWEN2.keys.items() if name != "attention_bias"},
        "hidden_size": size("hidden", 2048),
        "num_attention_heads": size("heads", 16),
        "num_key_value_heads": size("kv_heads", 16),
        "num_hidden_layers": size("layers", 24),
        "intermediate_size": size("ffn_hidden", 5632),
        "qkv_bias": flag("attention_bias", True),
        "decoder_sparse_step": size("", 1),
        "mlp_only_layers": Key("", None, "list", nullable=True),
        "moe_intermediate_size": size("expert_hidden", 1408),
        "shared_expert_intermediate_size": size("shared_expert_hidden", 5632),
        "num_experts_per_tok": size("experts_per_token", 4),
        "num_experts": size("experts", 60, least=0),
        # What the class writes where no window is used.
        "sliding_window": size("window", 4096, least=0, nullable=True),
    },
    architectures=decoder_heads("Qwen2Moe"),
    fixed={**LLAMA_LIKE, "shared_expert_gate": True, "attention_output_bias": False},
    inert=QWEN2.inert | ROUTING,
    finish=_qwen2_moe,
)

QWEN3_MOE = QWEN2_MOE._replace(
    keys={
        **{
            name: key
            for name, key in QWEN2_MOE.keys.items()
            if name
            not in ("qkv_bias", "num_experts", "shared_expert_intermediate_size", "max_window_layers", "layer_types")
        },
        "sliding_window": size("window", 4096, nullable=True),
        "num_attention_heads": size("heads", 32),
        "num_key_value_heads": size("kv_heads", 4),
        "intermediate_size": size("ffn_hidden", 6144),
        "attention_bias": flag("attention_bias", False),
        "moe_intermediate_size": size("expert_hidden", 768),
        "num_experts_per_tok": size("experts_per_token", 8),
        "num_local_experts": size("experts", 128, least=0),
    },
    architectures=decoder_heads("Qwen3Moe"),
    fixed={**LLAMA_LIKE, "qk_norm": "rmsnorm"},
    aliases={"num_experts": "num_local_experts"},
    inert=QWEN2_MOE.inert | names("max_window_layers layer_types"),
    finish=_qwen3_moe,
)

DEEPSEEK_V2 = ModelType(
    keys={
        "hidden_size": size("hidden", 4096),
        "num_attention_heads": size("heads", 32),
        "num_key_value_heads": size("", None),
        "num_hidden_layers": size("layers", 32),
        "intermediate_size": size("ffn_hidden", 11008),
        "vocab_size": size("vocab", 102400),
        "max_position_embeddings": size("max_positions", 2048),
        "hidden_act": activation("silu"),
        "attention_dropout": ATTENTION_DROPOUT,
        "attention_bias": flag("attention_bias", False),
        "mlp_bias": flag("ffn_bias", False),
        "tie_word_embeddings": flag("tied", False),
        "q_lora_rank": size("query_rank", 1536, nullable=True),
        "kv_lora_rank": size("kv_rank", 512),
        "qk_nope_head_dim": size("", 128),
        "qk_rope_head_dim": size("rope_dim", 64),
        "v_head_dim": size("value_dim", 128),
        "first_k_dense_replace": size("", 0, least=0),
        "n_routed_experts": size("experts", 64),
        "n_shared_experts": size("", 2),
        "num_experts_per_tok": size("experts_per_token", None),
        "moe_intermediate_size": size("expert_hidden", 1407),
        "topk_method": Key("", "greedy", "name", nullable=True),
        "n_group": size("", None),
        "topk_group": size("", None),
    },
    architectures=decoder_heads("DeepseekV2"),
    fixed={**LLAMA_LIKE, "attention_kind": "latent"},
    aliases={"num_experts": "n_routed_experts"},
    inert=ROPE
    | ROUTING
    | names(
        """aux_loss_alpha ep_size head_dim pretraining_tp qk_head_dim rms_norm_eps routed_scaling_factor
        scoring_func seq_aux"""
    ),
    must_be={"moe_layer_freq": (1,)},
    finish=_deepseek,
)

DEEPSEEK_V3 = DEEPSEEK_V2._replace(
    keys={
        **{name: key for name, key in DEEPSEEK_V2.keys.items() if name not in ("mlp_bias", "topk_method")},
        "hidden_size": size("hidden", 7168),
        "num_attention_heads": size("heads", 128),
        "num_key_value_heads": size("", 128, nullable=True),
        "num_hidden_layers": size("layers", 61),
        "intermediate_size": size("ffn_hidden", 18432),
        "vocab_size": size("vocab", 129280),
        "max_position_embeddings": size("max_positions", 4096),
        "first_k_dense_replace": size("", 3, least=0, nullable=True),
        "n_routed_experts": size("experts", 256),
        "n_shared_experts": size("", 1),
        "num_experts_per_tok": size("experts_per_token", 8, nullable=True),
        "moe_intermediate_size": size("expert_hidden", 2048),
        "n_group": size("", 8, nullable=True),
        "topk_group": size("", 4, nullable=True),
    },
    architectures=decoder_heads("DeepseekV3"),
    fixed={**LLAMA_LIKE, "attention_kind": "latent", "router": "sigmoid"},
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    # The class leaves the layers out that predict further tokens (num_nextn_predict_layers), weights and all.
    inert=DEEPSEEK_V2.inert | names("num_nextn_predict_layers rope_interleave topk_method"),
    must_be={"moe_layer_freq": (1,), "mlp_bias": (False,)},
)  # fmt: skip

GPT_OSS = ModelType(
    keys={
        **{name: key for name, key in LLAMA.keys.items() if name not in ("mlp_bias", "hidden_act")},
        "hidden_size": size("hidden", 2880),
        "num_attention_heads": size("heads", 64),
        "num_key_value_heads": size("kv_heads", 8),
        "head_dim": size("head_dim", 64),
        "num_hidden_layers": size("layers", 36),
        "intermediate_size": size("ffn_hidden", 2880),
        "vocab_size": size("vocab", 201088),
        "max_position_embeddings": size("max_positions", 131072),
        "attention_bias": flag("attention_bias", True),
        "sliding_window": size("window", 128, nullable=True),
        "layer_types": Key("", None, "list", nullable=True),
        "num_experts_per_tok": size("experts_per_token", 4),
        "num_local_experts": size("experts", 128),
    },
    architectures=decoder_heads("GptOss"),
    fixed={
        **LLAMA_LIKE, "attention_sinks": True, "router": "chosen", "router_bias": True, "expert_bias": True,
        "activation": "silu",
    },
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    # The experts' gate is a clamped SwiGLU of its own, whatever hidden_act says.
    inert=ROPE | ROUTING | names("hidden_act initial_context_length rms_norm_eps swiglu_alpha swiglu_limit"),
    finish=_gpt_oss,
)  # fmt: skip

GRANITE_MOE = LLAMA._replace(
    keys={
        **{name: key for name, key in LLAMA.keys.items() if name not in ("mlp_bias", "head_dim")},
        "num_experts_per_tok": size("experts_per_token", 2),
        "num_local_experts": size("experts", 8),
    },
    architectures={"GraniteMoeForCausalLM": LM_HEAD, "GraniteMoeModel": NO_HEAD},
    fixed={**LLAMA_LIKE, "router": "chosen"},
    inert=LLAMA.inert
    | ROUTING
    | names("attention_multiplier embedding_multiplier logits_scaling residual_multiplier"),
    finish=_mixtral,
    renamed={},
)

DBRX = ModelType(
    keys={
        "d_model": size("hidden", 2048),
        "n_heads": size("heads", 16),
        "n_layers": size("layers", 24),
        "vocab_size": size("vocab", 32000),
        "max_seq_len": size("max_positions", 2048),
        "resid_pdrop": probability("dropout", 0.0),
    },
    architectures={"DbrxForCausalLM": LM_HEAD, "DbrxModel": NO_HEAD},
    fixed={
        **LLAMA_LIKE, "norm": "layernorm", "tied": False,
    },
    aliases={
        "hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
    },
    # The class has emb_pdrop and does not apply it.
    inert=ROPE | ROUTING | names("emb_pdrop num_key_value_heads"),
    must_be={"tie_word_embeddings": (False,)},
    finish=_dbrx,
    nested={
        "attn_config": Nested(
            keys={"kv_n_heads": size("kv_heads", 1), "attn_pdrop": probability("attention_dropout", 0.0)},
            inert=names("clip_qkv rope_theta"),
        ),
        "ffn_config": Nested(
            keys={
                "ffn_hidden_size": size("ffn_hidden", 3584),
                "moe_num_experts": size("experts", 4),
                "moe_top_k": size("experts_per_token", 1),
            },
            inert=names("hidden_size moe_jitter_eps moe_loss_weight moe_normalize_expert_weights"),
            nested={"ffn_act_fn": Nested(keys={"name": activation("silu")})},
        ),
    },
)  # fmt: skip

TYPES: dict[str, ModelType] = {
    "mixtral": MIXTRAL, "qwen2_moe": QWEN2_MOE, "qwen3_moe": QWEN3_MOE, "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3, "gpt_oss": GPT_OSS, "granitemoe": GRANITE_MOE, "dbrx": DBRX,
}  # fmt: skip
