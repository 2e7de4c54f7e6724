"""Whole memory against typed formulas, published figures and PyTorch: recipes, recomputation, adapters, the peak."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfcost
from tfcost.errors import InputError, UnknownName
from tfcost.policy import RECIPES

DOCUMENT = {"hidden": 64, "heads": 4, "layers": 6, "vocab": 100, "batch": 2, "seq_len": 32}
b, N, d, h, l, V = 2, 32, 64, 4, 6, 100  # noqa: E741  layers
P = l * (12 * d * d + 13 * d) + V * d


def memory(model=None, **given):
    return tfcost.analyze(model, command="memory", **({} if model else DOCUMENT), **given)


# --- Recipes ----------------------------------------------------------------------------------------------------------

# weights, gradients, master weights, optimizer: bytes per parameter of a matrix at 2-byte weights, as the papers count.
TYPED = {
    "zero-16": (2, 2, 4, 8), "megatron-18": (2, 4, 4, 8), "grad-accum-20": (2, 6, 4, 8), "bf16-adam": (2, 2, 0, 4),
    "bf16-adam-in-backward": (2, 2, 0, 4), "adam8bit": (2, 2, 0, 2), "adam8bit-master": (2, 2, 4, 2),
    "adam8bit-in-backward": (2, 2, 0, 2), "adafactor": (2, 2, 0, 0), "sgd": (2, 2, 0, 0), "sgd-momentum": (2, 2, 0, 2),
    "sgd-in-backward": (2, 2, 0, 0), "rmsprop": (2, 2, 0, 2), "lion": (2, 2, 4, 4), "muon": (2, 2, 4, 4),
    "paged-adam8bit": (2, 2, 0, 0), "paged-adam8bit-in-backward": (2, 2, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPED)
def test_bytes_per_parameter(name):
    each = RECIPES[name].per_parameter(2)
    assert (each["weights"], each["gradients"], each["master_weights"], each["optimizer"]) == TYPED[name]


def test_fp32_and_fp8_per_parameter():
    assert sum(RECIPES["fp32-adam"].per_parameter(4).values()) == 16
    each = RECIPES["fp8"].per_parameter(1)
    assert sum(each.values()) - each["weights"] == 6  # FP8-LM's own sum: 2 master, 1 gradient, 1 + 2 Adam


def test_every_recipe_has_a_typed_row():
    assert set(TYPED) | {"fp32-adam", "fp8"} == set(RECIPES)


@pytest.mark.parametrize(
    "name", ["zero-16", "megatron-18", "grad-accum-20", "bf16-adam", "sgd", "sgd-momentum", "lion"]
)
def test_the_totals_are_the_row_by_parameters(name):
    totals = memory(recipe=name).totals
    weights, gradients, master, optimizer = TYPED[name]
    assert totals["weight_bytes"] == weights * P
    assert totals["gradient_bytes"] == gradients * P
    assert totals["master_weight_bytes"] == master * P
    assert totals["optimizer_bytes"] == optimizer * P
    step = memory(recipe=name).extra["moments"][-1]
    assert step["moment"] == "optimizer step"
    assert step["total"] == sum(TYPED[name]) * P


def test_in_backward_only_the_largest_gradient_is_there():
    assert memory(recipe="sgd-in-backward").totals["gradient_bytes"] == 2 * 4 * d * d


# --- Recomputation ----------------------------------------------------------------------------------------------------


def test_bytes_kept_and_work_done_again():
    """Korthikanti et al. 2022: 34bNd + 5bN²h, 34bNd, 2bNd; again: every layer's forward (full), QKᵀ and PV."""
    square, linear = 4 * b * N * N * d, 24 * b * N * d * d
    kept = {"none": 34 * b * N * d + 5 * b * N * N * h, "selective": 34 * b * N * d, "full": 2 * b * N * d}
    again = {"none": 0, "selective": square, "full": linear + square}
    for mode, per_layer in kept.items():
        totals = memory(recompute=mode).totals
        assert totals["activation_bytes"] == l * per_layer
        assert totals["activation_bytes_per_layer"] == per_layer
        work = tfcost.analyze(None, command="flops", **DOCUMENT, recompute=mode).totals
        assert work["recompute_flops"] == l * again[mode]
        assert work["hardware_flops"] == work["train_flops"] + l * again[mode]
    third = memory(recompute="every-3").totals["activation_bytes"]
    assert third == 2 * kept["full"] + 4 * kept["none"]
    with pytest.raises(InputError, match="layers 6 does not divide"):
        memory(recompute="every-4")


def test_chosen_ops():
    """``ops`` discards what the named ops make, ``save`` all else of a layer: bytes and FLOPs by hand."""
    names = "attention_norm,attention,attention_residual,mlp_norm,mlp,mlp_residual"
    sbh, square, core = b * N * d, b * N * N * h, 4 * b * N * N * d
    linear = 24 * b * N * d * d
    for recompute, kept, again in (
        (f"ops:{names}", 2 * sbh, linear + core),
        ("ops:scores,softmax,attention/dropout", 34 * sbh, core // 2),  # QKᵀ; PV's output is kept
        ("ops:activation", 34 * sbh + 5 * square - 8 * sbh, 0),  # GELU's output goes, its input is kept anyway
        ("ops:softmax", 34 * sbh + 5 * square, 0),  # the scores are kept in place of their softmax
        ("ops:attention_norm,mlp_norm", 34 * sbh + 5 * square - 4 * sbh, 0),
        ("save:query,key,value,output,up,down", (2 + 4 * 2 + 8 + 2) * sbh, core),
        ("save:gelu", 2 * sbh + 8 * sbh, linear + core),
    ):
        totals = memory(recompute=recompute).totals
        assert totals["activation_bytes_per_layer"] == kept, recompute
        work = tfcost.analyze(None, command="flops", **DOCUMENT, recompute=recompute).totals
        assert work["recompute_flops"] == l * again, recompute


def test_a_fused_kernel_is_chosen_whole():
    plain, again = (memory(attention="flash", recompute=each) for each in ("none", "ops:flash"))
    gone = 2 * b * N * d + 4 * b * N * h  # its output and log-sum-exp
    assert plain.totals["activation_bytes_per_layer"] - again.totals["activation_bytes_per_layer"] == gone
    work = tfcost.analyze(None, command="flops", **DOCUMENT, attention="flash", recompute="ops:flash").totals
    assert work["recompute_flops"] == l * 4 * b * N * N * d


def test_the_live_layer_stands_in_the_peak():
    moments = {m["moment"]: m for m in memory(recompute="full").extra["moments"]}
    least = l * 2 * b * N * d
    assert moments["end of forward"]["activations"] == least
    at_last = moments["backward at the last layer"]["activations"]
    assert least < at_last <= least - 2 * b * N * d + 34 * b * N * d + 5 * b * N * N * h


def test_flash_keeps_no_square_so_selective_leaves_it():
    assert memory(recompute="selective", attention="flash").totals == memory(attention="flash").totals


# --- Adapters, quantised weights, loss --------------------------------------------------------------------------------


def test_lora_parameters_and_kept_bytes():
    """PEFT prints 4,194,304 trainable for r=8 on Llama-2-7B's q and v: 32 * 2 * 8 * (4096 + 4096)."""
    totals = tfcost.analyze("llama-2-7b", command="params", lora_rank=8).totals
    assert totals["trainable_parameters"] == 4_194_304
    assert totals["parameters"] == 6_738_415_616 + 4_194_304
    tiny = {"hidden": 2048, "heads": 32, "kv_heads": 4, "layers": 22, "ffn": "glu", "ffn_hidden": 5632, "vocab": 32000}
    counted = tfcost.analyze(None, command="params", **tiny, lora_rank=64, lora_targets="all").totals
    assert counted["trainable_parameters"] == 50_462_720  # user case A22: TinyLlama


def test_frozen_weights_keep_what_their_inputs_gradients_need():
    """Against the whole 34 + 5: the inputs of K, of the out-projection and of both MLP products go (2 + 2 + 8 bNd and,
    for Q and V's shared input, nothing); A's products (rank r, two of them) come."""
    r = 4
    totals = memory(lora_rank=r, lora_targets="query,value").totals
    gone = (2 + 2 + 8) * b * N * d
    assert totals["activation_bytes_per_layer"] == 34 * b * N * d + 5 * b * N * N * h - gone + 2 * 2 * b * N * r


def test_frozen_trains_the_head_alone():
    totals = memory(frozen=True, tied=False).totals
    assert totals["activation_bytes"] == 0
    assert totals["gradient_bytes"] == 2 * V * d
    with pytest.raises(InputError, match="--untied"):
        memory(frozen=True)


def test_the_loss_holds_a_chunk_or_nothing_of_the_logits():
    eager, chunked, fused = (memory(loss=loss).totals["logits_bytes"] for loss in ("eager", "chunked=4", "fused"))
    assert eager == 2 * b * N * d + 6 * b * N * V
    assert chunked == 2 * b * N * d + 6 * b * N // 4 * V
    assert fused == 2 * b * N * d + 4 * b * N
    assert memory(logit_copies=3).totals["logits_bytes"] == 2 * b * N * d + (2 + 3 * 4) * b * N * V


def test_a_reference_model_is_a_second_set_of_weights():
    assert memory(reference_model=True).totals["weight_bytes"] == 4 * P


def test_labels_by_hand():
    """k labelled tokens of N: 2bkd + 6bkV kept by head and loss, 2bkdV FLOPs; the layers as ever."""
    k = 5
    plain, some = (memory(**each).totals for each in ({}, {"labels": k}))
    assert some["logits_bytes"] == 2 * b * k * d + 6 * b * k * V
    assert some["activation_bytes"] == plain["activation_bytes"]
    flops = [tfcost.analyze(None, command="flops", **DOCUMENT, **each).totals for each in ({}, {"labels": k})]
    assert flops[0]["forward_flops"] - flops[1]["forward_flops"] == 2 * b * (N - k) * d * V
    assert memory(labels=N).totals["logits_bytes"] == plain["logits_bytes"]


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "words"), [
    ({"recipe": "adamz"}, "unknown recipe 'adamz'"), ({"device": "h1000"}, "unknown device"),
    ({"quantize": "nf4"}, "do not train"), ({"quantize": "nf4", "lora_rank": 4, "dtype": "fp8"}, "--dtype bf16"),
    ({"lora_rank": 4, "lora_targets": "gate"}, "no 'gate'"), ({"lora_rank": 4, "lora_targets": "qq"}, "LoRA target"),
    ({"recompute": "some"}, "every-K"), ({"recompute": "ops:"}, "ops:A,B"),
    ({"recompute": "ops:activaton"}, "activation"),
    ({"recompute": "ops:softmax", "attention": "flash"}, "inside a fused kernel"),
    ({"loss": "chunked"}, "chunked=8"), ({"context": 5}, "--mode decode"),
    ({"labels": 33}, "32 tokens"), ({"labels": 1, "mode": "prefill"}, "training"),
    ({"labels": 1, "head": False}, "head"),
    ({"recipe": "zero-16", "dtype": "fp32"}, "fp32-adam"), ({"lora_targets": "query"}, "needs --lora-rank"),
])  # fmt: skip
def test_one_line_errors(given, words):
    with pytest.raises((InputError, UnknownName)) as caught:
        memory(**given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# --- Laws -------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["zero-16", "adam8bit", "sgd"]), st.sampled_from(["none", "selective", "full"]),
       st.sampled_from(["eager", "chunked=3", "fused"]), st.sampled_from(["eager", "flash"]))  # fmt: skip
def test_the_peak_is_a_moment_and_no_moment_is_above_it(recipe, recompute, loss, attention):
    report = memory(recipe=recipe, recompute=recompute, loss=loss, attention=attention)
    totals = {m["moment"]: m["total"] for m in report.extra["moments"]}
    assert report.totals["total_bytes"] == max(totals.values()) == totals[report.totals["peak_moment"]]
    for moment in report.extra["moments"]:
        parts = sum(value for key, value in moment.items() if key not in ("moment", "total"))
        assert parts == moment["total"]
