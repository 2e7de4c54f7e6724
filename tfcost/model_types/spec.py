"""What a row of the table of model types is made of: keys, heads, and the keys that mean nothing here.

A row says, for one ``model_type``: the keys that it reads and the field of :class:`tfcost.config.ModelConfig` that each
states (``keys``), the fields that every model of the type has (``fixed``), older or generic names of keys (``aliases``,
after the class's ``attribute_map``), keys that no figure depends on (``inert``), keys understood at some values only
(``must_be``), and the classes that ``architectures`` may name, the first the default, with the head that each has.
What cannot be said by a key alone is a short function, ``finish``. Any other key is reported, not guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate",
    "quick_gelu", "relu", "relu2", "relu6", "leaky_relu", "laplace", "linear", "mish", "sigmoid", "silu", "swish",
    "tanh", "prelu", "xielu",
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
            "probability": "a number from 0 to below 1", "flag": "true or false", "number": "a number",
            "list": "an array", "object": "an object", "sides": "a positive integer or an array of two",
            "name": f"one of {', '.join(self.choices)}" if self.choices else "a string",
        }  # fmt: skip
        return kinds[self.kind] + (" or null" if self.nullable else "")


def size(name: str, default: int | None, least: int = 1, nullable: bool = False) -> Key:
    """A size; one whose default is None may be null, and is then derived."""
    return Key(name, default, nullable=nullable or default is None, least=least)


def probability(name: str, default: float | None, nullable: bool = False) -> Key:
    """A dropout probability; null, where a class allows it, is one that is derived."""
    return Key(name, default, "probability", nullable=nullable or default is None)


def flag(name: str, default: bool | None, nullable: bool = False) -> Key:
    """A yes or no."""
    return Key(name, default, "flag", nullable=nullable or default is None)


def activation(default: str, name: str = "activation") -> Key:
    """The name of an activation function."""
    return Key(name, default, "name", choices=ACTIVATIONS)


Finish = Callable[[Mapping[str, Any], dict[str, Any]], None]
"""``finish(values, stated)``: the values of the row's keys, and the fields they state, which it completes."""


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Nested(NamedTuple):
    """The keys of an object inside a config: as :class:`ModelType` has them, without what makes a model."""

    keys: Mapping[str, Key]
    inert: frozenset[str] = frozenset()
    must_be: Mapping[str, tuple[Any, ...]] = NOTHING
    aliases: Mapping[str, str] = NOTHING
    nested: Mapping[str, Nested] = NOTHING
    parts: Mapping[str, ModelType] = NOTHING


class ModelType(NamedTuple):
    """A row of the table; see the module's docstring.

    ``nested`` are objects inside the config, whose values are named ``outer.inner``; ``parts`` are configs of other
    models inside it, whose values are what was read of each; ``labels`` is the class's own
    default of ``num_labels``; ``renamed`` has class names of older or original code, each with today's.
    """

    keys: Mapping[str, Key]
    architectures: Mapping[str, Mapping[str, Any]]
    fixed: Mapping[str, Any]
    aliases: Mapping[str, str] = NOTHING
    inert: frozenset[str] = frozenset()
    must_be: Mapping[str, tuple[Any, ...]] = NOTHING
    finish: Finish | None = None
    nested: Mapping[str, Nested] = NOTHING
    labels: int = 2
    renamed: Mapping[str, str] = NOTHING
    parts: Mapping[str, ModelType] = NOTHING


def names(text: str) -> frozenset[str]:
    """A set of key names from a string of them."""
    return frozenset(text.split())


COMMON_INERT = names(
    """_attn_implementation attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _flash_attn_2_enabled _name_or_path name_or_path _num_labels architectures assistant_confidence_threshold
    assistant_lookbehind auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id eos_token_ids epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    id2label initializer_range is_encoder_decoder label2id length_penalty max_length min_length model_type name
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_past output_scores pad_token_id padding prefix
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens target_lookbehind task_specific_params temperature tf_legacy_loss tie_last_hidden_states
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache""".strip()
)
"""Keys of every config that change no figure: token ids, generation settings, labels, provenance, storage dtype."""

COMMON_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "per_layer_config": ({}, None),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False, None),
}
"""Keys of every config that would change shapes, with the values that do not."""

LABELS = "num_labels"
"""Stands for the number of labels of a config, in a head's ``classes``."""

NO_HEAD: Mapping[str, Any] = {"head": False}
LM_HEAD: Mapping[str, Any] = {"head": True}

SCORE: Mapping[str, Any] = {"head": False, "classes": LABELS, "classifier_bias": False}
"""The classifier of decoder-only models: scores of every token, without a bias (GenericForSequenceClassification)."""


def decoder_heads(prefix: str) -> dict[str, Mapping[str, Any]]:
    """The heads of a decoder-only type whose classes begin with ``prefix``."""
    return {
        f"{prefix}ForCausalLM": LM_HEAD, f"{prefix}Model": NO_HEAD, f"{prefix}ForSequenceClassification": SCORE,
    }  # fmt: skip


PRE_NORM: Mapping[str, Any] = {"arch": "decoder", "pre_norm": True, "final_norm": True}
ROTARY: Mapping[str, Any] = {**PRE_NORM, "positions": "rotary"}
"""What most decoders share."""

ROPE = names(
    """rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings rope_ratio
    rotary_dim rotary_pct rotary_emb_base rope_local_base_freq rope_interleaved""".strip()
)
"""How queries and keys are rotated: no product and no parameter depends on it."""

SUMMARY = names(
    """summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type
    summary_use_proj""".strip()
)
"""Settings of a head that only the multiple-choice classes have."""
