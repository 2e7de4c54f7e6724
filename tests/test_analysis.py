"""Laws of every report, on models of random structure: sums, proportions, exactness, and what may not change what."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from strategies import LAW, QUICK, Case, cases, structures

from tfcost import analyze
from tfcost.analysis import TOTALS
from tfcost.convention import CONVENTIONS
from tfcost.errors import InputError

# The figure that a command's rows sum, and the total that they sum to.
SUMS = {
    "flops": ("flops", "forward_flops"), "params": ("parameters", "parameters"),
    "memory": ("bytes", "end_of_forward_bytes"),
}  # fmt: skip
COMMAND = st.sampled_from(sorted(SUMS))
BY = ("total", "component", "op", "layer")
RATIOS = ("flops_per_token", "train_flops_per_token")
STORED = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "master_weight_bytes")


def whole(value) -> bool:
    """An int, not a bool and not a float that looks like one."""
    return type(value) is int


# --- Rows -----------------------------------------------------------------------------------------------------------


@QUICK
@given(cases(), COMMAND, st.sampled_from(BY))
def test_rows_sum_to_the_total(case, command, by):
    figure, total = SUMS[command]
    report = case.analyze(command, by=by)
    assert sum(row[figure] for row in report.rows) == report.totals[total]


@QUICK
@given(cases(), COMMAND, st.sampled_from(BY))
def test_a_row_is_its_count_times_each(case, command, by):
    figure, _ = SUMS[command]
    for row in case.analyze(command, by=by).rows:
        assert row[figure] == row["count"] * row[f"{figure}_each"]
        assert whole(row["count"])
        assert row["count"] >= 1
        assert whole(row[figure])
        assert row[figure] > 0 or figure == "bytes"


@QUICK
@given(cases(), COMMAND, st.sampled_from(BY))
def test_paths_are_unique(case, command, by):
    paths = [row["path"] for row in case.analyze(command, by=by).rows]
    assert len(set(paths)) == len(paths)


@QUICK
@given(cases(), st.sampled_from(BY))
def test_macs_of_the_rows_sum_to_the_macs(case, by):
    report = case.analyze("flops", by=by)
    assert sum(row["count"] * row["macs_each"] for row in report.rows) == report.totals["forward_macs"]


@QUICK
@given(cases("decoder"), st.sampled_from(BY))
def test_macs_follow_a_halved_square(case, by):
    """Half of an odd square has no whole number of MACs; then there is none, rather than a rounded one."""
    report = case.analyze("flops", by=by, causal="half")
    macs = [row["macs_each"] for row in report.rows]
    if None not in macs:
        assert sum(row["count"] * row["macs_each"] for row in report.rows) == report.totals["forward_macs"]
    for row in report.rows:
        assert row["macs_each"] is None or 2 * row["macs_each"] == row["flops_each"]


@LAW
@given(cases("decoder"), st.sampled_from(sorted(CONVENTIONS)), st.sampled_from(BY))
def test_rows_sum_to_the_total_in_every_convention(case, convention, by):
    report = case.analyze("flops", by=by, convention=convention)
    assert sum(row["flops"] for row in report.rows) == report.totals["forward_flops"]


def test_the_row_by_total_is_one():
    for command, (figure, total) in SUMS.items():
        report = analyze(hidden=8, heads=2, layers=3, vocab=11, command=command, by="total")
        (row,) = report.rows
        assert row[figure] == report.totals[total]


def test_by_layer_has_a_row_for_each_layer_and_all_are_equal():
    report = analyze(hidden=8, heads=2, layers=5, vocab=11, seq_len=7, command="flops", by="layer")
    layers = [row for row in report.rows if row["path"].startswith("layer/")]
    assert [row["path"] for row in layers] == [f"layer/{index}" for index in range(5)]
    assert {row["flops"] for row in layers} == {24 * 7 * 8**2 + 4 * 7**2 * 8}


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("command", sorted(SUMS))
def test_what_layers_share_stands_in_a_row_of_its_own(layers, command):
    """An encoder's output is no decoder layer's, however many layers there are."""
    form = {"hidden": 8, "heads": 2, "arch": "encoder-decoder", "seq_len": 7, "src_len": 5}
    report = analyze(**form, layers=layers, command=command, by="layer")
    figure, _ = SUMS[command]
    layer_paths = {f"decoder/layer/{index}" for index in range(layers)}
    each = [row[figure] for row in report.rows if row["path"] in layer_paths]
    one = {
        "flops": 28 * 7 * 64 + 4 * 5 * 64 + 4 * 49 * 8 + 4 * 7 * 5 * 8, "params": 16 * 64 + 19 * 8,
        "memory": 43 * 7 * 8 + 4 * 5 * 8 + 5 * 49 * 2 + 5 * 7 * 5 * 2,
    }  # fmt: skip
    assert each == layers * [one[command]]


def test_ten_thousand_layers_have_rows_and_more_are_refused():
    form = {"hidden": 2, "heads": 1, "command": "params", "by": "layer"}
    assert len(analyze(**form, layers=10_000).rows) == 10_000
    with pytest.raises(InputError, match="10,000"):
        analyze(**form, layers=10_001).rows  # noqa: B018  rows are made when asked for
    with pytest.raises(InputError, match="--by"):
        analyze(**form, arch="encoder-decoder", layers=5_001).rows  # noqa: B018


@pytest.mark.parametrize(("path", "flops"), [
    ("layer/attention/query", 2 * 7 * 64), ("layer/attention/key", 2 * 7 * 64), ("layer/attention/value", 2 * 7 * 64),
    ("layer/attention/scores", 2 * 49 * 8), ("layer/attention/weighted_sum", 2 * 49 * 8),
    ("layer/attention/output", 2 * 7 * 64), ("layer/mlp/up", 8 * 7 * 64), ("layer/mlp/down", 8 * 7 * 64),
    ("head", 2 * 7 * 8 * 11),
])  # fmt: skip
def test_ops_of_the_documents_model(path, flops):
    report = analyze(hidden=8, heads=2, layers=3, vocab=11, seq_len=7, command="flops", by="op")
    rows = {row["path"]: row for row in report.rows}
    assert len(rows) == 9
    assert rows[path]["flops_each"] == flops
    assert rows[path]["count"] == (1 if path == "head" else 3)


# --- Proportions ----------------------------------------------------------------------------------------------------


@QUICK
@given(cases(), st.integers(2, 50))
def test_work_and_activations_are_linear_in_the_batch_and_parameters_free_of_it(case, times):
    one, many = case.totals(), case.totals(batch=times * case.run["batch"])
    for key, value in one.items():
        if value is None or key in ("end_of_forward_bytes", "total_bytes", "peak_moment") or key in RATIOS:
            continue
        fixed = "parameters" in key or key in STORED
        assert many[key] == (value if fixed else times * value), key
    assert many["flops_per_token"] == pytest.approx(one["flops_per_token"], rel=1e-15)


@QUICK
@given(cases(), st.integers(1, 99), st.integers(1, 99))
def test_parameters_are_free_of_the_pass(case, seq_len, src_len):
    changes = {"seq_len": seq_len} | ({"src_len": src_len} if "src_len" in case.run else {})
    other = case.totals(**changes, batch=7, attention="flash")
    for key, value in case.totals().items():
        if key.endswith("parameters"):
            assert other[key] == value


@QUICK
@given(cases("decoder"))
def test_attention_is_quadratic_in_the_length_and_the_rest_linear(case):
    """f(2N) - 2f(N) of a polynomial aN² + cN is 2aN²: twice attention's part."""
    assume(case.fields.get("window") is None and not case.fields["cross_attention"])
    short, long = case.totals(), case.totals(seq_len=2 * case.run["seq_len"])
    assert long["attention_flops"] == 4 * short["attention_flops"]
    assert long["forward_flops"] - 2 * short["forward_flops"] == 2 * short["attention_flops"]


@QUICK
@given(cases(), st.integers(2, 9))
def test_layers_add_up(case, times):
    """l layers keep and compute l times what one does, beside what stands outside of them."""
    free = ("layer_sets", "local_layers")
    fields = {key: value for key, value in case.fields.items() if not key.endswith("_layers") and key not in free}
    totals = [Case(fields | {"layers": layers}, case.run).totals() for layers in (1, 2, 1 + times)]
    for key in ("parameters", "forward_flops", "backward_flops", "activation_bytes", "attention_flops"):
        assert totals[2][key] - totals[0][key] == times * (totals[1][key] - totals[0][key]), key


# --- Totals that hang together --------------------------------------------------------------------------------------


@QUICK
@given(cases())
def test_totals_hang_together(case):
    t = SimpleNamespace(**case.totals())
    assert 2 * t.forward_macs == t.forward_flops
    assert t.train_flops == t.forward_flops + t.backward_flops
    assert t.hardware_flops == t.train_flops + t.recompute_flops
    assert t.recompute_flops == 0
    assert t.parameters == t.embedding_parameters + t.head_parameters + t.non_embedding_parameters
    stored = t.weight_bytes + t.optimizer_bytes + t.master_weight_bytes
    assert t.end_of_forward_bytes == t.activation_bytes + t.logits_bytes + stored
    assert t.total_bytes >= max(t.end_of_forward_bytes, stored + t.gradient_bytes)
    assert 0 < t.attention_flops < t.forward_flops
    assert t.forward_flops_causal <= t.forward_flops
    tokens = case.run["batch"] * case.run["seq_len"]
    assert t.flops_per_token == t.forward_flops / tokens
    assert t.train_flops_per_token == t.train_flops / tokens


@QUICK
@given(cases())
def test_the_totals_of_a_command_are_those_of_all_together(case):
    together = case.totals()
    for command, keys in TOTALS.items():
        alone = case.analyze(command).totals
        assert set(keys) <= set(alone)
        assert alone == {key: together[key] for key in alone}


def test_totals_have_the_keys_of_the_contract():
    report = analyze(hidden=8, heads=2, layers=3, vocab=11)
    assert (
        list(report.totals)
        == (
            "parameters forward_flops forward_macs backward_flops train_flops recompute_flops hardware_flops "
            "forward_flops_causal attention_flops flops_per_token train_flops_per_token active_parameters "
            "active_non_input_embedding_parameters embedding_parameters head_parameters non_embedding_parameters "
            "trainable_parameters activation_bytes activation_bytes_per_layer logits_bytes weight_bytes "
            "gradient_bytes optimizer_bytes master_weight_bytes kv_cache_bytes communication_buffer_bytes "
            "overhead_bytes end_of_forward_bytes total_bytes peak_moment fits"
        ).split()
    )


@QUICK
@given(cases())
def test_bytes_per_layer_are_given_where_every_layer_keeps_as_much(case):
    totals = case.totals()
    if case.fields["arch"] == "encoder-decoder":
        return
    depth = case.fields["layers"]
    outside = Case({**case.fields, "layers": 2 * depth}, case.run).totals()["activation_bytes"]
    assert totals["activation_bytes_per_layer"] * depth == outside - totals["activation_bytes"]


# --- Exactness ------------------------------------------------------------------------------------------------------


@QUICK
@given(cases(), st.sampled_from(BY))
def test_integers_are_never_floats(case, by):
    report = case.analyze(by=by)
    for key, value in report.totals.items():
        if key in RATIOS:
            assert type(value) is float
        elif key == "peak_moment":
            assert value in {moment["moment"] for moment in case.analyze("memory").extra["moments"]}
        else:
            assert value is None or whole(value), key
    for command in SUMS:
        for row in case.analyze(command, by=by).rows:
            assert not any(type(value) is float for value in row.values())


@QUICK
@given(cases())
def test_a_report_survives_json_exactly(case):
    report = case.analyze()
    again = json.loads(report.to_json())
    assert again["totals"] == report.totals
    assert again["rows"] == report.rows
    assert again["schema"] == "tfcost.report/1"


HUGE = st.integers(1, 10**24)


@QUICK
@given(st.tuples(HUGE, HUGE, HUGE, HUGE, st.integers(1, 10**12), st.integers(1, 10**12)))
@example((1536, 1048576, 10000, 1000000, 1000, 1000))
def test_huge_sizes_are_exact_to_the_digit(sizes):
    """24bNd² + 4bN²d per layer and 2bNdV, in Python's own integers."""
    b, N, l, V, h, k = sizes  # noqa: E741  layers
    d = h * k
    totals = analyze(hidden=d, heads=h, layers=l, vocab=V, batch=b, seq_len=N).totals
    assert totals["forward_flops"] == l * (24 * b * N * d**2 + 4 * b * N**2 * d) + 2 * b * N * d * V
    assert totals["parameters"] == l * (12 * d**2 + 13 * d) + V * d
    assert totals["activation_bytes"] == l * (34 * b * N * d + 5 * b * N**2 * h)
    assert totals["logits_bytes"] == 2 * b * N * d + 6 * b * N * V


def test_the_issues_huge_example():
    """``-b 1536 -N 1048576 -d 1000000 -h 1000 -l 10000 -V 1000000``, each product worked out by hand."""
    totals = analyze(hidden=10**6, heads=10**3, layers=10**4, vocab=10**6, batch=1536, seq_len=2**20).totals
    tokens = 1536 * 1048576  # 1,610,612,736
    assert tokens == 1_610_612_736
    assert totals["forward_flops"] == (
        386_547_056_640_000_000_000_000_000 + 67_553_994_410_557_440_000_000_000 + 3_221_225_472_000_000_000_000
    )


# --- Structure that may not matter, and structure that must ---------------------------------------------------------


@QUICK
@given(structures("decoder"), st.data())
def test_grouped_queries_leave_the_score_flops_alone(fields, data):
    """K and V have h_kv heads, the scores have h: an easy slip."""
    heads = fields["heads"]
    divisors = [size for size in range(1, heads + 1) if heads % size == 0]
    one, other = data.draw(st.sampled_from(divisors)), data.draw(st.sampled_from(divisors))
    first, second = (analyze(**{**fields, "kv_heads": kv}, seq_len=6, attention="eager").totals for kv in (one, other))
    assert first["attention_flops"] == second["attention_flops"]
    width = fields.get("head_dim") or fields["hidden"] // heads
    per_token = 2 * 2 * fields["hidden"] * width * (other - one) * fields["layers"]  # FLOPs of K and V
    assert second["forward_flops"] - first["forward_flops"] == 6 * per_token


@QUICK
@given(cases())
def test_a_tied_head_is_counted_once_and_an_untied_one_adds_its_table(case):
    assume("vocab" in case.fields and case.fields["head"])
    tied, untied = case.totals(tied=True), case.totals(tied=False)
    width = case.fields["hidden"]
    if case.fields.get("embedding_size", width) != width:
        width = case.fields["embedding_size"]
    assert untied["parameters"] - tied["parameters"] == case.fields["vocab"] * width
    assert untied["embedding_parameters"] == tied["embedding_parameters"]
    for key in ("forward_flops", "backward_flops", "activation_bytes", "logits_bytes"):
        assert untied[key] == tied[key]


@QUICK
@given(cases())
def test_the_kernel_changes_neither_parameters_nor_flops(case):
    """Flash attention removes bytes, not FLOPs."""
    assume("window" not in case.fields)
    eager, flash, math = (case.totals(attention=kernel) for kernel in ("eager", "flash", "math"))
    for key in ("parameters", "forward_flops", "backward_flops", "attention_flops", "logits_bytes"):
        assert eager[key] == flash[key] == math[key]
    assert eager == math


@QUICK
@given(cases(), st.integers(1, 20))
def test_a_window_shrinks_flash_attention_only(case, window):
    plain = {key: value for key, value in case.fields.items() if key not in ("window", "local_layers")}
    for kernel in ("eager", "flash"):
        run = case.run | {"attention": kernel}
        whole_square, windowed = Case(plain, run).totals(), Case(plain | {"window": window}, run).totals()
        both = case.fields["arch"] == "encoder-decoder"  # an encoder's own square is windowed, a cross one is not
        longest = sorted((run["seq_len"], run["src_len"] if both else 0))[1]
        if kernel == "eager" or window >= longest:
            assert windowed == whole_square
        else:
            assert windowed["attention_flops"] < whole_square["attention_flops"]
        assert windowed["activation_bytes"] == whole_square["activation_bytes"]


@QUICK
@given(cases("decoder"))
def test_flash_with_a_window_visits_min_n_w_keys(case):
    assume(not case.fields["cross_attention"])
    fields = {key: value for key, value in case.fields.items() if key != "local_layers"} | {"window": 3}
    n = case.run["seq_len"]
    totals = Case(fields, case.run).totals(attention="flash")
    width = fields.get("head_dim") or fields["hidden"] // fields["heads"]
    visited = sorted((n, 3))[0]
    each = 4 * case.run["batch"] * n * visited * fields["heads"] * width
    assert totals["attention_flops"] == fields["layers"] * each
    assert 2 * totals["flash_recompute_flops"] == fields["layers"] * each


@QUICK
@given(cases())
def test_bytes_scale_with_the_element_except_masks_and_fp32(case):
    """From 2 to 4 bytes an element: what is left at 0 bytes are masks, log-sum-exps and the loss's fp32 copy."""
    one, two, four = (case.totals(dtype=dtype) for dtype in ("fp8", "bf16", "fp32"))
    for key in ("activation_bytes", "logits_bytes"):
        per_byte = two[key] - one[key]
        assert four[key] - two[key] == 2 * per_byte
        fixed = one[key] - per_byte
        rows = Case(case.fields, case.run | {"dtype": "bf16"}).analyze("memory", by="op").rows
        head = {row["path"] for row in rows if row["path"].split("/")[0] in HEADS}
        kept = [row for row in rows if "tensor" in row and (row["path"] in head) == (key == "logits_bytes")]
        expected = sum(
            row["bytes"] for row in kept if row["tensor"].endswith(("/mask", "/log_sum_exp", "/fp32_log_probabilities"))
        )
        assert fixed == expected
    assert (one["weight_bytes"], two["weight_bytes"], four["weight_bytes"]) == (
        one["parameters"], 2 * one["parameters"], 4 * one["parameters"],
    )  # fmt: skip
    assert case.totals(dtype="fp16") == two


HEADS = ("head", "loss", "pooler", "next_sentence", "classifier", "classifier_dropout", "head_transform",
         "logit_softcap", "classifier_token", "classifier_dense", "classifier_input_dropout")  # fmt: skip


@QUICK
@given(cases())
def test_dropout_costs_memory_and_neither_work_nor_parameters(case):
    none = case.totals(dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0, embedding_dropout=0.0, final_dropout=0.0)
    some = case.totals(dropout=0.5, attention_dropout=0.5, ffn_dropout=0.5, embedding_dropout=0.5, final_dropout=0.5)
    for key in ("parameters", "forward_flops", "backward_flops"):
        assert none[key] == some[key]
    assert none["activation_bytes"] < some["activation_bytes"]


@QUICK
@given(cases(), st.sampled_from(("relu", "gelu", "silu")))
def test_the_activation_changes_nothing_in_the_documents_accounting(case, name):
    assert case.totals(activation=name) == case.totals()


# --- What a report says ---------------------------------------------------------------------------------------------


def test_a_report_says_what_it_assumed():
    asked = {"attention": "flash", "dtype": "fp32", "causal": "half", "convention": "pointwise"}
    report = analyze(hidden=8, heads=2, layers=3, **asked)
    given_ = report.assumptions
    assert (given_["attention"], given_["dtype"], given_["causal"]) == ("flash", "fp32", "half")
    assert (given_["convention"], given_["implementation"]) == ("pointwise", "document")
    assert given_["ignored_keys"] == []
    assert "no embedding" in given_["vocabulary"]
    assert "vocabulary" not in analyze(hidden=8, heads=2, layers=3, vocab=9).assumptions


def test_a_report_holds_the_resolved_model_and_the_inputs():
    report = analyze(hidden=8, heads=2, layers=3, batch=4, seq_len=5)
    assert report.inputs == {"batch": 4, "seq_len": 5}
    assert (report.model["hidden"], report.model["kv_heads"], report.model["head_dim"]) == (8, 2, 4)
    assert (report.model["ffn_hidden"], report.model["decoder_layers"]) == (32, 3)
    assert analyze(hidden=8, heads=2, layers=3).inputs == {"batch": 1, "seq_len": 2048}


def test_flash_attentions_recomputation_has_a_total_of_its_own():
    form = {"hidden": 8, "heads": 2, "layers": 3, "seq_len": 5, "command": "flops"}
    assert analyze(**form, attention="flash").totals["flash_recompute_flops"] == 3 * 2 * 5**2 * 8
    assert "flash_recompute_flops" not in analyze(**form, attention="eager").totals
