"""``validate``: the graph's figures are the reference module's, and a graph that is wrong is found out.

CI measures the first 60 cases of the standard grid and every 23rd of the rest; ``pytest -m slow`` all 600.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tfcost import analysis
from tfcost import point as entry
from tfcost.blocks import Run
from tfcost.cli.main import main
from tfcost.errors import InputError
from tfcost.models import DOCUMENT_MODEL, load
from tfcost.validate import gpu
from tfcost.validate.compare import Case, by_op, check, difference_in_symbols, module_path, nearest, scaled_down
from tfcost.validate.grid import grid
from tfcost.validate.run import QUICK, STANDARD, validate

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def document(b, n, d, h, layers, **options):
    cfg = DOCUMENT_MODEL.config(hidden=d, heads=h, layers=layers, **options)
    return Case(cfg, Run(b, n), "bf16")


ALL = list(grid(STANDARD))
SAMPLE = [*ALL[:QUICK], *ALL[QUICK::23]]


@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_the_grid_is_equal_to_the_byte(part):
    for case in SAMPLE[part::4]:
        for each in check(case):
            assert each.predicted == each.measured, (case.label, each)


@pytest.mark.slow
def test_the_whole_grid_is_equal_to_the_byte():
    report = validate(ALL, {})
    assert report.totals["cases"] == STANDARD
    assert [row for row in report.rows if row["difference"]] == []


def test_the_grid_meets_every_pair_of_choices():
    fields = ("arch", "activation", "ffn", "norm", "pre_norm", "bias", "positions", "tied", "dropout", "ffn_dropout")
    met = set()
    for case in ALL:
        values = [
            *[(name, getattr(case.cfg, name)) for name in fields],
            ("dtype", case.dtype),
            ("kernel", case.run.attention),
        ]
        met |= set(combinations(values, 2))
    sizes = {name: len({value for a, _ in met for key, value in [a] if key == name}) for name in fields}
    assert (sizes["arch"], sizes["activation"], sizes["positions"]) == (3, 3, 4)
    for one, other in combinations(sorted({a[0] for a, _ in met} | {b[0] for _, b in met}), 2):
        if {one, other} == {"dropout", "ffn_dropout"}:
            continue  # chosen together
        pairs = {frozenset(pair) for pair in met if {pair[0][0], pair[1][0]} == {one, other}}
        values = {name: {v for pair in met for key, v in pair if key == name} for name in (one, other)}
        assert len(pairs) == len(values[one]) * len(values[other]), (one, other)
    assert len({case.label for case in ALL}) == STANDARD
    assert sum(case.fvcore for case in ALL) >= 10


def test_the_documents_layer_by_hand():
    b, n, d, h, layers, v = 2, 16, 32, 4, 3, 50
    figures = {each.quantity: each for each in check(document(b, n, d, h, layers, vocab=v))}
    flops = layers * (24 * b * n * d**2 + 4 * b * n**2 * d) + 2 * b * n * d * v
    assert figures["forward_flops"].measured == flops
    assert figures["backward_flops"].measured == 2 * flops
    assert figures["parameters"].measured == layers * (12 * d**2 + 13 * d) + v * d
    plain = layers * (34 * b * n * d + 5 * b * n**2 * h) + 2 * b * n * d  # and the head's input
    assert figures["saved_bytes"].document == plain
    assert figures["saved_bytes"].measured == plain + layers * 8 * b * n  # bf16 mean and deviation of two norms


def test_the_reason_is_a_closed_form():
    assert difference_in_symbols(document(2, 16, 32, 4, 3)) == "l·4bN mean, l·4bN inverse_deviation"


def test_op_by_op_the_figures_are_the_documents():
    b, n, d, h = 2, 16, 32, 4
    rows = {row.path: row for row in by_op(document(b, n, d, h, 1))}
    assert all(row.equal for row in rows.values())
    assert rows["layer/attention/scores"].measured_flops == 2 * b * n**2 * d
    assert rows["layer/mlp/up"].measured_flops == 8 * b * n * d**2
    assert rows["layer/attention/softmax"].measured_bytes == 2 * b * n**2 * h
    assert rows["layer/attention/dropout"].measured_bytes == b * n**2 * h


@pytest.mark.parametrize(
    "left_out", ["layer/mlp/activation", "layer/attention/scores", "layer/attention/dropout", "layer/mlp_norm", "head"]
)
def test_a_graph_with_one_op_left_out_is_found_out(left_out, monkeypatch, capsys):
    whole = analysis.build

    def without(*args):
        graph = whole(*args)
        assert any(op.path == left_out for op in graph.ops)
        graph.ops = [op for op in graph.ops if op.path != left_out]
        return graph

    monkeypatch.setattr(analysis, "build", without)
    assert main("validate -b 2 -N 8 -d 16 -h 2 -l 1 -V 30 --format json".split()) == 1
    report = capsys.readouterr().out
    assert f"{left_out}: FLOPs" in report


def test_fused_attention_is_one_module():
    assert module_path("layer/attention/softmax", True) == "layer/attention/sdpa"
    assert module_path("decoder/layer/cross_attention/flash", True) == "decoder/layer/cross_attention/sdpa"
    assert module_path("layer/mlp/dropout", True) == "layer/mlp/dropout"
    assert module_path("layer/attention/rotary_key", False) == "layer/attention/rotary"


@pytest.mark.parametrize("name", ["gpt2", "gpt3-175b", "llama-3-8b", "bert-base", "transformer-base", "llama-2-7b"])
def test_presets_scaled_down_are_equal(name):
    model = load(name)
    point = entry.point_of(model)
    plain, _ = nearest(point.analysis.cfg)
    cfg, run = scaled_down(plain, point.analysis.run)
    assert (cfg.heads == cfg.kv_heads) == (point.analysis.cfg.heads == point.analysis.cfg.kv_heads)
    for attention in ("eager", "flash"):
        for each in check(Case(cfg, run._replace(attention=attention), "bf16")):
            assert each.equal, (name, each)


def test_what_the_reference_cannot_be_is_named():
    with pytest.raises(InputError, match="parallel"):
        nearest(entry.point_of("phi-2").analysis.cfg)


def test_fp8_does_not_run():
    with pytest.raises(InputError, match="fp8"):
        check(document(1, 4, 8, 2, 1)._replace(dtype="fp8"))


# What a GPU keeps, on fake tensors: PyTorch's own shape functions of the CUDA ops.


def test_cuda_rules_are_the_shapes_of_the_cuda_ops():
    b, n, h, k = 2, 17, 4, 8
    aten = torch.ops.aten
    with FakeTensorMode():
        x = torch.empty(b, n, h * k, device="cuda", dtype=torch.bfloat16)
        w = torch.empty(h * k, device="cuda", dtype=torch.bfloat16)
        _, mean, deviation = aten.native_layer_norm(x, [h * k], w, w, 1e-5)
        assert mean.dtype == deviation.dtype == torch.float32
        assert mean.numel() == b * n
        _, rms = aten._fused_rms_norm(x, [h * k], w, 1e-6)
        assert (rms.dtype, rms.numel()) == (torch.float32, b * n)
        assert aten.native_dropout(x, 0.1, True)[1].dtype == torch.bool
        q = torch.empty(b, h, n, k, device="cuda", dtype=torch.bfloat16)
        flash = aten._scaled_dot_product_flash_attention(q, q, q, 0.1, True)
        lse, state = flash[1], flash[6:8]
        assert (lse.dtype, tuple(lse.shape)) == (torch.float32, (b, h, n))
        assert sum(each.numel() * each.itemsize for each in state) == 24
        efficient = aten._scaled_dot_product_efficient_attention(q.float(), q.float(), q.float(), None, True, 0.1, True)
        assert tuple(efficient[1].shape) == (b, h, 32)
        assert sum(each.numel() * each.itemsize for each in efficient[2:4]) == 16


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        # One layer, b = 2, N = 16, d = 32, h = 4, beside the document's figure; typed from the shapes above.
        ({}, 4 * 2 * 16 * 4),  # four fp32 statistics per token
        ({"norm": "rmsnorm", "bias": False}, 2 * 2 * 16 * 4),
        ({"attention": "flash"}, 4 * 2 * 16 * 4 + 24),
        ({"activation": "relu"}, 4 * 2 * 16 * 4 - 8 * 2 * 16 * 32),  # ReLU's output is the next product's input
    ],
)
def test_the_cuda_reference_is_the_document_and_what_cuda_adds(options, extra):
    given = {"batch": 2, "seq_len": 16, "hidden": 32, "heads": 4, "layers": 1, **options}
    plain = entry.analyze(**given, command="memory").totals["activation_bytes"]
    real = entry.analyze(**given, implementation="reference", command="memory").totals["activation_bytes"]
    assert real - plain == extra


def test_a_gpus_record_makes_its_cases_again():
    cases = list(gpu.grid())
    assert len(cases) >= 60
    for case in cases[::7]:
        again = entry.point_of(None, **gpu.description(case), implementation="reference", semantics="cuda")
        kept = sum(s.copies * s.tensor.bytes for s in again.analysis.saved if s.op.path != "loss")
        assert gpu.predicted(case) == kept


def test_no_gpu_is_said_plainly(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["validate", "--torch-device", "cuda"]) == 2
    assert capsys.readouterr().err == "tfcost: --torch-device cuda: no GPU was found; --torch-device cpu needs none\n"
    assert main(["validate", "gpt2", "--torch-device", "cuda"]) == 2


def test_without_torch_the_extra_is_named(monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["validate", "--quick"]) == 2
    assert capsys.readouterr().err == "tfcost: validate needs torch: pip install '.[torch]' in tfcost's folder\n"


def test_the_table_of_one_case(capsys):
    assert main("validate -b 2 -N 8 -d 16 -h 2 -l 1 -V 30 --dtype fp32".split()) == 0
    out = capsys.readouterr().out
    assert "saved_bytes" in out
    assert "layer/attention/weighted_sum" in out
    assert "all equal" in out


def test_lists_give_a_case_each(capsys):
    assert main("validate -b 1,2 -N 4,8 -d 16 -h 2 --csv".split()) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("number,case,quantity,document,predicted,measured,difference")
    assert len(rows) == 4 * 4


@pytest.mark.parametrize("more", ["-V 10,20", "--ffn-hidden 10,20", "-N 4,4"])
def test_every_case_of_a_list_is_shown(more, capsys):
    assert main(f"validate -d 8 -h 2 -N 4 {more}".split()) == 0
    out = capsys.readouterr().out
    cases = 1 if more == "-N 4,4" else 2  # the same case twice is one
    assert out.count("saved_bytes") >= cases
    assert f"of {cases} case" in out


@pytest.mark.parametrize(
    "sizes", ["-d 10T -h 1 -l 1 -N 1", "-d 8 -h 2 -N 10T", "-d 8 -h 2 -l 10T -N 4", "-d 8 -h 2 -N 4 -l 1k"]
)
def test_a_case_that_would_not_fit_or_not_end_is_refused(sizes, capsys):
    assert main(["validate", *sizes.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_quick_goes_with_the_grid_alone(capsys):
    assert main(["validate", "gpt2", "--quick"]) == 2
    assert "--quick" in capsys.readouterr().err
