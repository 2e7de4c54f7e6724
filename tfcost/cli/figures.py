"""``tfcost flops``, ``params`` and ``memory``: the figures of one model, or one row per combination of listed sizes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

from tfcost.cli.options import (
    ADAPT,
    ALL_CONVENTIONS,
    COUNTING,
    MODEL_FLAGS,
    OUTPUT,
    PASS,
    ROWS,
    RUNNING,
    STORAGE,
    AppFor,
    Flag,
    command_app,
)  # fmt: skip
from tfcost.cli.output import emit, format_of
from tfcost.config import from_dict
from tfcost.errors import InputError
from tfcost.models import load
from tfcost.point import analyze, point_of
from tfcost.policy import RECIPES
from tfcost.report import Report

OUTPUT_KEYS = tuple(flag.keyword for flag in OUTPUT)


MAX_POINTS = 10_000


def reports(command: str, model: str | None, values: dict[str, Any], flags: tuple[Flag, ...]) -> Report:
    """The report of one of these commands."""
    return every_point(command, model, values, flags, lambda source, **given: analyze(source, **given, command=command))


def every_point(
    command: str, model: str | None, values: dict[str, Any], flags: tuple[Flag, ...], report_of: Callable[..., Report]
) -> Report:
    """The report of one point, or of the grid that listed sizes span."""
    keywords = {key: value for key, value in values.items() if key not in (*OUTPUT_KEYS, "conventions")}
    keywords.setdefault("formula", format_of(values) not in ("json", "csv"))
    source = None if model is None else load(model)
    sizes = [flag.keyword for flag in flags if flag.kind == "counts" and flag.keyword in keywords]
    listed = [key for key in sizes if len(keywords[key]) > 1]
    if (count := prod(len(keywords[key]) for key in sizes)) > MAX_POINTS:
        raise InputError(f"the lists span {count:,} combinations; at most {MAX_POINTS:,} are allowed")
    points = [dict(zip(sizes, point, strict=True)) for point in product(*(keywords[key] for key in sizes))]
    if not listed:
        return report_of(source, **{**keywords, **points[0]})
    if keywords.get("by", "total") != "total":
        raise InputError("--by needs one point: a list of sizes gives one row per combination")
    every = [report_of(source, **{**keywords, **point}) for point in points]
    rows = [{key: point[key] for key in listed} | report.totals for point, report in zip(points, every, strict=True)]
    warnings = list(dict.fromkeys(warning for report in every for warning in report.warnings))
    config, inputs = [
        {key: _all([getattr(report, part)[key] for report in every]) for key in getattr(every[0], part)}
        for part in ("model", "inputs")
    ]
    closed = (lambda: _closed_forms(every, listed)) if keywords["formula"] else None
    return Report(command, config, inputs, every[0].assumptions, {}, lambda: rows, closed, warnings, listed)


def _all(values: list[Any]) -> Any:
    """The one value that all points share, or the list of the different ones."""
    different = [value for index, value in enumerate(values) if value not in values[:index]]
    return different[0] if len(different) == 1 else different


def _closed_forms(every: list[Report], listed: list[str]) -> Any:
    """The closed forms that hold at every point of a grid; None where those of no one point do.

    A size that follows from others at some of the points only (h_kv = h, d_ff = 4d) must be a letter of its own.
    """
    if {"batch", "seq_len", "src_len"}.issuperset(listed):
        return every[0].closed
    recipe = every[0].assumptions.get("running", {}).get("recipe")
    if every[0].command == "memory" and recipe in RECIPES and RECIPES[recipe].by_size:
        return None  # each point may be on another side of the sizes that such a recipe asks for
    from tfcost.notation import symbol
    from tfcost.symbols import FIELD_SYMBOLS, symbolic_config

    configs = [{key: value for key, value in report.model.items() if key != "name"} for report in every]
    structures = [symbolic_config(from_dict(config))[0] for config in configs]
    differ = [field for field in FIELD_SYMBOLS if len({getattr(each, field) for each in structures}) > 1]
    for report, structure in zip(every, structures, strict=True):
        if all(getattr(structure, field) == symbol(FIELD_SYMBOLS[field]) for field in differ):
            return report.closed
    return None


FLAGS = (*PASS, *MODEL_FLAGS, *COUNTING, *STORAGE, *ADAPT, *ROWS, *OUTPUT)
MEMORY_FLAGS = (*PASS, *MODEL_FLAGS, *COUNTING, *STORAGE, *RUNNING, *ROWS, *OUTPUT)

HELP = {
    "flops": "FLOPs of a forward pass, a backward pass and a training step, by component.",
    "params": "Parameters by component: total, embeddings, head, and what is left.",
    "memory": "Bytes on one device: weights, gradients, optimizer, activations, logits, and the moment of the peak.",
}


def every_convention(model: str | None, values: dict[str, Any]) -> Report:
    """One point's FLOPs by each named convention."""
    from tfcost.side_by_side import conventions

    for key in ("convention", "by", "formula", "causal"):
        if key in values:
            raise InputError(f"--conventions shows them all; --{key} does not go with it")
    keywords = {key: value for key, value in values.items() if key not in (*OUTPUT_KEYS, "conventions")}
    for flag in FLAGS:
        if flag.kind == "counts" and flag.keyword in keywords:
            if len(keywords[flag.keyword]) > 1:
                raise InputError(f"--conventions needs one point; {flag.label} is a list")
            keywords[flag.keyword] = keywords[flag.keyword][0]
    return conventions(point_of(None if model is None else load(model), **keywords))


def app(name: str) -> AppFor:
    """The app of one of the commands."""

    flags = MEMORY_FLAGS if name == "memory" else FLAGS

    def action(model: str | None, values: dict[str, Any]) -> int:
        side_by_side = values.get("conventions")
        report = every_convention(model, values) if side_by_side else reports(name, model, values, flags)
        emit(report, values)
        return 1 if report.totals.get("fits") is False else 0

    if name == "flops":
        return command_app(name, HELP[name], (*flags, ALL_CONVENTIONS), action)
    return command_app(name, HELP[name], flags, action)
