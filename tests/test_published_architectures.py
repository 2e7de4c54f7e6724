"""Published figures of images, sound and mixtures: ``data/published_architectures.json`` has them, with sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tfcost

ROWS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "published_architectures.json").read_text(encoding="utf-8")
)

PRESETS = {
    # Where a source has another name for a preset.
    "vit-tiny-16-224": "vit-tiny-16-224", "swin-tiny-224": "swin-tiny", "swin-small-224": "swin-small",
    "swin-base-224": "swin-base", "mixtral-8x22b-v0.1": "mixtral-8x22b",
}  # fmt: skip


def preset(row: dict[str, Any]) -> str:
    name = row["inputs"].get("model", row["id"].partition("timm-")[2].removeprefix("fused-"))
    return PRESETS.get(name, name)


def of(kind: str) -> list[Any]:
    rows = [row for row in ROWS if row["kind"] == kind and row["use"] != "informational"]
    return [pytest.param(row, id=row["id"]) for row in rows]


def near(found: float, row: dict[str, Any]) -> bool:
    return abs(found - row["value"]) <= row["rel_tol"] * row["value"]


def test_every_row_is_read() -> None:
    kinds = {"params_active": 5, "flops": 13, "flops_trap": 5, "params_rounded": 3}
    assert {kind: sum(row["kind"] == kind for row in ROWS) for kind in kinds} == kinds
    assert sum(kinds.values()) == len(ROWS)


@pytest.mark.parametrize("row", of("flops"))
def test_macs(row: dict[str, Any]) -> None:
    """Papers print MACs, most of them under the name of FLOPs."""
    assert near(tfcost.analyze(preset(row), attention="eager").totals["forward_macs"], row)


@pytest.mark.parametrize("row", of("flops_trap"))
def test_macs_that_leave_attention_out(row: dict[str, Any]) -> None:
    """A counter that does not see fused attention misses exactly QKᵀ and PV."""
    totals = tfcost.analyze(preset(row), attention="eager").totals
    assert near(totals["forward_macs"] - totals["attention_flops"] / 2, row)
    assert not near(totals["forward_macs"], row)


@pytest.mark.parametrize("row", of("params_active"))
def test_active_parameters(row: dict[str, Any]) -> None:
    totals = tfcost.analyze(preset(row), command="params").totals
    key = "active_parameters"
    if "input embedding is EXCLUDED" in row["convention"]:
        key = "active_non_input_embedding_parameters"
    assert near(totals[key], row)


@pytest.mark.parametrize("row", of("params_rounded"))
def test_parameters(row: dict[str, Any]) -> None:
    assert near(tfcost.analyze(preset(row), command="params").totals["parameters"], row)


ACTIVE = {
    # Total and active parameters as the makers print them, in billions, and which count they mean.
    "gpt-oss-20b": (20.91, 3.61, "active_non_input_embedding_parameters"),
    "gpt-oss-120b": (116.83, 5.13, "active_non_input_embedding_parameters"),
    "mixtral-8x7b": (46.7, 12.9, "active_parameters"),
    "deepseek-v2": (236, 21, "active_parameters"),
    "qwen3-235b-a22b": (235, 22, "active_parameters"),
    "qwen1.5-moe-a2.7b": (14.3, 2.7, "active_parameters"),
    "dbrx": (132, 36, "active_parameters"),
    "moonlight-16b-a3b": (15.96, 2.24, "active_non_embedding"),
    "granite-3.0-1b-a400m": (1.33, 0.4, "active_parameters"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_as_their_makers_print_them(name: str) -> None:
    total, active, key = ACTIVE[name]
    totals = tfcost.analyze(name, command="params").totals
    if key == "active_non_embedding":
        found = totals["active_parameters"] - totals["embedding_parameters"] - totals["head_parameters"]
    else:
        found = totals[key]
    assert abs(totals["parameters"] / 1e9 - total) <= 0.006 * total
    assert abs(found / 1e9 - active) <= 0.03 * active + (0.04 if active < 1 else 0)
