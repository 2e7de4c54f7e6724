"""``tfcost kv``, ``devices`` and ``fit``: caches, capacities, and the largest that fits."""

from __future__ import annotations

from typing import Any

from tfcost.cli.figures import every_point
from tfcost.cli.options import (
    ADAPT,
    DEVICE,
    KV_DTYPE,
    MODEL_FLAGS,
    OUTPUT,
    PASS,
    RUN,
    STORAGE,
    AppFor,
    Flag,
    command_app,
)
from tfcost.cli.output import emit
from tfcost.errors import InputError
from tfcost.report import Report

FORMULA = Flag("formula", ("--formula/--no-formula",), "switch", "closed forms [default: no]")
KV_FLAGS = (
    *[flag for flag in PASS if flag.keyword != "attention"], *MODEL_FLAGS,
    *[flag for flag in STORAGE if flag.keyword == "dtype"], KV_DTYPE, *DEVICE, FORMULA, *OUTPUT,
)  # fmt: skip
FIT_FLAGS = (
    Flag("solve", ("--solve",), "choice", "what to make as large as fits",
         ("batch", "seq-len", "layers", "hidden", "lora-rank")),
    *PASS, *MODEL_FLAGS, *STORAGE, *RUN, *ADAPT, KV_DTYPE, *DEVICE, FORMULA, *OUTPUT,
)  # fmt: skip
DEVICE_FLAGS = OUTPUT


def kv(model: str | None, values: dict[str, Any]) -> int:
    """The KV cache; 1 where not even one sequence of these tokens fits the device."""
    from tfcost.fit import kv_report

    report = every_point("kv", model, values, KV_FLAGS, lambda source, **given: kv_report(source, **given))
    emit(report, values)
    return 1 if report.totals.get("fits") is False else 0


def devices(words: list[str] | None, values: dict[str, Any]) -> int:
    """The devices whose name or alias has every word in it; 1 where none has."""
    from tfcost.devices import entries

    wanted = [word.lower() for word in words or []]
    found = [
        {key: ", ".join(value) if isinstance(value, list) else value for key, value in entry.items()}
        for entry in entries().values()
        if all(any(word in name for name in (entry["name"], *entry["aliases"])) for word in wanted)
    ]
    emit(Report("devices", {}, {}, {}, {"devices": len(found)}, lambda: found, grid=["name"]), values)
    return 0 if found else 1


def fit(model: str | None, values: dict[str, Any]) -> int:
    """The largest that fits; 1 where nothing does."""
    from tfcost.fit import fit_report
    from tfcost.models import load

    given = {key: value for key, value in values.items() if key not in {flag.keyword for flag in OUTPUT}}
    for flag in FIT_FLAGS:
        if flag.kind == "counts" and flag.keyword in given:
            if len(given[flag.keyword]) > 1:
                raise InputError(f"{flag.label} takes one value here, not a list")
            given[flag.keyword] = given[flag.keyword][0]
    report = fit_report(None if model is None else load(model), **given)
    emit(report, values)
    return 0 if report.totals["total_bytes"] is not None else 1


HELP = {
    "kv": "The KV cache: bytes per token, per sequence, in all; with --device, the tokens that fit beside the weights.",
    "fit": "The largest batch, length, depth, width or LoRA rank that fits a device, what limits it, what would help.",
}


def app(name: str) -> AppFor:
    """The app of one of the commands."""
    if name == "devices":
        from tfcost.cli.options import Argument

        words = Argument("[WORD ...]", "parts of a name", several=True)
        return command_app(name, "The devices: names, bytes of memory, sources.", DEVICE_FLAGS, devices, words)
    flags, action = {"kv": (KV_FLAGS, kv), "fit": (FIT_FLAGS, fit)}[name]
    return command_app(name, HELP[name], flags, action)
