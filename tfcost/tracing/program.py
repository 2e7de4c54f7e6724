"""Running a module once on fake tensors, forward and backward, and what was recorded of it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

from tfcost.errors import InputError, TfcostError
from tfcost.tracing.recorder import Recorder, tensors_of
from tfcost.tracing.records import Chosen, OpRecord, SavedRecord
from tfcost.tracing.repeats import Repeats
from tfcost.tracing.results import Results, size_of
from tfcost.tracing.semantics import Semantics
from tfcost.tracing.torch_private import assumed_gpu, cached_arithmetic, fake_mode, sizes, torch, tree_map

Build = Callable[[Mapping[str, Any]], Any]
"""From the sizes by letter to the module; called under fake tensors, so that no weight takes memory."""

Feed = Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""From the sizes by letter to the arguments of the module's forward; called under fake tensors."""


class Weight(NamedTuple):
    """A parameter or buffer: its module, name, sizes, elements' type and bytes, and whether it is trained."""

    path: str
    name: str
    shape: tuple[Any, ...]
    dtype: str
    numel: Any
    bytes: Any
    trained: bool
    buffer: bool


class Recorded(NamedTuple):
    """A program that ran: its ops, kept tensors, weights, and the guards that its branches left behind.

    ``bounds`` are lengths that a table of rows limits; ``pinned`` letters turned out to have one size only.
    """

    ops: list[OpRecord]
    saved: list[SavedRecord]
    weights: list[Weight]
    guards: list[Any]
    letters: dict[Any, str]
    bounds: list[tuple[Any, int, str]]
    pinned: list[str]
    replays: int
    seconds: float
    chosen: dict[Any, Chosen] = {}  # noqa: RUF012  # never changed


class ModuleError(InputError):
    """A module failed in its own forward: its error, where, and on what shapes."""


class Progress:
    """A line on a terminal's stderr for whatever takes longer than two seconds; gone when it is done."""

    def __init__(self, wanted: bool) -> None:
        self.began = time.monotonic()
        self.wanted = wanted and sys.stderr is not None and sys.stderr.isatty()
        self.shown = False

    def tell(self, text: str) -> None:
        """Say what is being done, once two seconds have passed."""
        if self.wanted and time.monotonic() - self.began > 2:
            sys.stderr.write(f"tracing {text[:60]:<60}\r")
            sys.stderr.flush()
            self.shown = True

    def done(self) -> None:
        """Take the line away."""
        if self.shown:
            sys.stderr.write(" " * 70 + "\r")


@contextmanager
def calls(recorder: Recorder, repeats: Repeats | None, names: dict[int, str], progress: Progress) -> Iterator[None]:
    """While inside, every call of a module is known by its name, and may be one that needs no second run."""
    everything: Any = torch.nn.Module
    original = everything.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(self))
        if name is None:
            return original(self, *args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs)

        progress.tell(name)
        with recorder.inside(name):
            try:
                return forward(*args, **kwargs) if repeats is None else repeats.run(self, forward, args, kwargs)
            except Exception as error:
                if not hasattr(error, "tfcost_where"):
                    shapes = [str(list(each.shape)) for each in tensors_of((args, kwargs))]
                    error.tfcost_where = f"{name or 'the module'} ({type(self).__name__}) on {', '.join(shapes)}"  # type: ignore[attr-defined]
                raise

    everything.__call__ = call
    try:
        yield
    finally:
        everything.__call__ = original


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(value, torch.Tensor)


def run(
    build: Build,
    feed: Feed,
    hints: Mapping[str, int],
    *,
    symbolic: bool,
    train: bool,
    backward: bool,
    semantics: Semantics,
    share: bool = True,
    autocast: Any = None,
    progress: bool = False,
    fixed: Sequence[str] = (),
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    device: str = "cpu",
) -> Recorded:
    """Run a module once and record it.

    ``hints`` gives each letter its size in this run: with ``symbolic`` the size is that letter, except for those in
    ``fixed``. ``share`` runs equal layers once.
    """
    began = time.monotonic()
    mode = fake_mode(symbolic)
    lines = Progress(progress)
    open_letters = [letter for letter in hints if symbolic and letter not in fixed]
    with ExitStack() as stack:
        if symbolic:
            stack.enter_context(cached_arithmetic())
        given: dict[str, Any] = dict(hints)
        if open_letters:
            given |= dict(zip(open_letters, sizes(mode, [hints[each] for each in open_letters]), strict=True))
        letters = {size_of(given[letter]): letter for letter in open_letters}
        if device == "cuda":
            stack.enter_context(assumed_gpu())
        with mode, nullcontext() if device == "cpu" else torch.device(device):
            built = build(given)
            # A module that exists already comes with the means to put its own weights back.
            module = stack.enter_context(built) if hasattr(built, "__enter__") else built
            named = list(module.named_modules())  # once: a walk through a hundred layers is not for nothing
            modes = {each: each.training for _, each in named}
            stack.callback(restore, modes)
            module.train(train)
            args, kwargs = feed(given)
            if not backward:
                args, kwargs = tree_map(lambda leaf: leaf.detach() if is_tensor(leaf) else leaf, (args, kwargs))
            weights = weights_of(named)
            recorder = Recorder(semantics.result, Results() if symbolic else None)
            recorder.own([each for _, each in named])
            repeats = Repeats(named, recorder) if share else None
            names = {id(each): name for name, each in named}
            with calls(recorder, repeats, names, lines), semantics.functions(recorder), around():
                _passes(module, args, kwargs, recorder, backward, autocast, device, letters)
        recorder.name_saved()
        lines.done()
        ran = backward and (device == "cpu" or torch.cuda.is_available())
        if repeats is not None and ran and repeats.went_backward != repeats.expected_backward:
            # Some layer's output reaches no loss: equal layers then differ in their backward.
            return run(
                build, feed, hints, symbolic=symbolic, train=train, backward=backward, semantics=semantics,
                share=False, autocast=autocast, progress=progress, fixed=fixed, around=around, device=device,
            )  # fmt: skip
        shapes = mode.shape_env
        guards = [] if shapes is None else [guard.expr for guard in shapes.guards]
        pinned = [letter for size, letter in letters.items() if shapes is not None and shapes.replace(size) != size]
        return Recorded(
            recorder.ops, recorder.saved, weights, guards, letters, recorder.bounds, pinned,
            0 if repeats is None else repeats.replays, time.monotonic() - began, recorder.chosen,
        )  # fmt: skip


def restore(modes: Mapping[Any, bool]) -> None:
    """Put every module's training flag back."""
    for module, training in modes.items():
        module.training = training


def _passes(
    module: Any, args: Any, kwargs: Any, recorder: Recorder, backward: bool, autocast: Any, device: str,
    letters: Mapping[Any, str],
) -> None:  # fmt: skip
    """One forward pass, and one backward pass from a gradient of each output.

    Autograd's engine wants a real GPU for CUDA tensors, fake ones too: without one there is the forward pass alone.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(backward))
        stack.enter_context(recorder)
        cast = nullcontext() if autocast is None else torch.autocast(device, dtype=autocast)
        with cast, torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor):
            try:
                out = module(*args, **kwargs)
            except Exception as error:
                explain(error, letters)
                raise
        if not backward:
            return
        with recorder.mute():
            outputs = [each for each in tensors_of(out) if each.requires_grad]
            if not outputs:
                raise InputError("no output needs a gradient; --eval traces the forward pass alone")
            gradients = [torch.empty_like(each) for each in outputs]
        if device == "cuda" and not torch.cuda.is_available():
            return
        recorder.sums.watch(outputs)
        recorder.in_backward = True
        torch.autograd.backward(outputs, gradients)


def explain(error: Exception, letters: Mapping[Any, str]) -> None:
    """Turn a module's own error into one that says where, in our letters; those that mean something to us pass."""
    from tfcost.tracing.torch_private import cannot_follow

    if isinstance(error, TfcostError) or cannot_follow(error):
        return
    where = getattr(error, "tfcost_where", "the module")
    words = f"{where} fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    for size, letter in letters.items():
        words = re.sub(rf"\b{size}\b", letter, words)
    raise ModuleError(words) from error


def weights_of(named: Sequence[tuple[str, Any]]) -> list[Weight]:
    """The distinct parameters and buffers of modules with their names, each by the first name that it has."""
    found: list[Weight] = []
    seen: set[int] = set()
    for buffer, group in ((False, "_parameters"), (True, "_buffers")):
        for path, leaf, tensor in [(path, *item) for path, each in named for item in getattr(each, group).items()]:
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            numel = 1
            for size in tensor.shape:
                numel = numel * size_of(size)
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = tuple(map(size_of, tensor.shape))
            trained = bool(tensor.requires_grad)
            found.append(Weight(path, leaf, shape, dtype, numel, numel * tensor.itemsize, trained, buffer))
    return found
