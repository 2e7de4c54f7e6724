"""Public models against numbers that this project did not make: ``tests/data/hf_oracles.json`` says whose they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tfcost
from tfcost.hf import from_hf
from tfcost.models import Model

ORACLES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "hf_oracles.json").read_text())["models"]


def model_of(oracle: dict[str, Any]) -> Model:
    read = from_hf(oracle["config"])
    assert read.ignored_keys == []
    assert read.architecture == oracle["class"]
    return Model(oracle["model"], read.fields)


def test_every_family_is_here() -> None:
    assert len(ORACLES) == 82


def lengths_of(model: Model, n: int) -> dict[str, int]:
    """The lengths of a point: of text, of source and target, of the text beside sound or images; none for an image."""
    cfg = model.config()
    if cfg.patches is not None:
        return {}
    two = cfg.arch == "encoder-decoder" and cfg.source_positions is None
    return {"seq_len": n // 2, "src_len": n} if two else {"seq_len": n}


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle["model"])
def test_parameters_and_flops_are_exact(oracle: dict[str, Any]) -> None:
    model = model_of(oracle)
    # Mixtures of experts have no FLOPs here: their counts depend on the data, which the meta device has none of.
    for point in oracle["forward_flops"] or [{"b": 1, "N": 64, "flops": None}]:
        totals = tfcost.analyze(model, batch=point["b"], attention="eager", **lengths_of(model, point["N"])).totals
        assert totals["parameters"] == oracle["parameters"]
        assert point["flops"] in (None, totals["forward_flops"])


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle["model"])
def test_published_counts_hold_or_the_note_says_why(oracle: dict[str, Any]) -> None:
    assert oracle["published"] in (None, oracle["parameters"]) or oracle["note"]


@pytest.mark.parametrize("oracle", ORACLES[::4], ids=lambda oracle: oracle["model"])
def test_closed_forms_substitute_to_the_numbers(oracle: dict[str, Any]) -> None:
    """Built on symbols, then given the sizes: the same figures."""
    model = model_of(oracle)
    cfg = model.config()
    for attention in ("eager", "flash"):
        given = {"batch": 2, "attention": attention, **lengths_of(model, 96)}
        totals = tfcost.analyze(model, **given).totals
        report = tfcost.analyze(model, **given, formula=True)
        forms, values = report.closed.totals(), report.closed.values
        for key in ("parameters", "forward_flops", "train_flops", "activation_bytes", "logits_bytes"):
            assert forms[key].subs(values) == totals[key], (key, cfg.model_type)
