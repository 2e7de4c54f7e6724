"""Recomputation and a whole step's memory against PyTorch: torch.utils.checkpoint and MemTracker on the reference."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from tfcost.analysis import Analysis, Options, point_of  # noqa: E402
from tfcost.blocks import Run  # noqa: E402
from tfcost.convention import DOCUMENT  # noqa: E402
from tfcost.implementation import REFERENCE  # noqa: E402
from tfcost.policy import Running  # noqa: E402
from tfcost.validate import compare, counters  # noqa: E402

FIELDS = {"hidden": 32, "heads": 2, "layers": 4, "vocab": 50, "arch": "encoder"}
RUN = Run(2, 24)


def case(dtype="bf16"):
    cfg = point_of(None, **FIELDS, seq_len=24).analysis.cfg
    return compare.Case(cfg, RUN, dtype)


def predicted(dtype="bf16", **running):
    run = case(dtype)
    recipe = {"bf16": "zero-16", "fp32": "fp32-adam"}[dtype]
    options = Options(dtype, DOCUMENT, "full", REFERENCE["cpu"], Running(**{"recipe": recipe, **running}))
    return Analysis(run.cfg, run.run, options)


def layers_of(module):
    return next(child for name, child in module.named_modules() if name.endswith("layer"))


def recomputed(module, every=1):
    """Each ``every``-th layer under torch.utils.checkpoint."""
    for index, layer in enumerate(layers_of(module)):
        if index % every == 0:
            forward = layer.forward
            layer.forward = lambda *a, f=forward, **k: checkpoint(f, *a, use_reentrant=False, **k)
    return module


@pytest.mark.parametrize("every", [1, 2, 4])
def test_bytes_that_checkpoint_keeps(every):
    torch.manual_seed(0)
    kept = counters.saved_activations(recomputed(compare.build(case()), every), compare.inputs_of(case()))
    analysis = predicted(recompute="full", every=every)
    assert sum(each.bytes for each in kept) == sum(compare.without_loss(analysis).values())


def test_work_that_checkpoint_does_again():
    """Every layer's forward once more. Without the early stop, which would end it at the last kept tensor."""
    torch.manual_seed(0)
    module, inputs = recomputed(compare.build(case("fp32"))), compare.inputs_of(case("fp32"))
    loss = module(*inputs).sum()
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):
        torch.autograd.backward(loss)
    figures = predicted("fp32", recompute="full").flops
    assert counter.get_total_flops() == figures["backward_flops"] + figures["recompute_flops"]


def test_a_step_by_category():
    """MemTracker's parameters, gradients and optimizer states at the end of a step, and what is alive after forward."""
    from torch.distributed._tools.mem_tracker import MemTracker

    torch.manual_seed(0)
    module, inputs = compare.build(case("fp32")), compare.inputs_of(case("fp32"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)
    tracker = MemTracker()
    tracker.track_external(module, optimizer, *inputs)
    with tracker:
        for step in range(2):
            tracker.reset_mod_stats()
            logits = module(*inputs)
            if step == 1:
                forward = counted(tracker)
            torch.autograd.backward(logits.sum())
            if step == 1:
                backward = counted(tracker)
            optimizer.step()
            optimizer.zero_grad()
            del logits
    analysis = predicted("fp32")
    totals = analysis.totals(["memory"])
    counters_of_steps = 4 * len(list(module.parameters()))  # torch's Adam has a step tensor for each
    assert forward["parameters"] == backward["parameters"] == totals["weight_bytes"]
    assert forward["optimizer"] - counters_of_steps == totals["optimizer_bytes"]
    assert backward["gradients"] == totals["gradient_bytes"]
    logits = 2 * 24 * 50 * 4
    assert forward["activations"] == sum(compare.without_loss(analysis).values()) + logits


def counted(tracker):
    [snapshot] = tracker.get_tracker_snapshot().values()
    names = {"Parameter": "parameters", "Gradient": "gradients", "Optstate": "optimizer", "Activation": "activations"}
    found = {getattr(key, "value", str(key)): value for key, value in snapshot.items()}
    return {ours: found.get(theirs, 0) for theirs, ours in names.items()} | {"all": found}


# --- The peak of a step, to the byte ----------------------------------------------------------------------------------

WATCHED = REFERENCE["cpu"]._replace(sums_in_place=False)  # as PyTorch sums gradients while MemTracker watches
SCALARS = 2 * 4  # the loss, and the weight that its mean divides by


def peaks(fields, run, dtype):
    """The peak of cross-entropy of the fp32 logits of the reference: by MemTracker, and ours with its moment."""
    fields = dict(fields)
    run = run._replace(attention=fields.pop("attention", "eager"))
    made = compare.Case(point_of(None, **fields, seq_len=24).analysis.cfg, run, dtype)
    torch.manual_seed(0)
    module, inputs = compare.build(made), compare.inputs_of(made)
    vocab = fields["vocab"]
    targets = torch.randint(vocab, (run.batch * run.seq_len,))
    measured = counters.step_peak(
        module, inputs, lambda logits: torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets)
    )
    recipe = {"bf16": "bf16-adam", "fp32": "fp32-adam"}[dtype]
    moment = Analysis(made.cfg, run, Options(dtype, DOCUMENT, "full", WATCHED, Running(recipe=recipe))).whole.peak
    return measured - SCALARS, moment.total - moment.bytes["optimizer"], moment.name


SIZES = [
    ({"hidden": 32, "heads": 2, "layers": 3, "vocab": 8}, Run(2, 24)),
    ({"hidden": 32, "heads": 4, "layers": 2, "vocab": 8}, Run(2, 96)),  # where the score square is most of a layer
    ({"hidden": 32, "heads": 4, "layers": 1, "vocab": 600}, Run(3, 64)),
    ({"hidden": 128, "heads": 2, "layers": 3, "vocab": 8}, Run(1, 8)),
    ({"hidden": 64, "heads": 2, "layers": 1, "vocab": 2000}, Run(1, 8)),
]
KINDS = [
    {}, {"dropout": 0.0}, {"attention_dropout": 0.0}, {"embedding_dropout": 0.1}, {"ffn_dropout": 0.1, "dropout": 0.0},
    {"norm": "rmsnorm"}, {"norm": "rmsnorm", "dropout": 0.0, "bias": False, "final_norm": True}, {"pre_norm": False},
    {"activation": "relu"}, {"ffn": "glu", "activation": "silu"}, {"ffn": "glu", "ffn_hidden": 40, "tied": False},
    {"tied": False}, {"arch": "decoder"}, {"kv_heads": 1}, {"kv_heads": 1, "dropout": 0.0, "positions": "rotary"},
    {"positions": "learned", "max_positions": 128}, {"positions": "none"}, {"bias": False}, {"final_norm": True},
    {"attention": "flash", "attention_dropout": 0.0}, {"attention": "flash", "dropout": 0.0, "kv_heads": 1},
    {"arch": "encoder-decoder"}, {"arch": "encoder-decoder", "norm": "rmsnorm", "tied": False, "pre_norm": False},
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_peak_of_a_real_step(kind, dtype):
    for sizes, run in SIZES:
        fields = {"arch": "encoder", **sizes, **kind}
        if fields["arch"] == "encoder-decoder":
            run = run._replace(src_len=run.seq_len // 2)
        measured, ours, _ = peaks(fields, run, dtype)
        assert ours == measured, (fields, run)


def test_the_peak_is_at_every_kind_of_moment():
    """The grid above would prove little if the head were always the fullest."""
    moments = {
        peaks({"arch": "encoder", **sizes, **kind}, run, "fp32")[2]
        for sizes, run in SIZES
        for kind in KINDS[:8]
    }
    assert {f"backward at {place}" for place in ("the head", "the last layer", "the first layer")} <= moments
    assert any(moment.startswith("backward at embedding/") for moment in moments)


def test_watching_modules_holds_gradients():
    """MemTracker as it comes keeps the gradient of PV's weights until that of its values is there: a square too much,
    which the allocator never sees. Without dropout there is nothing between the two, and the peaks agree."""
    from torch.distributed._tools.mem_tracker import MemTracker

    fields = {"arch": "encoder", "hidden": 32, "heads": 8, "layers": 2, "vocab": 8}
    run = Run(1, 96)
    square = 8 * 96 * 96 * 4
    for dropout, held in ((0.1, square), (0.0, 0)):
        made = compare.Case(point_of(None, **fields, dropout=dropout, seq_len=24).analysis.cfg, run, "fp32")
        torch.manual_seed(0)
        module, inputs = compare.build(made), compare.inputs_of(made)
        tracker = MemTracker()
        tracker.track_external(module, *inputs)
        with tracker:
            output = module(*inputs)
            torch.autograd.backward(output.sum())
        [peak] = tracker.get_tracker_snapshot("peak").values()
        plain = counters.step_peak(module.zero_grad() or module, inputs, torch.sum)
        assert 0 <= peak["Total"] - inputs[0].nbytes - plain <= held
        assert (peak["Total"] - inputs[0].nbytes > plain) == bool(held)
