"""Hypothesis strategies: random ``config.json`` contents of every model type, small enough to run on a CPU.

Every key that a row of :data:`tfcost.model_types.MODEL_TYPES` reads is drawn, by its kind and the field that it states;
:data:`VALID` then makes the combinations that the transformers class of the type can build and run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tfcost.blocks import Run
from tfcost.config import ModelConfig
from tfcost.model_types import MODEL_TYPES, Key

Config = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]

PAD, EOS, TOKEN = 1, 2, 5
"""Token ids in use; every vocabulary is larger."""

LEGACY_TYPES = ("RefinedWeb", "RefinedWebModel")
"""Model types of older code, which transformers does not build."""

TYPES = tuple(name for name in MODEL_TYPES if name not in LEGACY_TYPES)

ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu", "tanh", "quick_gelu")


class Pass(NamedTuple):
    """A forward pass: sequences, tokens, and source tokens where there is an encoder."""

    batch: int
    seq_len: int
    src_len: int | None


def run_of(cfg: ModelConfig, batch: int, seq_len: int, src_len: int | None) -> Run:
    """The pass of a model: of text, of an image of its size, or of as many frames as it has positions for."""
    if cfg.patches is not None:
        return Run(batch, cfg.patches + cfg.prefix_tokens)
    if cfg.source_positions is not None and cfg.arch == "encoder":
        return Run(batch, cfg.source_positions, frames=2 * cfg.source_positions)
    if cfg.source_positions is not None:
        return Run(batch, seq_len, cfg.source_positions, frames=2 * cfg.source_positions)
    return Run(batch, seq_len, src_len)


def sizes(draw: Draw, heads: int, width: int) -> dict[str, Any]:
    """A small value for each field that is a size."""
    layers = draw(st.integers(1, 4))
    divisors = [each for each in range(1, heads + 1) if heads % each == 0]
    return {
        "hidden": heads * width, "heads": heads, "kv_heads": draw(st.sampled_from(divisors)),
        "head_dim": draw(st.sampled_from([2, 4, 8, 12])), "layers": layers, "encoder_layers": layers,
        "decoder_layers": draw(st.integers(1, 4)), "ffn_hidden": draw(st.integers(1, 40)),
        "vocab": draw(st.integers(8, 60)), "max_positions": draw(st.integers(16, 40)),
        "type_vocab": draw(st.integers(1, 4)), "embedding_size": draw(st.sampled_from([4, heads * width])),
        "relative_buckets": 2 * draw(st.integers(2, 20)), "window": draw(st.integers(1, 12)),
        "ffn_count": draw(st.integers(1, 4)), **expert_sizes(draw),
        "channels": draw(st.integers(1, 4)), "pooler_size": draw(st.integers(1, 9)), "source_positions": 5,
        "window_side": draw(st.integers(1, 3)), "query_rank": draw(st.integers(1, 6)),
        "kv_rank": 2 * draw(st.integers(1, 3)),
        "rope_dim": 2 * draw(st.integers(1, 3)), "value_dim": draw(st.integers(1, 6)),
    }  # fmt: skip


def expert_sizes(draw: Draw) -> dict[str, Any]:
    """The sizes of a mixture of experts."""
    experts = draw(st.integers(1, 5))
    return {
        "experts": experts, "experts_per_token": draw(st.integers(1, experts)),
        "expert_hidden": draw(st.integers(1, 9)), "shared_expert_hidden": draw(st.integers(1, 9)),
    }  # fmt: skip


def value_of(draw: Draw, key: Key, known: dict[str, Any]) -> Any:
    """A value for one key."""
    if key.kind == "size":
        value = known.get(key.field, key.default)
        return None if key.nullable and draw(st.integers(0, 3)) == 0 else value
    if key.kind == "probability":
        return draw(st.sampled_from([0.0, 0.1, 0.5]))
    if key.kind == "flag":
        return draw(st.booleans())
    if key.kind == "sides":
        return draw(st.integers(2, 4) if key.field == "patch_size" else st.integers(4, 11))
    if key.kind == "number":
        return draw(st.sampled_from([None, 30.0]))
    if key.kind == "name":
        return draw(st.sampled_from(key.choices if key.choices and len(key.choices) < 6 else ACTIVATIONS))
    return None


@st.composite
def configs(draw: Draw, model_type: str) -> Config:
    """A config of this type, all of whose sizes are small."""
    row = MODEL_TYPES[model_type]
    known = sizes(draw, draw(st.sampled_from([1, 2, 4, 6])), draw(st.sampled_from([8, 16])))
    config = {name: value_of(draw, key, known) for name, key in row.keys.items()}
    config["pad_token_id"] = PAD
    if model_type in VALID:
        VALID[model_type](draw, config)
    # What is not a size may be left out, for the class's default.
    for name, key in row.keys.items():
        if key.kind in ("probability", "flag", "number") and draw(st.integers(0, 4)) == 0 and name not in KEPT:
            config.pop(name, None)
    # A key may have its generic name.
    for alias, name in row.aliases.items():
        usable = alias not in UNKNOWN_ALIASES.get(model_type, ()) and name in config
        if usable and draw(st.integers(0, 3)) == 0:
            config[alias] = config.pop(name)
    architecture = draw(st.sampled_from([name for name in row.architectures if name not in NOT_ALONE]))
    if architecture.endswith("ForMaskedImageModeling"):
        # The class makes a square of the patches.
        for name in ("image_size", "patch_size"):
            if isinstance(config[name], list):
                config[name] = max(config[name])
    if draw(st.booleans()):
        config["id2label"] = {str(index): f"L{index}" for index in range(draw(st.integers(1, 5)))}
    return {**config, "model_type": model_type, "architectures": [architecture]}


NOT_ALONE = ("Gemma3Model",)
"""Classes that need a vision tower beside the language model."""

UNKNOWN_ALIASES = {
    # Names of Falcon's original code.
    "falcon": ("n_head", "n_layer", "n_head_kv"),
    # With this name for num_layers the class gives a decoder whose depth is left out its default depth.
    "t5": ("num_hidden_layers",), "mt5": ("num_hidden_layers",),
    # OpenAI's name, which stands beside the other; a width that the feed-forward's config does not follow.
    "gpt_oss": ("experts_per_token",), "dbrx": ("hidden_size",),
}  # fmt: skip
"""Aliases that the classes of today do not have, or do not follow."""

KEPT = (
    "add_cross_attention", "is_decoder", "multi_query", "qk_layernorm", "use_sliding_window", "parallel_attn", "alibi",
    "new_decoder_architecture", "use_bottleneck", "use_bottleneck_attention", "key_query_shared_bottleneck",
    "use_weighted_layer_sum",
)  # fmt: skip
"""Keys that a valid combination rests on."""


def _mistral(draw: Draw, config: Config) -> None:
    config["num_key_value_heads"] = config["num_key_value_heads"] or 1


def _gemma2(draw: Draw, config: Config) -> None:
    config["sliding_window"] = config["sliding_window"] or 3
    _layer_types(draw, config)


def _layer_types(draw: Draw, config: Config) -> None:
    layers = config["num_hidden_layers"]
    windowed = config.get("use_sliding_window", True) and config["sliding_window"] is not None
    kinds = ["full_attention", "sliding_attention"] if windowed else ["full_attention", "attention"]
    config["layer_types"] = draw(
        st.none() | st.lists(st.sampled_from(kinds), min_size=layers, max_size=layers)
        if windowed or "max_window_layers" in config
        else st.lists(st.sampled_from(kinds), min_size=layers, max_size=layers)
    )
    if "max_window_layers" in config:
        config["max_window_layers"] = draw(st.integers(0, 5))


def _gpt_neo(draw: Draw, config: Config) -> None:
    first = draw(st.lists(st.sampled_from(["global", "local"]), min_size=1, max_size=3))
    times = draw(st.integers(1, 2))
    second = draw(st.lists(st.sampled_from(["global", "local"]), max_size=2))
    config["attention_types"] = [[first, times], [second, 1]]
    layers = config["num_layers"] = len(first) * times + len(second)
    # Older configs have the expanded list too, which the class then reads.
    del config["attention_layers"]
    if draw(st.booleans()):
        kinds = st.sampled_from(["global", "local"])
        config["attention_layers"] = draw(st.lists(kinds, min_size=layers, max_size=layers))


def _gpt_bigcode(draw: Draw, config: Config) -> None:
    config["add_cross_attention"] = config["add_cross_attention"] and not config["multi_query"]


def _gptj(draw: Draw, config: Config) -> None:
    width, rest = divmod(config["n_embd"], config["n_head"])
    assert rest == 0
    config["rotary_dim"] = draw(st.sampled_from([each for each in (2, 4, 8) if each <= width]))


def _bloom(draw: Draw, config: Config) -> None:
    config["n_inner"] = draw(st.sampled_from([None, 4 * config["hidden_size"]]))


def _falcon(draw: Draw, config: Config) -> None:
    new = config["new_decoder_architecture"]
    config["parallel_attn"] = config["parallel_attn"] or new
    if not new and not config["multi_query"]:
        config["num_kv_heads"] = None
    config["num_ln_in_parallel_attn"] = draw(st.sampled_from([None, 1, 2] if new else [None, 1]))


def _mpt(draw: Draw, config: Config) -> None:
    config["attn_config"] = draw(st.sampled_from([None, {}, {"attn_pdrop": 0, "clip_qkv": 6.0}, {"prefix_lm": False}]))


def _gemma3(draw: Draw, config: Config) -> None:
    config["sliding_window_pattern"] = draw(st.integers(1, 4))
    _gemma2(draw, config)


def _phi(draw: Draw, config: Config) -> None:
    config["head_dim"] = None if config["qk_layernorm"] else draw(st.sampled_from([None, 4, 8]))
    _null_is_absent(draw, config)


def _null_is_absent(draw: Draw, config: Config) -> None:
    """The class reads ``head_dim`` only where it is: null is nothing that it could multiply by."""
    if config["head_dim"] is None:
        del config["head_dim"]


def _qwen2(draw: Draw, config: Config) -> None:
    _layer_types(draw, config)
    _null_is_absent(draw, config)


def _decoder_flags(draw: Draw, config: Config) -> None:
    config["add_cross_attention"] = config["add_cross_attention"] and config["is_decoder"]


def _roberta(draw: Draw, config: Config) -> None:
    _decoder_flags(draw, config)
    config["pad_token_id"] = draw(st.integers(0, 3))


def _albert(draw: Draw, config: Config) -> None:
    config["num_hidden_layers"] = draw(st.integers(1, 5))
    config["num_hidden_groups"] = draw(st.integers(1, 6))
    config["inner_group_num"] = draw(st.integers(1, 3))


def _mobilebert(draw: Draw, config: Config) -> None:
    hidden = config["hidden_size"]
    config["intra_bottleneck_size"] = draw(st.sampled_from([hidden, 2 * hidden, 24]))
    config["true_hidden_size"] = config["intra_bottleneck_size" if config["use_bottleneck"] else "hidden_size"]
    if config["intra_bottleneck_size"] != hidden and not config["use_bottleneck_attention"]:
        config["key_query_shared_bottleneck"] = True
    config["embedding_size"] = draw(st.sampled_from([4, hidden]))


def _t5(draw: Draw, config: Config) -> None:
    config["num_layers"] = draw(st.integers(1, 4))
    config["num_decoder_layers"] = draw(st.sampled_from([None, 1, 3]))
    config["feed_forward_proj"] = draw(st.sampled_from(["relu", "gated-gelu", "gated-silu", "gelu_new"]))
    # The class ties whatever the key says; the test of the oracles has the untied ones.
    for name, value in {"is_gated_act": st.booleans(), "dense_act_fn": st.sampled_from(ACTIVATIONS)}.items():
        if draw(st.booleans()):
            config[name] = draw(value)
        else:
            del config[name]


def _bart(draw: Draw, config: Config) -> None:
    config["decoder_attention_heads"] = draw(st.sampled_from([1, 2, 4]))
    config["decoder_ffn_dim"] = draw(st.integers(1, 30))


def _qwen2_moe(draw: Draw, config: Config) -> None:
    _sparse(draw, config)
    config["sliding_window"] = config["sliding_window"] or 3
    _layer_types(draw, config)
    _null_is_absent(draw, config)


def _sparse(draw: Draw, config: Config) -> None:
    layers = config["num_hidden_layers"]
    config["decoder_sparse_step"] = draw(st.integers(1, 3))
    config["mlp_only_layers"] = draw(st.none() | st.lists(st.integers(0, layers), max_size=3))
    config["output_router_logits"] = False  # of layers that may all be dense


def _qwen3_moe(draw: Draw, config: Config) -> None:
    _sparse(draw, config)
    _null_is_absent(draw, config)


def _deepseek(draw: Draw, config: Config) -> None:
    # The classes insist on heads that divide the width, which they do here, and on a top k.
    del config["num_key_value_heads"]
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["qk_nope_head_dim"] = 2 * draw(st.integers(1, 3))
    config["first_k_dense_replace"] = draw(st.integers(0, 4))
    config["n_shared_experts"] = draw(st.integers(1, 3))
    config["n_group"] = config["topk_group"] = 1
    config.pop("topk_method", None)
    config["v_head_dim"] = config["v_head_dim"] or 3
    config["num_experts_per_tok"] = config["num_experts_per_tok"] or 1
    config["moe_intermediate_size"] = config["moe_intermediate_size"] or 2
    # The group limit of the third version takes two of each group's experts.
    if config["n_routed_experts"] == 1:
        config["n_routed_experts"] = 2


def _gpt_oss(draw: Draw, config: Config) -> None:
    _gemma2(draw, config)


def _granitemoe(draw: Draw, config: Config) -> None:
    config["num_local_experts"] = config["num_local_experts"] or 4
    config["num_experts_per_tok"] = draw(st.integers(1, config["num_local_experts"]))


def _dbrx(draw: Draw, config: Config) -> None:
    divisors = [each for each in range(1, config["n_heads"] + 1) if config["n_heads"] % each == 0]
    # The class reads a rope_theta of the attention, for which it has no default.
    config["attn_config"] = {"rope_theta": 1e4, "kv_n_heads": draw(st.sampled_from(divisors)), "clip_qkv": 8.0}
    experts = expert_sizes(draw)
    config["ffn_config"] = draw(st.sampled_from([{"ffn_act_fn": {"name": "gelu"}}, {}])) | {
        "ffn_hidden_size": experts["expert_hidden"], "moe_num_experts": experts["experts"],
        "moe_top_k": experts["experts_per_token"], "moe_normalize_expert_weights": draw(st.sampled_from([None, 1.0])),
    }  # fmt: skip


def _rectangle(draw: Draw, config: Config) -> None:
    for name, least in (("image_size", 4), ("patch_size", 1)):
        if draw(st.booleans()):
            config[name] = [config[name], draw(st.integers(least, least + 3))]


def _dinov2(draw: Draw, config: Config) -> None:
    config["mlp_ratio"] = draw(st.integers(1, 4))
    if "num_register_tokens" in config:
        config["num_register_tokens"] = draw(st.integers(0, 3))


def _swin(draw: Draw, config: Config) -> None:
    stages = draw(st.integers(1, 3))
    config["depths"] = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    config["num_heads"] = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=stages, max_size=stages))
    config["embed_dim"] = 4 * draw(st.integers(1, 3))
    config["mlp_ratio"] = draw(st.sampled_from([1.0, 2, 3.3, 4.0]))
    # The smallest grid holds a window, and the table of positions fits the grid, or the class refuses the image.
    side, patch = config["window_size"], config["patch_size"] = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    grids = [draw(st.integers(side * 2 ** (stages - 1), side * 2 ** (stages - 1) + 5)) for _ in range(2)]
    short = 0 if config["use_absolute_embeddings"] else draw(st.integers(0, patch - 1))
    config["image_size"] = [grid * patch - short for grid in grids]


def _clip(draw: Draw, config: Config) -> None:
    config["projection_dim"] = draw(st.integers(1, 9))
    for name, model_type in (("text_config", "clip_text_model"), ("vision_config", "clip_vision_model")):
        tower = draw(configs(model_type))
        tower = {key: value for key, value in tower.items() if key not in ("architectures", "id2label")}
        config[draw(st.sampled_from([name, f"{name}_dict"]))] = tower


def _clip_tower(draw: Draw, config: Config) -> None:
    config["projection_dim"] = draw(st.integers(1, 9))
    if "image_size" in config:
        config["patch_size"] = draw(st.integers(1, 4))
        config["image_size"] = draw(st.integers(config["patch_size"], 11))


def _whisper(draw: Draw, config: Config) -> None:
    config["decoder_attention_heads"] = draw(st.sampled_from([1, 2, 4]))
    config["decoder_ffn_dim"] = draw(st.integers(1, 30))
    config["use_weighted_layer_sum"] = False


VALID: dict[str, Callable[[Draw, Config], None]] = {
    "gpt_neo": _gpt_neo, "gpt_bigcode": _gpt_bigcode, "gptj": _gptj, "bloom": _bloom, "falcon": _falcon, "mpt": _mpt,
    "qwen2": _qwen2, "qwen3": _layer_types, "gemma2": _gemma2, "mistral": _mistral, "gemma3_text": _gemma3, "phi": _phi,
    "phi3": _null_is_absent, "bert": _decoder_flags, "electra": _decoder_flags, "roberta": _roberta,
    "xlm-roberta": _roberta, "camembert": _roberta, "albert": _albert, "mobilebert": _mobilebert, "t5": _t5, "mt5": _t5,
    "bart": _bart, "mbart": _bart, "mixtral": _mistral, "qwen2_moe": _qwen2_moe, "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "gpt_oss": _gpt_oss, "granitemoe": _granitemoe, "dbrx": _dbrx,
    "vit": _rectangle, "deit": _rectangle, "dinov2": _dinov2, "dinov2_with_registers": _dinov2, "swin": _swin,
    "clip": _clip, "clip_text_model": _clip_tower, "clip_vision_model": _clip_tower, "whisper": _whisper,
}  # fmt: skip
