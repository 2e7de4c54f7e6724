"""``tfcost trace`` against concrete runs (PyTorch's counter, saved-tensor hooks, real tensors) and known formulas."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import sympy  # noqa: E402
import transformers  # noqa: E402
from trace_families import EXPERTS, FAMILIES  # noqa: E402
from trace_fixtures import fixtures  # noqa: E402
from trace_oracle import DTYPES, Measured, inputs_of, measure, traffic  # noqa: E402

import tfcost  # noqa: E402
from tfcost.cli.main import main  # noqa: E402
from tfcost.errors import InputError  # noqa: E402
from tfcost.notation import symbol  # noqa: E402
from tfcost.tracing.program import run  # noqa: E402
from tfcost.tracing.semantics import Semantics  # noqa: E402
from tfcost.tracing.sources import from_transformers  # noqa: E402
from tfcost.tracing.trace import figures, hints_of, traced  # noqa: E402
from tfcost.tracing.traced import Traced  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.transformers, pytest.mark.filterwarnings("default")]

SAMPLE = ("gpt2", "llama", "mixtral", "bert", "t5", "vit")
"""The families that every run of the suite traces; ``-m slow`` traces all of them."""

SIZES = {"b": 3, "N": 21, "T": 21, "S": 29}
B, N = symbol("b"), symbol("N")


def lengths_of(name: str) -> dict[str, int]:
    if name in ("vit", "swin", "dinov2"):
        return {"batch": 3}
    return {"batch": 3, "seq_len": 21} | ({"src_len": 29} if name in ("t5", "bart") else {})


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def concrete(name: str, attention: str) -> Measured:
    """A real run on a CPU. Experts: FLOPs of the class's own loop, kept bytes of its grouped products."""
    config = transformers.CONFIG_MAPPING[name].from_dict(dict(FAMILIES[name]))
    for each in (config, *vars(config).values()):
        if hasattr(each, "use_cache"):
            each.use_cache = False
    cls = getattr(transformers, FAMILIES[name]["architectures"][0])
    kernel = "sdpa" if attention == "flash" and cls._supports_sdpa else "eager"
    inputs = inputs_of(config, SIZES, DTYPES["bf16"])

    def measured() -> Measured:
        torch.manual_seed(0)
        return measure(cls._from_config(config, attn_implementation=kernel, dtype=DTYPES["bf16"]), inputs)

    if name not in EXPERTS:
        return measured()
    config._experts_implementation = "eager"
    looped = measured()
    config._experts_implementation = "grouped_mm"
    return looped._replace(kept=measured().kept)


def check_family(name: str, attention: str, folder: Path) -> str:
    """One line of the table; raises where a figure differs."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(FAMILIES[name]))
    began = time.process_time()
    report = tfcost.trace(path, attention=attention, semantics="cpu", formula=False, **lengths_of(name))
    seconds = time.process_time() - began
    found = concrete(name, attention)
    totals = report.totals
    assert report.extra["unpriced"] == []
    assert totals["parameters"] == found.parameters
    assert totals["forward_flops"] == found.forward
    assert totals["backward_flops"] == found.backward
    assert totals["activation_bytes"] == found.kept
    method = report.assumptions["method"]
    return f"{name:<14}{attention:<7}{method:<11}{found.forward:>14,}{found.kept:>12,}  identical{seconds:>7.2f} s"


@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("name", SAMPLE)
def test_a_family_equals_a_concrete_run(name: str, attention: str, tmp_path: Path) -> None:
    check_family(name, attention, tmp_path)


@pytest.mark.slow
def test_every_family_equals_a_concrete_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{'family':<14}{'kernel':<7}{'method':<11}{'forward FLOPs':>14}{'bytes kept':>12}"]
    for attention in ("eager", "flash"):
        lines += [check_family(name, attention, tmp_path) for name in FAMILIES]
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert len(lines) == 1 + 2 * len(FAMILIES)


def test_gpt2_is_the_formula_of_the_issue() -> None:
    report = tfcost.trace("gpt2", batch=2, seq_len=512)
    assert sympy.expand(report.formulas["forward_flops"].expr - 1536 * B * N * (24 * N + 160849)) == 0
    assert report.totals["parameters"] == 124_439_808
    assert report.totals["forward_flops"] == 272_320_954_368  # FlopCounterMode on the class: tests/data/hf_oracles.json
    assert report.extra["valid"] == ["N <= 1024"]
    assert report.totals["backward_flops"] == 2 * report.totals["forward_flops"]
    rows = report.rows
    assert sum(row["flops"] for row in rows) == report.totals["forward_flops"]
    assert sum(row["backward_flops"] for row in rows) == report.totals["backward_flops"]
    assert sum(row["saved_bytes"] for row in rows) == report.totals["activation_bytes"]
    assert sum(row["parameters"] for row in rows) == report.totals["parameters"]


ORACLES = json.loads((Path(__file__).parent / "data" / "hf_oracles.json").read_text())["models"]


def check_oracle(oracle: Mapping[str, Any], folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(oracle["config"]))
    sizes = {} if "patch_size" in oracle["config"] else {"seq_len": 64}  # an image has the length that it has
    report = tfcost.trace(path, train=False, batch=2, **sizes)
    assert report.totals["parameters"] == oracle["parameters"]
    form = sympy.sympify(report.formulas["forward_flops"].expr)
    two = "S" in {str(each) for each in form.free_symbols}
    for point in oracle["forward_flops"]:
        n = point["N"]
        sizes = {B: point["b"]} | ({symbol("S"): n, symbol("T"): n // 2} if two else {N: n})
        assert form.subs(sizes) == point["flops"]


@pytest.mark.parametrize("oracle", ORACLES[::16], ids=lambda oracle: oracle["model"])
def test_oracles_of_public_models(oracle: Mapping[str, Any], tmp_path: Path) -> None:
    check_oracle(oracle, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle["model"])
def test_every_oracle_of_public_models(oracle: Mapping[str, Any], tmp_path: Path) -> None:
    check_oracle(oracle, tmp_path)


D, H, V = symbol("d"), symbol("h"), symbol("V")
DOCUMENT = {
    "eager": ({}, {"forward_flops": 24 * B * N * D**2 + 4 * B * N**2 * D, "parameters": 12 * D**2 + 13 * D,
                   "activation_bytes": 34 * B * N * D + 5 * B * N**2 * H + 16 * B * N}),
    "flash": ({}, {"forward_flops": 24 * B * N * D**2 + 4 * B * N**2 * D,
                   "activation_bytes": 34 * B * N * D + 4 * B * N * H + 16 * B * N,
                   "flash_recompute_flops": 2 * B * N**2 * D}),
}  # fmt: skip


@pytest.mark.parametrize("attention", DOCUMENT)
def test_pytorch_itself_derives_the_documents_formulas(attention: str) -> None:
    fields, expected = DOCUMENT[attention]
    report = tfcost.trace(None, batch=2, seq_len=64, attention=attention, **fields)
    # PyTorch's flash kernel takes heads of up to 256; beyond that a GPU runs another.
    assert report.extra["valid"] == ([] if attention == "eager" else ["d/h <= 256"])
    for key, formula in expected.items():
        assert sympy.expand(report.formulas[key].expr - formula) == 0, key


def test_logits_and_cross_attention_in_symbols() -> None:
    decoder = tfcost.trace(None, batch=2, seq_len=64, vocab=1000).formulas
    assert sympy.expand(decoder["forward_flops"].expr - (24 * B * N * D**2 + 4 * B * N**2 * D + 2 * B * N * D * V)) == 0
    assert sympy.expand(decoder["parameters"].expr - (12 * D**2 + 13 * D + V * D)) == 0
    t, s = symbol("T"), symbol("S")
    two = tfcost.trace(None, batch=2, seq_len=64, arch="encoder-decoder").formulas["forward_flops"].expr
    encoder = 24 * B * s * D**2 + 4 * B * s**2 * D
    layer = 28 * B * t * D**2 + 4 * B * s * D**2 + 4 * B * t**2 * D + 4 * B * t * s * D
    assert sympy.expand(two - encoder - layer) == 0


UNCOUNTED = {"encoder_layer", "encoder", "decoder", "transformer", "multihead", "lstm", "products"}
"""Of these PyTorch's own counter misses something in eval: the fast path, recurrent layers, matrix times vector."""


@pytest.mark.parametrize("name", fixtures())
def test_programs_that_no_config_describes(name: str) -> None:
    make, inputs, dynamic = fixtures()[name]
    module = make()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    report = tfcost.trace(module, inputs, dynamic=dynamic, semantics="cpu", attention="flash")
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    found = measure(module, inputs)
    totals = report.totals
    assert totals["parameters"] == found.parameters
    extra, kept = (
        {"lstm": 3 * 21 * 2 * 80 * (24 + 20 + 20 + 20), "products": 3 * 21 * 288 // 11}.get(name, 0),
        found.kept,
    )
    if name == "products":
        extra = 2 * (3 * 21 * 12 + 12 * 12 + 12)  # y @ v, mv and dot, which the counter has no formula for
    assert totals["forward_flops"] == found.forward + extra
    if name == "lstm":
        assert [each["op"] for each in report.extra["unpriced"]] == [
            "aten.mkldnn_rnn_layer (workspace kept for backward)"
        ]
        assert totals["incomplete"]
        return
    assert not totals["incomplete"]
    assert totals["activation_bytes"] == kept
    if name != "products":
        assert totals["backward_flops"] == found.backward
    evaluated = tfcost.trace(module, inputs, dynamic=dynamic, semantics="cpu", train=False)
    assert evaluated.totals["forward_flops"] == totals["forward_flops"]
    assert "backward_flops" not in evaluated.totals
    if name not in UNCOUNTED:
        assert evaluated.totals["forward_flops"] == measure(module, inputs, train=False).forward


def source_at(name: str, attention: str, folder: Path) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps(FAMILIES[name]))
    sizes = {key: {"batch": 5, "seq_len": 31, "src_len": 23}[key] for key in lengths_of(name)}
    return from_transformers(str(path), attention, "bf16", sizes)


def check_sharing(name: str, attention: str, folder: Path) -> None:
    """Everything but time is the same whether equal layers share a run or not: traffic of backward too."""
    source = source_at(name, attention, folder)
    runs = []
    for share in (True, False):
        options: dict[str, Any] = {"symbolic": False, "train": True, "backward": True, "share": share}
        recorded = run(
            source.build, source.feed, hints_of(source), semantics=Semantics("cuda", attention), around=source.around,
            **options,
        )  # fmt: skip
        runs.append((recorded.replays, figures(Traced(recorded, lambda value: value))))
    assert runs[0][0] > 0 == runs[1][0]
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "deepseek_v3", "t5", "bart", "albert"])
def test_equal_layers_run_once_or_every_time(name: str, tmp_path: Path) -> None:
    check_sharing(name, "eager", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("name", FAMILIES)
def test_equal_layers_of_every_family(name: str, attention: str, tmp_path: Path) -> None:
    check_sharing(name, attention, tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "t5", "albert"])
def test_traffic_is_that_of_a_real_run(name: str, tmp_path: Path) -> None:
    """Bytes read and written, sums of gradients included, against every op that PyTorch runs on real tensors."""
    source = source_at(name, "eager", tmp_path)
    recorded = run(
        source.build, source.feed, hints_of(source), symbolic=False, train=True, backward=True,
        semantics=Semantics("cpu", "eager"), around=source.around,
    )  # fmt: skip
    found = figures(Traced(recorded, lambda value: value))
    config = transformers.CONFIG_MAPPING[name].from_dict(dict(FAMILIES[name]))
    config.use_cache = False
    cls = getattr(transformers, FAMILIES[name]["architectures"][0])
    module = cls._from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    with source.around():
        assert traffic(module, inputs_of(config, hints_of(source), torch.bfloat16)) == tuple(
            found[f"{part}_bytes"] for part in ("forward_read", "forward_written", "backward_read", "backward_written")
        )


def test_a_layer_that_looks_at_its_index_is_not_shared() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index
            self.up = torch.nn.Sequential(torch.nn.Linear(8, 8))

        def forward(self, x: Any) -> Any:
            return x + self.up(x) if self.index % 2 else x

    model = torch.nn.Sequential(*[Layer(index) for index in range(4)])
    report = tfcost.trace(model, (torch.randn(3, 8),), dynamic={0: {0: "b"}})
    assert report.formulas["forward_flops"].expr == 2 * 2 * 64 * B


def test_an_op_without_a_price_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "fourier_model.py").write_text(
        "import torch\n"
        "class M(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.fft.fft(x).real\n"
        "def make():\n"
        "    return M(), (torch.randn(3, 16),), {0: {0: 'b'}}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "fourier_model:make", "--json", "--eval"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["totals"]["incomplete"] is True
    assert report["unpriced"] == [{"op": "aten._fft_r2c", "count": 1}]
    assert "aten._fft_r2c" in err
    assert main(["trace", "fourier_model:make", "--json", "--eval", "--allow-incomplete", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothere"], "unknown model 'nothere'"),
        (["no.json"], "no such file"),
        (["nopackage:make"], "no module named 'nopackage'"),
        (["json:nothing"], "json has no 'nothing'"),
        (["gpt2", "-d", "64"], "does not go with a MODEL"),
        (["gpt2", "-N", "1k,2k"], "takes one value here"),
        (["gpt2", "--src-len", "5"], "--src-len needs an encoder and a decoder"),
        (["gpt2", "--torch-device", "cuda"], "CUDA build"),
        (["gpt2", "--peak", "--eval"], "--peak is of a training step"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in arguments and torch.version.cuda is not None:
        pytest.skip("this is a CUDA build")
    assert main(["trace", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_a_module_that_fails_says_where() -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(5, 5)

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    with pytest.raises(InputError, match=r"inner \(Linear\) on \[3, 4\] fails: RuntimeError"):
        tfcost.trace(Broken(), (torch.randn(3, 4),))


def test_sizes_of_one_and_sizes_beyond_the_range() -> None:
    one = tfcost.trace("bert-tiny", batch=1, seq_len=1)
    assert one.totals["forward_flops"] == one.formulas["forward_flops"].expr.subs({B: 1, N: 1})
    with pytest.raises(InputError, match="fails"):
        tfcost.trace("bert-tiny", batch=2, seq_len=600)


def test_semantics_and_kernels_differ_as_they_do() -> None:
    gpu, cpu = (tfcost.trace("bert-tiny", batch=3, seq_len=64, semantics=each).totals for each in ("cuda", "cpu"))
    assert gpu["forward_flops"] == cpu["forward_flops"]
    # 2 layers, 2 heads: masks of one byte and not two (scores and three of the width); fp32 statistics of five norms.
    masks = 2 * (2 * 3 * 64 * 64 + 2 * 3 * 64 * 128) + 3 * 64 * 128
    assert cpu["activation_bytes"] - gpu["activation_bytes"] == masks - 5 * 2 * 2 * 3 * 64
    math = tfcost.trace("bert-tiny", batch=3, seq_len=64, attention="math", semantics="cpu").totals
    assert math["forward_flops"] == cpu["forward_flops"]
    assert math["activation_bytes"] > cpu["activation_bytes"]


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert", "t5", "swin"])
def test_fake_cuda_tensors_keep_what_cuda_semantics_keep(name: str, attention: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FAMILIES[name]))
    sizes = lengths_of(name) | ({"seq_len": 32} if "seq_len" in lengths_of(name) else {})
    real, replaced = (
        tfcost.trace(path, attention=attention, formula=False, torch_device=device, **sizes).totals
        for device in ("cuda", "cpu")
    )
    assert real == replaced


def test_autocast_keeps_half_precision_copies() -> None:
    full = tfcost.trace("bert-tiny", batch=3, seq_len=64, dtype="fp32").totals
    cast = tfcost.trace("bert-tiny", batch=3, seq_len=64, dtype="fp32", autocast="bf16").totals
    assert cast["forward_flops"] == full["forward_flops"]
    assert cast["weight_bytes"] == full["weight_bytes"]
    assert cast["activation_bytes"] != full["activation_bytes"]


def test_the_peak_of_a_step_has_categories() -> None:
    peak = tfcost.trace("bert-tiny", batch=3, seq_len=64, peak=True).extra["peak"]["bytes"]
    weights = tfcost.trace("bert-tiny", batch=3, seq_len=64).totals["weight_bytes"]
    assert peak["parameters"] == weights
    assert peak["optimizer_states"] >= 2 * weights
    assert peak["total"] == sum(value for key, value in peak.items() if key != "total")


def test_json_has_the_kept_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "bert-tiny", "-b", "3", "-N", "64", "--json", "--by", "op", "--quiet"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "tfcost.report/1"
    kept = report["saved_tensors"]
    assert {"module", "op", "shape", "dtype", "count", "bytes_each", "bytes"} == set(kept[0])
    floating = [each["bytes"] for each in kept if each["dtype"] not in ("int64", "int32")]
    assert sum(floating) == report["totals"]["activation_bytes"]
    for row in report["rows"]:
        assert row["flops"] == row["count"] * row["flops_each"]


def test_results_of_traced_say_how(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FAMILIES["bloom"]))
    source = from_transformers(str(path), "eager", "bf16", {"batch": 2, "seq_len": 16})
    from tfcost.tracing.trace import Settings

    result = traced(source, Settings())
    assert result.method in ("symbolic", "polynomial")
    if result.method == "polynomial":
        assert len(result.checked) >= 2
        assert "solved exactly" in " ".join(result.notes)
