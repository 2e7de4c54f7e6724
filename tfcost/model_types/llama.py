"""Llama and the decoders built like it: rotary, RMSNorm, gated feed-forward. Mistral, Qwen, Gemma; and Phi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfcost.errors import ConfigError
from tfcost.model_types.spec import (
    NO_HEAD,
    ROPE,
    ROTARY,
    SCORE,
    Key,
    ModelType,
    activation,
    decoder_heads,
    flag,
    names,
    probability,
    size,
)  # fmt: skip
from tfcost.model_types.windows import MAX_LAYERS, state_layer_types, state_window_from

LLAMA_LIKE: Mapping[str, Any] = {**ROTARY, "norm": "rmsnorm", "ffn": "glu", "bias": False, "dropout": 0.0}

ATTENTION_DROPOUT = probability("attention_dropout", 0.0, nullable=True)


def _llama(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    stated["attention_output_bias"] = values["attention_bias"]


def _qwen2(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    state_window_from(values, stated)


def _qwen3(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _llama(values, stated)
    state_window_from(values, stated)


def _gemma2(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _llama(values, stated)
    state_layer_types(values, stated, "LG")
    stated["attention_softcap"] = values["attn_logit_softcapping"] is not None
    stated["logit_softcap"] = values["final_logit_softcapping"] is not None


def _gemma3(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _llama(values, stated)
    period = values["sliding_window_pattern"]
    if period > MAX_LAYERS:
        raise ConfigError(f"sliding_window_pattern {period} is longer than any stack of layers")
    state_layer_types(values, stated, "L" * (period - 1) + "G")
    stated["logit_softcap"] = values["final_logit_softcapping"] is not None
    if values["use_bidirectional_attention"]:
        stated["bidirectional"] = True
        if stated["window"] is not None:
            # The class keeps w/2 + 1 and sees keys nearer than that on either side (Gemma3TextConfig.__post_init__).
            half, _ = divmod(stated["window"], 2)
            stated["window"] = 2 * half + 1


def _phi(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    if not values["qk_layernorm"]:
        return
    stated["qk_norm"] = "layernorm"
    heads, width = values["num_attention_heads"], values["head_dim"]
    if width is not None and heads * width != values["hidden_size"]:
        raise ConfigError(
            f"head_dim {width} is not supported with qk_layernorm true: the class norms hidden_size / heads"
        )


LLAMA = ModelType(
    keys={
        "hidden_size": size("hidden", 4096),
        "num_attention_heads": size("heads", 32),
        "num_key_value_heads": size("kv_heads", None),
        "head_dim": size("head_dim", None),
        "num_hidden_layers": size("layers", 32),
        "intermediate_size": size("ffn_hidden", 11008),
        "vocab_size": size("vocab", 32000),
        "max_position_embeddings": size("max_positions", 2048),
        "hidden_act": activation("silu"),
        "attention_dropout": ATTENTION_DROPOUT,
        "attention_bias": flag("attention_bias", False),
        "mlp_bias": flag("ffn_bias", False),
        "tie_word_embeddings": flag("tied", False),
    },
    architectures=decoder_heads("Llama"),
    fixed=LLAMA_LIKE,
    inert=ROPE | names("is_llama_config max_sequence_length pretraining_tp rms_norm_eps"),
    finish=_llama,
    renamed={"LLaMAForCausalLM": "LlamaForCausalLM"},
)


def _without(keys: Mapping[str, Key], *left_out: str) -> dict[str, Key]:
    return {name: key for name, key in keys.items() if name not in left_out}


MISTRAL = LLAMA._replace(
    keys={
        **_without(LLAMA.keys, "attention_bias", "mlp_bias"),
        "num_key_value_heads": size("kv_heads", 8, nullable=True),
        "intermediate_size": size("ffn_hidden", 14336),
        "max_position_embeddings": size("max_positions", 4096 * 32),
        "sliding_window": size("window", 4096, nullable=True),
    },
    architectures=decoder_heads("Mistral"),
    must_be={"attention_bias": (False,), "mlp_bias": (False,)},
    finish=None,
    renamed={},
)

QWEN2 = LLAMA._replace(
    keys={
        **_without(LLAMA.keys, "attention_bias", "mlp_bias"),
        "num_key_value_heads": size("kv_heads", 32, nullable=True),
        "intermediate_size": size("ffn_hidden", 22016),
        "vocab_size": size("vocab", 151936),
        "max_position_embeddings": size("max_positions", 32768),
        "use_sliding_window": flag("", False),
        "sliding_window": size("window", 4096, nullable=True),
        "max_window_layers": size("", 28, least=0),
        "layer_types": Key("", None, "list", nullable=True),
    },
    architectures=decoder_heads("Qwen2"),
    fixed={**LLAMA_LIKE, "attention_bias": True},
    inert=LLAMA.inert | names("rope_scaling use_mrope"),
    must_be={"mlp_bias": (False,)},
    finish=_qwen2,
    renamed={},
)

QWEN3 = QWEN2._replace(
    keys={**QWEN2.keys, "head_dim": size("head_dim", 128), "attention_bias": flag("attention_bias", False)},
    architectures=decoder_heads("Qwen3"),
    fixed={**LLAMA_LIKE, "qk_norm": "rmsnorm"},
    finish=_qwen3,
)

GEMMA = LLAMA._replace(
    keys={
        **_without(LLAMA.keys, "mlp_bias"),
        "hidden_size": size("hidden", 3072),
        "num_attention_heads": size("heads", 16),
        "num_key_value_heads": size("kv_heads", 16),
        "head_dim": size("head_dim", 256),
        "num_hidden_layers": size("layers", 28),
        "intermediate_size": size("ffn_hidden", 24576),
        "vocab_size": size("vocab", 256000),
        "max_position_embeddings": size("max_positions", 8192),
        "hidden_act": activation("gelu_pytorch_tanh"),
        "tie_word_embeddings": flag("tied", True),
    },
    architectures=decoder_heads("Gemma"),
    inert=LLAMA.inert | names("hidden_activation"),
    must_be={"mlp_bias": (False,), "use_bidirectional_attention": (None, False)},
    renamed={},
)

GEMMA2 = GEMMA._replace(
    keys={
        **_without(GEMMA.keys, "hidden_act"),
        "hidden_size": size("hidden", 2304),
        "num_attention_heads": size("heads", 8),
        "num_key_value_heads": size("kv_heads", 4),
        "num_hidden_layers": size("layers", 26),
        "intermediate_size": size("ffn_hidden", 9216),
        "hidden_activation": activation("gelu_pytorch_tanh"),
        "sliding_window": size("window", 4096, nullable=True),
        "layer_types": Key("", None, "list", nullable=True),
        "attn_logit_softcapping": Key("", 50.0, "number", nullable=True),
        "final_logit_softcapping": Key("", 30.0, "number", nullable=True),
    },
    architectures=decoder_heads("Gemma2"),
    fixed={**LLAMA_LIKE, "sandwich_norm": True},
    inert=LLAMA.inert | names("hidden_act query_pre_attn_scalar sliding_window_size"),
    finish=_gemma2,
)

GEMMA3 = GEMMA2._replace(
    keys={
        **_without(GEMMA2.keys, "attn_logit_softcapping"),
        "vocab_size": size("vocab", 262208),
        "max_position_embeddings": size("max_positions", 131072),
        "final_logit_softcapping": Key("", None, "number", nullable=True),
        "sliding_window_pattern": size("", 6),
        "use_bidirectional_attention": flag("", False, nullable=True),
    },
    architectures={
        **decoder_heads("Gemma3"), "Gemma3TextModel": NO_HEAD, "Gemma3TextForSequenceClassification": SCORE,
    },
    fixed={**LLAMA_LIKE, "sandwich_norm": True, "qk_norm": "rmsnorm"},
    # The class reads attn_logit_softcapping and does not apply it.
    inert=GEMMA2.inert | names("_sliding_window_pattern attn_logit_softcapping"),
    must_be={"mlp_bias": (False,)},
    finish=_gemma3,
    # The language model of a multimodal one, whose text_config this is.
    renamed={"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"},
)  # fmt: skip

PHI = ModelType(
    keys={
        "hidden_size": size("hidden", 2048),
        "num_attention_heads": size("heads", 32),
        "num_key_value_heads": size("kv_heads", None),
        "head_dim": size("head_dim", None),
        "num_hidden_layers": size("layers", 24),
        "intermediate_size": size("ffn_hidden", 8192),
        "vocab_size": size("vocab", 51200),
        "max_position_embeddings": size("max_positions", 2048),
        "hidden_act": activation("gelu_new"),
        "resid_pdrop": probability("dropout", 0.0),
        "embd_pdrop": probability("embedding_dropout", 0.0),
        "attention_dropout": ATTENTION_DROPOUT,
        "qk_layernorm": flag("", False),
        "tie_word_embeddings": flag("tied", False),
    },
    architectures={**decoder_heads("Phi"), "PhiForCausalLM": {"head": True, "head_bias": True}},
    fixed={**ROTARY, "bias": True, "parallel": True},
    inert=ROPE | names("layer_norm_eps"),
    finish=_phi,
)

PHI3 = ModelType(
    keys={
        **_without(PHI.keys, "embd_pdrop", "qk_layernorm"),
        "hidden_size": size("hidden", 3072),
        "num_hidden_layers": size("layers", 32),
        "vocab_size": size("vocab", 32064),
        "max_position_embeddings": size("max_positions", 4096),
        "hidden_act": activation("silu"),
        "sliding_window": size("window", None),
    },
    architectures=decoder_heads("Phi3"),
    fixed={**ROTARY, "norm": "rmsnorm", "ffn": "glu", "bias": False},
    # The class has embd_pdrop and does not apply it.
    inert=ROPE | names("embd_pdrop full_attn_mod interpolate_factor rms_norm_eps"),
    must_be={"attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,)},
)

STARCODER2 = ModelType(
    keys={
        "hidden_size": size("hidden", 3072),
        "num_attention_heads": size("heads", 24),
        "num_key_value_heads": size("kv_heads", 2),
        "num_hidden_layers": size("layers", 30),
        "intermediate_size": size("ffn_hidden", 12288),
        "vocab_size": size("vocab", 49152),
        "max_position_embeddings": size("max_positions", 4096),
        "hidden_act": activation("gelu_pytorch_tanh"),
        "residual_dropout": probability("dropout", 0.0),
        "embedding_dropout": probability("embedding_dropout", 0.0),
        "attention_dropout": probability("attention_dropout", 0.0),
        "use_bias": flag("bias", True),
        "sliding_window": size("window", None, nullable=True),
        "tie_word_embeddings": flag("tied", True),
    },
    architectures=decoder_heads("Starcoder2"),
    fixed={**ROTARY, "norm": "layernorm", "norm_bias": True},
    # Of the configs of its first days; the class has one norm and one feed-forward.
    must_be={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
    inert=ROPE
    | names(
        """attention_softmax_in_fp32 layer_norm_epsilon norm_epsilon scale_attention_softmax_in_fp32
        scale_attn_weights"""
    ),
)

TYPES: dict[str, ModelType] = {
    "llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "gemma": GEMMA, "gemma2": GEMMA2,
    "gemma3_text": GEMMA3, "phi": PHI, "phi3": PHI3, "starcoder2": STARCODER2,
}  # fmt: skip
