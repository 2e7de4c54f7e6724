"""Whole memory against typed formulas, published figures and PyTorch: recipes, recomputation, adapters, the peak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfcost
from tfcost.analysis import point_of
from tfcost.errors import InputError, UnknownName
from tfcost.policy import RECIPES
from tfcost.stored import quantized

GIB = 2**30
ROWS = json.loads((Path(__file__).parent / "data" / "memory_published.json").read_text(encoding="utf-8"))["rows"]

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
    "sgd-in-backward": (2, 2, 0, 0), "lion": (2, 2, 4, 4), "muon": (2, 2, 4, 4),
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


def test_eight_bit_states_have_a_scale_per_256_elements_and_small_tensors_in_fp32():
    # per layer: four d² and two 4d² matrices (32 * 64² elements are whole blocks), 4d + 5d + 4d small ones
    matrices = l * 12 * d * d + V * d
    small = l * 13 * d
    blocks = l * 12 * d * d // 256 + V * d // 256
    assert memory(recipe="adam8bit").totals["optimizer_bytes"] == 2 * (matrices + 4 * blocks) + 2 * 4 * small


def test_in_backward_only_the_largest_gradient_is_there():
    assert memory(recipe="sgd-in-backward").totals["gradient_bytes"] == 2 * 4 * d * d


OPTIMIZERS = {
    "fp32-adam": ("AdamW", {}), "sgd-momentum": ("SGD", {"momentum": 0.9}), "sgd": ("SGD", {}),
    "adafactor": ("Adafactor", {}),
}  # fmt: skip


def reference(cfg, dtype="float32"):
    torch = pytest.importorskip("torch")
    from tfcost.validate.translate import reference_of

    del torch
    return reference_of(cfg, dtype)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_that_torch_makes(name):
    """Every state tensor of a step of torch.optim on the document's weights; step counters are no element's."""
    torch = pytest.importorskip("torch")
    kind, options = OPTIMIZERS[name]
    analysis = point_of(None, **DOCUMENT, dtype="fp32", recipe=name).analysis
    parameters = []
    for weight in analysis.weights:
        from tfcost.stored import sides

        shape = sides(weight) if len(weight.axes) > 1 else (weight.numel,)
        parameters += [torch.nn.Parameter(torch.zeros(*shape)) for _ in range(weight.copies)]
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer = getattr(torch.optim, kind)(parameters, lr=0.1, **options)
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    made = sum(t.numel() * t.element_size() for t in states)
    assert analysis.totals(["memory"])["optimizer_bytes"] == made
    assert analysis.totals(["memory"])["gradient_bytes"] == sum(p.grad.nbytes for p in parameters)


# --- Published --------------------------------------------------------------------------------------------------------

UNIT = {"GB": 10**9, "GiB": 2**30, "MiB": 2**20, "KiB/token": 2**10, "kB/token": 10**3, "bytes": 1, "tokens": 1}


def ours(row) -> float | None:
    given, kind = row["inputs"], row["kind"]
    if kind == "activation_memory" and "none-notp" in row["id"]:
        return memory_of(given)["activation_bytes_per_layer"]
    if kind == "kv_cache" and {"kv_heads", "head_dim"} <= given.keys():
        return kv_of(given)["kv_cache_bytes_per_token"]
    if kind == "kv_cache" and "cache_GiB" in given:
        heads = given["hidden"] // 128
        each = kv_of({"kv_heads": heads, "head_dim": 128, "layers": given["layers"], "bytes": 2})
        return given["cache_GiB"] * GIB // each["kv_cache_bytes_per_token"]
    if kind == "weights_memory":
        return given["params"] * {"fp32": 4, "fp16": 2}[given["dtype"]]
    if row["id"].startswith("state_memory/zero"):
        return given["params"] * sum(RECIPES["zero-16"].per_parameter(2).values())
    if row["id"].startswith("memory/nanogpt"):
        each = RECIPES["fp32-adam"].per_parameter(4)
        return given["params"] * (each["weights"] + each["optimizer"])
    return None


def memory_of(given):
    return tfcost.analyze(
        None, command="memory", hidden=given["hidden"], heads=given["heads"], layers=given["layers"],
        vocab=given["vocab"], batch=given["micro_batch"], seq_len=given["seq"],
    ).totals  # fmt: skip


def kv_of(given):
    from tfcost.fit import kv_report

    heads, width = given["kv_heads"], given["head_dim"]
    report = kv_report(
        None, hidden=heads * width, heads=heads, head_dim=width, layers=given["layers"], vocab=10,
        dtype={1: "fp8", 2: "bf16", 4: "fp32"}[given["bytes"]],
    )  # fmt: skip
    return report.totals


COMPARED = [row for row in ROWS if ours(row) is not None and row["unit"] in UNIT]


@pytest.mark.parametrize("row", COMPARED, ids=[row["id"] for row in COMPARED])
def test_a_published_figure(row):
    assert ours(row) == pytest.approx(row["value"] * UNIT[row["unit"]], rel=max(row["rel_tol"], 1e-12))


def test_enough_of_the_published_figures_are_compared():
    assert len(COMPARED) >= 12


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


@pytest.mark.parametrize(("name", "expected"), [
    ("nf4", 64 * 256 // 2 + 4 * 64 * 256 // 64),
    ("nf4-dq", 64 * 256 // 2 + 64 * 256 // 64 + 4 * 64 * 256 // 64 // 256 + 4),
    ("int8", 64 * 256 + 4 * 256), ("fp8", 64 * 256 + 4),
])  # fmt: skip
def test_bytes_of_a_quantised_matrix(name, expected):
    from tfcost.graph import Graph
    from tfcost.policy import QUANTIZED

    assert quantized(Graph().weight("w", ("d", "f"), (64, 256)), QUANTIZED[name]) == expected


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


# --- User cases -------------------------------------------------------------------------------------------------------


def test_a10_the_774m_model_in_32_gb():
    report = memory("gpt2-large", vocab=50304, batch=4, seq_len=1024, attention="eager", device="32GB")
    totals = report.totals
    assert totals["activation_bytes"] == pytest.approx(21.52e9, rel=2e-3)
    assert not totals["fits"]
    assert 50304 * 1024 * 4 * 4 == 786 * 2**20


def test_a11_states_and_activations_of_a_7b():
    layer = 16 * 4096 * 2 * 4096 + 4 * 4096 * 2 * 32 + 8 * 4096 * 2 * 11008
    report = tfcost.analyze("llama-2-7b", command="memory", batch=2, seq_len=4096)
    assert report.totals["activation_bytes_per_layer"] == layer == 1_259_339_776


def test_a02_flash_keeps_10sbh_and_a_log_sum_exp():
    report = tfcost.analyze(
        None, command="memory", by="op", hidden=8192, heads=32, layers=1, seq_len=4096, attention="flash", dropout=0.0
    )
    kept = {row["tensor"]: row["bytes"] for row in report.rows if row["path"].startswith("layer/attention/")}
    assert sum(kept.values()) == 336_068_608


S06 = [("zero-16", 107.8), ("megatron-18", 121.3), ("bf16-adam", 53.9), ("sgd", 27.0)]


@pytest.mark.parametrize(("recipe", "gigabytes"), S06)
def test_s06_a_7b_on_80_gb(recipe, gigabytes):
    report = tfcost.analyze("llama-2-7b", command="memory", batch=1, seq_len=128, recipe=recipe, device="80GB")
    assert report.extra["moments"][-1]["total"] == pytest.approx(gigabytes * 1e9, rel=2e-3)
    assert report.totals["fits"] == (gigabytes < 80)


def test_a16_and_a18_one_fp32_copy_of_the_logits():
    for vocab, length, expected in ((151936, 32768, 18.55), (262144, 15000, 14.65)):
        saved = point_of(None, hidden=64, heads=1, layers=1, vocab=vocab, seq_len=length).analysis.saved
        [copy] = [each.tensor.bytes for each in saved if each.tensor.path.endswith("fp32_log_probabilities")]
        assert copy / GIB == pytest.approx(expected, abs=0.005)


def test_a04_a_layer_of_bert_large_and_its_boundary():
    shape = {"hidden": 1024, "heads": 16, "layers": 1, "seq_len": 512}
    kept = {mode: tfcost.analyze(None, command="memory", **shape, recompute=mode).totals for mode in ("none", "full")}
    assert kept["none"]["activation_bytes"] == 38_797_312
    assert kept["full"]["activation_bytes"] == 1_048_576


def test_a21_lora_of_a_13b_with_checkpointing():
    """26.5 GB of weights, 0.33 of boundaries, and the logits; measured 28 GB."""
    given = {"vocab": 64000, "seq_len": 800, "lora_rank": 8, "recompute": "full"}
    totals = tfcost.analyze("llama-2-13b", command="memory", **given).totals
    assert totals["end_of_forward_bytes"] == pytest.approx(27.4e9, rel=0.05)
    assert totals["total_bytes"] == pytest.approx(28e9, rel=0.05)


@pytest.mark.parametrize(("heads", "hidden", "percent"), [(96, 12288, 70), (128, 20480, 65)])
def test_what_selective_recomputation_saves(heads, hidden, percent):
    """Korthikanti et al. 2022, section 5: of GPT-3 and of MT-NLG, at N = 2048."""
    shape = {"hidden": hidden, "heads": heads, "layers": 1, "seq_len": 2048}
    kept = [tfcost.analyze(None, command="memory", **shape, recompute=mode).totals["activation_bytes"]
            for mode in ("none", "selective")]  # fmt: skip
    assert 100 * (1 - kept[1] / kept[0]) == pytest.approx(percent, rel=0.01)


@pytest.mark.parametrize(("recipe", "gigabytes"), [("sgd-in-backward", 13.99), ("sgd", 27.83)])
def test_s09_pure_bf16_of_a_7b(recipe, gigabytes):
    """Weights, and weights with all gradients: measured 13.99 and 27.83 GB."""
    step = tfcost.analyze("llama-2-7b", command="memory", seq_len=16, recipe=recipe).extra["moments"][-1]
    assert step["total"] == pytest.approx(gigabytes * 1e9, rel=0.05)


def test_a13_multi_query_attention_with_and_without_the_square():
    """sbh(30 + 4/a + 5as/h) in 40 layers is 206.4 GiB; without 5as/h 56.4. Flash adds its fp32 log-sum-exp, 4bNh."""
    shape = {"hidden": 6144, "heads": 48, "kv_heads": 1, "layers": 40, "seq_len": 2048, "batch": 4}
    gib = {
        name: tfcost.analyze(None, command="memory", **shape, **given).totals["activation_bytes"] / GIB
        for name, given in (("eager", {}), ("selective", {"recompute": "selective"}), ("flash", {"attention": "flash"}))
    }
    tokens = 4 * 2048
    assert gib["eager"] == 40 * (tokens * 6144 * 30 + tokens * 4 * 128 + 5 * tokens * 2048 * 48) / GIB
    assert (round(gib["eager"], 1), round(gib["selective"], 1)) == (206.4, 56.4)
    assert gib["flash"] - gib["selective"] == 40 * 4 * tokens * 48 / GIB


def test_a15_gpt2_in_fp32():
    """States of 16 bytes per parameter, 1.854 GiB; copies of the logits of 0.767 GiB, four of them at the peak: the
    logits, their log-probabilities, and two gradients of that shape."""
    report = tfcost.analyze("gpt2", command="memory", batch=8, seq_len=512, dtype="fp32")
    moments = {moment["moment"]: moment for moment in report.extra["moments"]}
    assert moments["optimizer step"]["total"] == 16 * 124_439_808
    assert moments["optimizer step"]["total"] / GIB == pytest.approx(1.854, abs=5e-4)
    assert report.totals["peak_moment"] == "backward at the head"
    copy, head_input = 8 * 512 * 50257 * 4, 8 * 512 * 768 * 4
    assert copy / GIB == pytest.approx(0.767, abs=5e-4)
    peak = moments["backward at the head"]
    assert peak["logits"] + peak["logit_gradients"] - head_input == 4 * copy


def test_a06_and_a28_states_and_logits():
    """What does not depend on how transformers writes its layers: 1.99 GB of states, and copies of the logits."""
    for batch, length, gigabytes in ((8, 1024, 1.647), (4, 512, 0.4117)):
        report = tfcost.analyze("gpt2", command="memory", batch=batch, seq_len=length, dtype="fp32", attention="eager")
        assert report.extra["moments"][-1]["total"] == pytest.approx(1.99e9, rel=1e-3)
        [copy] = {
            each.tensor.bytes
            for each in point_of("gpt2", batch=batch, seq_len=length, dtype="fp32").analysis.saved
            if each.tensor.axes == ("b", "n", "v")
        }
        assert copy / 1e9 == pytest.approx(gigabytes, rel=1e-3)


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
