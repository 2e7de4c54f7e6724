"""Adapters and frozen weights: what a frozen PyTorch model with adapters keeps for backward, to the byte."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import tfcost  # noqa: E402
from tfcost.analysis import Analysis, Options  # noqa: E402
from tfcost.blocks import Run  # noqa: E402
from tfcost.convention import DOCUMENT  # noqa: E402
from tfcost.errors import InputError  # noqa: E402
from tfcost.graph import Adapters  # noqa: E402
from tfcost.implementation import REFERENCE  # noqa: E402
from tfcost.point import point_of  # noqa: E402
from tfcost.policy import Running  # noqa: E402
from tfcost.validate import compare, counters  # noqa: E402
from tfcost.validate.attention import Dropout  # noqa: E402

RANK = 3
MODELS = {
    "gelu": {"hidden": 32, "heads": 2, "layers": 2, "vocab": 50},
    "glu": {"hidden": 32, "heads": 4, "kv_heads": 2, "layers": 2, "vocab": 50, "ffn": "glu", "activation": "silu",
            "norm": "rmsnorm", "bias": False, "tied": False, "positions": "rotary", "dropout": 0.0},
}  # fmt: skip
TARGETS = [("query", "value"), ("query", "key", "value", "output"), ("up", "down"), ("query",), ("value", "down"),
           ("output",), ("gate",)]  # fmt: skip
CASES = [(model, targets) for model in MODELS for targets in TARGETS if model == "glu" or "gate" not in targets]


class LoRA(nn.Module):
    """Hu et al. 2021, arXiv:2106.09685, section 4.1: W x + (alpha/r) B A x, W frozen."""

    def __init__(self, base: nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout) if dropout else nn.Identity()
        self.base = base
        self.a = nn.Linear(base.in_features, RANK, bias=False, dtype=base.weight.dtype)
        self.b = nn.Linear(RANK, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x):
        return self.base(x) + 2.0 * self.b(self.a(self.dropout(x)))


def adapted(case, targets, dropout=0.0):
    """The reference of a case, frozen, with adapters on the layers' linear layers of these names."""
    torch.manual_seed(0)
    module = compare.build(case).requires_grad_(False)
    for name, child in list(module.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if isinstance(child, nn.Linear) and leaf in targets:
            setattr(module.get_submodule(parent), leaf, LoRA(child, dropout))
    return module


def case_of(model, attention, dtype):
    cfg = point_of(None, **MODELS[model], seq_len=24).analysis.cfg
    return compare.Case(cfg, Run(2, 24, attention=attention), dtype)


def predicted(case, adapters):
    recipe = {"bf16": "zero-16", "fp32": "fp32-adam"}[case.dtype]
    options = Options(case.dtype, DOCUMENT, "full", REFERENCE["cpu"], Running(recipe=recipe, adapters=adapters))
    return Analysis(case.cfg, case.run, options)


def with_gradient(module, _, output):
    """What PEFT's ``enable_input_require_grads`` does to the embedding's output."""
    return output.requires_grad_(True)


def bytes_kept(module, case):
    return sum(each.bytes for each in counters.saved_activations(module, compare.inputs_of(case)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize(("model", "targets"), CASES, ids=lambda value: "+".join(value) if value is tuple else None)
def test_what_a_frozen_model_with_adapters_keeps(model, targets, attention, dtype):
    """Frozen products keep no input of their own; norms, activations and attention keep what their inputs need."""
    case = case_of(model, attention, dtype)
    module = adapted(case, targets)
    module.embedding.token.register_forward_hook(with_gradient)
    analysis = predicted(case, Adapters(RANK, targets))
    trains = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert analysis.counts["trainable_parameters"] == trains
    assert sum(compare.without_loss(analysis).values()) == bytes_kept(module, case)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("model", "targets"), CASES, ids=lambda value: "+".join(value) if value is tuple else None)
def test_dropout_of_an_adapters_input(model, targets, dtype):
    """Each adapter's dropped input, and its mask, one byte per element."""
    case = case_of(model, "eager", dtype)
    module = adapted(case, targets, 0.1)
    module.embedding.token.register_forward_hook(with_gradient)
    analysis = predicted(case, Adapters(RANK, targets, 0.1))
    assert sum(compare.without_loss(analysis).values()) == bytes_kept(module, case)


def test_without_a_gradient_of_the_embedding_the_first_layer_keeps_less():
    """Its first norm's input and two statistics, and Q: K has no gradient there, being frozen on a frozen input."""
    case = case_of("gelu", "eager", "fp32")
    batch, length, width, size = 2, 24, 32, 4
    fewer = 2 * batch * length * width * size + 2 * batch * length * size
    ours = sum(compare.without_loss(predicted(case, Adapters(RANK, ("query", "value")))).values())
    assert ours - bytes_kept(adapted(case, ("query", "value")), case) == fewer


def test_a_frozen_model_with_a_head_that_trains_keeps_the_heads_input():
    case = case_of("glu", "eager", "fp32")
    module = compare.build(case).requires_grad_(False)
    module.get_submodule("head").requires_grad_(True)
    analysis = predicted(case, Adapters())
    assert sum(compare.without_loss(analysis).values()) == bytes_kept(module, case) == 2 * 24 * 32 * 4


def test_adapters_of_latent_attention():
    """DeepSeek-V3: its second query projection of 1,536 to 128 * 192, and the output of 128 * 128 to 7,168."""
    totals = tfcost.analyze("deepseek-v3", command="params", lora_rank=4, lora_targets="query,output").totals
    assert totals["trainable_parameters"] == 61 * 4 * ((1536 + 128 * 192) + (128 * 128 + 7168))


@pytest.mark.parametrize(("model", "given", "words"), [
    ("mixtral-8x7b", {"lora_rank": 4, "lora_targets": "gate"}, "(experts take none); they have key, output, query"),
    ("deepseek-v3", {"lora_rank": 4}, "no 'value'"),
    ("gpt2", {"lora_rank": 4, "lora_targets": "gate"}, "no 'gate'; they have down, key, output, query, up, value"),
    ("gpt2", {"lora_rank": 4, "frozen": True}, "give one"),
    ("gpt2", {"quantize": "nf4"}, "--lora-rank, --frozen or --mode prefill"),
    ("gpt2", {"mode": "prefill", "recipe": "sgd"}, "--recipe goes with --mode train"),
    ("gpt2", {"mode": "decode", "recompute": "full"}, "--recompute goes with --mode train"),
])  # fmt: skip
def test_what_cannot_be_adapted_or_trained_is_said_in_one_line(model, given, words):
    with pytest.raises(InputError) as caught:
        tfcost.analyze(model, command="memory", **given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_frozen_layers_may_be_quantised():
    """Llama 3 8B with a head that trains: its layers in nf4, and Adam for the head alone."""
    totals = tfcost.analyze("llama-3-8b", command="memory", quantize="nf4", frozen=True, seq_len=16).totals
    head = 128_256 * 4096
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert totals["optimizer_bytes"] == 8 * head
    assert totals["weight_bytes"] == 2 * (8_030_261_248 - matrices) + matrices // 2 + matrices // 16 + 32 * 7 * 64


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("targets", [("query", "value"), ("up", "down"), ("query", "key", "value", "output")])
@pytest.mark.parametrize("model", MODELS)
def test_the_peak_of_a_step_of_adapters(model, targets, dtype):
    """To the byte, but for the embedding's output: made a leaf by the hook it stays, where no norm keeps it anyway."""
    case = case_of(model, "eager", dtype)
    module = adapted(case, targets)
    module.embedding.token.register_forward_hook(with_gradient)
    labels = torch.randint(50, (48,))

    def loss(logits):
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels)

    measured = counters.step_peak(module, compare.inputs_of(case), loss) - 2 * 4  # the loss and its divisor
    watched = REFERENCE["cpu"]._replace(sums_in_place=False)
    recipe = {"bf16": "bf16-adam", "fp32": "fp32-adam"}[dtype]
    running = Running(recipe=recipe, adapters=Adapters(RANK, targets))
    peak = Analysis(case.cfg, case.run, Options(dtype, DOCUMENT, "full", watched, running)).whole.peak
    leaf = 0 if (model, dtype) == ("glu", "fp32") else 2 * 24 * 32 * {"bf16": 2, "fp32": 4}[dtype]
    assert measured - leaf == peak.total - peak.bytes["optimizer"]
