"""Models of images: ViT, DeiT, DINOv2 (with and without registers), Swin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfcost.errors import ConfigError
from tfcost.model_types.spec import LABELS, Key, ModelType, activation, flag, names, probability, size

IMAGE: Mapping[str, Any] = {
    "family": "image", "arch": "encoder", "positions": "learned", "pre_norm": True, "final_norm": True, "bias": True,
    "head": False, "prefix_tokens": 1, "classifier_tokens": "first",
}  # fmt: skip


PIXELS: Mapping[str, Any] = {"pixels": True}
"""A head that predicts the pixels of masked patches."""

MAX_RATIO, MAX_WIDTH = 1000, 10**9
"""A product of these is a float that has every digit."""


def sides(field: str, default: int) -> Key:
    """A side of a square, or both sides of a rectangle."""
    return Key(field, default, "sides")


def state_sides(values: Mapping[str, Any], stated: dict[str, Any], prefix: str = "") -> None:
    """State the rows and columns of image and patch, where the config gives both."""
    for key, width in (("image_size", "image_width"), ("patch_size", "patch_width")):
        if isinstance(value := values[prefix + key], list):
            stated[key], stated[width] = value


def _image(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    state_sides(values, stated)
    stated["follows_dropout"] = ("embedding_dropout",)
    if stated.pop("pixels", False):
        stated |= {"pixel_stride": values["encoder_stride"], "mask_token": True}


def _dinov2(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _image(values, stated)
    stated["ffn_hidden"] = values["mlp_ratio"] * values["hidden_size"]
    if values["use_swiglu_ffn"]:
        # Two thirds of that, rounded up to a multiple of eight (Dinov2SwiGLUFFN).
        stated |= {"ffn_hidden": (2 * stated["ffn_hidden"] // 3 + 7) // 8 * 8, "ffn": "glu", "activation": "silu"}
    if "num_register_tokens" in values:
        stated["plain_tokens"] = values["num_register_tokens"]
        stated["prefix_tokens"] = 1 + values["num_register_tokens"]


def _swin(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    _image(values, stated)
    for key, field in (("depths", "stage_layers"), ("num_heads", "stage_heads")):
        if not values[key] or not all(isinstance(each, int) and not isinstance(each, bool) for each in values[key]):
            raise ConfigError(f"{key} must be an array of positive integers, not {str(values[key])[:60]}")
        if min(values[key]) < 1:
            raise ConfigError(f"{key} must be an array of positive integers, not {str(values[key])[:60]}")
        stated[field] = tuple(values[key])
    if len(values["depths"]) != len(values["num_heads"]):
        raise ConfigError(f"depths has {len(values['depths'])} stages, but num_heads has {len(values['num_heads'])}")
    ratio = values["mlp_ratio"]
    if not 0 < ratio <= MAX_RATIO or values["embed_dim"] > MAX_WIDTH:
        raise ConfigError(f"mlp_ratio must be above 0 and at most {MAX_RATIO}, and embed_dim at most {MAX_WIDTH:,}")
    stated |= {"layers": sum(values["depths"]), "heads": values["num_heads"][0], "ffn_ratio": ratio}
    stated["ffn_hidden"] = int(ratio * values["embed_dim"])
    if not values["use_absolute_embeddings"]:
        stated["positions"] = "none"


VIT = ModelType(
    keys={
        "hidden_size": size("hidden", 768),
        "num_hidden_layers": size("layers", 12),
        "num_attention_heads": size("heads", 12),
        "intermediate_size": size("ffn_hidden", 3072),
        "hidden_act": activation("gelu"),
        "hidden_dropout_prob": probability("dropout", 0.0),
        "attention_probs_dropout_prob": probability("attention_dropout", 0.0),
        "image_size": sides("image_size", 224),
        "patch_size": sides("patch_size", 16),
        "num_channels": size("channels", 3),
        "qkv_bias": flag("attention_bias", True),
        "pooler_output_size": size("pooler_size", None),
        "pooler_act": activation("tanh", "pooler_activation"),
        "encoder_stride": size("", 16),
    },
    architectures={
        "ViTModel": {"pooler": True},
        "ViTForImageClassification": {"classes": LABELS},
        "ViTForMaskedImageModeling": PIXELS,
    },
    fixed=IMAGE,
    inert=names("layer_norm_eps"),
    finish=_image,
)

DEIT = VIT._replace(
    architectures={
        "DeiTModel": {"pooler": True},
        "DeiTForImageClassification": {"classes": LABELS},
        "DeiTForImageClassificationWithTeacher": {"classes": LABELS, "classifiers": 2},
        "DeiTForMaskedImageModeling": PIXELS,
    },
    fixed={**IMAGE, "prefix_tokens": 2},  # the class token, and that of the teacher
)

DINOV2 = ModelType(
    keys={
        **{
            name: key
            for name, key in VIT.keys.items()
            if name not in ("intermediate_size", "pooler_output_size", "pooler_act", "encoder_stride")
        },
        "patch_size": sides("patch_size", 14),
        "mlp_ratio": size("", 4),
        "use_swiglu_ffn": flag("", False),
        "use_mask_token": flag("mask_token", True),
    },
    architectures={
        "Dinov2Model": {},
        "Dinov2ForImageClassification": {"classes": LABELS, "classifier_tokens": "first_and_mean"},
    },
    fixed={**IMAGE, "layer_scale": True},
    # Stochastic depth keeps one number for each image and branch.
    inert=names(
        """_out_features _out_indices apply_layernorm drop_path_rate layer_norm_eps layerscale_value out_features
        out_indices reshape_hidden_states stage_names"""
    ),
    finish=_dinov2,
)

DINOV2_REGISTERS = DINOV2._replace(
    keys={
        **{name: key for name, key in DINOV2.keys.items() if name != "use_mask_token"},
        "patch_size": sides("patch_size", 16),
        "num_register_tokens": size("", 4, least=0),
    },
    architectures={
        "Dinov2WithRegistersModel": {},
        "Dinov2WithRegistersForImageClassification": {"classes": LABELS, "classifier_tokens": "first_and_mean"},
    },
    fixed={**IMAGE, "layer_scale": True, "mask_token": True},
    inert=DINOV2.inert | names("interpolate_antialias interpolate_offset"),
)

SWIN = ModelType(
    keys={
        "embed_dim": size("hidden", 96),
        "depths": Key("", (2, 2, 6, 2), "list"),
        "num_heads": Key("", (3, 6, 12, 24), "list"),
        "window_size": size("window_side", 7),
        "mlp_ratio": Key("", 4.0, "number"),
        "hidden_act": activation("gelu"),
        "hidden_dropout_prob": probability("dropout", 0.0),
        "attention_probs_dropout_prob": probability("attention_dropout", 0.0),
        "image_size": sides("image_size", 224),
        "patch_size": sides("patch_size", 4),
        "num_channels": size("channels", 3),
        "qkv_bias": flag("attention_bias", True),
        "use_absolute_embeddings": flag("", False),
        "encoder_stride": size("", 32),
    },
    architectures={
        "SwinModel": {},
        "SwinForImageClassification": {"classes": LABELS, "classifier_tokens": "mean"},
        "SwinForMaskedImageModeling": PIXELS,
    },
    fixed={**IMAGE, "family": "windows", "prefix_tokens": 0, "patch_norm": True},
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    # num_layers and hidden_size are what the class makes of depths and embed_dim.
    inert=names(
        """_out_features _out_indices drop_path_rate hidden_size layer_norm_eps num_layers out_features
        out_indices path_norm stage_names"""
    ),
    finish=_swin,
)

TYPES: dict[str, ModelType] = {
    "vit": VIT, "deit": DEIT, "dinov2": DINOV2, "dinov2_with_registers": DINOV2_REGISTERS, "swin": SWIN,
}  # fmt: skip
