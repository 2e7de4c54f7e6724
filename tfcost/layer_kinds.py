"""Which layers of a stack have a sliding window, and which a dense feed-forward where the others have experts.

A rule is ``(first, before, after)``: the kinds of the first layers, then those of the rest, each a string that repeats,
one letter per layer: L (local) or G (global), D (dense) or E (experts). How kinds interleave changes no figure of a
model, so that a config holds how many layers there are of each.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from tfcost.errors import InputError

Rule: TypeAlias = tuple[int, str, str]

MAX_LAYERS = 100_000
"""Layers that are looked at one by one, where windows and experts are each in some of them."""


def letter(rule: Rule, index: int) -> str:
    """The kind of one layer."""
    first, before, after = rule
    if index < first:
        return before[index % len(before)]
    return after[(index - first) % len(after)]


def count(rule: Rule, wanted: str, layers: int) -> int:
    """How many of ``layers`` layers are of a kind."""
    first, before, after = rule
    found = 0
    for length, pattern in ((min(first, layers), before), (layers - min(first, layers), after)):
        rounds, rest = divmod(length, len(pattern) or 1)
        found += rounds * pattern.count(wanted) + pattern[:rest].count(wanted)
    return found


def complete_kinds(given: dict[str, Any]) -> None:
    """Replace the rules among stated fields by counts: ``local_layers``, ``dense_layers``, ``local_dense_layers``."""
    pattern, start = given.pop("window_pattern", None), given.pop("window_from", None)
    windows: Rule | None = given.pop("window_rule", None)
    experts: Rule | None = given.pop("expert_rule", None)
    if windows is None and pattern is not None:
        windows = (0, "", pattern)
    elif windows is None and start is not None:
        windows = (start, "G", "L")
    if "window" not in given or "local_layers" in given:
        windows = None
    if "experts" not in given or "dense_layers" in given:
        experts = None
    layers: int = given["decoder_layers" if "decoder_layers" in given else "encoder_layers"]
    if windows is not None and not 0 < (local := count(windows, "L", layers)) < layers:
        windows = None
        if local == 0:
            del given["window"]
    elif windows is not None:
        given["local_layers"] = local
    if experts is not None and not 0 < (dense := count(experts, "D", layers)) < layers:
        if dense == layers:
            del given["experts"]
    elif experts is not None:
        given["dense_layers"] = dense
        if windows is not None:
            if layers > MAX_LAYERS:
                raise InputError(f"-l/--layers {layers:,} is beyond {MAX_LAYERS:,}, with windows and experts in some")
            both = [letter(windows, index) + letter(experts, index) for index in range(layers)]
            given["local_dense_layers"] = both.count("LD")
