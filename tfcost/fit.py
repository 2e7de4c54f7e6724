"""``tfcost fit``: the largest size at which a model fits a device, by exact search; and the KV cache's report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tfcost.analysis import Analysis
from tfcost.blocks import Run
from tfcost.config import ModelConfig, choice
from tfcost.devices import device
from tfcost.errors import InputError
from tfcost.fit_formula import Root, root_of
from tfcost.kv import Cache, caches, totals
from tfcost.memory import Memory
from tfcost.models import DOCUMENT_MODEL, Model
from tfcost.point import Point, point_of
from tfcost.policy import Running
from tfcost.report import Report

SOLVED = {"batch": "batch", "seq-len": "seq_len", "layers": "layers", "hidden": "hidden", "lora-rank": "lora_rank"}
MAX_STEPS = 2**40
"""Beyond so many steps the size is no limit at all."""


class Solution(NamedTuple):
    """The largest value that fits (0: none does), the point there, and the point one step beyond."""

    value: int
    step: int
    at: Point | None
    beyond: Point | None


def total_of(point: Point) -> int:
    """The bytes at the peak."""
    total: int = point.analysis.whole.peak.total
    return total


def largest(build: Callable[[int], Point], capacity: int, step: int = 1, most: int | None = None) -> Solution:
    """The largest multiple of ``step`` (at most ``most``) whose memory is within ``capacity``: doubling, then halving.

    Memory grows with every size that is solved for, so the answer is exact: it fits there, and not one step beyond.
    """
    points: dict[int, Point] = {}

    def fits(steps: int) -> bool:
        points[steps] = build(steps * step)
        return total_of(points[steps]) <= capacity

    limit = None if most is None else most // step
    if not fits(1):
        return Solution(0, step, None, points[1])
    low, high = 1, 2
    while limit is None or high <= limit:
        if not fits(high):
            break
        low, high = high, 2 * high
        if high > MAX_STEPS:
            return Solution(low * step, step, points[low], None)
    if limit is not None:
        high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    beyond = None if limit is not None and high > limit else points[high]
    return Solution(low * step, step, points[low], beyond)


class FitForms(NamedTuple):
    """The closed forms of a fit: the solved size, by the capacity C, and the bytes at the limiting moment."""

    name: str
    root: Root
    values: dict[str, int]
    """The capacity C, and the answer by its letter."""

    def formulas(self, keys: Any) -> dict[str, Any]:
        """The closed form of each total that has one."""
        found = {self.name: self.root.solution, "total_bytes_next": self.root.bytes}
        return {key: found[key] for key in keys if key in found}


def _closed(name: str, solution: Solution, build: Callable[[int], Point], capacity: int) -> Root | str:
    """The closed form of a solution, or why there is none."""
    if solution.at is None:
        return f"no closed form for {name} here: nothing fits"
    if solution.beyond is None:
        return f"no closed form for {name} here: what limits it is no size of memory"

    def moments(value: int) -> dict[str, int]:
        return {moment.name: moment.total for moment in build(value).analysis.whole.moments}

    return root_of(name, solution.value, solution.step, moments, capacity)


def fit_report(model: Model | None, solve: str | None = None, formula: bool = False, **given: Any) -> Report:
    """The largest that fits a device, what limits it, and what would help most; with ``formula`` its closed form."""
    name = SOLVED[choice("--solve", solve or "batch", SOLVED)]
    if not given.get("device"):
        raise InputError("fit needs --device NAME (tfcost devices lists them) or a size such as --device 24GB")
    if name in given:
        raise InputError(f"--solve {solve or 'batch'} finds that size; --{name.replace('_', '-')} does not go with it")
    found = device(given["device"])
    source = DOCUMENT_MODEL if model is None else model
    step = _step(source, given) if name == "hidden" else 1
    most = _most(source, given) if name == "seq_len" else None

    def build(value: int, **changes: Any) -> Point:
        return point_of(source, **{**given, **changes, name: value})

    solution = largest(build, found.memory_bytes, step, most)
    at = solution.beyond if solution.at is None else solution.at
    assert at is not None
    report = _report(solution, at, found.memory_bytes, name, what_ifs(solution, build, found.memory_bytes, most))
    if not formula:
        return report
    root = _closed(name, solution, build, found.memory_bytes)
    if isinstance(root, str):
        report.warnings.append(root)
        return report
    report.extra["closed_form_at"] = root.moment
    report.closed_forms = lambda: FitForms(name, root, {"C": found.memory_bytes, root.letter: solution.value})
    return report


def _step(model: Model, given: dict[str, Any]) -> int:
    """Widths are tried in steps of the number of heads, which must divide them."""
    heads: int | None = given.get("heads") or model.stated.get("heads")
    if heads is None:
        raise InputError("missing -h/--heads")
    return heads


def _most(model: Model, given: dict[str, Any]) -> int | None:
    """The longest sequence that the model has positions for, where they are learned."""
    fields = {key: value for key, value in given.items() if key in ("positions", "max_positions")}
    stated = {**model.stated, **fields}
    return stated.get("max_positions") if stated.get("positions") == "learned" else None


class Change(NamedTuple):
    """A what-if: how it is asked for, and whether it says something new of this run."""

    flags: str
    keywords: dict[str, Any]
    applies: Callable[[Point, Running], bool]


def _trains(running: Running) -> bool:
    return running.mode == "train"


CHANGES = (
    Change("--attention flash", {"attention": "flash"}, lambda p, r: p.analysis.run.attention != "flash"),
    Change("--recompute selective", {"recompute": "selective"},
           lambda p, r: _trains(r) and r.recompute == "none" and p.analysis.run.attention != "flash"),
    Change("--recompute full", {"recompute": "full"},
           lambda p, r: _trains(r) and (r.recompute != "full" or r.every != 1)),
    Change("--loss chunked=8", {"loss": "chunked=8", "logit_copies": None},
           lambda p, r: _trains(r) and r.loss == "eager"),
    Change("--loss fused", {"loss": "fused", "logit_copies": None}, lambda p, r: _trains(r) and r.loss != "fused"),
    Change("--recipe adam8bit", {"recipe": "adam8bit", "optimizer": None},
           lambda p, r: _trains(r) and r.recipe != "adam8bit" and p.analysis.options.dtype != "fp8"),
    Change("--recipe bf16-adam", {"recipe": "bf16-adam", "optimizer": None},
           lambda p, r: _trains(r) and r.recipe in ("zero-16", "megatron-18", "grad-accum-20")),
    Change("--lora-rank 16", {"lora_rank": 16}, lambda p, r: _trains(r) and r.adapters is None),
    Change("--quantize nf4", {"quantize": "nf4"},
           lambda p, r: not r.quantize and (not _trains(r) or bool(r.adapters and r.adapters.rank))),
    Change("--kv-dtype fp8", {"kv_dtype": "fp8"},
           lambda p, r: not _trains(r) and r.kv_dtype in ("bf16", "fp16", "fp32")),
)  # fmt: skip
"""What could help, each a change of the run that leaves the model's structure as it is."""


def what_ifs(solution: Solution, build: Callable[..., Point], capacity: int, most: int | None) -> list[dict[str, Any]]:
    """Each change that saves something one step beyond what fits: bytes saved there, and the largest with it."""
    base = solution.beyond
    if base is None:
        return []
    value = solution.value + solution.step
    found = []
    for change in CHANGES:
        if not change.applies(base, base.analysis.options.running):
            continue
        try:
            changed = build(value, **change.keywords)
        except InputError:  # another flag forbids it
            continue
        saved = total_of(base) - total_of(changed)
        if saved > 0:
            with_it = largest(lambda n, c=change: build(n, **c.keywords), capacity, solution.step, most)  # type: ignore[misc]
            found.append({"what_if": change.flags, "saved_bytes": saved, "largest": with_it.value})
    return sorted(found, key=lambda row: -row["saved_bytes"])


def _report(solution: Solution, at: Point, capacity: int, name: str, helps: list[dict[str, Any]]) -> Report:
    base = at.report("memory", "component", False)
    memory: Memory = at.analysis.whole
    beyond = solution.beyond
    if beyond is None:
        limit = "positions" if name == "seq_len" else "nothing"
    else:
        moment = beyond.analysis.whole.peak
        limit = f"{max(moment.bytes, key=lambda category: moment.bytes[category])}, {moment.name}"
    figures = {
        name: solution.value, "total_bytes": None if solution.at is None else memory.peak.total,
        "total_bytes_next": None if beyond is None else total_of(beyond), "capacity_bytes": capacity,
        "limited_by": limit,
    }  # fmt: skip
    inputs = {key: value for key, value in base.inputs.items() if key != name}
    return Report(
        "fit", base.model, inputs, base.assumptions, figures, lambda: helps, None, base.warnings, (),
        memory.notes(),
    )  # fmt: skip


def kv_report(model: Model | None, device: str | None = None, formula: bool = False, **given: Any) -> Report:
    """The KV cache of ``batch`` sequences of ``seq_len`` tokens, and how many tokens fit a device."""
    overhead = given.get("overhead") or 0
    point = point_of(model, **given, mode="prefill", device=device)
    analysis, running = point.analysis, point.analysis.options.running
    found = caches(analysis.cfg, analysis.run, running.kv_dtype)
    weights = analysis.whole.states["weights"]
    capacity = analysis.whole.device
    free = None if capacity is None else max(capacity.memory_bytes - weights - overhead, 0)
    figures = totals(found, analysis.run, free, expanded_of(analysis.cfg, analysis.run, running.kv_dtype))
    if capacity is not None:
        figures |= {"weight_bytes": weights, "capacity_bytes": capacity.memory_bytes,
                    "fits": figures["kv_cache_bytes"] <= (free or 0)}  # fmt: skip
    rows = [
        {"path": cache.path, "count": cache.copies, "bytes_per_token": cache.bytes_each, "window": cache.window}
        for cache in found
        if cache.tokens is None
    ]
    base = point.report("memory", "component", False)
    closed = (lambda: KvForms(analysis)) if formula else None
    extra = {} if capacity is None else {"device": capacity._asdict()}
    return Report("kv", base.model, base.inputs, base.assumptions, figures, lambda: rows, closed, base.warnings,
                  (), extra)  # fmt: skip


def expanded_of(cfg: ModelConfig, run: Run, dtype: str) -> list[Cache] | None:
    """What latent attention would cache if it kept every head's keys and values; None for other attention."""
    return caches(cfg, run, dtype, expanded=True) if cfg.attention_kind == "latent" else None


class KvForms:
    """The closed forms of a KV cache's totals."""

    def __init__(self, analysis: Analysis) -> None:
        from tfcost.symbols import symbolic_config, symbolic_run

        symbolic, sizes = symbolic_config(analysis.cfg)
        self.run, lengths = symbolic_run(analysis.cfg, analysis.run)
        self.values = {**lengths, **sizes}
        dtype = analysis.options.running.kv_dtype
        self.found, self.expanded = caches(symbolic, self.run, dtype), expanded_of(symbolic, self.run, dtype)

    def formulas(self, keys: Any) -> dict[str, Any]:
        """The closed form of each total that has one."""
        from tfcost.notation import plain

        figures = totals(self.found, self.run, None, self.expanded)
        return {key: plain(figures[key]) for key in keys if figures.get(key) is not None}
