"""``tfcost validate`` as a report: cases run one after another, every figure kept."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from typing import Any

import torch

from tfcost.report import Report
from tfcost.validate.compare import Case, Check, by_op, check, difference_in_symbols
from tfcost.validate.grid import grid

STANDARD = 600
QUICK = 60
"""Cases of the standard grid, and of ``--quick``. About 50 ms each on one core."""


def standard_cases(quick: bool) -> list[Case]:
    """The standard grid, or the beginning of it."""
    return list(grid(QUICK if quick else STANDARD))


def validate(cases: Iterable[Case], assumptions: dict[str, Any], progress: bool = False) -> Report:
    """Run every case; the report's rows are its figures, predicted beside measured.

    ``totals`` say how many figures of how many cases were compared and how many differ. Where a case differs its ops
    are compared one by one, and the row's ``ops`` name those that differ.
    """
    every = list(cases)
    rows: list[dict[str, Any]] = []
    for index, case in enumerate(every, 1):
        if progress and sys.stderr.isatty():
            sys.stderr.write(f"\r{index} of {len(every)} cases")
            sys.stderr.flush()
        checks = check(case)
        different = _different_ops(case) if any(not each.equal for each in checks) else ""
        rows += [{"number": index} | _row(case, each, "" if each.equal else different) for each in checks]
    if progress and sys.stderr.isatty():
        sys.stderr.write("\r" + " " * 40 + "\r")
    totals = {
        "cases": len(every),
        "measurements": len(rows),
        "different": sum(row["difference"] != 0 for row in rows),
    }
    extra: dict[str, Any] = {"environment": environment()}
    if len(every) == 1:
        extra["ops"] = [row._asdict() for row in by_op(every[0])]
        for row in rows:
            if row["quantity"] == "saved_bytes" and row["reason"]:
                row["reason"] += f" ({difference_in_symbols(every[0])})"
    return Report("validate", {}, {}, assumptions, totals, lambda: rows, extra=extra)


def _different_ops(case: Case) -> str:
    return "; ".join(
        f"{row.path}: FLOPs {row.flops:,} predicted, {row.measured_flops:,} measured, "
        f"bytes {row.bytes:,} predicted, {row.measured_bytes:,} measured"
        for row in by_op(case)
        if not row.equal
    )


def _row(case: Case, each: Check, ops: str) -> dict[str, Any]:
    return {
        "case": case.label, "quantity": each.quantity, "document": each.document, "predicted": each.predicted,
        "measured": each.measured, "difference": each.measured - each.predicted, "reason": each.reason,
        "note": each.note, "ops": ops,
    }  # fmt: skip


def environment() -> dict[str, str]:
    """What the measurements were made with."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"torch": torch.__version__, "python": platform.python_version(), "device": device}
