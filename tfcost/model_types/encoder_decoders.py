"""Encoder-decoders: T5 (v1.0, v1.1), mT5, BART, mBART."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfcost.errors import ConfigError
from tfcost.model_types.spec import (
    ACTIVATIONS,
    LABELS,
    LM_HEAD,
    NO_HEAD,
    Key,
    ModelType,
    activation,
    flag,
    names,
    probability,
    size,
)  # fmt: skip

DENSE_CLASSES: Mapping[str, Any] = {
    "head": False, "classes": LABELS, "classifier_tokens": "first", "classifier_dense": "tanh",
    "classifier_input_dropout": True,
}  # fmt: skip
"""Dense, tanh and scores of one token, the last <eos>."""


def _t5(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    stated["follows_dropout"] = ("embedding_dropout", "ffn_dropout", "final_dropout")
    encoder, decoder = values["num_layers"], values["num_decoder_layers"]
    if decoder is None or stated["arch"] == "encoder":
        stated["layers"] = encoder
    else:
        stated |= {"encoder_layers": encoder, "decoder_layers": decoder}
    parts = values["feed_forward_proj"].split("-")
    if len(parts) > 2 or (len(parts) == 2 and parts[0] != "gated") or parts[-1] not in ACTIVATIONS:
        raise ConfigError(f"feed_forward_proj {values['feed_forward_proj'][:60]!r} is not ACT or gated-ACT")
    gated = values["is_gated_act"]
    stated["ffn"] = "glu" if (len(parts) == 2 if gated is None else gated) else "mlp"
    act = "gelu_new" if values["feed_forward_proj"] == "gated-gelu" else parts[-1]
    stated["activation"] = values["dense_act_fn"] or act


def _bart(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    stated["follows_dropout"] = ("embedding_dropout",)
    heads, ffn = values["decoder_attention_heads"], values["decoder_ffn_dim"]
    if stated["arch"] == "decoder":
        del stated["encoder_layers"]
        stated |= {"heads": heads, "ffn_hidden": ffn}
        return
    # Stated only where they differ, so that a what-if of the encoder's holds for both.
    stated["decoder_heads"] = heads if heads != stated["heads"] else None
    stated["decoder_ffn_hidden"] = ffn if ffn != stated["ffn_hidden"] else None
    stated["separate_tables"] = not values["tie_word_embeddings"]


T5 = ModelType(
    keys={
        "d_model": size("hidden", 512),
        "d_kv": size("head_dim", 64),
        "d_ff": size("ffn_hidden", 2048),
        "num_heads": size("heads", 8),
        "num_layers": size("", 6),
        "num_decoder_layers": size("", None),
        "vocab_size": size("vocab", 32128),
        # No table and no limit: the length that the model was trained at.
        "n_positions": size("max_positions", None),
        "relative_attention_num_buckets": size("relative_buckets", 32),
        "feed_forward_proj": Key("", "relu", "name"),
        "is_gated_act": flag("", None),
        "dense_act_fn": activation("", "")._replace(default=None, nullable=True),
        "dropout_rate": probability("dropout", 0.1),
        "classifier_dropout": probability("classifier_dropout", 0.0),
        "tie_word_embeddings": flag("tied", True),
    },
    architectures={
        "T5ForConditionalGeneration": LM_HEAD,
        "T5Model": NO_HEAD,
        "T5EncoderModel": {"head": False, "arch": "encoder"},
        "T5ForSequenceClassification": DENSE_CLASSES,
    },
    fixed={
        "arch": "encoder-decoder", "positions": "relative", "norm": "rmsnorm", "pre_norm": True, "final_norm": True,
        "bias": False,
    },
    aliases={
        "hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    inert=names(
        """initializer_factor layer_norm_epsilon relative_attention_max_distance
        scale_decoder_outputs"""
    ),
    must_be={"is_decoder": (False,)},
    finish=_t5,
    renamed={"T5WithLMHeadModel": "T5ForConditionalGeneration"},
)  # fmt: skip

MT5 = T5._replace(
    keys={
        **T5.keys,
        "d_ff": size("ffn_hidden", 1024),
        "num_heads": size("heads", 6),
        "num_layers": size("", 8),
        "vocab_size": size("vocab", 250112),
        "feed_forward_proj": Key("", "gated-gelu", "name"),
    },
    architectures={f"M{name}": head for name, head in T5.architectures.items()},
    renamed={},
)

BART = ModelType(
    keys={
        "d_model": size("hidden", 1024),
        "encoder_layers": size("encoder_layers", 12),
        "encoder_attention_heads": size("heads", 16),
        "encoder_ffn_dim": size("ffn_hidden", 4096),
        "decoder_layers": size("decoder_layers", 12),
        "decoder_attention_heads": size("", 16),
        "decoder_ffn_dim": size("", 4096),
        "vocab_size": size("vocab", 50265),
        "max_position_embeddings": size("max_positions", 1024),
        "activation_function": activation("gelu"),
        "dropout": probability("dropout", 0.1),
        "attention_dropout": probability("attention_dropout", 0.0),
        "activation_dropout": probability("ffn_dropout", 0.0),
        "classifier_dropout": probability("classifier_dropout", 0.0),
        "tie_word_embeddings": flag("tied", True),
    },
    architectures={
        "BartForConditionalGeneration": LM_HEAD,
        "BartModel": NO_HEAD,
        "BartForSequenceClassification": DENSE_CLASSES,
        "BartForCausalLM": {"head": True, "arch": "decoder", "cross_attention": True},
    },
    fixed={
        "arch": "encoder-decoder", "positions": "learned", "position_offset": 2, "pre_norm": False,
        "embedding_norm": True, "bias": True,
    },
    aliases={
        "hidden_size": "d_model", "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    },
    inert=names(
        """classif_dropout decoder_layerdrop encoder_layerdrop force_bos_token_to_be_generated init_std is_decoder
        scale_embedding"""
    ),
    # Of fairseq's options the class has these.
    must_be={
        "normalize_before": (False,), "normalize_embedding": (True,), "add_final_layer_norm": (False,),
        "add_bias_logits": (False,), "static_position_embeddings": (False,), "extra_pos_embeddings": (2,),
    },
    finish=_bart,
    labels=3,
)  # fmt: skip

MBART = BART._replace(
    architectures={f"M{name}": head for name, head in BART.architectures.items()},
    fixed={**BART.fixed, "pre_norm": True, "final_norm": True},
    must_be={**BART.must_be, "normalize_before": (True,), "add_final_layer_norm": (True,)},
    labels=2,
)

TYPES: dict[str, ModelType] = {"t5": T5, "mt5": MT5, "bart": BART, "mbart": MBART}
