"""Every structure that this package knows: built on symbols and then given the sizes, it has the figures of numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfcost
from tfcost.models import Model, load, preset_files

KEYS = (
    "parameters", "active_parameters", "active_non_input_embedding_parameters", "non_embedding_parameters",
    "forward_flops", "train_flops", "attention_flops", "activation_bytes", "logits_bytes", "sort_comparisons",
)  # fmt: skip

LAW = settings(deadline=None, max_examples=40)

Draw = st.DrawFn


def check(model: Model | None, **given_fields: Any) -> None:
    report = tfcost.analyze(model, **given_fields, formula=True)
    forms = report.closed.totals([key for key in KEYS if key in report.totals])
    found = {key: form.subs(report.closed.values) for key, form in forms.items()}
    assert found == {key: report.totals[key] for key in forms}


@st.composite
def bases(draw: Draw) -> dict[str, Any]:
    heads = draw(st.sampled_from([1, 2, 4]))
    return {
        "hidden": heads * draw(st.sampled_from([3, 4, 10])), "heads": heads, "layers": draw(st.integers(1, 5)),
        "vocab": draw(st.sampled_from([None, 7, 50])), "ffn": draw(st.sampled_from(["mlp", "glu"])),
        "ffn_hidden": draw(st.sampled_from([None, 9])), "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "bias": draw(st.booleans()), "tied": draw(st.booleans()), "dropout": draw(st.sampled_from([0.0, 0.1])),
        "batch": draw(st.integers(1, 3)), "attention": draw(st.sampled_from(["eager", "flash", "math"])),
        "arch": draw(st.sampled_from(["decoder", "encoder"])), "seq_len": draw(st.sampled_from([1, 12, 35])),
    }  # fmt: skip


@st.composite
def mixtures(draw: Draw) -> dict[str, Any]:
    fields = draw(bases())
    experts = draw(st.integers(1, 6))
    fields |= {
        "experts": experts, "experts_per_token": draw(st.integers(1, experts)),
        "expert_hidden": draw(st.sampled_from([None, 5])), "shared_expert_hidden": draw(st.sampled_from([None, 3])),
        "router": draw(st.sampled_from(["softmax", "chosen", "sigmoid"])),
        "shared_expert_gate": draw(st.booleans()), "attention_sinks": draw(st.booleans()),
    }  # fmt: skip
    if draw(st.booleans()) and fields["layers"] > 1:
        fields["dense_layers"] = draw(st.integers(1, fields["layers"] - 1))
    if draw(st.booleans()):
        fields["window"] = draw(st.sampled_from([1, 8, 12, 40]))
        if draw(st.booleans()) and fields["layers"] > 1:
            fields["local_layers"] = draw(st.integers(1, fields["layers"] - 1))
            dense = fields.get("dense_layers", 0)
            least, most = dense + fields["local_layers"] - fields["layers"], min(dense, fields["local_layers"])
            fields["local_dense_layers"] = draw(st.integers(max(least, 0), most))
    if draw(st.booleans()):
        fields |= {"experts": 4, "experts_per_token": 2, "capacity_factor": draw(st.sampled_from(["1", "2", "1.5"]))}
        fields["batch"] = 4
    return fields


@LAW
@given(mixtures())
def test_mixtures_sinks_and_windows(fields: dict[str, Any]) -> None:
    check(None, **fields)


@st.composite
def latents(draw: Draw) -> dict[str, Any]:
    return draw(bases()) | {
        "attention_kind": "latent", "kv_rank": draw(st.integers(1, 9)), "rope_dim": draw(st.integers(1, 4)),
        "query_rank": draw(st.sampled_from([None, 6])), "value_dim": draw(st.sampled_from([None, 5])),
        "head_dim": draw(st.integers(4, 8)), "absorbed": draw(st.booleans()),
    }  # fmt: skip


@LAW
@given(latents())
def test_latent_attention(fields: dict[str, Any]) -> None:
    check(None, **fields)


@st.composite
def sparse(draw: Draw) -> dict[str, Any]:
    fields = draw(bases())
    if draw(st.booleans()):
        return fields | {"attention_kind": "linear", "features": draw(st.integers(1, 9))}
    return fields | {
        "attention_kind": "lsh", "hashes": draw(st.integers(1, 3)), "buckets": 2 * draw(st.integers(1, 4)),
        "chunk_length": draw(st.sampled_from([1, 4, 6])), "seq_len": 12 * draw(st.integers(1, 4)),
    }  # fmt: skip


@LAW
@given(sparse())
def test_attention_without_a_square(fields: dict[str, Any]) -> None:
    check(None, **fields)


@st.composite
def pictures(draw: Draw) -> dict[str, Any]:
    fields = draw(bases())
    for name in ("vocab", "seq_len", "arch", "tied"):
        del fields[name]
    patch = draw(st.integers(1, 5))
    plain = draw(st.integers(0, 2))
    return fields | {
        "image_size": draw(st.integers(patch, 19)), "patch_size": patch, "channels": draw(st.integers(1, 4)),
        "classes": draw(st.integers(0, 5)), "layer_scale": draw(st.booleans()), "plain_tokens": plain,
        "prefix_tokens": plain + draw(st.integers(0, 2)), "image_width": draw(st.sampled_from([None, patch + 3])),
        "classifier_tokens": draw(st.sampled_from(["first", "mean", "first_and_mean"])),
    }  # fmt: skip


@LAW
@given(pictures())
def test_images(fields: dict[str, Any]) -> None:
    check(None, **fields)


@LAW
@given(st.integers(0, 40), st.sampled_from([4, 7]), st.integers(1, 3), st.sampled_from(["eager", "flash"]))
def test_windows_that_cover_the_grid_and_windows_that_do_not(
    pixels: int, side: int, stages: int, attention: str
) -> None:
    stated = {
        **load("swin-tiny").stated, "window_side": side, "stage_layers": (1, 2, 3)[:stages],
        "stage_heads": (3, 6, 8)[:stages], "layers": sum((1, 2, 3)[:stages]),
    }  # fmt: skip
    check(Model("", stated), image_size=4 * side * 2 ** (stages - 1) + pixels, attention=attention, batch=2)


@LAW
@given(st.integers(1, 3200), st.integers(1, 448), st.sampled_from(["eager", "flash"]))
def test_sound(frames: int, length: int, attention: str) -> None:
    check(load("whisper-tiny"), frames=frames, seq_len=length, attention=attention)


@LAW
@given(st.sampled_from(["rnn", "lstm", "gru", "conv"]), bases(), st.integers(1, 2), st.integers(1, 7))
def test_layers_that_are_no_transformers(kind: str, fields: dict[str, Any], biases: int, kernel: int) -> None:
    sizes = {key: fields[key] for key in ("hidden", "layers", "vocab", "batch", "seq_len", "bias", "tied", "dropout")}
    check(load(kind), **sizes, **({"kernel": kernel} if kind == "conv" else {"gate_biases": biases}))


NEW = sorted(
    name
    for name in preset_files()
    if name.startswith(("mixtral", "qwen3-", "deepseek-v", "gpt-oss", "granite", "dbrx", "vit", "swin", "clip", "dino"))
)


@pytest.mark.parametrize("name", NEW[::5])
def test_presets(name: str) -> None:
    check(load(name), batch=2, attention="flash")
