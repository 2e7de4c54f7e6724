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
    assert len(ORACLES) == 65


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle["model"])
def test_parameters_and_flops_are_exact(oracle: dict[str, Any]) -> None:
    model = model_of(oracle)
    two = model.config().arch == "encoder-decoder"
    for point in oracle["forward_flops"]:
        n = point["N"]
        lengths = {"seq_len": n // 2, "src_len": n} if two else {"seq_len": n}
        totals = tfcost.analyze(model, batch=point["b"], attention="eager", **lengths).totals
        assert totals["parameters"] == oracle["parameters"]
        assert totals["forward_flops"] == point["flops"]


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle["model"])
def test_published_counts_hold_or_the_note_says_why(oracle: dict[str, Any]) -> None:
    assert oracle["published"] in (None, oracle["parameters"]) or oracle["note"]


@pytest.mark.parametrize("oracle", ORACLES[::4], ids=lambda oracle: oracle["model"])
def test_closed_forms_substitute_to_the_numbers(oracle: dict[str, Any]) -> None:
    """Built on symbols, then given the sizes: the same figures."""
    model = model_of(oracle)
    cfg = model.config()
    for attention in ("eager", "flash"):
        totals = tfcost.analyze(model, batch=2, seq_len=96, attention=attention).totals
        report = tfcost.analyze(model, batch=2, seq_len=96, attention=attention, formula=True)
        forms, values = report.closed.totals(), report.closed.values
        for key in ("parameters", "forward_flops", "train_flops", "activation_bytes", "logits_bytes"):
            assert forms[key].subs(values) == totals[key], (key, cfg.model_type)
