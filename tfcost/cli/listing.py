"""``tfcost models`` and ``compare``: what presets there are, and several models beside each other."""

from __future__ import annotations

from typing import Any

from tfcost.cli.options import COUNTING, MODEL_FLAGS, OUTPUT, PASS, STORAGE, AppFor, Argument, Flag, command_app
from tfcost.cli.output import emit
from tfcost.errors import InputError, UnknownName
from tfcost.report import Report

OUTPUT_KEYS = tuple(flag.keyword for flag in OUTPUT)

LIST_FLAGS = (
    Flag("family", ("--family",), "text", "only this model_type (gpt2, llama, bert ...)"),
    Flag("max_params", ("--max-params",), "counts", "at most so many parameters (10B)"),
    Flag("min_params", ("--min-params",), "counts", "at least so many parameters"),
    *OUTPUT,
)

LAYER_KEYS = ("hidden", "heads", "ffn_hidden", "window", "kernel")
COMPARE_FLAGS = (*PASS, *[flag for flag in MODEL_FLAGS if flag.keyword in LAYER_KEYS], *COUNTING, *STORAGE, *OUTPUT)


def only(key: str, values: dict[str, Any]) -> Any:
    """The one value of a flag; a list has no answer here."""
    value = values[key]
    if not isinstance(value, list):
        return value
    if len(value) > 1:
        raise InputError(f"--{key.replace('_', '-')} takes one value here, not a list")
    return value[0]


def models(words: list[str] | None, values: dict[str, Any]) -> int:
    """The presets, by family and size; 1 where none is left."""
    from tfcost.catalogue import entries, family_names

    if (family := values.get("family")) is not None and family not in family_names():
        raise UnknownName("--family", family, family_names())
    bounds = {key: only(key, values) for key in ("min_params", "max_params") if key in values}
    found = entries(" ".join(words) if words else None, family, **bounds)
    report = Report("models", {}, {}, {}, {"models": len(found)}, lambda: found, grid=["name"])
    emit(report, values)
    return 0 if found else 1


def compare(specs: list[str] | None, values: dict[str, Any]) -> None:
    """Models beside each other."""
    from tfcost.side_by_side import compare as side_by_side

    given = {key: only(key, values) for key in values if key not in OUTPUT_KEYS}
    emit(side_by_side(specs or [], **given), values)


def app(name: str) -> AppFor:
    """The app of one of the commands."""
    if name == "models":
        words = Argument("[WORD ...]", "parts of a name, or something like one", several=True)
        return command_app(name, "The presets: names, sizes, sources.", LIST_FLAGS, models, words)
    help = "Models side by side, absolute and relative to the first; what differs in their configs comes first."
    several = Argument(
        "MODEL MODEL ...", "presets, config files or what-ifs of them: gpt2:layers=24,hidden=1024", several=True
    )
    return command_app(name, help, COMPARE_FLAGS, compare, several)
