"""The walk through one layer: its steps are the document's, its sums the layer's, its remarks to the point."""

from __future__ import annotations

import pytest
import sympy

import tfcost
from tfcost.cli.formulas import explain, formula
from tfcost.explain import remarks, steps, sums
from tfcost.notation import symbol
from tfcost.point import point_of
from tfcost.render import table_text
from tfcost.symbols import closed_forms

b, N, d, h = map(symbol, ("b", "N", "d", "h"))

DOCUMENT = {
    "layer/attention_norm": ("[b, N, d] -> [b, N, d]", 0, 2 * b * N * d),
    "layer/attention/query": ("[b, N, d] x [d, d] -> [b, N, d]", 2 * b * N * d**2, 2 * b * N * d),
    "layer/attention/key": ("[b, N, d] x [d, d] -> [b, N, d]", 2 * b * N * d**2, 0),
    "layer/attention/value": ("[b, N, d] x [d, d] -> [b, N, d]", 2 * b * N * d**2, 0),
    "layer/attention/scores": ("[b, h, N, d/h] x [b, h, d/h, N] -> [b, h, N, N]", 2 * b * N**2 * d, 4 * b * N * d),
    "layer/attention/softmax": ("[b, h, N, N] -> [b, h, N, N]", 0, 2 * b * N**2 * h),
    "layer/attention/dropout": ("[b, h, N, N] -> [b, h, N, N]", 0, b * N**2 * h),
    "layer/attention/weighted_sum": (
        "[b, h, N, N] x [b, h, N, d/h] -> [b, h, N, d/h]", 2 * b * N**2 * d, 2 * b * N**2 * h + 2 * b * N * d,
    ),
    "layer/attention/output": ("[b, N, d] x [d, d] -> [b, N, d]", 2 * b * N * d**2, 2 * b * N * d),
    "layer/attention/output_dropout": ("[b, N, d] -> [b, N, d]", 0, b * N * d),
    "layer/attention_residual": ("[b, N, d] + [b, N, d] -> [b, N, d]", 0, 0),
    "layer/mlp_norm": ("[b, N, d] -> [b, N, d]", 0, 2 * b * N * d),
    "layer/mlp/up": ("[b, N, d] x [d, 4d] -> [b, N, 4d]", 8 * b * N * d**2, 2 * b * N * d),
    "layer/mlp/activation": ("[b, N, 4d] -> [b, N, 4d]", 0, 8 * b * N * d),
    "layer/mlp/down": ("[b, N, 4d] x [4d, d] -> [b, N, d]", 8 * b * N * d**2, 8 * b * N * d),
    "layer/mlp/output_dropout": ("[b, N, d] -> [b, N, d]", 0, b * N * d),
    "layer/mlp_residual": ("[b, N, d] + [b, N, d] -> [b, N, d]", 0, 0),
}  # fmt: skip
"""One pre-norm layer as the document walks through it (Korthikanti et al. 2022, section 4): shape, FLOPs, bytes."""


def test_the_document_s_layer_step_by_step():
    found = steps(closed_forms().analysis)
    assert [step["path"] for step in found] == list(DOCUMENT)
    for step in found:
        shapes, flops, kept = DOCUMENT[step["path"]]
        assert step["shapes"] == shapes
        assert sympy.expand(step["flops_each"] - flops) == 0, step["path"]
        assert sympy.expand(step["bytes_each"] - kept) == 0, step["path"]
        assert step["what"]


def test_the_sums_of_a_layer():
    analysis = closed_forms().analysis
    (layer,) = sums(analysis, steps(analysis))
    assert sympy.expand(layer["flops_each"] - (24 * b * N * d**2 + 4 * b * N**2 * d)) == 0
    assert sympy.expand(layer["bytes_each"] - (34 * b * N * d + 5 * b * N**2 * h)) == 0


def test_a_decoder_layer_keeps_the_encoder_output_once():
    t, s = symbol("T"), symbol("S")
    analysis = closed_forms(arch="encoder-decoder").analysis
    found = steps(analysis)
    encoder, decoder = sums(analysis, found)
    assert (encoder["path"], decoder["path"]) == ("encoder/layer", "decoder/layer")
    flops = 28 * b * t * d**2 + 4 * b * s * d**2 + 4 * b * t**2 * d + 4 * b * t * s * d
    assert sympy.expand(decoder["flops_each"] - flops) == 0
    kept = 43 * b * t * d + 4 * b * s * d + 5 * b * t**2 * h + 5 * b * t * s * h
    assert sympy.expand(decoder["bytes_each"] - kept) == 0
    once = [step for step in found if "bytes_once" in step]
    assert [step["path"] for step in once] == ["decoder/layer/cross_attention/key"]
    assert once[0]["bytes_once"] == 2 * b * s * d
    assert "2bSd" in table_text(explain(None, {"arch": "encoder-decoder"}), 100, False)


@pytest.mark.parametrize("model", ["gpt2", "llama-3-8b", "bert-base", "transformer-base"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_symbols_and_numbers_agree_and_sum_to_the_report(model, attention):
    report = explain(model, {"attention": attention, "seq_len": [48], "batch": [3]})
    cfg = tfcost.analyze(model).model
    values = {"b": 3, "N": 48, "T": 48, "S": 48, "d": cfg["hidden"], "h": cfg["heads"], "h_kv": cfg["kv_heads"],
              "d_k": cfg["head_dim"], "d_ff": cfg["ffn_hidden"]}  # fmt: skip
    for row in report.rows:
        assert row["flops_formula"].expr.subs({symbol(k): v for k, v in values.items()}) == row["flops_each"]
        assert row["bytes_formula"].expr.subs({symbol(k): v for k, v in values.items()}) == row["bytes_each"]
    layers = {"encoder/layer": cfg["encoder_layers"], "decoder/layer": cfg["decoder_layers"]}
    whole = tfcost.analyze(model, command="flops", attention=attention, seq_len=48, batch=3, by="op")
    inside = sum(row["flops"] for row in whole.rows if "layer/" in row["path"])
    depth = cfg["encoder_layers"] or cfg["decoder_layers"]
    assert inside == sum(layers.get(each["path"], depth) * each["flops_each"] for each in report.extra["layers"])
    per_layer = tfcost.analyze(model, command="memory", attention=attention, seq_len=48, batch=3).totals
    if len(report.extra["layers"]) == 1:
        assert report.extra["layers"][0]["bytes_each"] == per_layer["activation_bytes_per_layer"]


def test_shapes_with_numbers():
    rows = {row["path"]: row for row in explain("llama-3-8b", {"seq_len": [10], "attention": "eager"}).rows}
    assert rows["layer/attention/query"]["shapes_here"] == "[1, 10, 4096] x [4096, 4096] -> [1, 10, 4096]"
    assert rows["layer/attention/key"]["shapes_here"] == "[1, 10, 4096] x [4096, 1024] -> [1, 10, 1024]"
    assert rows["layer/attention/scores"]["shapes_here"] == "[1, 32, 10, 128] x [1, 8, 128, 10] -> [1, 32, 10, 10]"
    assert rows["layer/mlp/product"]["shapes_here"] == "[1, 10, 14336] * [1, 10, 14336] -> [1, 10, 14336]"


def test_without_sizes_there_are_symbols_only():
    report = explain(None, {})
    assert all("flops_each" not in row and "shapes_here" not in row for row in report.rows)
    assert "= " not in table_text(report, 100, False).split("Assumptions")[0].replace("+ ", "")


def test_one_layer_suffices_to_be_walked_through():
    assert len(explain(None, {"hidden": [512], "heads": [8]}).rows) == len(DOCUMENT)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"heads": 16}, "d_k = 32 is below 64"), ({"head_dim": 128}, "h d_k = 1,024 is not d = 512"),
        ({"kv_heads": 2}, "2 key/value heads for 8 query heads"), ({"ffn_hidden": 1536}, "d_ff = 1,536 is 3 d"),
        ({"vocab": 100}, "V = 100 is no multiple of 64"), ({"seq_len": 3073}, "N = 3,073 is beyond 6d = 3,072"),
    ],
)  # fmt: skip
def test_a_remark_where_a_choice_is_unusual(fields, says):
    base = {"hidden": 512, "heads": 8, "layers": 1, "seq_len": 16}
    point = point_of(None, **{**base, **fields})
    assert any(remark.startswith(says) for remark in remarks(point.analysis.cfg, point.analysis.run.seq_len))


def test_no_remark_where_all_is_usual():
    point = point_of(None, hidden=512, heads=8, layers=1, vocab=640, seq_len=3072)
    assert remarks(point.analysis.cfg, 3072) == []


@pytest.mark.parametrize("by", ["component", "op", "total"])
@pytest.mark.parametrize("model", [None, "gpt2", "transformer-base", "albert"])
def test_the_formula_rows_sum_to_its_totals(tmp_path, model, by):
    if model == "albert":  # one set of weights in all layers: its parameters have another count than its ops
        (tmp_path / "config.json").write_text('{"model_type": "albert"}', encoding="utf-8")
        model = str(tmp_path)
    report = formula(model, {"by": by})
    totals = report.formulas
    for figure, total in (("flops", "forward_flops"), ("parameters", "parameters"), ("bytes", "end_of_forward_bytes")):
        whole = sum(row["count"].expr * row[figure].expr for row in report.rows)
        assert sympy.expand(whole - totals[total].expr) == 0, figure
