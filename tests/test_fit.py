"""The largest that fits, the KV cache and the devices: exact searches, typed caches, user cases."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from test_cli import run as run

import tfcost
from tfcost.devices import device, entries
from tfcost.errors import InputError, UnknownName
from tfcost.fit import fit_report, kv_report
from tfcost.models import load

GIB = 2**30
NORMS = ["layernorm", "rmsnorm"]
SMALL = {"hidden": 32, "heads": 2, "layers": 2, "vocab": 64, "seq_len": 16}


def total(**given):
    return tfcost.analyze(None, command="memory", **{**SMALL, **given}).totals["total_bytes"]


# --- fit --------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(500_000, 40_000_000), st.sampled_from(["batch", "seq-len", "layers", "hidden"]),
       st.sampled_from(["eager", "flash"]), st.sampled_from(["none", "full"]))  # fmt: skip
def test_it_fits_there_and_not_one_step_further(capacity, solve, attention, recompute):
    name = solve.replace("-", "_")
    given = {key: value for key, value in SMALL.items() if key != name} | {"attention": attention}
    report = fit_report(None, solve, device=str(capacity), recompute=recompute, **given)
    value, step = report.totals[name], 2 if solve == "hidden" else 1
    at = {"attention": attention, "recompute": recompute}
    if value:
        assert total(**at, **{name: value}) == report.totals["total_bytes"] <= capacity
    else:
        assert report.totals["total_bytes"] is None
    beyond = total(**at, **{name: value + step})
    assert beyond == report.totals["total_bytes_next"] > capacity


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["batch", "seq_len", "layers", "hidden"]), st.integers(1, 60), st.integers(1, 40))
def test_memory_grows_with_every_size_that_is_solved_for(name, low, more):
    step = 2 if name == "hidden" else 1
    assert total(**{name: step * low}) < total(**{name: step * (low + more)})


def test_lora_rank():
    report = fit_report(None, "lora-rank", device="1MB", **SMALL)
    rank = report.totals["lora_rank"]
    assert total(lora_rank=rank) <= 10**6 < total(lora_rank=rank + 1)


RECIPES = ["zero-16", "megatron-18", "grad-accum-20", "bf16-adam", "sgd", "sgd-momentum", "lion", "muon", "adafactor"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_closed_form_is_what_the_search_finds(data):
    """Evaluated by Python as it is printed: the search's answer, which fits there and not one step further."""
    from math import isqrt

    solve = data.draw(st.sampled_from(["batch", "seq-len", "layers", "hidden", "lora-rank"]))
    name = solve.replace("-", "_")
    shape = {
        "hidden": 8 * data.draw(st.integers(1, 8)), "heads": data.draw(st.sampled_from([1, 2, 4])),
        "layers": data.draw(st.integers(1, 6)), "vocab": data.draw(st.integers(5, 600)),
        "seq_len": data.draw(st.integers(1, 60)), "batch": data.draw(st.integers(1, 5)),
    }  # fmt: skip
    how = {
        "recipe": data.draw(st.sampled_from(RECIPES)), "attention": data.draw(st.sampled_from(["eager", "flash"])),
        "recompute": data.draw(st.sampled_from(["none", "selective", "full", "save:up,query", "ops:activation"])),
        "loss": data.draw(st.sampled_from(["eager", "fused"])), "norm": data.draw(st.sampled_from(NORMS)),
        "ffn": data.draw(st.sampled_from(["mlp", "glu"])), "tied": data.draw(st.booleans()),
        "dropout": data.draw(st.sampled_from([0.0, 0.1])), "arch": data.draw(st.sampled_from(["decoder", "encoder"])),
    }  # fmt: skip
    if solve == "lora-rank":
        how["recipe"] = data.draw(st.sampled_from(["zero-16", "bf16-adam"]))
    fields = {key: value for key, value in shape.items() if key != name} | how
    least = tfcost.analyze(None, command="memory", **fields, **{name: shape.get(name, 1)}).totals["total_bytes"]
    capacity = data.draw(st.integers(least + 1, 40 * least))
    report = fit_report(None, solve, formula=True, device=str(capacity), **fields)
    value, step = report.totals[name], shape["heads"] if solve == "hidden" else 1
    event(f"{solve}: {'closed form' if report.formulas else 'none'}")
    if not report.formulas:
        [why] = report.warnings
        # What is the fullest op of a moment may change just there; never so far from the answer.
        assert "are no polynomial around the answer" in why
        return
    letters = {**report.letters, "isqrt": isqrt}
    assert eval(report.formulas[name], {}, letters) == value
    for at in (value, value + step):
        moments = {
            moment["moment"]: moment["total"]
            for moment in tfcost.analyze(None, command="memory", **fields, **{name: at}).extra["moments"]
        }
        by_formula = eval(report.formulas["total_bytes_next"], {}, letters | {report.closed_forms().root.letter: at})
        assert by_formula == moments[report.extra["closed_form_at"]]
        assert (by_formula <= capacity) == (at == value)


@pytest.mark.parametrize(("solve", "form"), [("batch", "(C - {rest}) // {each}"), ("layers", "(C - {rest}) // {each}")])
def test_the_closed_form_by_hand(solve, form):
    """Full recomputation, fused loss and plain SGD: the fullest moment is a sum of few terms, linear in b and in l."""
    report = fit_report(None, solve, formula=True, device="40MB", recipe="sgd", recompute="full", loss="fused",
                        **{key: value for key, value in SMALL.items() if key != solve})  # fmt: skip
    each = total(recipe="sgd", recompute="full", loss="fused", **{solve: 50}) - total(
        recipe="sgd", recompute="full", loss="fused", **{solve: 49}
    )
    rest = total(recipe="sgd", recompute="full", loss="fused", **{solve: 50}) - 50 * each
    assert report.formulas[solve] == form.format(rest=rest, each=each)


@pytest.mark.parametrize(("solve", "device", "words"), [
    ("batch", "1kB", "nothing fits"), ("lora-rank", "48GB", "8-bit states round up"), ("seq-len", "h200", "no size of"),
])  # fmt: skip
def test_no_closed_form_is_said(solve, device, words):
    report = fit_report(load("gpt2-xl"), solve, formula=True, device=device, recipe="adam8bit")
    assert not report.formulas
    assert words in report.warnings[0]


def test_learned_positions_bound_the_length():
    report = fit_report(load("gpt2"), "seq-len", device="h200", recompute="full")
    assert report.totals["seq_len"] == 1024
    assert report.totals["limited_by"] == "positions"
    assert report.totals["total_bytes_next"] is None


def test_what_ifs_are_ranked_by_the_bytes_that_they_save():
    report = fit_report(load("gpt2-xl"), device="24GB", seq_len=1024, attention="eager")
    saved = [row["saved_bytes"] for row in report.rows]
    assert saved == sorted(saved, reverse=True)
    one = {"batch": report.totals["batch"] + 1, "seq_len": 1024, "attention": "eager"}
    flash = next(row for row in report.rows if row["what_if"] == "--attention flash")
    before, after = (
        tfcost.analyze("gpt2-xl", command="memory", **{**one, **change}).totals["total_bytes"]
        for change in ({}, {"attention": "flash"})
    )
    assert flash["saved_bytes"] == before - after


@pytest.mark.parametrize(("arguments", "status"), [
    (["fit", "gpt2", "--device", "a100"], 0), (["fit", "gpt2", "--device", "1GB", "--json"], 1),
    (["fit", "gpt2"], 2), (["fit", "gpt2", "--device", "24GB", "-b", "2"], 2),
    (["memory", "gpt2", "--device", "1GB", "--json"], 1), (["memory", "gpt2", "--device", "t4", "--json"], 0),
    (["kv", "bert-base"], 2), (["kv", "llama-3-70b", "--device", "h100", "--json"], 1), (["devices", "nope"], 1),
    (["memory", "gpt2", "--device", "24G"], 2), (["memory", "gpt2", "--overhead", "lots"], 2),
])  # fmt: skip
def test_exit_status(run, arguments, status):
    code, out, err = run(*arguments)
    assert code == status
    assert (err.count("\n") == 1) == (status == 2)
    assert "Traceback" not in out + err


@pytest.mark.parametrize("width", [80, 114])
def test_the_table_of_moments_fits_and_names_its_columns(width):
    from tfcost.render import table_text

    text = table_text(fit_report(load("gpt2-xl"), device="24GB", seq_len=1024, attention="eager"), width, False)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    at = next(i for i, line in enumerate(lines) if line.startswith("end of forward"))
    header = " ".join(lines[at - 3 : at])
    assert "weights" in header
    assert "GiB" in header or "GiB" in lines[at]


# --- KV cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "per_token"), [
    ("llama-3-8b", 131_072), ("llama-3-70b", 327_680), ("llama-3.1-405b", 516_096), ("llama-2-7b", 512 * 1024),
])  # fmt: skip
def test_k01_bytes_per_token(model, per_token):
    """2 l h_kv d_k elements of two bytes: user cases K01 and K07."""
    totals = kv_report(load(model), seq_len=1000, batch=3).totals
    assert totals["kv_cache_bytes_per_token"] == per_token
    assert totals["kv_cache_bytes"] == 3 * 1000 * per_token


@pytest.mark.parametrize(("tokens", "gib"), [(1024, 0.492), (16_000, 7.69), (128_000, 61.52)])
def test_k01_the_cache_of_405b(tokens, gib):
    report = kv_report(load("llama-3.1-405b"), seq_len=tokens)
    assert report.totals["kv_cache_bytes"] / GIB == pytest.approx(gib, rel=1e-3)


def test_k05_an_explicit_head_dim():
    totals = kv_report(None, hidden=5120, heads=64, kv_heads=8, head_dim=128, layers=64).totals
    assert totals["kv_cache_bytes_per_token"] == 262_144


def test_the_element_and_the_model_s_own_dtype_are_two_things():
    eight = kv_report(load("llama-3-8b"), seq_len=1000, kv_dtype="fp8").totals
    assert eight["kv_cache_bytes_per_token"] == 131_072 // 2


def test_windows_have_both_bounds():
    """Gemma 2 9B: 42 layers, half of them with 4,096 tokens; 2 * 8 * 256 * 2 bytes per layer and token."""
    each, tokens = 2 * 8 * 256 * 2, 8192
    totals = kv_report(load("gemma-2-9b"), seq_len=tokens).totals
    assert totals["kv_cache_bytes"] == 21 * each * (tokens + 4096)
    assert totals["kv_cache_bytes_without_windows"] == 42 * each * tokens
    assert totals["kv_cache_bytes_per_token_beyond_windows"] == 21 * each


def test_cross_attention_is_cached_once():
    """An encoder-decoder caches T tokens of its own and the S tokens of the source: 2 l d (T + S) elements."""
    fields = {"arch": "encoder-decoder", "hidden": 64, "heads": 4, "layers": 3, "vocab": 100}
    totals = kv_report(None, **fields, seq_len=10, src_len=7).totals
    assert totals["kv_cache_bytes"] == 2 * 3 * 64 * (10 + 7) * 2
    assert totals["kv_cache_bytes_per_token"] == 2 * 3 * 64 * 2


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(0, 10**6), st.booleans())
def test_so_many_tokens_fit_and_not_one_more(batch, free, windowed):
    from tfcost.kv import Cache, cache_bytes, max_tokens

    found = [Cache("a", 2, 8, None), Cache("b", 3, 16, 50 if windowed else None)]

    def needed(tokens):
        each, longer = divmod(tokens, batch)
        return (batch - longer) * cache_bytes(found, each) + longer * cache_bytes(found, each + 1)

    most = max_tokens(found, free, batch)
    assert needed(most) <= free < needed(most + 1)


def test_tokens_beside_the_weights_on_a_device():
    totals = kv_report(load("llama-3-8b"), seq_len=8192, device="h100").totals
    assert totals["max_tokens"] == (entries()["h100-80gb"]["memory_bytes"] - 2 * 8_030_261_248) // 131_072


# --- Devices ----------------------------------------------------------------------------------------------------------


def test_every_device_has_bytes_and_a_source():
    assert len(entries()) >= 12
    seen = set()
    for name, entry in entries().items():
        assert entry["name"] == name
        nominal = int(entry["nominal"].removesuffix(" GB"))
        assert 0.9 * nominal * 10**9 < entry["memory_bytes"] <= nominal * GIB
        assert entry["source"]
        for alias in (name, *entry["aliases"]):
            assert alias not in seen
            seen.add(alias)


STATED = re.compile(r"(\d+(?:\.\d+)?)(?: )?(GiB|MB|bytes)")
UNITS = {"GiB": 2**30, "MB": 2**20, "bytes": 1}
"""PyTorch prints total_memory as MB and divides by 2**20 (torch/csrc/cuda/Module.cpp)."""


def test_a_devices_bytes_are_what_its_source_states():
    for name, entry in entries().items():
        figure, unit = STATED.findall(entry["source"])[0]
        assert entry["memory_bytes"] == int(Fraction(figure) * UNITS[unit]), name
        where = entry["source"].partition("(")[2]
        assert where.startswith(("https://", '"', "TorchCodec's documentation")), name


def test_devices_by_name_alias_and_size():
    assert device("h100") == device("H100-80GB")
    assert device("24GB").memory_bytes == 24 * 10**9
    assert device("1.5GiB").memory_bytes == 3 * 2**29
    with pytest.raises(UnknownName, match="did you mean"):
        device("h100-80g")
    for wrong in ("24G", "0", "0GB", "5XB"):
        with pytest.raises(InputError):
            device(wrong)


def test_devices_lists_them(run):
    code, out, _ = run("devices", "--json")
    assert code == 0
    assert {row["name"] for row in json.loads(out)["rows"]} == set(entries())


@pytest.mark.parametrize(("model", "elements"), [("deepseek-v3", 61 * (512 + 64)), ("deepseek-v2", 60 * (512 + 64))])
def test_latent_attention_caches_what_is_compressed_once(model, elements):
    """DeepSeek-V2's table 1: (d_c + d_r) l elements per token; V3 in BF16 is 70.272 kB (Zhao et al. 2025, table 1)."""
    totals = kv_report(load(model), seq_len=100).totals
    assert totals["kv_cache_bytes_per_token"] == 2 * elements
    assert totals["kv_cache_bytes_expanded"] > 10 * totals["kv_cache_bytes"]
