"""Recomputation and a whole step's memory against PyTorch: torch.utils.checkpoint and MemTracker on the reference."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from tfcost.analysis import Analysis, Options  # noqa: E402
from tfcost.blocks import Run  # noqa: E402
from tfcost.convention import DOCUMENT  # noqa: E402
from tfcost.implementation import REFERENCE  # noqa: E402
from tfcost.point import point_of  # noqa: E402
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
    with set_checkpoint_early_stop(False):
        loss = module(*inputs).sum()
    with FlopCounterMode(display=False) as counter:
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


# --- Chosen ops, against PyTorch's selective activation checkpointing ------------------------------------------------

MAIN = ("addmm", "mm", "bmm", "native_layer_norm", "_softmax", "native_dropout", "gelu", "add")
"""The one op of each submodule that makes its output; views, transposes and copies for layout are left to PyTorch."""


class Selective:
    """Layers under torch.utils.checkpoint with a policy by submodule: outputs of the named ones are saved."""

    def __init__(self, module, names):
        self.names, self.stack = names, []
        for layer in layers_of(module):
            for name, child in layer.named_modules():
                child.register_forward_pre_hook(lambda *_, name=name: self.stack.append(name))
                child.register_forward_hook(self.leave, always_call=True)
            forward = layer.forward
            layer.forward = lambda *a, f=forward, **k: checkpoint(
                f, *a, use_reentrant=False, context_fn=self.contexts, **k
            )

    def leave(self, *_):
        self.stack.pop()

    def contexts(self):
        from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

        def policy(_, op, *args, **kwargs):
            inner = self.stack[-1] if self.stack else ""
            chosen = inner in self.names and op.overloadpacket.__name__ in MAIN
            return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.MUST_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)


LISTS = [
    ["attention.query", "attention.key", "attention.value"],
    ["mlp.up"],
    ["mlp.up", "mlp.down", "attention.output", "attention.query", "attention.key", "attention.value"],
    ["attention_norm", "mlp_norm", "mlp.activation"],
    ["attention.softmax"],
    ["attention.softmax", "attention.dropout", "attention.weighted_sum"],
    ["attention.output_dropout", "mlp.output_dropout"],
]


@pytest.mark.parametrize("names", LISTS, ids=lambda names: "+".join(names))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_saved_outputs_against_selective_checkpointing(names, dtype):
    """Bytes alive after the forward pass, and the FLOPs of backward, which runs all else of the layers once more."""
    from torch.distributed._tools.mem_tracker import MemTracker

    torch.manual_seed(0)
    module, inputs = compare.build(case(dtype)), compare.inputs_of(case(dtype))
    Selective(module, names)
    tracker = MemTracker()
    tracker.track_external(module, *inputs)
    with tracker, set_checkpoint_early_stop(False):
        logits = module(*inputs)
        alive = counted(tracker)["activations"]
    loss = logits.sum()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(loss)
    analysis = predicted(dtype, recompute="save", chosen=tuple(name.replace(".", "/") for name in names))
    kept = sum(compare.without_loss(analysis).values())
    assert alive - logits.nbytes == kept
    figures = analysis.flops
    assert counter.get_total_flops() == figures["backward_flops"] + figures["recompute_flops"]


class Call(torch.nn.Module):
    """A function where a module stood."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def test_the_attention_core_under_checkpoint_is_selective():
    """QKᵀ to PV of each layer under torch.utils.checkpoint: bytes, and QKᵀ and PV once more."""
    torch.manual_seed(0)
    module, inputs = compare.build(case("fp32")), compare.inputs_of(case("fp32"))
    for layer in layers_of(module):
        attention = layer.attention

        def core(
            q, k, v, a=attention.scores, b=attention.softmax, c=attention.dropout, d=attention.weighted_sum
        ):  # fmt: skip
            return checkpoint(lambda q, k, v: d(c(b(a(q, k))), v), q, k, v, use_reentrant=False)

        attention.scores = Call(lambda q, k, mask: (q, k))
        attention.softmax = Call(lambda pair, may_hide_all: pair)
        attention.dropout = torch.nn.Identity()
        attention.weighted_sum = Call(lambda pair, v, core=core: core(*pair, v))
    kept = counters.saved_activations(module, inputs)
    analysis = predicted("fp32", recompute="selective")
    assert sum(each.bytes for each in kept) == sum(compare.without_loss(analysis).values())
    with set_checkpoint_early_stop(False):  # which is read when the forward runs
        loss = module(*inputs).sum()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(loss)
    assert counter.get_total_flops() == analysis.flops["backward_flops"] + analysis.flops["recompute_flops"]


def test_discarded_outputs_against_a_function_that_makes_them_again():
    """``ops:activation``: GELU's output, which the next product needs, is made again from its input. In PyTorch, the
    two under one checkpoint keep that input alone; the product's own work is then no part of what runs again."""
    torch.manual_seed(0)
    module, inputs = compare.build(case("fp32")), compare.inputs_of(case("fp32"))
    for layer in layers_of(module):
        mlp = layer.mlp
        pair = torch.nn.Sequential(mlp.activation, mlp.dropout, mlp.down)
        mlp.activation, mlp.dropout = torch.nn.Identity(), torch.nn.Identity()
        mlp.down = Call(lambda x, pair=pair: checkpoint(pair, x, use_reentrant=False))
    kept = counters.saved_activations(module, inputs)
    analysis = predicted("fp32", recompute="ops", chosen=("activation",))
    assert sum(each.bytes for each in kept) == sum(compare.without_loss(analysis).values())
    assert analysis.flops["recompute_flops"] == 0


# --- Logits only where labels are -------------------------------------------------------------------------------------


class Labelled(torch.nn.Module):
    """A trunk whose hidden states are selected by a mask before the head sees them, as masked language models do."""

    def __init__(self, trunk, hidden, vocab, where, dtype):
        super().__init__()
        self.trunk = trunk
        self.register_buffer("where", where)
        self.head = torch.nn.Linear(hidden, vocab, bias=False, dtype=dtype)

    def forward(self, ids):
        return self.head(self.trunk(ids)[self.where])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("labels", [1, 5, 23])
def test_logits_of_the_labelled_tokens_alone(labels, dtype):
    """Bytes kept, FLOPs and the peak of a step of a program that selects before its head."""
    sizes = {"hidden": 32, "heads": 2, "layers": 1, "vocab": 900, "arch": "encoder", "tied": False, "final_norm": True}
    cfg = point_of(None, **sizes, seq_len=24).analysis.cfg
    made = compare.Case(cfg._replace(head=False), RUN, dtype)
    where = torch.zeros(2, 24, dtype=torch.bool)
    for row in where:
        row[torch.randperm(24)[:labels]] = True
    torch.manual_seed(0)
    module = Labelled(compare.build(made), 32, 900, where, compare.DTYPES[dtype])
    inputs = compare.inputs_of(made)
    kept, flops = counters.saved_activations(module, inputs), counters.torch_flops(module, inputs)
    targets = torch.randint(900, (2 * labels,))
    peak = counters.step_peak(
        module, inputs, lambda logits: torch.nn.functional.cross_entropy(logits.float(), targets)
    )
    recipe = {"bf16": "bf16-adam", "fp32": "fp32-adam"}[dtype]
    options = Options(dtype, DOCUMENT, "full", WATCHED, Running(recipe=recipe))
    analysis = Analysis(cfg, RUN._replace(labels=labels), options)
    assert sum(each.bytes for each in kept) == sum(compare.without_loss(analysis).values())
    assert flops.forward == analysis.flops["forward_flops"]
    assert flops.backward == analysis.flops["backward_flops"]
    moment = analysis.whole.peak
    assert peak - SCALARS - where.nbytes == moment.total - moment.bytes["optimizer"], moment.name
