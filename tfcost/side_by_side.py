"""Several answers beside each other: one model by every convention, and several models by one."""

from __future__ import annotations

import os
from typing import Any

from tfcost.config import FIELDS, SIZE_FIELDS, ModelConfig, flag
from tfcost.convention import CONVENTIONS
from tfcost.errors import InputError
from tfcost.models import LAYERS, Model, load
from tfcost.point import Point, point_of
from tfcost.report import Report


def conventions(point: Point) -> Report:
    """One model's FLOPs by each named convention, per step and per target token, with what each leaves out.

    A convention that is not defined for the model has no figures, and says why.
    """
    rows: list[dict[str, Any]] = []
    for name, convention in CONVENTIONS.items():
        row: dict[str, Any] = {"convention": name}
        try:
            figures = point.priced_by(convention)
        except InputError as error:
            # The message ends with the reason; before it stands the flag, which the row already names.
            rows.append(row | dict.fromkeys(COLUMNS) | {"leaves_out": str(error).partition(f"{name} ")[2]})
            continue
        rows.append(row | {key: figures[key] for key in COLUMNS} | {"leaves_out": convention.leaves_out})
    base = point.report("flops", "component", False)
    return Report(
        "conventions", base.model, base.inputs, base.assumptions, {}, lambda: rows, None, base.warnings, ["convention"],
        {"sources": {name: convention.source for name, convention in CONVENTIONS.items()}},
    )  # fmt: skip


COLUMNS = (
    "forward_macs", "forward_flops", "backward_flops", "train_flops", "hardware_flops", "flops_per_token",
    "train_flops_per_token",
)  # fmt: skip


def read_spec(spec: str) -> tuple[Model, dict[str, Any]]:
    """A model and its what-if: ``gpt2``, ``gpt2:layers=24``, ``./config.json:kv_heads=8,attention_dropout=0``.

    The names are the long flags', with dashes or underscores. A file whose name has a colon wins over a what-if.
    """
    base, colon, changes = spec.rpartition(":")
    if not colon or "=" not in changes or os.path.exists(spec):
        return load(spec), {}
    what_if: dict[str, Any] = {}
    for change in changes.split(","):
        field, equals, text = change.partition("=")
        field = field.strip().replace("-", "_")
        if not equals or field == "model_type" or field not in (*FIELDS, "layers"):
            raise InputError(
                f"in {spec!r}: {change!r} is not FIELD=VALUE with a field such as layers, hidden, kv_heads"
            )
        what_if[field] = _value(field, text.strip())
    return load(base), what_if


def _value(field: str, text: str) -> Any:
    from tfcost.units import parse_count, parse_probability

    default = ModelConfig._field_defaults.get(field)
    if isinstance(default, bool):
        return {"true": True, "false": False, "yes": True, "no": False}.get(text.lower(), text)
    if field.endswith("dropout"):
        return parse_probability(text, flag(field))
    if field in SIZE_FIELDS or default is None or isinstance(default, int):
        return 0 if text == "0" and isinstance(default, int) else parse_count(text, flag(field))
    return text


def compare(specs: list[str], **given: Any) -> Report:
    """Models beside each other: the fields that differ first, then every total, each relative to the first model."""
    if len(specs) < 2:
        raise InputError("compare needs at least two models, for example: tfcost compare gpt2 gpt2-medium")
    names = [spec if specs.index(spec) == index else f"{spec} ({index + 1})" for index, spec in enumerate(specs)]
    read = [read_spec(spec) for spec in specs]
    layers = [model.name in LAYERS for model, _ in read]
    if any(layers):
        if not all(layers):
            raise InputError(f"layers ({', '.join(LAYERS)}) are compared with each other, not with models")
        from tfcost.layer_table import compare_layers

        return compare_layers([(name, *each) for name, each in zip(names, read, strict=True)], **given)
    points = {name: point_of(model, **{**given, **what_if}) for name, (model, what_if) in zip(names, read, strict=True)}
    if given.get("seq_len") is None:
        # Each has a default length of its own; figures are compared at one that all of them have.
        # A model of images has no other length than its own.
        texts = [name for name, point in points.items() if point.analysis.cfg.patches is None]
        shortest = min([points[name].analysis.run.seq_len for name in texts], default=None)
        for name, (model, what_if) in zip(names, read, strict=True):
            if name in texts:
                points[name] = point_of(model, **{**given, "seq_len": shortest, **what_if})
    first, *others = names
    reports = {name: point.report(None, "component", False) for name, point in points.items()}
    rows: list[dict[str, Any]] = []
    settings = {name: report.inputs | report.assumptions | report.model for name, report in reports.items()}
    for key in dict.fromkeys(key for setting in settings.values() for key in setting):
        values = {name: setting.get(key) for name, setting in settings.items()}
        differs = any(value != values[first] for value in values.values())
        if differs and key not in ("name", "counts", "leaves_out", "routing"):
            rows.append({"what": key} | values)
    totals = list(dict.fromkeys(key for report in reports.values() for key in report.totals))
    for key in totals:
        values = {name: report.totals.get(key) for name, report in reports.items()}
        ratios = {f"{name} / {first}": _ratio(values[name], values[first]) for name in others}
        rows.append({"what": key} | values | ratios)
    warnings = [f"{name}: {warning}" for name, point in points.items() for warning in point.warnings]
    base = reports[first]
    shared = {
        key: value
        for key, value in base.inputs.items()
        if all(each.inputs.get(key) == value for each in reports.values())
    }
    return Report(
        "compare", {"models": {name: report.model for name, report in reports.items()}}, shared, base.assumptions, {},
        lambda: rows, None, warnings, ["what"],
    )  # fmt: skip


def _ratio(value: Any, base: Any) -> float | None:
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (value, base))
    return value / base if numbers and base else None
