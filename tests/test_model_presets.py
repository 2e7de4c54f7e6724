"""The presets in ``data/models``: read without a warning, sourced, and as large as their makers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tfcost
from tfcost.hf import from_hf
from tfcost.model_types import MODEL_TYPES
from tfcost.models import Model, preset_files

FOLDER = Path(__file__).parent.parent / "data" / "models"
PRESETS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
CONFIGS = {name: preset for name, preset in PRESETS.items() if "config" in preset}

ROUNDED = {"gpt3-175b"}
"""Presets whose published count is a round number."""


def test_there_are_enough_of_them_and_of_every_family() -> None:
    assert len(CONFIGS) >= 75
    older_code, parts = {"RefinedWeb", "RefinedWebModel"}, {"clip_text_model", "clip_vision_model"}
    assert {preset["config"]["model_type"] for preset in CONFIGS.values()} == set(MODEL_TYPES) - older_code - parts


def test_names_and_aliases_are_unique_and_lower_case() -> None:
    names = [name for preset in PRESETS.values() for name in (preset["name"], *preset.get("aliases", []))]
    assert len(names) == len(set(names))
    assert all(name == name.lower() and name == name.strip() and "/" not in name for name in names)
    assert all(preset["name"] == stem for stem, preset in PRESETS.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_preset_reads_whole_and_has_a_source(name: str) -> None:
    preset = CONFIGS[name]
    assert from_hf(preset["config"]).ignored_keys == []
    assert preset["source"]
    assert preset["published_parameters"] is not None or preset["note"]
    stated = set(preset["config"])
    assert stated >= {"model_type", "architectures"}
    assert stated & {"vocab_size", "image_size", "vision_config"}


PUBLISHED = [name for name, preset in CONFIGS.items() if preset["published_parameters"] and name not in ROUNDED]
"""The presets whose exact count is published."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    preset = CONFIGS[name]
    model = Model(name, from_hf(preset["config"]).fields)
    totals = tfcost.analyze(model, command="params").totals
    assert totals["parameters"] == preset["published_parameters"]


@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_every_preset_has_every_figure(attention: str) -> None:
    """Each command's rows sum to its total, for each model that is shipped: none may be one that a command forgot."""
    total = {"flops": "forward_flops", "params": "parameters", "memory": "end_of_forward_bytes"}
    figure = {"flops": "flops", "params": "parameters", "memory": "bytes"}
    for name in preset_files():
        for command, key in total.items():
            report = tfcost.analyze(name, attention=attention, command=command)
            assert sum(row[figure[command]] for row in report.rows) == report.totals[key], (name, command)
            assert report.to_json()
