"""The table of model types: which keys of a ``config.json`` mean what, with the defaults of transformers 5.24.

A row says, for one ``model_type``: the keys that it reads and the field of :class:`tfcost.config.ModelConfig` that each
states (``keys``), the fields that every model of the type has (``fixed``), older or generic names of keys (``aliases``,
after the class's ``attribute_map``), keys that no figure depends on (``inert``), keys that are understood at some values
only (``must_be``), and the classes that ``architectures`` may name, the first the default, with the head that each has.
What cannot be said by a key alone is a short function, ``finish``. Any other key is reported, not guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate",
    "quick_gelu", "relu", "relu2", "relu6", "leaky_relu", "laplace", "linear", "mish", "sigmoid", "silu", "swish", "tanh",
    "prelu", "xielu",
)  # fmt: skip
"""The names in transformers' ``ACT2FN`` (activations.py, version 5.24)."""


class Key(NamedTuple):
    """A key of a config: the field that it states (empty: only ``finish`` reads it), its default and kind."""

    field: str
    default: Any
    kind: str = "size"
    nullable: bool = False
    choices: tuple[str, ...] = ()
    least: int = 1

    def wants(self) -> str:
        """What the key holds, for a message."""
        kinds = {
            "size": "a positive integer" if self.least == 1 else f"an integer of at least {self.least}",
            "probability": "a number from 0 to below 1", "flag": "true or false", "object": "an object",
            "list": "an array", "name": f"one of {', '.join(self.choices)}" if self.choices else "a string",
        }  # fmt: skip
        return kinds[self.kind] + (" or null" if self.nullable else "")


def size(name: str, default: int | None, least: int = 1) -> Key:
    """A size; one whose default is None may be null, and is then derived."""
    return Key(name, default, nullable=default is None, least=least)


def probability(name: str, default: float) -> Key:
    """A dropout probability."""
    return Key(name, default, "probability")


def flag(name: str, default: bool) -> Key:
    """A yes or no."""
    return Key(name, default, "flag")


def activation(default: str, name: str = "activation") -> Key:
    """The name of an activation function."""
    return Key(name, default, "name", choices=ACTIVATIONS)


Finish = Callable[[Mapping[str, Any], dict[str, Any]], None]


class ModelType(NamedTuple):
    """A row of the table; see the module's docstring."""

    keys: Mapping[str, Key]
    architectures: Mapping[str, Mapping[str, Any]]
    fixed: Mapping[str, Any]
    aliases: Mapping[str, str] = MappingProxyType({})
    inert: frozenset[str] = frozenset()
    must_be: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    finish: Finish | None = None


COMMON_INERT = frozenset(
    """_attn_implementation attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_range
    is_encoder_decoder label2id length_penalty max_length min_length model_type name no_repeat_ngram_size
    num_beam_groups num_beams num_labels num_return_sequences output_attentions output_hidden_states output_past
    output_scores pad_token_id prefix problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version transformers.js_config typical_p
    use_bfloat16 use_cache auto_map""".split()
)
"""Keys of every config that change no figure: token ids, generation settings, labels, provenance, storage dtype."""

NO_HEAD: dict[str, Any] = {"head": False}
LM_HEAD: dict[str, Any] = {"head": True}


def _gpt2(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    stated["position_offset"] = 0
    if values["add_cross_attention"]:
        stated["cross_attention"] = True


def _encoder_only(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    """BERT-like encoders: the embedding has the residual dropout."""
    stated["embedding_dropout"] = stated["dropout"]


def _llama(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    stated["attention_output_bias"] = values["attention_bias"]


MODEL_TYPES: dict[str, ModelType] = {
    "gpt2": ModelType(
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
        architectures={
            "GPT2LMHeadModel": LM_HEAD,
            "GPT2Model": NO_HEAD,
            "GPT2ForSequenceClassification": {"head": False, "classes": 2, "classifier_bias": False},
        },
        fixed={"arch": "decoder", "positions": "learned", "pre_norm": True, "final_norm": True, "bias": True},
        aliases={
            "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions", "n_ctx": "n_positions",
        },
        inert=frozenset(
            """layer_norm_epsilon reorder_and_upcast_attn scale_attn_by_inverse_layer_idx scale_attn_weights
            summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj""".split()
        ),
        finish=_gpt2,
    ),
    "bert": ModelType(
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
            "tie_word_embeddings": flag("tied", True),
        },
        architectures={
            "BertModel": {"head": False, "pooler": True},
            "BertForMaskedLM": {"head": True, "head_transform": True, "head_bias": True},
            "BertForPreTraining": {
                "head": True, "head_transform": True, "head_bias": True, "pooler": True, "next_sentence": True,
            },
            "BertForSequenceClassification": {"head": False, "pooler": True, "classes": 2},
        },
        fixed={
            "arch": "encoder", "positions": "learned", "pre_norm": False, "bias": True, "embedding_norm": True,
        },
        inert=frozenset("layer_norm_eps position_embedding_type classifier_dropout".split()),
        must_be={"is_decoder": (False,), "add_cross_attention": (False,)},
        finish=_encoder_only,
    ),
    "llama": ModelType(
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
            "attention_dropout": probability("attention_dropout", 0.0),
            "attention_bias": flag("attention_bias", False),
            "mlp_bias": flag("ffn_bias", False),
            "tie_word_embeddings": flag("tied", False),
        },
        architectures={
            "LlamaForCausalLM": LM_HEAD,
            "LlamaModel": NO_HEAD,
            "LlamaForSequenceClassification": {"head": False, "classes": 2, "classifier_bias": False},
        },
        fixed={
            "arch": "decoder", "positions": "rotary", "pre_norm": True, "final_norm": True, "bias": False,
            "norm": "rmsnorm", "ffn": "glu", "dropout": 0.0,
        },
        inert=frozenset("rms_norm_eps rope_theta rope_scaling rope_parameters pretraining_tp".split()),
        finish=_llama,
    ),
}
