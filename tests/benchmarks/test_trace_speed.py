"""What tracing costs, each beside a baseline of the same run, in processor seconds of one thread.

A whole trace (the module built, forward and backward on symbolic shapes, closed forms) against one concrete forward
pass of the same model on fake tensors (built and run); and 126 layers of Llama-3.1-405B against 32 of Llama-3-8B.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tfcost.tracing.program import run  # noqa: E402
from tfcost.tracing.semantics import Semantics  # noqa: E402
from tfcost.tracing.sources import Source, from_transformers  # noqa: E402
from tfcost.tracing.torch_private import FakeTensorMode, fake_mode  # noqa: E402
from tfcost.tracing.trace import Settings, figures, hints_of, traced  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.transformers, pytest.mark.filterwarnings("default")]


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """The least processor time of some runs, each with an empty cache of fake operators."""
    least = float("inf")
    for _ in range(times):
        FakeTensorMode.cache_clear()
        began = time.process_time()
        work()
        least = min(least, time.process_time() - began)
    return least


def source(name: str) -> Source:
    return from_transformers(name, "eager", "bf16", {"batch": 5, "seq_len": 509})


def fake_forward(made: Source) -> None:
    """The baseline: one forward pass on fake tensors of concrete sizes, nothing recorded."""
    with fake_mode(False):
        module = made.build(made.letters).train()
        args, kwargs = made.feed(made.letters)
        module(*args, **kwargs)


def whole_trace(made: Source) -> None:
    figures(traced(made, Settings()).forms)


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "t5-small", "t5-base", "t5-3b"])
def test_a_trace_costs_at_most_three_forward_passes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = source(name)
    whole_trace(made)
    baseline, whole = seconds(lambda: fake_forward(made)), seconds(lambda: whole_trace(made))
    with capsys.disabled():
        print(f"\n{name}: trace {whole:.2f} s, one fake forward {baseline:.2f} s, {whole / baseline:.2f}x")
    assert whole <= 3 * baseline


def test_405b_costs_little_more_than_8b(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = source("llama-3-8b"), source("llama-3.1-405b")
    whole_trace(small)
    # In turns, so that a slow moment of the machine weighs on both.
    turns = [(seconds(lambda: whole_trace(small), 1), seconds(lambda: whole_trace(large), 1)) for _ in range(8)]
    eight, many = (min(times) for times in zip(*turns, strict=True))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    with capsys.disabled():
        print(f"\nLlama-3.1-405B {many:.2f} s, Llama-3-8B {eight:.2f} s, {many / eight:.2f}x; {memory:.2f} GB")
    assert many <= 1.5 * eight
    assert memory < 1.5


def test_sharing_layers_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The same program with every layer run: equal figures, several times the time."""
    made = source("gpt2")
    options = {"symbolic": True, "train": True, "backward": True, "semantics": Semantics("cuda", "eager")}
    hints = hints_of(made)
    shared = seconds(lambda: run(made.build, made.feed, hints, around=made.around, **options), 1)
    whole = seconds(lambda: run(made.build, made.feed, hints, around=made.around, share=False, **options), 1)
    with capsys.disabled():
        print(f"\ngpt2: equal layers once {shared:.2f} s, every layer {whole:.2f} s")
    assert shared < whole
