"""The rows of the table against the config classes of transformers: names, defaults, models of nothing but defaults."""

from __future__ import annotations

import dataclasses
import warnings
from random import Random
from typing import Any

import pytest
from hf_configs import TYPES, configs, run_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfcost.config import complete
from tfcost.families import build
from tfcost.graph import weights_of
from tfcost.hf import from_hf
from tfcost.model_types import COMMON_INERT, COMMON_MUST_BE, MODEL_TYPES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]

EXTRA = {
    # Keys that modeling code reads from a config that has them, without a field or a default in its class.
    "gpt_neo": {"attention_layers"}, "qwen2": {"head_dim"}, "phi": {"head_dim"}, "phi3": {"head_dim"},
    "gemma3_text": {"sliding_window_pattern"}, "mobilebert": {"true_hidden_size"},
    "t5": {"is_gated_act", "dense_act_fn"}, "mt5": {"is_gated_act", "dense_act_fn"}, "qwen2_moe": {"head_dim"},
    "qwen3_moe": {"head_dim"},
} | {
    # Keys of older classes that say how long a sequence may be, where today's has no limit.
    "bloom": {"seq_length", "n_inner"},
}  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {
    # What a class cannot do without, though its config has no default for it, or one that contradicts the others.
    "gpt_neo": {"num_layers": 24}, "deepseek_v2": {"num_experts_per_tok": 6},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
}  # fmt: skip
LENGTHS = {"t5": {"n_positions"}, "mt5": {"n_positions"}}


def config_class(model_type: str) -> Any:
    return transformers.CONFIG_MAPPING[model_type]


def defaults(model_type: str) -> dict[str, Any]:
    """The fields of a config class with their defaults, as they stand before it derives anything."""
    return {each.name: each.default for each in dataclasses.fields(config_class(model_type))}


@pytest.mark.parametrize("model_type", TYPES)
def test_defaults_are_those_of_the_class(model_type: str) -> None:
    known = defaults(model_type)
    extra = EXTRA.get(model_type, set()) | LENGTHS.get(model_type, set())
    # T5's class ties whatever the key says; its default is the tie.
    extra |= {"tie_word_embeddings"} if model_type == "t5" else set()
    # Qwen3-MoE's field has the name that its attribute_map calls the generic one.
    known |= {own: known[name] for name, own in config_class(model_type).attribute_map.items() if name in known}
    for name, key in MODEL_TYPES[model_type].keys.items():
        if name in extra:
            assert name not in known
        else:
            assert key.default == known[name], name


@pytest.mark.parametrize("model_type", TYPES)
def test_every_attribute_of_the_class_is_classified(model_type: str) -> None:
    row = MODEL_TYPES[model_type]
    common = {*COMMON_INERT, *COMMON_MUST_BE}
    classified = {*row.keys, *row.inert, *row.must_be, *row.aliases, *row.nested, *row.parts, *common}
    assert set(defaults(model_type)) - classified == set()
    assert set(config_class(model_type).attribute_map) <= set(row.aliases)
    for generic, own in config_class(model_type).attribute_map.items():
        assert row.aliases[generic] == own


@pytest.mark.parametrize("model_type", TYPES)
def test_what_the_class_writes_is_understood(model_type: str) -> None:
    """A config.json saved by transformers has no key that is reported as unknown."""
    made = config_class(model_type)(**NEEDED.get(model_type, {}))
    read = from_hf({**made.to_dict(), "model_type": model_type})
    assert read.ignored_keys == []


@pytest.mark.parametrize("model_type", TYPES)
def test_no_row_says_a_key_twice(model_type: str) -> None:
    row = MODEL_TYPES[model_type]
    groups = [set(row.keys), set(row.inert), set(row.must_be), set(row.aliases), set(row.nested), set(row.parts)]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert not (set(row.keys) | set(row.must_be)) & COMMON_INERT - {"pad_token_id"}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_of_defaults(model_type: str) -> None:
    """No key at all: the class's own default model, built on the meta device."""
    assert_as_large({} if model_type == "gpt_neo" else NEEDED.get(model_type, {}), model_type)


INDEPENDENT = {
    "vocab", "max_positions", "ffn_hidden", "type_vocab", "relative_buckets", "ffn_count", "decoder_layers", "window",
}  # fmt: skip
"""Fields whose sizes need not fit the others'."""


@pytest.mark.parametrize("model_type", TYPES)
def test_sizes_that_are_left_out(model_type: str) -> None:
    """Some keys at random, the others at the class's defaults, on the meta device."""

    @settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(configs(model_type), st.randoms())
    def holds(config: dict[str, Any], random: Random) -> None:
        keys = MODEL_TYPES[model_type].keys
        for name in [name for name, key in keys.items() if key.field in INDEPENDENT and random.random() < 0.5]:
            config.pop(name, None)
        architecture = config.pop("architectures")[0]
        tied = {} if model_type == "dbrx" else {"tie_word_embeddings": True}  # DBRX refuses a tie
        assert_as_large({**config, **tied}, model_type, architecture)

    holds()


def assert_as_large(config: dict[str, Any], model_type: str, architecture: str | None = None) -> None:
    """Both count as many parameters."""
    read = from_hf({**config, "model_type": model_type, "architectures": [architecture] if architecture else None})
    cfg = complete(read.fields)
    graph = build(cfg, run_of(cfg, 1, 8, 8 if cfg.arch == "encoder-decoder" else None))
    keys = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        model = getattr(transformers, read.architecture)(config_class(model_type)(**keys))
    assert sum(w.numel * w.copies for w in weights_of(graph.ops)) == sum(p.numel() for p in model.parameters())
