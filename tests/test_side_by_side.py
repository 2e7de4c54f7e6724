"""``compare``, ``models`` and ``flops --conventions``: figures beside each other, held to published and typed ones."""

from __future__ import annotations

import json

import pytest

from tfcost.catalogue import entries, family_names
from tfcost.cli.main import main
from tfcost.convention import CONVENTIONS
from tfcost.errors import InputError
from tfcost.side_by_side import compare, read_spec

GPT2 = 124_439_808  # the public checkpoint, Radford et al. 2019
GPT2_MEDIUM = 354_823_168


def run(capsys, *arguments):
    assert main([*arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def by_name(rows, key):
    return {row[key]: row for row in rows}


# --- compare ----------------------------------------------------------------------------------------------------------


def test_what_differs_comes_first_and_totals_are_relative_to_the_first_model():
    report = compare(["gpt2", "gpt2-medium"])
    names = [row["what"] for row in report.rows]
    assert names[:4] == ["hidden", "heads", "kv_heads", "ffn_hidden"]
    assert "vocab" not in names  # the same in both
    rows = by_name(report.rows, "what")
    assert rows["hidden"] == {"what": "hidden", "gpt2": 768, "gpt2-medium": 1024}
    assert rows["parameters"]["gpt2"] == GPT2
    assert rows["parameters"]["gpt2-medium"] == GPT2_MEDIUM
    assert rows["parameters"]["gpt2-medium / gpt2"] == GPT2_MEDIUM / GPT2


def test_a_what_if_stands_beside_its_model():
    rows = by_name(compare(["gpt2", "gpt2:layers=24"]).rows, "what")
    per_layer = 12 * 768**2 + 13 * 768
    assert rows["parameters"]["gpt2:layers=24"] - rows["parameters"]["gpt2"] == 12 * per_layer


def test_flags_apply_to_every_model():
    rows = by_name(compare(["gpt2", "bert-base"], batch=3, seq_len=100).rows, "what")
    assert "seq_len" not in rows
    n, d = 100, 768
    layers = 12 * (24 * 3 * n * d**2 + 4 * 3 * n**2 * d)
    assert rows["forward_flops"]["gpt2"] == layers + 2 * 3 * n * d * 50257
    assert rows["forward_flops"]["bert-base"] == layers + 2 * 3 * d**2  # the pooler, on one token


def test_the_same_model_twice_has_two_columns():
    rows = by_name(compare(["gpt2", "gpt2"]).rows, "what")
    assert rows["parameters"] == {
        "what": "parameters", "gpt2": GPT2, "gpt2 (2)": GPT2, "gpt2 (2) / gpt2": 1.0,
    }  # fmt: skip


def test_models_without_a_figure_have_a_gap_not_a_zero():
    rows = by_name(compare(["gpt2", "transformer-base"]).rows, "what")
    assert rows["activation_bytes_per_layer"]["transformer-base"] is None
    assert rows["activation_bytes_per_layer"]["transformer-base / gpt2"] is None


@pytest.mark.parametrize(
    ("specs", "match"),
    [
        (["gpt2"], "at least two"),
        (["gpt2", "gtp2"], "did you mean"),
        (["gpt2", "gpt2:layers=0"], "layers"),
        (["gpt2", "gpt2:layers=two"], "layers"),
        (["gpt2", "gpt2:colour=red"], "colour"),
        (["gpt2", "gpt2:layers=2,hidden"], "hidden"),
        (["gpt2", "gpt2:hidden=770"], "does not divide"),
        (["gpt2", "gpt2:ffn=cube"], "ffn"),
    ],
)
def test_what_cannot_be_compared_is_one_line(specs, match):
    with pytest.raises(InputError, match=match) as caught:
        compare(specs)
    assert "\n" not in str(caught.value)


def test_a_spec_reads_flags_by_either_spelling():
    assert read_spec("llama-3-8b:kv-heads=32")[1] == {"kv_heads": 32}
    assert read_spec("llama-3-8b:kv_heads=4k,tied=yes,attention_dropout=0.5")[1] == {
        "kv_heads": 4000, "tied": True, "attention_dropout": 0.5,
    }  # fmt: skip


def test_a_file_whose_name_has_a_colon_and_an_equals_sign_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b=c").write_text('{"model_type": "gpt2", "n_layer": 1}')
    model, what_if = read_spec("./a:b=c")
    assert (model.stated["layers"], what_if) == (1, {})


def test_compare_on_the_command_line(capsys):
    report = run(capsys, "compare", "gpt2", "gpt2:layers=24", "-N", "512")
    assert report["command"] == "compare"
    assert set(report["model"]["models"]) == {"gpt2", "gpt2:layers=24"}
    assert main(["compare", "gpt2", "gpt2-medium", "-N", "1k,2k"]) == 2
    assert "list" in capsys.readouterr().err


# --- models -----------------------------------------------------------------------------------------------------------


def test_every_preset_is_listed_with_its_count(capsys):
    report = run(capsys, "models")
    rows = by_name(report["rows"], "name")
    assert len(rows) == report["totals"]["models"] >= 70
    assert rows["gpt2"]["parameters"] == rows["gpt2"]["published_parameters"] == GPT2
    assert all(row["source"] for row in rows.values())


def test_filters(capsys):
    rows = run(capsys, "models", "--family", "gpt2", "--max-params", "400M")["rows"]
    assert {"gpt2", "gpt2-medium"} <= {row["name"] for row in rows}
    assert "gpt2-large" not in {row["name"] for row in rows}  # 774M
    assert all(row["family"] == "gpt2" and row["parameters"] <= 400_000_000 for row in rows)
    assert main("models --min-params 2T".split()) == 1  # none: the answer is no


def test_the_search_takes_parts_and_likenesses():
    assert entries("llama 8b")[0]["family"] == "llama"
    assert all("8b" in entry["name"] for entry in entries("llama 8b"))
    assert entries("gpt2")[0]["name"] == "gpt2"
    assert entries("gtp2-medum")[0]["name"] == "gpt2-medium"
    assert entries("qwertyuiop") == []


def test_an_unknown_family_brings_a_suggestion(capsys):
    assert main(["models", "--family", "lama"]) == 2
    assert "did you mean llama" in capsys.readouterr().err
    assert "gpt2" in family_names()


# --- conventions ------------------------------------------------------------------------------------------------------


def test_conventions_side_by_side(capsys):
    report = run(capsys, "flops", "gpt2", "-N", "1024", "--conventions")
    rows = by_name(report["rows"], "convention")
    assert set(rows) == set(CONVENTIONS)
    n, d, layers, v = 1024, 768, 12, 50257
    exact = layers * (24 * n * d**2 + 4 * n**2 * d) + 2 * n * d * v
    assert rows["document"]["forward_flops"] == exact
    assert rows["document"]["train_flops"] == 3 * exact
    assert rows["document"]["forward_macs"] == exact // 2
    assert rows["6p-all"]["train_flops_per_token"] == 6 * GPT2
    assert rows["palm-all"]["train_flops_per_token"] == 6 * GPT2 + 12 * layers * d * n
    assert rows["fvcore"]["train_flops"] is None  # it counts forward only, and says nothing of the rest
    assert all(row["leaves_out"] for row in rows.values())


def test_a_convention_that_does_not_apply_says_why(capsys):
    rows = by_name(run(capsys, "flops", "t5-small", "--conventions")["rows"], "convention")
    assert rows["megatron"]["forward_flops"] is None
    assert "one stack" in rows["megatron"]["leaves_out"]
    assert "one stack" in rows["chinchilla-a4"]["leaves_out"]


@pytest.mark.parametrize("more", ["--convention document", "--by op", "--formula", "-N 1k,2k"])
def test_what_does_not_go_with_conventions_is_refused(more, capsys):
    assert main(["flops", "gpt2", "--conventions", *more.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("form", ["table", "json", "csv", "markdown", "latex"])
def test_nothing_found_is_said_in_every_format(form, capsys):
    assert main(["models", "zzzzzzzz", "--format", form]) == 1
    assert capsys.readouterr().err == ""


def test_a_what_if_of_a_field_without_a_flag():
    rows = by_name(compare(["mistral-7b", "mistral-7b:window=128"], seq_len=1000).rows, "what")
    assert rows["window"]["mistral-7b:window=128"] == 128
    layers, d, n, w = 32, 4096, 1000, 128
    difference = rows["attention_flops"]["mistral-7b"] - rows["attention_flops"]["mistral-7b:window=128"]
    assert difference == layers * 4 * n * (n - w) * d


def test_a_head_that_does_not_fit_the_table_is_named(capsys):
    assert main(["flops", "electra-small", "--head"]) == 2
    assert "--head" in capsys.readouterr().err
