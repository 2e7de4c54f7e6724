"""Random configs of every model type against the transformers class: parameters and forward FLOPs, exactly.

The keys that a row reads are drawn, and those that it calls inert are turned over: they must change nothing.

The class is built with random weights and run in eager attention under PyTorch's own counter. The models are small and
run on the CPU rather than on the meta device: some classes look at the values of their masks and token ids.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
from hf_configs import EOS, TOKEN, TYPES, Config, Draw, Pass, configs, run_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfcost.blocks import Run
from tfcost.config import ModelConfig, complete
from tfcost.families import build
from tfcost.graph import weights_of
from tfcost.hf import from_hf
from tfcost.model_types import MODEL_TYPES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

PASSES = st.builds(Pass, st.integers(1, 2), st.integers(1, 11), st.integers(1, 7))
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@st.composite
def inert_keys(draw: Draw, model_type: str) -> Config:
    """Random values of keys that the row calls inert: booleans turned over, feed-forwards run chunk by chunk."""
    row = MODEL_TYPES[model_type]
    known = {each.name: each.default for each in dataclasses.fields(transformers.CONFIG_MAPPING[model_type])}
    config: Config = {name: draw(st.booleans()) for name in row.inert if isinstance(known.get(name), bool)}
    if model_type == "bloom":
        config["pretraining_tp"] = draw(st.sampled_from([1, 2, 4]))
    return {**config, "chunk_size_feed_forward": draw(st.sampled_from([0, 1]))}


def ours(config: Config, run: Pass) -> tuple[ModelConfig, Run, int, int]:
    """What tfcost reads, and the parameters and FLOPs that it finds."""
    read = from_hf(config)
    assert read.ignored_keys == []
    cfg = complete(read.fields)
    source = run.src_len if cfg.arch == "encoder-decoder" or (cfg.cross_attention and can_cross(config)) else None
    length = run.src_len if classifies_by_eos(config) and run.src_len is not None else run.seq_len
    passed = run_of(cfg, run.batch, length, source)
    graph = build(cfg, passed)
    parameters = sum(weight.numel * weight.copies for weight in weights_of(graph.ops))
    return cfg, passed, parameters, sum(2 * op.forward.macs * op.copies for op in graph.ops)


def can_cross(config: Config) -> bool:
    """GPT-BigCode's cross-attention cannot run: its class splits keys and values by the width of one head."""
    return config["model_type"] != "gpt_bigcode"


def classifies_by_eos(config: Config) -> bool:
    """The classifiers of encoder-decoders read the source into the decoder too, and take its <eos>."""
    return config["model_type"] in ("t5", "mt5", "bart", "mbart") and "Classification" in config["architectures"][0]


def windows(made: Any, cfg: ModelConfig) -> tuple[int | None, int]:
    """The window of a transformers config, and how many layers have it."""
    if cfg.model_type == "gpt_neo":
        kinds, window = made.attention_layers, made.window_size
    else:
        window = getattr(made, "sliding_window", None)
        if window is None:
            return None, 0
        kinds = getattr(made, "layer_types", None) or ["sliding_attention"] * made.num_hidden_layers
    local = sum(kind in ("sliding_attention", "local") for kind in kinds)
    if window is None or local == 0:
        return None, 0
    return 2 * window - 1 if getattr(made, "use_bidirectional_attention", False) else window, local


def theirs(config: Config, cfg: ModelConfig, run: Run) -> tuple[int, int]:
    """Parameters and FLOPs of the transformers class; its windows, which change neither in eager attention, agree."""
    keys = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    if "id2label" in keys:
        keys["id2label"] = dict(keys["id2label"])
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    made = transformers.CONFIG_MAPPING[config["model_type"]](**keys, **eager)
    made.eos_token_id, made.decoder_start_token_id = EOS, TOKEN
    local = 0 if cfg.window is None else cfg.decoder_layers if cfg.local_layers is None else cfg.local_layers
    assert (cfg.window, local) == windows(made, cfg)
    model = getattr(transformers, config["architectures"][0])(made).eval()
    inputs = inputs_of(config, cfg, run)
    # DBRX takes views of its experts' weights, which the counter cannot follow without gradients.
    with torch.set_grad_enabled(cfg.model_type == "dbrx"), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return sum(parameter.numel() for parameter in model.parameters()), counter.get_total_flops()


def inputs_of(config: Config, cfg: ModelConfig, run: Run) -> dict[str, Any]:
    """Tokens, and whatever else the class reads; a value that does not matter for each."""
    if cfg.source_positions is not None:
        frames = torch.zeros(run.batch, cfg.channels, run.frames)
        sound = {"input_features": frames}
        if cfg.arch == "encoder":
            return sound
        return sound | {"decoder_input_ids": torch.full((run.batch, run.seq_len), TOKEN)}
    if cfg.patches is not None:
        return {"pixel_values": pixels(cfg, run.batch)}
    length = run.seq_len if cfg.arch != "encoder-decoder" else run.src_len
    ids = torch.full((run.batch, length), TOKEN)
    inputs: dict[str, Any] = {"input_ids": ids}
    if cfg.tower is not None:
        return inputs | {"pixel_values": pixels(cfg.tower, run.batch)}
    if not cfg.family:
        inputs["use_cache"] = False
    if classifies_by_eos(config):
        ids[:, -1] = EOS
    elif cfg.arch == "encoder-decoder":
        inputs["decoder_input_ids"] = torch.full((run.batch, run.seq_len), TOKEN)
    elif run.src_len is not None:
        memory = torch.zeros(run.batch, run.src_len, cfg.hidden)
        inputs |= {"encoder_outputs": (memory,)} if cfg.model_type == "whisper" else {"encoder_hidden_states": memory}
    return inputs


def pixels(cfg: ModelConfig, batch: int) -> Any:
    """Images of a model's size."""
    return torch.zeros(batch, cfg.channels, cfg.image_size, cfg.image_width or cfg.image_size)


def untied(config: Config, cfg: ModelConfig) -> int:
    """What a T5 with an untied head has beyond its class, which ties whatever the config says."""
    return cfg.vocab * cfg.hidden if config["model_type"] in ("t5", "mt5") and cfg.head and not cfg.tied else 0


def check(config: Config, run: Pass) -> None:
    cfg, passed, parameters, flops = ours(config, run)
    assert (parameters - untied(config, cfg), flops) == theirs(config, cfg, passed)


@pytest.mark.parametrize("model_type", TYPES)
def test_random_configs(model_type: str) -> None:
    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
    @given(configs(model_type), inert_keys(model_type), PASSES)
    def holds(config: Config, inert: Config, run: Pass) -> None:
        check({**inert, **config}, run)

    holds()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_many_random_configs(model_type: str) -> None:
    @settings(max_examples=300, deadline=None, database=None, suppress_health_check=CHECKS)
    @given(configs(model_type), inert_keys(model_type), PASSES)
    def holds(config: Config, inert: Config, run: Pass) -> None:
        check({**inert, **config}, run)

    holds()
