"""Encoders: BERT, RoBERTa (and XLM-RoBERTa, CamemBERT), DistilBERT, ELECTRA, ALBERT, MobileBERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfcost.errors import ConfigError
from tfcost.model_types.spec import LABELS, NO_HEAD, SUMMARY, ModelType, activation, flag, names, probability, size

ENCODER: Mapping[str, Any] = {
    "arch": "encoder", "positions": "learned", "pre_norm": False, "bias": True, "embedding_norm": True,
}  # fmt: skip

POOLED = {"head": False, "pooler": True}
MASKED_LM: Mapping[str, Any] = {"head": True, "head_transform": True, "head_bias": True, "head_spare_bias": True}
"""BERT's transform and a bias per word; where it is untied, the class has that bias twice and uses one."""

PRE_TRAINING = {**MASKED_LM, "pooler": True, "next_sentence": 2}
POOLED_CLASSES = {**POOLED, "classes": LABELS}
FIRST_TOKEN: Mapping[str, Any] = {"head": False, "classes": LABELS, "classifier_tokens": "first"}

MAX_FEED_FORWARDS = 1000
"""They are built one by one; MobileBERT has 4."""

LEGACY_POOLER = names(
    "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type"
)
"""Keys of BERT's first checkpoints that no class reads."""


def _encoder(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    """The embedding has the residual dropout; so has the classifier, unless the config gives it its own."""
    stated["follows_dropout"] = ("embedding_dropout", "classifier_dropout")


def _bert(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _encoder(values, stated)
    if values["is_decoder"]:
        stated["arch"] = "decoder"
    if values["add_cross_attention"]:
        if not values["is_decoder"]:
            raise ConfigError("add_cross_attention true needs is_decoder true")
        stated["cross_attention"] = True


def _roberta(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    """Positions are counted from ``pad_token_id + 1`` on, so the table has that many rows more than positions."""
    _bert(values, stated)
    rows, pad = values["max_position_embeddings"], values["pad_token_id"]
    offset = 0 if pad is None else pad + 1
    if rows <= offset:
        raise ConfigError(f"max_position_embeddings {rows} leaves no position after pad_token_id {pad}")
    stated |= {"max_positions": rows - offset, "position_offset": offset}


def _electra(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _bert(values, stated)
    stated["embedding_projection"] = "after"
    if stated.get("classes") == 1:
        stated |= {"classifier_dense": values["hidden_act"], "classifier_dropout": 0.0}


def _albert(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    """Each group of ``inner_group_num`` layers runs as one; the groups, not the layers, have weights."""
    _encoder(values, stated)
    inner = values["inner_group_num"]
    stated |= {
        "layers": values["num_hidden_layers"] * inner,
        "layer_sets": values["num_hidden_groups"] * inner,
        "embedding_projection": "after",
        "projection_if_equal": "after",
        "ffn_output_dropout": 0.0,
    }


def _mobilebert(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _encoder(values, stated)
    trigram, bottleneck = values["trigram_input"], values["use_bottleneck"]
    hidden, inner = values["hidden_size"], values["intra_bottleneck_size"]
    if (true_hidden := values["true_hidden_size"]) not in (None, inner if bottleneck else hidden):
        raise ConfigError(
            f"true_hidden_size {true_hidden} contradicts use_bottleneck, hidden_size and intra_bottleneck_size"
        )
    if values["num_feedforward_networks"] > MAX_FEED_FORWARDS:
        raise ConfigError(f"num_feedforward_networks must be at most {MAX_FEED_FORWARDS}")
    if values["embedding_size"] > hidden:
        raise ConfigError(f"embedding_size {values['embedding_size']} is larger than hidden_size {hidden}")
    stated |= {
        "norm": "scale_shift" if values["normalization_type"] == "no_norm" else "layernorm",
        "norm_bias": True,
        "embedding_projection": "before",
        # The class always has the projection, and uses it for trigrams or where the widths differ.
        "projection_if_equal": "before" if trigram else "unused",
        "embedding_context": 3 if trigram else 1,
    }
    if not bottleneck:
        return
    shared, attention = values["key_query_shared_bottleneck"], values["use_bottleneck_attention"]
    if not shared and not attention and hidden != inner:
        raise ConfigError(
            "key_query_shared_bottleneck false needs use_bottleneck_attention true, unless intra_bottleneck_size is "
            "hidden_size: the class cannot run it"
        )
    stated |= {
        "bottleneck": inner, "bottleneck_queries": shared, "bottleneck_values": attention,
        # Inside the bottleneck the class has no dropout; it has one after it.
        "attention_output_dropout": 0.0, "ffn_output_dropout": 0.0,
    }  # fmt: skip


BERT = ModelType(
    keys={
        "hidden_size": size("hidden", 768),
        "num_attention_heads": size("heads", 12),
        "num_hidden_layers": size("layers", 12),
        "intermediate_size": size("ffn_hidden", 3072),
        "vocab_size": size("vocab", 30522),
        "max_position_embeddings": size("max_positions", 512),
        "type_vocab_size": size("type_vocab", 2),
        "hidden_act": activation("gelu"),
        "hidden_dropout_prob": probability("dropout", 0.1),
        "attention_probs_dropout_prob": probability("attention_dropout", 0.1),
        "classifier_dropout": probability("classifier_dropout", None),
        "is_decoder": flag("", False),
        "add_cross_attention": flag("", False),
        "tie_word_embeddings": flag("tied", True),
    },
    architectures={
        "BertModel": POOLED,
        "BertForMaskedLM": MASKED_LM,
        "BertLMHeadModel": MASKED_LM,
        "BertForPreTraining": PRE_TRAINING,
        "BertForSequenceClassification": POOLED_CLASSES,
    },
    fixed=ENCODER,
    inert=LEGACY_POOLER | names("layer_norm_eps"),
    must_be={"position_embedding_type": ("absolute", None)},
    finish=_bert,
)


def roberta(prefix: str, vocab: int) -> ModelType:
    """RoBERTa's row for the classes that begin with ``prefix``."""
    masked = {**MASKED_LM, "head_activation": "gelu"}
    return BERT._replace(
        keys={**BERT.keys, "vocab_size": size("vocab", vocab), "pad_token_id": size("", 1, least=-1, nullable=True)},
        architectures={
            f"{prefix}Model": POOLED,
            f"{prefix}ForMaskedLM": masked,
            f"{prefix}ForCausalLM": masked,
            f"{prefix}ForSequenceClassification": {
                **FIRST_TOKEN, "classifier_dense": "tanh", "classifier_input_dropout": True,
            },
        },
        finish=_roberta,
    )  # fmt: skip


DISTILBERT = ModelType(
    keys={
        "dim": size("hidden", 768),
        "n_heads": size("heads", 12),
        "n_layers": size("layers", 6),
        "hidden_dim": size("ffn_hidden", 3072),
        "vocab_size": size("vocab", 30522),
        "max_position_embeddings": size("max_positions", 512),
        "activation": activation("gelu"),
        "dropout": probability("dropout", 0.1),
        "attention_dropout": probability("attention_dropout", 0.1),
        "seq_classif_dropout": probability("classifier_dropout", 0.2),
        "tie_word_embeddings": flag("tied", True),
    },
    architectures={
        "DistilBertModel": NO_HEAD,
        "DistilBertForMaskedLM": {**MASKED_LM, "head_spare_bias": False},
        "DistilBertForSequenceClassification": {**FIRST_TOKEN, "classifier_dense": "relu"},
    },
    # Dropout follows the feed-forward only.
    fixed={**ENCODER, "attention_output_dropout": 0.0},
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    inert=names("qa_dropout sinusoidal_pos_embds tie_weights_"),
    finish=_encoder,
)

ELECTRA = BERT._replace(
    keys={
        **BERT.keys,
        "embedding_size": size("embedding_size", 128),
        "hidden_size": size("hidden", 256),
        "num_attention_heads": size("heads", 4),
        "intermediate_size": size("ffn_hidden", 1024),
    },
    architectures={
        "ElectraModel": NO_HEAD,
        "ElectraForPreTraining": {"head": False, "classes": 1},
        "ElectraForMaskedLM": {**MASKED_LM, "head_activation": "gelu", "head_spare_bias": False},
        "ElectraForCausalLM": {**MASKED_LM, "head_activation": "gelu", "head_spare_bias": False},
        "ElectraForSequenceClassification": {
            **FIRST_TOKEN, "classifier_dense": "gelu", "classifier_input_dropout": True,
        },
    },
    inert=SUMMARY | names("layer_norm_eps"),
    finish=_electra,
)  # fmt: skip

NEVER_A_DECODER = {name: key for name, key in BERT.keys.items() if name not in ("is_decoder", "add_cross_attention")}

ALBERT = ModelType(
    keys={
        **{name: key for name, key in NEVER_A_DECODER.items() if name != "classifier_dropout"},
        "embedding_size": size("embedding_size", 128),
        "hidden_size": size("hidden", 4096),
        "num_attention_heads": size("heads", 64),
        "num_hidden_layers": size("", 12),
        "num_hidden_groups": size("", 1),
        "inner_group_num": size("", 1),
        "intermediate_size": size("ffn_hidden", 16384),
        "vocab_size": size("vocab", 30000),
        "hidden_act": activation("gelu_new"),
        "hidden_dropout_prob": probability("dropout", 0.0),
        "attention_probs_dropout_prob": probability("attention_dropout", 0.0),
        "classifier_dropout_prob": probability("classifier_dropout", 0.1),
    },
    architectures={
        "AlbertModel": POOLED,
        "AlbertForMaskedLM": MASKED_LM,
        # Sentence order, over num_labels, instead of BERT's next sentence.
        "AlbertForPreTraining": {**MASKED_LM, "pooler": True, "classes": LABELS},
        "AlbertForSequenceClassification": POOLED_CLASSES,
    },
    fixed=ENCODER,
    inert=names("down_scale_factor gap_size layer_norm_eps layers_to_keep net_structure_type num_memory_blocks"),
    must_be={"position_embedding_type": ("absolute", None), "is_decoder": (False,)},
    finish=_albert,
)

MOBILEBERT = ModelType(
    keys={
        **NEVER_A_DECODER,
        "hidden_size": size("hidden", 512),
        "num_attention_heads": size("heads", 4),
        "num_hidden_layers": size("layers", 24),
        "intermediate_size": size("ffn_hidden", 512),
        "hidden_act": activation("relu"),
        "hidden_dropout_prob": probability("dropout", 0.0),
        "embedding_size": size("embedding_size", 128),
        "trigram_input": flag("", True),
        "use_bottleneck": flag("", True),
        "intra_bottleneck_size": size("", 128),
        "use_bottleneck_attention": flag("", False),
        "key_query_shared_bottleneck": flag("", True),
        "num_feedforward_networks": size("ffn_count", 4),
        "normalization_type": activation("no_norm", "")._replace(choices=("no_norm", "layer_norm")),
        "classifier_activation": flag("pooler_dense", True),
        "true_hidden_size": size("", None),
    },
    architectures={
        "MobileBertModel": POOLED,
        "MobileBertForMaskedLM": {**MASKED_LM, "head_factored": True},
        "MobileBertForPreTraining": {**PRE_TRAINING, "head_factored": True},
        "MobileBertForSequenceClassification": POOLED_CLASSES,
    },
    fixed=ENCODER,
    inert=names("layer_norm_eps"),
    must_be={"position_embedding_type": ("absolute", None), "is_decoder": (False,)},
    finish=_mobilebert,
)

TYPES: dict[str, ModelType] = {
    "bert": BERT, "roberta": roberta("Roberta", 50265), "xlm-roberta": roberta("XLMRoberta", 30522),
    "camembert": roberta("Camembert", 30522), "distilbert": DISTILBERT, "electra": ELECTRA, "albert": ALBERT,
    "mobilebert": MOBILEBERT,
}  # fmt: skip
