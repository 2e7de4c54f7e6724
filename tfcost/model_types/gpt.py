"""Decoders before Llama: GPT-2, GPT-Neo, GPT-J, GPT-NeoX, GPT-BigCode, BLOOM, OPT, Falcon, MPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfcost.errors import ConfigError
from tfcost.model_types.spec import (
    LM_HEAD,
    NO_HEAD,
    PRE_NORM,
    ROPE,
    ROTARY,
    SCORE,
    SUMMARY,
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
from tfcost.model_types.windows import gpt_neo_pattern, shortest

LEARNED = {**PRE_NORM, "positions": "learned"}
ALIBI = {**PRE_NORM, "positions": "alibi"}

GPT2_NAMES = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}  # fmt: skip


def _cross_attention(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    stated["cross_attention"] = values["add_cross_attention"]


def _gpt_neo(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    pattern = gpt_neo_pattern(values)
    if "L" not in pattern:
        stated["window"] = None
    stated["window_pattern"] = shortest(pattern)


def _gpt_neox(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    stated["follows_dropout"] = ("embedding_dropout",)
    stated["attention_output_bias"] = values["attention_bias"]


def _gpt_bigcode(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _cross_attention(values, stated)
    if values["multi_query"]:
        stated["kv_heads"] = 1
        if values["add_cross_attention"]:
            raise ConfigError("add_cross_attention true needs multi_query false: the class has no such cross-attention")


def _bloom(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    if values["n_inner"] not in (None, 4 * values["hidden_size"]):
        raise ConfigError(f"n_inner {values['n_inner']} is not supported: the class's feed-forward is 4 hidden_size")


def _opt(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    before = values["do_layer_norm_before"]
    stated |= {"pre_norm": before, "final_norm": before and not values["_remove_final_layer_norm"]}
    if values["word_embed_proj_dim"] is not None:
        stated |= {"embedding_projection": "before", "embedding_projection_bias": False, "output_projection": True}


def _falcon(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    new, parallel, norms = (
        values[key] for key in ("new_decoder_architecture", "parallel_attn", "num_ln_in_parallel_attn")
    )
    if new and not parallel:
        raise ConfigError(
            "parallel_attn false is not supported with new_decoder_architecture true: the class cannot run it"
        )
    if norms not in ((None, 1, 2) if new else (None, 1)):
        raise ConfigError(
            f"num_ln_in_parallel_attn {norms} is not supported with new_decoder_architecture {str(new).lower()}; "
            f"supported: {'1 or 2' if new else '1'}"
        )
    if not new:
        # num_kv_heads counts only in the new architecture.
        if not values["multi_query"] and values["num_kv_heads"] not in (None, values["num_attention_heads"]):
            raise ConfigError(
                f"num_kv_heads {values['num_kv_heads']} needs multi_query or new_decoder_architecture true"
            )
        stated["kv_heads"] = 1 if values["multi_query"] else None
    hidden = values["hidden_dropout"]
    stated |= {
        "positions": "alibi" if values["alibi"] else "rotary",
        "parallel": parallel,
        "parallel_norms": 2 if new and norms != 1 else 1,
        # Without ALiBi the class has no dropout on the attention weights.
        "attention_dropout": values["attention_dropout"] if values["alibi"] else 0.0,
        "dropout": hidden,
        "parallel_dropout": hidden if parallel else 0.0,
        "attention_output_dropout": 0.0 if parallel else values["attention_dropout"],
        "ffn_output_dropout": 0.0 if parallel else hidden,
    }


def _mpt(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    # The class uses attn_pdrop for the residual branches too, and neither resid_pdrop nor emb_pdrop.
    stated["dropout"] = stated["attention_dropout"]


GPT2 = ModelType(
    keys={
        "n_embd": size("hidden", 768),
        "n_head": size("heads", 12),
        "n_layer": size("layers", 12),
        "n_inner": size("ffn_hidden", None),
        "vocab_size": size("vocab", 50257),
        "n_positions": size("max_positions", 1024),
        "activation_function": activation("gelu_new"),
        "resid_pdrop": probability("dropout", 0.1),
        "attn_pdrop": probability("attention_dropout", 0.1),
        "embd_pdrop": probability("embedding_dropout", 0.1),
        "tie_word_embeddings": flag("tied", True),
        "add_cross_attention": flag("", False),
    },
    architectures={"GPT2LMHeadModel": LM_HEAD, "GPT2Model": NO_HEAD, "GPT2ForSequenceClassification": SCORE},
    fixed={**LEARNED, "bias": True},
    aliases=GPT2_NAMES,
    inert=SUMMARY
    | names(
        """layer_norm_epsilon n_ctx n_special predict_special_tokens reorder_and_upcast_attn
        scale_attn_by_inverse_layer_idx scale_attn_weights"""
    ),
    finish=_cross_attention,
)

GPT_BIGCODE = GPT2._replace(
    keys={
        **GPT2.keys,
        "activation_function": activation("gelu_pytorch_tanh"),
        "multi_query": flag("", True),
    },
    architectures=decoder_heads("GPTBigCode"),
    inert=GPT2.inert
    | names(
        """attention_head_type attention_softmax_in_fp32 inference_runner max_batch_size max_sequence_length
        num_key_value_heads pad_key_length pre_allocate_kv_cache scale_attention_softmax_in_fp32
        validate_runner_input"""
    ),
    finish=_gpt_bigcode,
)

GPT_NEO = ModelType(
    keys={
        "hidden_size": size("hidden", 2048),
        "num_heads": size("heads", 16),
        "num_layers": size("layers", 24),
        "intermediate_size": size("ffn_hidden", None),
        "vocab_size": size("vocab", 50257),
        "max_position_embeddings": size("max_positions", 2048),
        "attention_types": Key("", None, "list", nullable=True),
        "attention_layers": Key("", None, "list", nullable=True),
        "window_size": size("window", 256),
        "activation_function": activation("gelu_new"),
        "resid_dropout": probability("dropout", 0.0),
        "embed_dropout": probability("embedding_dropout", 0.0),
        "attention_dropout": probability("attention_dropout", 0.0),
        "tie_word_embeddings": flag("tied", True),
    },
    architectures=decoder_heads("GPTNeo"),
    fixed={**LEARNED, "bias": True, "attention_bias": False},
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    inert=SUMMARY | names("classifier_dropout layer_norm_epsilon"),
    finish=_gpt_neo,
)

GPTJ = ModelType(
    keys={
        "n_embd": size("hidden", 4096),
        "n_head": size("heads", 16),
        "n_layer": size("layers", 28),
        "n_inner": size("ffn_hidden", None),
        "vocab_size": size("vocab", 50400),
        "n_positions": size("max_positions", 2048),
        "activation_function": activation("gelu_new"),
        "resid_pdrop": probability("dropout", 0.0),
        "embd_pdrop": probability("embedding_dropout", 0.0),
        "attn_pdrop": probability("attention_dropout", 0.0),
        "tie_word_embeddings": flag("tied", False),
    },
    architectures={**decoder_heads("GPTJ"), "GPTJForCausalLM": {"head": True, "head_bias": True}},
    fixed={
        **ROTARY, "bias": True, "attention_bias": False, "attention_output_bias": False, "parallel": True,
    },
    aliases=GPT2_NAMES,
    inert=ROPE | SUMMARY | names("layer_norm_epsilon n_ctx scale_attn_weights"),
    must_be={"rotary": (True,)},
)  # fmt: skip

GPT_NEOX = ModelType(
    keys={
        "hidden_size": size("hidden", 6144),
        "num_attention_heads": size("heads", 64),
        "num_hidden_layers": size("layers", 44),
        "intermediate_size": size("ffn_hidden", 24576),
        "vocab_size": size("vocab", 50432),
        "max_position_embeddings": size("max_positions", 2048),
        "hidden_act": activation("gelu"),
        "hidden_dropout": probability("dropout", 0.0),
        "attention_dropout": probability("attention_dropout", 0.0),
        "attention_bias": flag("attention_bias", True),
        "use_parallel_residual": flag("parallel", True),
        "tie_word_embeddings": flag("tied", False),
    },
    architectures=decoder_heads("GPTNeoX"),
    fixed={**ROTARY, "bias": True, "parallel_norms": 2},
    inert=ROPE
    | names(
        """attention_probs_dropout_prob classifier_dropout hidden_dropout_prob is_decoder layer_norm_eps
        layernorm_epsilon"""
    ),
    finish=_gpt_neox,
)

BLOOM = ModelType(
    keys={
        "hidden_size": size("hidden", 64),
        "n_head": size("heads", 8),
        "n_layer": size("layers", 2),
        "n_inner": size("", None),
        "vocab_size": size("vocab", 250880),
        # No table and no limit: the length that the model was trained at.
        "seq_length": size("max_positions", None),
        "hidden_dropout": probability("dropout", 0.0),
        "attention_dropout": probability("attention_dropout", 0.0),
        "tie_word_embeddings": flag("tied", True),
    },
    architectures=decoder_heads("Bloom"),
    fixed={**ALIBI, "bias": True, "embedding_norm": True, "scores_with_bias": True},
    aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    inert=names(
        """apply_residual_connection_post_layernorm attention_softmax_in_fp32 bias_dropout_fusion layer_norm_epsilon
        masked_softmax_fusion offset_alibi pretraining_tp skip_bias_add skip_bias_add_qkv slow_but_exact"""
    ),
    finish=_bloom,
)

OPT = ModelType(
    keys={
        "hidden_size": size("hidden", 768),
        "num_attention_heads": size("heads", 12),
        "num_hidden_layers": size("layers", 12),
        "ffn_dim": size("ffn_hidden", 3072),
        "vocab_size": size("vocab", 50272),
        "max_position_embeddings": size("max_positions", 2048),
        "word_embed_proj_dim": size("embedding_size", None),
        "do_layer_norm_before": flag("", True),
        "_remove_final_layer_norm": flag("", False),
        "enable_bias": flag("bias", True),
        "layer_norm_elementwise_affine": flag("norm_affine", True),
        "activation_function": activation("relu"),
        "dropout": probability("dropout", 0.1),
        "attention_dropout": probability("attention_dropout", 0.0),
        "tie_word_embeddings": flag("tied", True),
    },
    architectures=decoder_heads("OPT"),
    fixed={"arch": "decoder", "positions": "learned", "position_offset": 2, "norm_bias": True},
    inert=names("activation_dropout init_std layerdrop scale_embeddings"),
    must_be={"learned_embeddings": (True,)},
    finish=_opt,
)

FALCON = ModelType(
    keys={
        "hidden_size": size("hidden", 4544),
        "num_attention_heads": size("heads", 71),
        "num_hidden_layers": size("layers", 32),
        "num_kv_heads": size("kv_heads", None),
        "ffn_hidden_size": size("ffn_hidden", None),
        "vocab_size": size("vocab", 65024),
        "max_position_embeddings": size("max_positions", 2048),
        "num_ln_in_parallel_attn": size("", None),
        "alibi": flag("", False),
        "new_decoder_architecture": flag("", False),
        "multi_query": flag("", True),
        "parallel_attn": flag("", True),
        "bias": flag("bias", False),
        "activation": activation("gelu"),
        "hidden_dropout": probability("", 0.0),
        "attention_dropout": probability("", 0.0),
        "tie_word_embeddings": flag("tied", True),
    },
    architectures=decoder_heads("Falcon"),
    fixed={**PRE_NORM, "norm_bias": True},
    # The names of the model's original code, model_type RefinedWeb and RefinedWebModel.
    aliases={
        "n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
        "n_head_kv": "num_kv_heads",
    },
    inert=ROPE | names("apply_residual_connection_post_layernorm layer_norm_epsilon"),
    must_be={"ff_factor": (4,)},
    finish=_falcon,
    renamed={
        "RWForCausalLM": "FalconForCausalLM", "RWModel": "FalconModel",
        "RWForSequenceClassification": "FalconForSequenceClassification",
    },
)  # fmt: skip

REFINED_WEB = FALCON._replace(keys={**FALCON.keys, "new_decoder_architecture": flag("", True)})
"""Falcon-40B's original code has the new architecture without a key that says so."""

MPT = ModelType(
    keys={
        "d_model": size("hidden", 2048),
        "n_heads": size("heads", 16),
        "n_layers": size("layers", 24),
        "max_seq_len": size("max_positions", 2048),
        "vocab_size": size("vocab", 50368),
        "tie_word_embeddings": flag("tied", True),
    },
    nested={
        "attn_config": Nested(
            keys={"attn_pdrop": probability("attention_dropout", 0.0)},
            inert=names(
                """alibi_bias_max attn_impl attn_uses_sequence_id clip_qkv prefix_lm rope_dail_config rope_hf_config
                rope_impl rope_theta softmax_scale"""
            ),
            must_be={
                "attn_type": ("multihead_attention",), "qk_ln": (False,), "alibi": (True,), "rope": (False,),
                "sliding_window_size": (-1,),
            },
        )
    },
    architectures=decoder_heads("Mpt"),
    fixed={**ALIBI, "bias": False, "activation": "gelu"},
    aliases={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    inert=names(
        """emb_pdrop embedding_fraction init_config init_device layer_norm_epsilon learned_pos_emb
        logit_scale resid_pdrop tokenizer_name verbose"""
    ),
    # The class builds these whatever the key says.
    must_be={
        "expansion_ratio": (4,), "no_bias": (True,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
    },
    finish=_mpt,
    renamed={"MPTForCausalLM": "MptForCausalLM", "MPTModel": "MptModel"},
)  # fmt: skip

TYPES: dict[str, ModelType] = {
    "gpt2": GPT2, "gpt_bigcode": GPT_BIGCODE, "gpt_neo": GPT_NEO, "gptj": GPTJ, "gpt_neox": GPT_NEOX, "bloom": BLOOM,
    "opt": OPT, "falcon": FALCON, "RefinedWebModel": FALCON, "RefinedWeb": REFINED_WEB, "mpt": MPT,
}  # fmt: skip
