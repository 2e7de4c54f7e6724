"""The table of the moments of a step: what is alive at each, by what it is for, and a bar of it against the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfcost.render import Column, Page, add_table, bar, needs
from tfcost.report import Report
from tfcost.units import binary_and_decimal


def add_moments(page: Page, report: Report) -> None:
    """What is alive at each moment, by category, and a bar of it against the device (or against the peak)."""
    moments = report.extra.get("moments", ())
    if not moments:
        return
    peak = max(moment["total"] for moment in moments)
    capacity = report.extra.get("device", {}).get("memory_bytes", peak)
    merged = [{column: sum(moment.get(key, 0) for key in keys) for column, keys in MOMENT_COLUMNS.items()}
              for moment in moments]  # fmt: skip
    keys = [column for column in MOMENT_COLUMNS if any(row[column] for row in merged)]
    columns = [Column("moment"), *[Column(key, right=True) for key in keys], Column("in all", right=True)]
    columns.append(Column("", droppable=True))
    rows = []
    for moment, row in zip(moments, merged, strict=True):
        parts = [gib(row[key]) if row[key] else "" for key in keys]
        rows.append([moment["moment"], *parts, gib(moment["total"]), bar(min(moment["total"], capacity), capacity)])
    page.write()
    if needs(columns[:-1], [row[:-1] for row in rows]) > page.width:
        _moments_in_one_unit(page, moments, merged, keys)
    else:
        add_table(page, columns, rows)
    if device := report.extra.get("device"):
        fits = "fits in" if peak <= capacity else "does not fit in"
        page.write()
        page.paragraph(
            f"{binary_and_decimal(peak)} at the peak {fits} {device['name']}: {binary_and_decimal(capacity)}"
        )


def _moments_in_one_unit(
    page: Page, moments: Sequence[dict[str, Any]], merged: Sequence[dict[str, int]], keys: Sequence[str]
) -> None:
    """The same for a narrow page: one unit for all, named once in the headers, which are broken."""
    unit, size = next((name, 2**power) for name, power in (("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0))
                      if max(moment["total"] for moment in moments) >= 2**power or not power)  # fmt: skip

    def short(count: int) -> str:
        text = f"{count / size:,.2f}"
        return "<0.01" if count and text == "0.00" else text

    columns = [Column("moment", wraps=True)]
    columns += [Column(f"{BROKEN.get(key, key)}\n{unit}", right=True) for key in [*keys, "in all"]]
    rows = [
        [moment["moment"], *[short(row[key]) if row[key] else "" for key in keys], short(moment["total"])]
        for moment, row in zip(moments, merged, strict=True)
    ]
    add_table(page, columns, rows)


BROKEN = {"optimizer": "opti-\nmizer", "gradients": "gradi-\nents", "activations": "acti-\nvations"}
"""Headers of the table of moments on two lines."""

MOMENT_COLUMNS = {
    "weights": ("weights", "reference_weights"), "optimizer": ("optimizer", "master_weights"),
    "gradients": ("gradients",), "activations": ("activations", "temporary"), "logits": ("logits", "logit_gradients"),
    "cache": ("kv_cache",), "other": ("overhead",),
}  # fmt: skip
"""The columns of the table of moments, and the categories that each sums."""


def gib(count: int) -> str:
    """Bytes in short: ``1.53 GiB``."""
    return binary_and_decimal(count).partition(" (")[0]
