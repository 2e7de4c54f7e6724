"""Predicted beside measured: the graph's figures against the reference module's, case by case and op by op.

Nothing here has a tolerance. Where an instrument counts by another convention (fvcore counts LayerNorm; PyTorch's
counter has no formula for a CPU's fused attention) the prediction is made by that convention and the row says so.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from tfcost.analysis import Analysis, Options
from tfcost.blocks import Run, kernel
from tfcost.config import ModelConfig
from tfcost.convention import CONVENTIONS, DOCUMENT, FLOPS_PER_MAC
from tfcost.errors import InputError
from tfcost.implementation import DOCUMENT as IMPLEMENTED
from tfcost.implementation import REFERENCE
from tfcost.models import DOCUMENT_MODEL
from tfcost.validate import counters
from tfcost.validate.reference import Transformer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

FUSED = ("scores", "softmax", "dropout", "weighted_sum", "flash", "fp32_query", "fp32_key", "fp32_value", "attended")
"""The graph's steps inside what the module runs as one call of scaled_dot_product_attention."""

OPTIONS = (
    "arch",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn_hidden",
    "vocab",
    "src_vocab",
    "ffn",
    "activation",
    "norm",
    "pre_norm",
    "final_norm",
    "bias",
    "tied",
    "head",
    "positions",
    "max_positions",
    "dropout",
    "attention_dropout",
    "ffn_dropout",
    "embedding_dropout",
)
"""The fields of a model that the reference module takes, under the same names."""


class Case(NamedTuple):
    """A model and a pass that the reference can run. ``fvcore`` asks for that instrument too (it traces: slow)."""

    cfg: ModelConfig
    run: Run
    dtype: str
    fvcore: bool = False

    @property
    def label(self) -> str:
        """What distinguishes a case, in one line."""
        cfg, run = self.cfg, self.run
        lengths = f"b={run.batch} N={run.seq_len}" + (f" S={run.src_len}" if run.src_len is not None else "")
        sizes = f"d={cfg.hidden} h={cfg.heads}" + (f"/{cfg.kv_heads}" if cfg.kv_heads != cfg.heads else "")
        other = {"V": cfg.vocab, "V_src": cfg.src_vocab, "d_ff": cfg.ffn_hidden, "d_k": cfg.head_dim}
        sizes += "".join(f" {letter}={size}" for letter, size in other.items() if size is not None)
        layers = f"{cfg.encoder_layers}+{cfg.decoder_layers}" if cfg.arch == "encoder-decoder" else f"{cfg.layers}"
        ends = [
            word
            for word, there in (("final norm", cfg.final_norm), ("untied", not cfg.tied), ("no head", not cfg.head))
            if there
        ]
        drops = [cfg.dropout, cfg.attention_dropout, cfg.ffn_dropout, cfg.embedding_dropout]
        words = [
            cfg.arch,
            "pre" if cfg.pre_norm else "post",
            cfg.norm,
            cfg.ffn,
            cfg.activation,
            cfg.positions,
            "bias" if cfg.bias else "no bias",
            "dropout " + "/".join(f"{p:g}" for p in drops),
            self.dtype,
            run.attention,
            *ends,
        ]
        return f"{lengths} {sizes} l={layers} {', '.join(words)}"


class Check(NamedTuple):
    """One figure of one case: the document's, what was predicted, what was measured.

    ``reason`` is why the prediction is not the document's figure; ``note`` what the instrument counts in its own way.
    """

    quantity: str
    document: int
    predicted: int
    measured: int
    reason: str = ""
    note: str = ""

    @property
    def equal(self) -> bool:
        """Whether the prediction holds to the unit."""
        return self.predicted == self.measured


ENDS = (
    "embedding_norm",
    "type_vocab",
    "position_offset",
    "pooler",
    "next_sentence",
    "head_transform",
    "head_bias",
    "classes",
    "classifier_dropout",
    "model_type",
)
"""What a real model has before its first layer and after its last that the reference has not."""


def nearest(cfg: ModelConfig) -> tuple[ModelConfig, list[str]]:
    """The nearest model that the reference can be, and the fields of the ends that were left out for it.

    A difference inside the layers (a norm of queries, parallel branches) is an :class:`InputError` that names it.
    """
    if cfg.family:
        raise InputError(f"the reference module has no family = {cfg.family!r}: it cannot be this model")
    stated = {field: getattr(cfg, field) for field in OPTIONS}
    # gelu_new and its like run as the exact function: the same work, and the same one input kept by one kernel.
    stated["activation"] = next((name for name in ("gelu", "relu", "silu") if cfg.activation.startswith(name)), "gelu")
    stated |= {name: getattr(cfg, name) for name in ("encoder_layers", "decoder_layers") if getattr(cfg, name)}
    embedding_dropout = stated.pop("embedding_dropout")
    plain = DOCUMENT_MODEL.config(**stated)._replace(embedding_dropout=embedding_dropout)
    other = [
        name for name in ModelConfig._fields if getattr(cfg, name) != getattr(plain, name) and name != "activation"
    ]
    for field in other:
        if field not in ENDS:
            raise InputError(f"the reference module has no {field} = {getattr(cfg, field)!r}: it cannot be this model")
    return plain, [field for field in other if field != "model_type"]


def cpu_kernel(case: Case) -> str:
    """The attention kernel that a CPU runs in this case."""
    return kernel(case.run.attention, case.cfg, REFERENCE["cpu"], Options(case.dtype).itemsize)


def reference_options(cfg: ModelConfig) -> dict[str, Any]:
    """The arguments that make the reference module a model."""
    options = {field: getattr(cfg, field) for field in OPTIONS}
    if cfg.arch == "encoder-decoder":
        return options | {name: getattr(cfg, name) for name in ("encoder_layers", "decoder_layers")}
    return options | {"layers": cfg.layers}


def scaled_down(cfg: ModelConfig, run: Run) -> tuple[ModelConfig, Run]:
    """A model of the same structure that runs here: two layers, heads of 8, at most 64 tokens and 512 words."""
    group = cfg.heads // cfg.kv_heads
    kv_heads = min(cfg.kv_heads, max(1, 4 // group))
    heads = kv_heads * group
    width = 8
    sizes: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": width,
        "hidden": heads * width * (1 if cfg.heads * cfg.head_dim == cfg.hidden else 2),
    }
    sizes["ffn_hidden"] = max(1, sizes["hidden"] * cfg.ffn_hidden // cfg.hidden)
    for field, most in (
        ("encoder_layers", 2),
        ("decoder_layers", 2),
        ("vocab", 512),
        ("src_vocab", 512),
        ("max_positions", 128),
    ):
        if getattr(cfg, field):
            sizes[field] = min(getattr(cfg, field), most)
    source = None if run.src_len is None else min(run.src_len, 48)
    return cfg._replace(**sizes), run._replace(batch=min(run.batch, 2), seq_len=min(run.seq_len, 64), src_len=source)


def build(case: Case, device: str = "cpu") -> nn.Module:
    """The reference module of a case, in training mode."""
    fused = case.run.attention != "eager"
    options = reference_options(case.cfg)
    module = Transformer(
        **options, attention="sdpa" if fused else "eager", dtype=DTYPES[case.dtype], device=torch.device(device)
    )
    return module.train()


def inputs_of(case: Case, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Random token ids, or hidden vectors that need a gradient where there is no vocabulary."""
    cfg, run = case.cfg, case.run

    def tokens(vocab: int | None, length: int) -> torch.Tensor:
        if vocab is None:
            shape = (run.batch, length, cfg.hidden)
            return torch.randn(*shape, dtype=DTYPES[case.dtype], device=device, requires_grad=True)
        return torch.randint(vocab, (run.batch, length), device=device)

    target = tokens(cfg.vocab, run.seq_len)
    if cfg.arch != "encoder-decoder":
        return (target,)
    assert run.src_len is not None, "an encoder-decoder's pass has a source"
    return tokens(cfg.vocab if cfg.src_vocab is None else cfg.src_vocab, run.src_len), target


def predict(case: Case, semantics: str = "cpu") -> Analysis:
    """The graph of a case, with what the reference keeps."""
    return Analysis(case.cfg, case.run, Options(case.dtype, DOCUMENT, "full", REFERENCE[semantics]))


def _kernel(case: Case) -> Any:
    """Forces PyTorch's unfused kernel where the case asks for ``math``."""
    if case.run.attention != "math":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


def check(case: Case) -> list[Check]:
    """Run one case and set every figure beside its prediction."""
    if case.dtype not in DTYPES:
        raise InputError(f"--dtype {case.dtype} does not run here; choose {', '.join(DTYPES)}")
    reference = predict(case)
    document = Analysis(case.cfg, case.run, Options(case.dtype))
    torch.manual_seed(0)
    module, inputs = build(case), inputs_of(case)
    with _kernel(case):
        saved = counters.saved_activations(module, inputs)
        flops = counters.torch_flops(module, inputs)
    count = reference.parameters["parameters"]
    checks = [
        Check("parameters", count, count, sum(counters.parameters(module).values())),
        *_flops_checks(case, reference, flops),
        _saved_check(reference, document, saved),
    ]
    if case.fvcore:
        checks.append(_fvcore_check(reference, counters.fvcore_macs(module, inputs)))
    return checks


def _flops_checks(case: Case, analysis: Analysis, measured: counters.Flops) -> list[Check]:
    exact = analysis.priced_by(DOCUMENT)
    uncounted, reason, note = 0, "", ""
    if cpu_kernel(case) == "flash":
        # FlopCounterMode has formulas for the CUDA kernels only (torch 2.13, utils/flop_counter.py).
        uncounted = exact["attention_flops"]
        reason = f"{-uncounted:+,} attention (backward twice that), which PyTorch does not count here"
        note = "PyTorch's counter has no formula for a CPU's fused attention: QKᵀ and PV are left out of its FLOPs"
    pairs = (("forward_flops", uncounted, measured.forward), ("backward_flops", 2 * uncounted, measured.backward))
    return [Check(name, exact[name], exact[name] - less, found, reason, note) for name, less, found in pairs]


def _saved_check(reference: Analysis, document: Analysis, measured: list[counters.Kept]) -> Check:
    kept, plain = without_loss(reference), without_loss(document)
    changes = [f"{change:+,} {what}" for what, change in difference(kept, plain).items()]
    total = sum(each.bytes for each in measured)
    return Check("saved_bytes", sum(plain.values()), sum(kept.values()), total, ", ".join(changes))


def without_loss(analysis: Analysis) -> dict[str, Any]:
    """Bytes kept, by the path of the op that keeps them and the tensor's own name; the module has no loss."""
    kept: dict[str, Any] = {}
    for saved in analysis.saved:
        if saved.op.path != "loss":
            name = f"{saved.op.path}/{saved.tensor.path.rpartition('/')[2]}"
            kept[name] = kept.get(name, 0) + saved.copies * saved.tensor.bytes
    return kept


def difference(kept: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """The bytes that the reference keeps beyond the document's accounting (or short of it), by what each tensor is."""
    changes: dict[str, Any] = {}
    for name in dict.fromkeys([*kept, *plain]):
        if change := kept.get(name, 0) - plain.get(name, 0):
            what = name.rpartition("/")[2]
            changes[what] = changes.get(what, 0) + change
    return {what: change for what, change in changes.items() if change}


def difference_in_symbols(case: Case) -> str:
    """:func:`difference` as closed forms: ``l·4bN mean + l·4bN inverse_deviation``."""
    from tfcost.notation import written
    from tfcost.symbols import ClosedForms

    kept, plain = (
        without_loss(
            ClosedForms(case.cfg, case.run, Options(case.dtype, implementation=rules), "memory", "op").analysis
        )
        for rules in (REFERENCE["cpu"], IMPLEMENTED)
    )
    return ", ".join(f"{written(change)} {what}" for what, change in difference(kept, plain).items())


def _fvcore_check(analysis: Analysis, measured: counters.Macs) -> Check:
    exact = analysis.priced_by(DOCUMENT)["forward_flops"] // FLOPS_PER_MAC
    predicted = analysis.priced_by(CONVENTIONS["fvcore"])["forward_flops"]
    missing = ", ".join(sorted(name.removeprefix("aten::") for name in measured.unsupported))
    reason = f"{predicted - exact:+,} LayerNorm, 5 per element" if predicted != exact else ""
    note = f"fvcore has no handler for {missing}; it counts LayerNorm at 5 per element" if missing else ""
    return Check("fvcore_macs", exact, predicted, measured.total, reason, note)


class OpRow(NamedTuple):
    """One submodule: its forward FLOPs and the bytes it keeps, predicted and measured."""

    path: str
    flops: int
    measured_flops: int
    bytes: int
    measured_bytes: int

    @property
    def equal(self) -> bool:
        """Whether both figures hold."""
        return self.flops == self.measured_flops and self.bytes == self.measured_bytes


def by_op(case: Case) -> list[OpRow]:
    """Op by op: layers summed, so that ``layer.0.mlp.up`` and ``layer.1.mlp.up`` are ``layer/mlp/up``."""
    analysis = predict(case)
    fused = case.run.attention != "eager"
    flash = cpu_kernel(case) == "flash"
    torch.manual_seed(0)
    module, inputs = build(case), inputs_of(case)
    with _kernel(case):
        saved = counters.saved_activations(module, inputs)
        flops = counters.torch_flops(module, inputs)
    figures: dict[str, list[int]] = {}
    for line in analysis.lines(DOCUMENT, False):
        uncounted = flash and line.attention  # see _flops_checks
        _add(figures, module_path(line.path, fused), 0, 0 if uncounted else line.copies * line.forward)
    for each in analysis.saved:
        if each.op.path != "loss":
            _add(figures, module_path(each.op.path, fused), 2, each.copies * each.tensor.bytes)
    for name, count in flops.by_module.items():
        _add(figures, without_indices(name), 1, count)
    for kept in saved:
        _add(figures, without_indices(kept.module), 3, kept.bytes)
    return [OpRow(path, *values) for path, values in figures.items() if any(values)]


def _add(figures: dict[str, list[int]], path: str, index: int, value: int) -> None:
    figures.setdefault(path, [0, 0, 0, 0])[index] += value


def without_indices(name: str) -> str:
    """A module's dotted name as the graph's path: ``layer.0.mlp.up`` is ``layer/mlp/up``."""
    return "/".join(part for part in name.split(".") if not part.isdigit())


def module_path(path: str, fused: bool) -> str:
    """The submodule that runs an op of the graph."""
    block, _, name = path.rpartition("/")
    if fused and name in FUSED and block.endswith("attention"):
        return f"{block}/sdpa"
    return f"{block}/rotary" if name in ("rotary_query", "rotary_key") else path
