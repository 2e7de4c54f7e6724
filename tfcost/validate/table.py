"""A ``validate`` report for people: a line per case, its figures marked equal or not, and one case op by op."""

from __future__ import annotations

from typing import Any

from tfcost.render import Column, Page, add_table, cell
from tfcost.report import Report

QUANTITIES = ("parameters", "forward_flops", "backward_flops", "saved_bytes", "fvcore_macs")


def table_text(report: Report, width: int, colour: bool) -> str:
    """The whole report as text."""
    page = Page(width, colour)
    page.write("tfcost validate: predicted and measured", "bold")
    page.write()
    if "ops" in report.extra:
        _one(page, report)
    else:
        cases: dict[int, dict[str, dict[str, Any]]] = {}
        for row in report.rows:
            cases.setdefault(row["number"], {})[row["quantity"]] = row
        for figures in cases.values():
            _case(page, next(iter(figures.values()))["case"], figures)
    page.write()
    for reason in dict.fromkeys(row["note"] for row in report.rows if row["note"]):
        page.paragraph(f"Note: {reason}", "dim", further="  ")
    if report.assumptions.get("left_out"):
        page.paragraph("Left out, since the reference has no such thing: " + ", ".join(report.assumptions["left_out"]))
    _verdict(page, report)
    return page.text()


def _case(page: Page, label: str, figures: dict[str, dict[str, Any]]) -> None:
    page.paragraph(label, further="  ")
    marks = [f"{name} {_mark(figures[name])}" for name in QUANTITIES if name in figures]
    page.paragraph("; ".join(marks), indent="    ")
    for name, row in figures.items():
        if row["difference"]:
            page.paragraph(f"differs: {row['ops'] or name}", "red", indent="    ")


def _mark(row: dict[str, Any]) -> str:
    if row["difference"] == 0:
        return f"= {cell(row['measured'])}"
    return f"{cell(row['predicted'])} predicted ≠ {cell(row['measured'])} measured"


def _one(page: Page, report: Report) -> None:
    page.paragraph(report.rows[0]["case"], further="  ")
    page.write()
    names = ("document", "predicted", "measured", "difference")
    columns = [Column("quantity"), *[Column(name, right=True) for name in names]]
    add_table(page, columns, [[row["quantity"], *[cell(row[name]) for name in names]] for row in report.rows])
    page.write()
    for row in report.rows:
        if row["reason"]:
            page.paragraph(f"{row['quantity']} against the document: {row['reason']}", "dim", further="  ")
    page.write()
    keys = ("flops", "measured_flops", "bytes", "measured_bytes")
    headers = ("FLOPs predicted", "measured", "bytes predicted", "measured")
    columns = [Column("op"), *[Column(header, right=True) for header in headers]]
    add_table(page, columns, [[op["path"], *[cell(op[key]) for key in keys]] for op in report.extra["ops"]])


def _verdict(page: Page, report: Report) -> None:
    totals, where = report.totals, report.extra["environment"]
    figures = f"{totals['measurements']:,} figures of {totals['cases']:,} case{'s' if totals['cases'] > 1 else ''}"
    verdict = f"{totals['different']:,} differ" if totals["different"] else "all equal"
    page.paragraph(f"{figures}: {verdict} (torch {where['torch']}, {where['device']})", "bold")
