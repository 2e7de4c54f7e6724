"""``tfcost validate MODEL --trace``: the graph of a config minus the traced program of its transformers class.

Parameters and FLOPs, forward and backward, are the same closed forms for every model type; kept bytes are the same or
listed item by item. The program's side knows nothing of the table of model types.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import sympy  # noqa: E402
from hf_configs import TYPES, configs  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from trace_families import FAMILIES, KIN  # noqa: E402

from tfcost.cli.main import main  # noqa: E402
from tfcost.model_types import MODEL_TYPES  # noqa: E402
from tfcost.models import preset_files  # noqa: E402
from tfcost.report import Report  # noqa: E402
from tfcost.tracing.against import compare  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.transformers, pytest.mark.filterwarnings("default")]

CONFIGS = {**FAMILIES, **KIN}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def subtract(config: dict[str, Any], folder: Path, **keywords: Any) -> Report:
    """The comparison of a config with its program."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return compare(str(path), batch=3, **keywords)


def check_identity(report: Report, what: Any) -> None:
    """Raise unless parameters and FLOPs are identical, and the listed tensors sum to what else is different."""
    rows = {row["quantity"]: row for row in report.rows if "analytic" in row}
    assert set(rows) == {"parameters", "forward_flops", "backward_flops", "activation_bytes"}
    for quantity in ("parameters", "forward_flops", "backward_flops"):
        assert rows[quantity]["difference"].expr == 0, (quantity, what)
        assert rows[quantity]["program"].expr != 0
    listed = sum(row["difference"].expr for row in report.rows if "what" in row)
    assert sympy.expand(listed - rows["activation_bytes"]["difference"].expr) == 0, what
    assert report.totals["different"] == 0, what


def test_every_model_type_is_here() -> None:
    """All that transformers builds: the legacy names of Falcon's code are not among its types."""
    assert set(CONFIGS) == set(TYPES)
    assert set(MODEL_TYPES) - set(TYPES) == {"RefinedWeb", "RefinedWebModel"}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_minus_its_program(model_type: str, tmp_path: Path) -> None:
    check_identity(subtract(CONFIGS[model_type], tmp_path), CONFIGS[model_type])


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("llama", "LlamaForSequenceClassification"), ("t5", "T5EncoderModel"), ("t5", "T5ForSequenceClassification"),
     ("bart", "BartForCausalLM"), ("gemma3_text", "Gemma3Model")],
)  # fmt: skip
def test_another_class_minus_its_program(model_type: str, architecture: str, tmp_path: Path) -> None:
    """Classes that read values (the last token, an <eos>), have one stack of two, or stand for a part of a whole."""
    config = CONFIGS[model_type] | {"architectures": [architecture]}
    check_identity(subtract(config, tmp_path), config)


@pytest.mark.parametrize("model_type", ["bert", "whisper", "vit", "mobilebert"])
def test_without_architectures_both_sides_take_the_same_class(model_type: str, tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIGS[model_type].items() if key != "architectures"}
    check_identity(subtract(config, tmp_path), config)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_every_class_of_a_type_minus_its_program(model_type: str, tmp_path: Path) -> None:
    for architecture in MODEL_TYPES[model_type].architectures:
        config = CONFIGS[model_type] | {"architectures": [architecture]}
        check_identity(subtract(config, tmp_path), architecture)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_random_configs_minus_their_programs(model_type: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("random")

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(configs(model_type))
    def check(config: dict[str, Any]) -> None:
        check_identity(subtract(config, folder), config)

    check()


def presets() -> dict[str, str]:
    """One preset of each model type that has one."""
    found: dict[str, str] = {}
    for name, path in preset_files().items():
        config = json.loads(path.read_text()).get("config")
        if config:
            found.setdefault(config["model_type"], name)
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b", "bert-base", "t5-small", "dbrx"])
def test_a_preset_minus_its_program(name: str) -> None:
    check_identity(compare(name), name)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_a_preset_of_every_type_minus_its_program(attention: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a fused kernel the graph prices the keys in the window and the program's kernel all: that is said."""
    assert len(presets()) >= len(TYPES) - 2  # CLIP's towers stand in CLIP's presets
    for model_type, name in presets().items():
        report = compare(name, attention=attention)
        reasons = {row["reason"] for row in report.rows if row["quantity"].endswith("flops") and row["reason"]}
        with capsys.disabled():
            print(f"\n{model_type} ({name}), {attention}: {'; '.join(reasons) or 'identical'}", end="")
        if not reasons:
            check_identity(report, name)
        assert attention == "flash" or not reasons
        assert all(reason.startswith("a window") for reason in reasons)


def test_what_does_not_apply_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["vit-base-16-224", "-N", "20"], ["gpt2", "--src-len", "9"], ["whisper-base", "--src-len", "9"]):
        assert main(["validate", *arguments, "--trace", "--quiet"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
