"""Which layers of a decoder have a sliding window: a pattern of L (local, with a window) and G (global)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfcost.errors import ConfigError

LAYER_TYPES = {"full_attention": "G", "sliding_attention": "L", "attention": "G"}
"""Names in ``layer_types``; ``attention`` is the older name of ``full_attention``."""

GPT_NEO_TYPES = {"global": "G", "local": "L"}
"""Names in GPT-Neo's ``attention_types``."""

MAX_LAYERS = 100_000
"""The longest pattern that is written out."""


def spelled(key: str, names: Sequence[Any], letters: Mapping[str, str], layers: int) -> str:
    """A list of layer kinds as a pattern; a :class:`ConfigError` unless it names every layer."""
    for name in names:
        if not isinstance(name, str) or name not in letters:
            known = ", ".join(letters)
            raise ConfigError(f"{key} has {str(name)[:60]!r}, which is not supported; supported: {known}")
    if len(names) != layers:
        raise ConfigError(f"{key} names {len(names)} layers, but the model has {layers}")
    return "".join([letters[name] for name in names])


def shortest(pattern: str) -> str:
    """The shortest pattern that repeats to this one: LGLGL is LG. (Knuth, Morris and Pratt's table of borders.)"""
    border = [0]
    for letter in pattern[1:]:
        length = border[-1]
        while length and pattern[length] != letter:
            length = border[length - 1]
        border.append(length + (pattern[length] == letter))
    return pattern[: len(pattern) - border[-1]]


def state_layer_types(values: Mapping[str, Any], stated: dict[str, Any], default: str) -> None:
    """State the pattern that ``layer_types`` spells, or the class's default, to be repeated over the layers."""
    pattern = default
    if values["layer_types"] is not None:
        layers = values["num_hidden_layers"]
        pattern = spelled("layer_types", values["layer_types"], LAYER_TYPES, layers)
        # The default, spelled out, stays a default: it goes on over layers that a what-if adds.
        repeated = default * (layers // len(default) + 1)
        pattern = default if pattern == repeated[:layers] else shortest(pattern)
    state_pattern(values, stated, pattern)


def state_pattern(values: Mapping[str, Any], stated: dict[str, Any], pattern: str) -> None:
    """State a pattern. Without a window it must be all global."""
    if "L" not in pattern:
        stated["window"] = None
    elif stated.get("window") is None:
        raise ConfigError("layer_types has sliding_attention, but sliding_window is null or not in use")
    stated["window_pattern"] = pattern


def state_window_from(values: Mapping[str, Any], stated: dict[str, Any]) -> None:
    """Qwen's rule: with ``use_sliding_window``, the layers from ``max_window_layers`` on have a window."""
    if not values["use_sliding_window"]:
        stated["window"] = None
    if values["layer_types"] is None:
        stated["window_from"] = values["max_window_layers"]
        return
    layers, full = values["num_hidden_layers"], values["max_window_layers"]
    pattern = spelled("layer_types", values["layer_types"], LAYER_TYPES, layers)
    if stated["window"] is not None and pattern == "G" * min(full, layers) + "L" * (layers - full):
        stated["window_from"] = full
    else:
        state_pattern(values, stated, shortest(pattern))


def gpt_neo_pattern(values: Mapping[str, Any]) -> str:
    """GPT-Neo's ``attention_types``, ``[[["global", "local"], 12]]``: each list of kinds so many times over.

    ``attention_layers``, the expanded list that older configs have beside it, wins where both stand, as in the class.
    """
    layers = values["num_layers"]
    if values["attention_layers"] is not None:
        return spelled("attention_layers", values["attention_layers"], GPT_NEO_TYPES, layers)
    types: Any = [[["global", "local"], 12]] if values["attention_types"] is None else values["attention_types"]
    expanded: list[Any] = []
    for item in types:
        kinds, times = item if isinstance(item, list) and len(item) == 2 else (None, None)
        if not isinstance(kinds, list) or not isinstance(times, int) or not 0 <= times * len(kinds) <= MAX_LAYERS:
            raise ConfigError(
                'attention_types must be like [[["global", "local"], 12]]: kinds, and how often they repeat, '
                f"for {layers} layers"
            )
        expanded += kinds * times
    return spelled("attention_types", expanded, GPT_NEO_TYPES, layers)
