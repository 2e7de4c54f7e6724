"""``tfcost flops``, ``params`` and ``memory``: the figures of one model, or one row per combination of listed sizes."""

from __future__ import annotations

from itertools import product
from typing import Any

import typer

from tfcost.analysis import analyze
from tfcost.cli.options import COUNTING, OUTPUT, PASS, ROWS, STORAGE, STRUCTURE, Flag, command_app
from tfcost.cli.output import emit, format_of
from tfcost.errors import InputError
from tfcost.models import load
from tfcost.report import Report

OUTPUT_KEYS = tuple(flag.keyword for flag in OUTPUT)


def reports(command: str, model: str | None, values: dict[str, Any], flags: tuple[Flag, ...]) -> Report:
    """The report of one point, or of the grid that listed sizes span."""
    keywords = {key: value for key, value in values.items() if key not in OUTPUT_KEYS}
    keywords.setdefault("formula", format_of(values) == "table")
    source = None if model is None else load(model)
    sizes = [flag.keyword for flag in flags if flag.kind == "counts" and flag.keyword in keywords]
    listed = [key for key in sizes if len(keywords[key]) > 1]
    points = [dict(zip(sizes, point, strict=True)) for point in product(*(keywords[key] for key in sizes))]
    if not listed:
        return analyze(source, **{**keywords, **points[0]}, command=command)
    if keywords.get("by", "component") != "component":
        raise InputError("--by needs one point: a list of sizes gives one row per combination")
    every = [analyze(source, **{**keywords, **point}, command=command) for point in points]
    first = every[0]
    rows = [{key: point[key] for key in listed} | report.totals for point, report in zip(points, every, strict=True)]
    warnings = list(dict.fromkeys(warning for report in every for warning in report.warnings))
    config = {key: keywords[key] if key in listed else value for key, value in first.model.items()}
    inputs = {key: keywords[key] if key in listed else value for key, value in first.inputs.items()}
    # The closed forms are those of the structure, so one point's stand for all.
    return Report(command, config, inputs, first.assumptions, {}, lambda: rows, first.closed_forms, warnings, listed)


FLAGS = (*PASS, *STRUCTURE, *COUNTING, *STORAGE, *ROWS, *OUTPUT)

HELP = {
    "flops": "FLOPs of a forward pass, a backward pass and a training step, by component.",
    "params": "Parameters by component: total, embeddings, head, and what is left.",
    "memory": "Bytes at the end of a forward pass: activations kept for backward, logits, weights.",
}


def app(name: str) -> typer.Typer:
    """The app of one of the commands."""
    return command_app(name, HELP[name], FLAGS, lambda model, values: emit(reports(name, model, values, FLAGS), values))
