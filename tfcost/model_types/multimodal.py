"""Models of two kinds of input: CLIP (text and images, and its towers alone), Whisper (sound and text)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfcost.errors import ConfigError
from tfcost.model_types.spec import (
    LABELS,
    LM_HEAD,
    NO_HEAD,
    ModelType,
    activation,
    flag,
    names,
    probability,
    size,
)  # fmt: skip
from tfcost.model_types.vision import IMAGE

CLIP_LAYER: Mapping[str, Any] = {"pre_norm": True, "bias": True, "dropout": 0.0, "head": False}
CLIP_TEXT: Mapping[str, Any] = {**CLIP_LAYER, "arch": "decoder", "positions": "learned", "final_norm": True}
CLIP_IMAGE: Mapping[str, Any] = {
    **IMAGE, **CLIP_LAYER, "family": "image-tower", "final_norm": False, "embedding_norm": True, "patch_bias": False,
    "pooled_norm": True,
}  # fmt: skip

# Older configs have a dropout, which no class has applied, and what every config had then.
INERT = names("dropout initializer_factor is_decoder layer_norm_eps tie_word_embeddings")


def _clip_tower(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    if stated.pop("project", False):
        if values["projection_dim"] is None:
            raise ConfigError("projection_dim must be a positive integer, not null")
        stated["projection_size"] = values["projection_dim"]


def _clip(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    common = {"projection_size": values["projection_dim"]}
    text, image = values["text_config"].stated, values["vision_config"].stated
    if "classes" in stated:
        stated |= {**CLIP_IMAGE, **image, "classifier_tokens": "mean_after_first"}
        return
    stated |= {**CLIP_TEXT, **text, **common, "family": "towers", "tower": {**CLIP_IMAGE, **image, **common}}


CLIP_TEXT_MODEL = ModelType(
    keys={
        "hidden_size": size("hidden", 512),
        "intermediate_size": size("ffn_hidden", 2048),
        "num_hidden_layers": size("layers", 12),
        "num_attention_heads": size("heads", 8),
        "vocab_size": size("vocab", 49408),
        "max_position_embeddings": size("max_positions", 77),
        "hidden_act": activation("quick_gelu"),
        "attention_dropout": probability("attention_dropout", 0.0, nullable=True),
        "projection_dim": size("", 512, nullable=True),
    },
    architectures={"CLIPTextModel": {}, "CLIPTextModelWithProjection": {"project": True}},
    fixed={**CLIP_TEXT, "family": "text-tower"},
    inert=INERT,
    finish=_clip_tower,
)

CLIP_VISION = ModelType(
    keys={
        "hidden_size": size("hidden", 768),
        "intermediate_size": size("ffn_hidden", 3072),
        "num_hidden_layers": size("layers", 12),
        "num_attention_heads": size("heads", 12),
        "num_channels": size("channels", 3),
        "image_size": size("image_size", 224),
        "patch_size": size("patch_size", 32),
        "hidden_act": activation("quick_gelu"),
        "attention_dropout": probability("attention_dropout", 0.0, nullable=True),
        "projection_dim": size("", 512),
    },
    architectures={"CLIPVisionModel": {}, "CLIPVisionModelWithProjection": {"project": True}},
    fixed=CLIP_IMAGE,
    inert=INERT,
    finish=_clip_tower,
)

CLIP = ModelType(
    keys={"projection_dim": size("", 512)},
    parts={"text_config": CLIP_TEXT_MODEL, "vision_config": CLIP_VISION},
    architectures={"CLIPModel": {}, "CLIPForImageClassification": {"classes": LABELS}},
    fixed={},
    inert=names("initializer_factor logit_scale_init_value"),
    finish=_clip,
)


def _whisper(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    stated["follows_dropout"] = ("embedding_dropout",)
    heads, ffn = values["decoder_attention_heads"], values["decoder_ffn_dim"]
    if stated["arch"] == "encoder":
        if values["use_weighted_layer_sum"]:
            raise ConfigError("use_weighted_layer_sum true is not supported; supported: false")
        stated |= {"projection_size": values["classifier_proj_size"], "positions": "none"}  # but those of the frames
        for field in ("decoder_layers", "vocab", "max_positions", "tied"):
            del stated[field]
        return
    if stated["arch"] == "decoder":
        stated |= {"heads": heads, "ffn_hidden": ffn}
        for field in ("encoder_layers", "source_positions", "channels"):
            del stated[field]
        return
    stated["decoder_heads"] = heads if heads != stated["heads"] else None
    stated["decoder_ffn_hidden"] = ffn if ffn != stated["ffn_hidden"] else None


WHISPER = ModelType(
    keys={
        "d_model": size("hidden", 384),
        "encoder_layers": size("encoder_layers", 4),
        "encoder_attention_heads": size("heads", 6),
        "encoder_ffn_dim": size("ffn_hidden", 1536),
        "decoder_layers": size("decoder_layers", 4),
        "decoder_attention_heads": size("", 6),
        "decoder_ffn_dim": size("", 1536),
        "vocab_size": size("vocab", 51865),
        "num_mel_bins": size("channels", 80),
        "max_source_positions": size("source_positions", 1500),
        "max_target_positions": size("max_positions", 448),
        "activation_function": activation("gelu"),
        "dropout": probability("dropout", 0.0),
        "attention_dropout": probability("attention_dropout", 0.0),
        "activation_dropout": probability("ffn_dropout", 0.0),
        "tie_word_embeddings": flag("tied", True),
        "classifier_proj_size": size("", 256),
        "use_weighted_layer_sum": flag("", False),
    },
    architectures={
        "WhisperForConditionalGeneration": LM_HEAD,
        "WhisperModel": NO_HEAD,
        "WhisperForAudioClassification": {
            "head": False, "arch": "encoder", "family": "speech-encoder", "classes": LABELS,
            "classifier_tokens": "mean",
        },
        "WhisperForCausalLM": {"head": True, "arch": "decoder", "family": "", "cross_attention": True},
    },
    fixed={
        "family": "speech", "arch": "encoder-decoder", "positions": "learned", "pre_norm": True, "final_norm": True,
        "bias": True, "key_bias": False,
    },
    aliases={
        "hidden_size": "d_model", "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers", "num_key_value_heads": "encoder_attention_heads",
    },
    # Layers that are left out at random in training, and parts of the spectrogram that are hidden, are counted in full.
    inert=names(
        """apply_spec_augment decoder_layerdrop encoder_layerdrop init_std mask_feature_length
        mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob median_filter_width
        scale_embedding alignment_heads lang_to_id language forced_decoder_ids task_to_id
        is_multilingual no_timestamps_token_id prev_sot_token_id return_timestamps max_initial_timestamp_index"""
    ),
    finish=_whisper,
)  # fmt: skip

TYPES: dict[str, ModelType] = {
    "clip": CLIP, "clip_text_model": CLIP_TEXT_MODEL, "clip_vision_model": CLIP_VISION, "whisper": WHISPER,
}  # fmt: skip
