"""A ``trace`` report for people: rows with all their figures, totals with closed forms, the range, what was assumed."""

from __future__ import annotations

from typing import Any

from tfcost.render import Column, Page, add_forms, add_table, cell, form, reading
from tfcost.report import Report, assumptions_line

HEADERS = {
    "flops": "FLOPs forward", "backward_flops": "backward", "recompute_flops": "recompute", "parameters": "parameters",
    "saved_bytes": "bytes kept", "read_bytes": "bytes read", "written_bytes": "written",
}  # fmt: skip


def table_text(report: Report, width: int, colour: bool) -> str:
    """The whole report as text."""
    page = Page(width, colour)
    sizes = ", ".join(f"{key}={cell(value)}" for key, value in report.inputs.items())
    model = report.model
    page.paragraph(f"tfcost trace {model['name']} ({model['class']}): {sizes}", "bold", further="  ")
    page.write()
    shown = [key for key in HEADERS if any(row.get(key) for row in report.rows)]
    columns = [Column("path"), *[Column(HEADERS[key], right=True, droppable=True) for key in shown]]
    add_table(page, columns, [[row["path"], *[cell(row.get(key, 0)) for key in shown]] for row in report.rows])
    page.write()
    columns = [Column("total"), Column("value", right=True), Column("", droppable=True)]
    add_table(page, columns, [[key, cell(value), reading(key, value)] for key, value in report.totals.items()])
    if report.formulas:
        page.write()
        add_forms(page, ((key, form(value)) for key, value in report.formulas.items() if form(value) != "0"))
        page.write()
        page.paragraph(", ".join(f"{letter}={value:,}" for letter, value in report.letters.items()))
    page.write()
    _closing(page, report)
    return page.text()


def _closing(page: Page, report: Report) -> None:
    valid = report.extra["valid"]
    method = "derived on symbolic shapes" if report.assumptions["method"] == "symbolic" else "solved exactly"
    where = (
        f"hold for {', '.join(valid)}" if valid else "hold at every size that the program's branches were asked about"
    )
    page.paragraph(f"Closed forms {method}; {where}.", further="  ")
    for note in report.extra["notes"]:
        page.paragraph(f"Note: {note}", further="  ")
    if report.extra["unpriced"]:
        names = ", ".join(f"{each['op']} ({each['count']})" for each in report.extra["unpriced"])
        page.paragraph(f"INCOMPLETE: no price for {names}", "red", further="  ")
    _peak(page, report.extra.get("peak"))
    page.write()
    page.paragraph(assumptions_line(report), "dim", further="  ")


def _peak(page: Page, peak: Any) -> None:
    if peak is None:
        return
    page.write()
    page.paragraph(f"Peak of a training step ({peak['optimizer']}), in {peak['moment']}:", "bold")
    columns = [Column("category"), Column("bytes", right=True), Column("", droppable=True)]
    rows = [[name, cell(value), reading("x_bytes", value)] for name, value in peak["bytes"].items()]
    add_table(page, columns, rows)
