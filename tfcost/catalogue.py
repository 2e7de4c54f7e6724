"""What presets there are: the rows of ``tfcost models``."""

from __future__ import annotations

from difflib import SequenceMatcher
from functools import cache
from typing import Any

from tfcost.models import preset, preset_files, preset_names
from tfcost.point import point_of

LIKENESS = 0.6
"""A word is like a name from this ratio of matching letters on (difflib's measure)."""


@cache
def _entry(name: str) -> dict[str, Any]:
    model = preset(name)
    cfg = model.config()
    counted = point_of(model).analysis.parameters["parameters"]
    return {
        "name": name, "family": cfg.model_type or "document", "parameters": counted,
        "published_parameters": model.published_parameters, "layers": cfg.layers, "hidden": cfg.hidden,
        "heads": cfg.heads, "source": model.source,
    }  # fmt: skip


def family_names() -> list[str]:
    """The families that have a preset."""
    return sorted({_entry(name)["family"] for name in preset_files()})


def entries(
    query: str | None = None, family: str | None = None, min_params: int = 0, max_params: int | None = None
) -> list[dict[str, Any]]:
    """The presets whose name (or alias) is like ``query``, of one family, within bounds of parameters; best first."""
    names = list(preset_files()) if query is None else _like(query)
    found = [_entry(name) for name in names]
    return [
        entry
        for entry in found
        if (family is None or entry["family"] == family)
        and entry["parameters"] >= min_params
        and (max_params is None or entry["parameters"] <= max_params)
    ]


def _like(query: str) -> list[str]:
    """Names that contain every part of the query; where there are none, those that are spelled like it."""
    wanted = query.lower()
    parts = wanted.replace("-", " ").replace("_", " ").split()
    aliases: dict[str, list[str]] = {}
    for alias, name in preset_names().items():
        aliases.setdefault(name, []).append(alias.lower())
    within = [name for name, spellings in aliases.items() if any(all(p in each for p in parts) for each in spellings)]
    if within:
        return sorted(within, key=lambda name: (name != wanted, not name.startswith(wanted), name))
    scores = {
        name: max(SequenceMatcher(None, wanted, each).ratio() for each in spellings)
        for name, spellings in aliases.items()
    }
    return sorted((name for name in scores if scores[name] >= LIKENESS), key=lambda name: -scores[name])
