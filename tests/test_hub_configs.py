"""Reading ``config.json`` as hubs have it: old names, extra keys, keys left out, null, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hf_configs import run_of
from hypothesis import given, settings
from hypothesis import strategies as st

import tfcost
from tfcost.config import complete
from tfcost.errors import ConfigError, InputError, UnknownName
from tfcost.families import build
from tfcost.hf import from_hf
from tfcost.model_types import MODEL_TYPES, MODULES, Key, ModelType
from tfcost.model_types.spec import decoder_heads, size
from tfcost.model_types.windows import shortest
from tfcost.models import Model

HUB: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "hub_configs.json").read_text())["configs"]


def parameters(config: dict[str, Any], **what_if: Any) -> int:
    return int(tfcost.analyze(Model("", from_hf(config).fields), command="params", **what_if).totals["parameters"])


def small(model_type: str, **keys: Any) -> dict[str, Any]:
    return {"model_type": model_type, **keys}


@pytest.mark.parametrize("name", HUB)
def test_hub_configs_read_without_a_warning_and_are_exact(name: str) -> None:
    entry = HUB[name]
    assert from_hf(entry["config"]).ignored_keys == entry.get("ignored", [])
    assert parameters(entry["config"]) == entry["parameters"]


def test_every_family_has_a_hub_config() -> None:
    types = {entry["config"].get("model_type") for entry in HUB.values()}
    assert set(MODEL_TYPES) - types <= {"falcon", "gemma3_text", "clip_text_model", "clip_vision_model"}


def test_a_key_that_is_not_known_is_reported_and_changes_nothing() -> None:
    config = small("llama", attention_sinks=4, mystery={"a": 1})
    assert from_hf(config).ignored_keys == ["attention_sinks", "mystery"]
    assert parameters(config) == parameters(small("llama"))


def test_null_differs_from_absent() -> None:
    """Mistral's window: absent it is the class's 4,096, null there is none."""
    assert complete(from_hf(small("mistral")).fields).window == 4096
    assert complete(from_hf(small("mistral", sliding_window=None)).fields).window is None
    assert complete(from_hf(small("llama", num_key_value_heads=None)).fields).kv_heads == 32
    with pytest.raises(ConfigError, match="hidden_size must be a positive integer, not null"):
        from_hf(small("llama", hidden_size=None))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (small("llama", hidden_size="4096"), 'hidden_size must be a positive integer, not "4096"'),
        (small("llama", hidden_size=4096.0), "hidden_size must be a positive integer, not 4096.0"),
        (small("llama", hidden_size=True), "hidden_size must be a positive integer, not true"),
        (small("llama", num_hidden_layers=0), "num_hidden_layers must be a positive integer, not 0"),
        (small("llama", attention_bias=1), "attention_bias must be true or false, not 1"),
        (small("gpt2", resid_pdrop=1), "resid_pdrop must be a number from 0 to below 1, not 1"),
        (small("gpt2", resid_pdrop="0.1"), 'resid_pdrop must be a number from 0 to below 1, not "0.1"'),
        (small("llama", architectures="LlamaForCausalLM"), "architectures must be a list of class names"),
        (small("llama", architectures=["LlamaForTokenClassification"]), "supported: LlamaForCausalLM, LlamaModel"),
        (small("gpt2", n_embd=768, hidden_size=1024), "hidden_size is 1024 but n_embd is 768"),
        (small("mpt", attn_config=[]), r"attn_config must be an object or null, not \[\]"),
        (small("mpt", attn_config={"qk_ln": True}), "attn_config.qk_ln true is not supported"),
        (small("mpt", attn_config={"attn_type": "grouped_query_attention"}), 'supported: "multihead_attention"'),
        (small("mpt", expansion_ratio=8), "expansion_ratio 8 is not supported for this model type; supported: 4"),
        (small("mpt", no_bias=False), "no_bias false is not supported"),
        (small("bert", pruned_heads={"0": [1]}), "pruned_heads"),
        (small("bert", position_embedding_type="relative_key"), "position_embedding_type"),
        (small("bert", add_cross_attention=True), "add_cross_attention true needs is_decoder true"),
        (small("llama", per_layer_config={"0": {"hidden_size": 2}}), "per_layer_config"),
        (small("gpt_bigcode", add_cross_attention=True), "needs multi_query false"),
        (small("falcon", new_decoder_architecture=True, parallel_attn=False), "parallel_attn false is not supported"),
        (small("falcon", num_ln_in_parallel_attn=2), "num_ln_in_parallel_attn 2 is not supported"),
        (small("gpt_neo", num_layers=12), "attention_types must be like|names 24 layers"),
        (small("gpt_neo", attention_types=[[["global", "sparse"], 12]]), "attention_types has 'sparse'"),
        (small("gpt_neo", attention_types=[["global", "local"]]), "attention_types must be like"),
        (small("gpt_neo", attention_types=[[["global"], 10**12]]), "attention_types must be like"),
        (small("mobilebert", num_feedforward_networks=10**12), "num_feedforward_networks must be at most 1000"),
        (small("qwen2", layer_types=["full_attention"]), "layer_types names 1 layers, but the model has 32"),
        (small("gemma2", layer_types=["conv"] * 26), "layer_types has 'conv'"),
        (small("gemma2", layer_types=[["x"]] * 26), "layer_types has"),
        (small("qwen2", layer_types=["sliding_attention"] * 32), "sliding_window is null or not in use"),
        (small("roberta", max_position_embeddings=2), "leaves no position after pad_token_id 1"),
        (small("t5", feed_forward_proj="gated-gelu-x"), "feed_forward_proj"),
        (small("t5", feed_forward_proj="swiglu-gelu"), "feed_forward_proj"),
        (small("mobilebert", key_query_shared_bottleneck=False), "key_query_shared_bottleneck false needs"),
        (small("mobilebert", embedding_size=1024), "embedding_size 1024 is larger than hidden_size 512"),
        (small("mobilebert", true_hidden_size=512), "true_hidden_size 512 contradicts"),
        (small("bart", architectures=["BartForSequenceClassification"], id2label=[]), "id2label must be an object"),
        (small("bart", architectures=["BartForSequenceClassification"], num_labels=0), "num_labels must be"),
        (small("bart", normalize_before=True), "normalize_before true is not supported"),
        ({"hidden_size": 8}, "the config has no model_type"),
        ({"model_type": 3}, "model_type must be a string, not 3"),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value)[:60],
)
def test_what_cannot_be_used_is_refused_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        from_hf(config)
    assert "\n" not in str(caught.value)


def test_an_unknown_model_type_lists_close_ones() -> None:
    with pytest.raises(UnknownName, match="did you mean mistral"):
        from_hf(small("mistrall"))


def test_legacy_names_are_the_new_ones() -> None:
    assert parameters(small("bloom", n_embed=32, num_attention_heads=4)) == parameters(
        small("bloom", hidden_size=32, n_head=4)
    )
    new = small("falcon", num_attention_heads=4, num_hidden_layers=2, hidden_size=64, num_kv_heads=2)
    old = small("RefinedWeb", n_head=4, n_layer=2, hidden_size=64, n_head_kv=2)
    assert parameters(old) == parameters({**new, "new_decoder_architecture": True})


def test_text_config_is_followed_and_the_rest_is_reported() -> None:
    text = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "odd": 1}
    wrapper = {
        "model_type": "llava", "architectures": ["LlamaForCausalLM"], "text_config": text, "vision_config": {"a": 1},
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    read = from_hf(wrapper)
    assert read.ignored_keys == ["text_config.odd", "vision_config"]
    assert read.fields["tied"] is True
    assert parameters(wrapper) == parameters({**text, "tie_word_embeddings": True})


def test_the_whole_models_class_decides_the_language_models_head() -> None:
    def architecture(name: str, model_type: str) -> str:
        text = {"model_type": model_type, "architectures": ["Elsewhere"]}
        return from_hf({"model_type": "whole", "architectures": [name], "text_config": text}).architecture

    assert architecture("LlavaForConditionalGeneration", "llama") == "LlamaForCausalLM"
    assert architecture("Mistral3ForConditionalGeneration", "mistral") == "MistralForCausalLM"
    assert architecture("PaliGemmaModel", "gemma") == "GemmaModel"
    assert architecture("Gemma3ForConditionalGeneration", "gemma3_text") == "Gemma3ForCausalLM"
    assert architecture("LlamaForSequenceClassification", "llama") == "LlamaForSequenceClassification"
    with pytest.raises(ConfigError, match="LlavaForImageTextRetrieval"):
        architecture("LlavaForImageTextRetrieval", "llama")


def test_quantization_is_read_where_understood_and_never_an_error() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert from_hf(small("llama", quantization_config=gptq)).quantization == {"method": "gptq", "bits": 4}
    assert from_hf(small("llama", quantization_config=nf4)).quantization == {"method": "bitsandbytes", "bits": 4}
    assert from_hf(small("llama", quantization_config={"quant_method": "fp8"})).quantization == {
        "method": "fp8", "bits": None,
    }  # fmt: skip
    for strange in ({"x": 1}, [], "nf4", None, {"quant_method": "x", "bits": "four"}):
        read = from_hf(small("llama", quantization_config=strange))
        assert read.quantization is None
        assert read.ignored_keys == ["quantization_config"]
    assert parameters(small("llama", quantization_config=gptq)) == parameters(small("llama"))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_without_architectures_the_head_is_the_types_own(model_type: str) -> None:
    """A causal or conditional class with logits; a bare model for encoders."""
    needed = {"num_experts_per_tok": 6} if model_type == "deepseek_v2" else {}
    read = from_hf(small(model_type, **needed))
    bare = read.fields["arch"] == "encoder" or model_type in ("clip", "clip_text_model")
    assert read.architecture.endswith("Model" if bare and model_type != "gpt2" else ("LM", "LMHeadModel", "Generation"))
    assert read.fields["head"] is not bare
    for none in (None, []):
        assert from_hf(small(model_type, architectures=none, **needed)) == read


def test_labels_are_counted_as_transformers_counts_them() -> None:
    def classes(model_type: str, name: str, **keys: Any) -> int:
        return int(from_hf(small(model_type, architectures=[name], **keys)).fields["classes"])

    assert classes("bert", "BertForSequenceClassification") == 2
    assert classes("bart", "BartForSequenceClassification") == 3
    assert classes("mbart", "MBartForSequenceClassification") == 2
    assert classes("bert", "BertForSequenceClassification", num_labels=7) == 7
    assert classes("bert", "BertForSequenceClassification", num_labels=7, id2label={"0": "a"}) == 1
    assert classes("electra", "ElectraForPreTraining", num_labels=7) == 1


def test_layers_that_differ_are_counted_in_groups() -> None:
    def layers(config: dict[str, Any], **what_if: Any) -> tuple[int, int | None, int | None]:
        cfg = complete({**from_hf(config).fields, **what_if})
        return cfg.decoder_layers, cfg.local_layers, cfg.window

    assert layers(small("gemma2")) == (26, 13, 4096)
    assert layers(small("gemma3_text")) == (26, 22, 4096)
    assert layers(small("gemma3_text", sliding_window_pattern=2)) == (26, 13, 4096)
    assert layers(small("gpt_neo")) == (24, 12, 256)
    assert layers(small("gpt_neo", attention_types=[[["global"], 24]])) == (24, None, None)
    assert layers(small("mistral")) == (32, None, 4096)
    assert layers(small("qwen2")) == (32, None, None)
    assert layers(small("qwen2", use_sliding_window=True)) == (32, 4, 4096)
    assert layers(small("qwen2", use_sliding_window=True, max_window_layers=0)) == (32, None, 4096)
    assert layers(small("qwen2", use_sliding_window=True, max_window_layers=40)) == (32, None, None)
    assert layers(small("phi3", sliding_window=2047)) == (32, None, 2047)
    # A what-if of the depth goes on with the pattern, spelled out in the config or not.
    spelled = ["sliding_attention", "full_attention"] * 13
    assert layers(small("gemma2"), layers=7) == layers(small("gemma2", layer_types=spelled), layers=7) == (7, 4, 4096)
    assert layers(small("qwen2", use_sliding_window=True), layers=48) == (48, 20, 4096)


def test_windows_are_priced_by_the_kernel() -> None:
    """Eager attention computes the whole square; flash visits the window's keys in the local layers only."""
    model = Model("", from_hf(small("gemma2", sliding_window=100)).fields)
    n, heads, width = 1000, 8, 256
    square, band = 4 * n * n * heads * width, 4 * n * 100 * heads * width
    eager = tfcost.analyze(model, seq_len=n, attention="eager").totals["attention_flops"]
    flash = tfcost.analyze(model, seq_len=n, attention="flash").totals["attention_flops"]
    assert (eager, flash) == (26 * square, 13 * square + 13 * band)


def test_cross_attention_runs_only_with_a_source() -> None:
    model = Model("", from_hf(small("gpt2", add_cross_attention=True)).fields)
    plain = Model("", from_hf(small("gpt2")).fields)
    without = tfcost.analyze(model, seq_len=64).totals
    assert without["forward_flops"] == tfcost.analyze(plain, seq_len=64).totals["forward_flops"]
    d, layers = 768, 12
    assert without["parameters"] - parameters(small("gpt2")) == layers * (4 * d * d + 6 * d)
    across = tfcost.analyze(model, seq_len=64, src_len=10).totals
    assert across["parameters"] == without["parameters"]
    assert across["forward_flops"] - without["forward_flops"] == layers * (
        4 * 64 * d * d + 4 * 10 * d * d + 4 * 64 * 10 * d
    )


@pytest.mark.parametrize(
    ("model_type", "longest"),
    [("roberta", 510), ("opt", 2048), ("bart", 1024), ("llama", 2048), ("mpt", 2048), ("t5", None), ("bloom", None)],
)
def test_the_longest_sequence_leaves_offsets_out(model_type: str, longest: int | None) -> None:
    assert complete(from_hf(small(model_type)).fields).max_positions == longest


def test_what_the_config_states_stays_in_a_what_if() -> None:
    stated = Model("", from_hf(small("llama", head_dim=128, num_key_value_heads=8)).fields)
    assert stated.config(heads=64).head_dim == 128
    assert Model("", from_hf(small("llama")).fields).config(heads=64).head_dim == 64
    assert Model("", from_hf(small("gpt2")).fields).config(hidden=1536).ffn_hidden == 4 * 1536
    with pytest.raises(InputError, match="does not divide"):
        stated.config(heads=12)


@pytest.mark.parametrize("module", MODULES)
def test_the_index_names_the_rows_of_each_module(module: str) -> None:
    held = __import__(f"tfcost.model_types.{module}", fromlist=["TYPES"]).TYPES
    assert set(held) == set(MODULES[module].split())


def test_a_family_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A type that nobody has heard of: its keys, its head, and nothing else."""
    tiny = ModelType(
        keys={
            "width": size("hidden", 8),
            "heads": size("heads", 2),
            "depth": size("layers", 3),
            "words": size("vocab", 5),
        },
        architectures=decoder_heads("Tiny"),
        fixed={"arch": "decoder", "positions": "none", "final_norm": True},
    )
    monkeypatch.setattr(MODEL_TYPES, "added", {})
    MODEL_TYPES.add("tiny", tiny)
    config = {"model_type": "tiny", "architectures": ["TinyForCausalLM"], "depth": 4, "colour": "red"}
    assert from_hf(config).ignored_keys == ["colour"]
    d, layers, vocab = 8, 4, 5
    assert parameters(config) == layers * (12 * d * d + 13 * d) + vocab * d + 2 * d
    with pytest.raises(ConfigError, match="depth must be a positive integer, not 0"):
        from_hf({**config, "depth": 0})


SCALARS = st.sampled_from(
    [None, True, False, -1, 0, 1, 2, 7, 128, 10**9, 10**20, 0.5, 1.0, -2.5, 1e300, "", "x", "relu", "gated-gelu",
     "global", "sliding_attention"],
)  # fmt: skip
JSON = SCALARS | st.lists(SCALARS | st.lists(SCALARS, max_size=2), max_size=3) | st.dictionaries(
    st.sampled_from(["a", "0", "attn_pdrop", "model_type"]), SCALARS, max_size=2
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_any_value_of_any_key_is_used_or_refused(data: st.DataObject) -> None:
    """Whatever stands in a config, reading and pricing it works or raises an InputError of one line."""
    model_type = data.draw(st.sampled_from(list(MODEL_TYPES)))
    row = MODEL_TYPES[model_type]
    names = [*row.keys, *row.must_be, *row.nested, *row.parts, "architectures", "id2label", "num_labels", "text_config"]
    changed = data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=3))
    message = ""
    try:
        cfg = complete(from_hf({"model_type": model_type, **changed}).fields)
        build(cfg, run_of(cfg, 1, 8, 8))
    except InputError as error:
        message = str(error)
    assert "\n" not in message


@given(st.text("LG", min_size=1, max_size=30))
def test_the_shortest_pattern_repeats_to_the_whole(pattern: str) -> None:
    period = shortest(pattern)
    assert (period * len(pattern))[: len(pattern)] == pattern
    assert not any((pattern[:n] * len(pattern))[: len(pattern)] == pattern for n in range(1, len(period)))


@pytest.mark.parametrize("kind", ["size", "sides", "probability", "flag", "number", "list", "object", "name"])
def test_every_kind_of_key_says_what_it_wants(kind: str) -> None:
    assert Key("", None, kind, nullable=True).wants().endswith(" or null")
