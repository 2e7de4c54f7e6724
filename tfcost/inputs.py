"""What follows from a model's input that is no text: patches of an image, the stages over them, another tower."""

from __future__ import annotations

from typing import Any

from tfcost.blocks import Run
from tfcost.config import ModelConfig, Stage, complete, size
from tfcost.errors import InputError
from tfcost.graph import div

SIDES = ("image_size", "image_width", "patch_size", "patch_width", "channels")
"""What is said of an image and its patches."""


def complete_family(given: dict[str, Any]) -> None:
    """Complete the fields of a model whose family is not that of its ``arch``."""
    if given["family"] == "towers":
        # --image-size and --patch-size are of the tower that has an image.
        sides = {field: given.pop(field) for field in SIDES if field in given}
        given["tower"] = given["tower"] | sides
    if "image_size" in given:
        complete_image(given)
    if given["family"] == "windows":
        complete_stages(given)
    if isinstance(given.get("tower"), dict):
        given["tower"] = complete(given["tower"])


def run_of(
    cfg: ModelConfig, batch: int, seq_len: int | None, src_len: int | None, frames: int | None
) -> tuple[Run, list[str]]:
    """The pass of a model whose input is an image or sound, and what there is to warn of."""
    if cfg.source_positions is not None:
        if src_len is not None:
            raise InputError("--src-len does not apply to a model of sound; --frames are its source")
        frames = 2 * cfg.source_positions if frames is None else frames
        size("--frames", frames)
        positions = -(-frames // 2)  # the second convolution takes every other frame
        alone = cfg.family == "speech-encoder"
        if alone and seq_len is not None:
            raise InputError("-N/--seq-len does not apply to an encoder of sound; --frames do")
        length = cfg.max_positions if seq_len is None else seq_len
        if not alone:
            size("-N/--seq-len", length)
        warnings = []
        if positions > cfg.source_positions:
            longest = 2 * cfg.source_positions
            warnings.append(f"--frames {frames:,} is beyond the {longest:,} that the model has positions for")
        run = Run(batch, length, positions, frames=frames)
        return run._replace(seq_len=positions, src_len=None) if alone else run, warnings
    for value, name in ((seq_len, "-N/--seq-len"), (src_len, "--src-len"), (frames, "--frames")):
        if value is not None:
            raise InputError(f"{name} does not apply to a model of images; --image-size and --patch-size do")
    return Run(batch, cfg.patches + cfg.prefix_tokens), []


def grid(given: dict[str, Any], padded: bool) -> tuple[int, int]:
    """Rows and columns of patches: of whole ones, or of those that cover the image."""
    missing = [flag for flag in ("image_size", "patch_size") if flag not in given]
    if missing:
        raise InputError("missing " + ", ".join("--" + flag.replace("_", "-") for flag in missing))
    height, patch = given["image_size"], given["patch_size"]
    width, patch_width = given.get("image_width", height), given.get("patch_width", patch)
    extra, extra_width = (patch - 1, patch_width - 1) if padded else (0, 0)
    rows, columns = (height + extra) // patch, (width + extra_width) // patch_width
    if rows == 0 or columns == 0:
        raise InputError(f"--image-size {min(height, width)} is smaller than --patch-size {max(patch, patch_width)}")
    return rows, columns


def complete_image(given: dict[str, Any]) -> None:
    """Count the patches. ViT's projection leaves out what is beyond the last whole patch, Swin's pads the image."""
    if given["arch"] != "encoder":
        raise InputError(f"--image-size needs --arch encoder, not {given['arch']}")
    if "vocab" in given:
        raise InputError("-V/--vocab does not apply to an image model; --classes are what it tells apart")
    rows, columns = grid(given, given["family"] == "windows")
    given["patches"] = rows * columns
    given.setdefault("positions", "learned")
    given["head"] = False  # of a language model
    if given["family"] not in ("windows", "diffusion"):
        given.setdefault("prefix_tokens", 1)
        given.setdefault("embedding_dropout", given["dropout"])
        given.setdefault("classifier_tokens", "first")


def complete_stages(given: dict[str, Any]) -> None:
    """The stages of a Swin: widths double and the grid's sides halve (rounded up) from one to the next."""
    depths, heads, side = given["stage_layers"], given["stage_heads"], given["window_side"]
    if len(depths) != len(heads):
        raise InputError(f"the model has {len(depths)} stages, but heads for {len(heads)}")
    if given["encoder_layers"] != sum(depths):
        raise InputError(f"-l/--layers does not apply to a model of stages, which have {depths} layers")
    if given["heads"] != heads[0]:
        raise InputError(f"-h/--heads does not apply to a model of stages, which have {heads} heads")
    rows, columns = grid(given, padded=True)
    if given["positions"] == "learned" and grid(given, padded=False) != (rows, columns):
        raise InputError(f"--image-size {given['image_size']} does not divide by --patch-size {given['patch_size']}")
    ratio = given.get("ffn_ratio", 4)
    stages = []
    for index, (layers, count) in enumerate(zip(depths, heads, strict=True)):
        width = given["hidden"] * 2**index
        div(width, count, f"the width of stage {index + 1},", "its heads,")
        if min(rows, columns) < side:
            raise InputError(
                f"--image-size {given['image_size']} leaves {rows} x {columns} patches to stage {index + 1}, "
                f"fewer than a window of {side} x {side} holds"
            )
        covered = -(-rows // side) * side * -(-columns // side) * side
        stages.append(Stage(layers, count, width, int(ratio * width), rows * columns, covered))
        rows, columns = -(-rows // 2), -(-columns // 2)
    given["stages"] = tuple(stages)
