"""``tfcost validate MODEL --trace``: the graph of a config minus the graph of the program, in symbols.

Parameters and FLOPs must be the same closed forms. Of the bytes kept for backward, what both sides have cancels item by
item; what is left on each side is listed, with the module and the op that keep it, and sums to the difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import sympy

from tfcost.analysis import Analysis, Options
from tfcost.convention import DOCUMENT
from tfcost.implementation import REFERENCE
from tfcost.models import load
from tfcost.notation import plain, symbol
from tfcost.point import point_of
from tfcost.render import Column, Page, add_table, cell
from tfcost.report import Report
from tfcost.tracing.quiet import quiet
from tfcost.tracing.sources import from_transformers
from tfcost.tracing.trace import Result, Settings, conditions_in_words, figures, traced

QUANTITIES = ("parameters", "forward_flops", "backward_flops")


def analytic(spec: str, attention: str, dtype: str, semantics: str, inputs: Mapping[str, str]) -> Analysis:
    """The graph of a config at its own sizes, with the letters that the program has for batch and lengths.

    A length that the config fixes (patches of an image, frames of a sound) stays a number; a program that reads one
    text in encoder and decoder has one length for both.
    """
    found = point_of(load(spec), attention=attention, dtype=dtype).analysis
    lengths: dict[str, Any] = {name: symbol(letter) for letter, name in inputs.items()}
    if found.run.src_len is not None and found.cfg.source_positions is None:
        lengths.setdefault("src_len", lengths["seq_len"])
    run = found.run._replace(**lengths)
    return Analysis(found.cfg, run, Options(dtype, DOCUMENT, "full", REFERENCE[semantics]))


def analytic_items(analysis: Analysis) -> list[tuple[str, Any, int]]:
    """What the analytic side keeps, without a loss: the op and tensor, bytes of one, how many."""
    found = []
    for saved in analysis.saved:
        if saved.op.path != "loss":
            name = f"{saved.op.path} keeps {saved.tensor.path.rpartition('/')[2]}"
            found.append((name, sympy.expand(saved.tensor.bytes), int(saved.copies)))
    return found


def traced_items(result: Result) -> list[tuple[str, Any, int]]:
    """What the program keeps: module, op, sizes and type of each tensor, bytes of one, how many."""
    found = []
    for where, record, tensor in result.forms.kept:
        if record.floating:
            shape = " x ".join(str(size) for size in tensor.shape)
            name = f"{where} keeps {shape} {record.dtype}"
            found.append((name, sympy.expand(result.forms.value(record.bytes)), int(tensor.copies)))
    return found


def leftover(items: list[tuple[str, Any, int]], common: Mapping[Any, int]) -> list[tuple[str, Any, int]]:
    """Items that have no partner: of equal ones, the last."""
    spare = Counter(common)
    found = []
    for name, each, copies in items:
        cancelled = min(copies, spare[each])
        spare[each] -= cancelled
        if copies > cancelled:
            found.append((name, each, copies - cancelled))
    return found


def compare(
    spec: str, *, attention: str = "eager", dtype: str = "bf16", semantics: str = "cuda", batch: int = 2,
    seq_len: int | None = None, src_len: int | None = None, progress: bool = False,
) -> Report:  # fmt: skip
    """The report: one row per quantity, then one per kept tensor that only one side has."""
    with quiet():
        source = from_transformers(spec, attention, dtype, {"batch": batch, "seq_len": seq_len, "src_len": src_len})
        graph = analytic(spec, attention, dtype, semantics, source.inputs)  # the quick side first: it may refuse
        result = traced(source, Settings(attention=attention, dtype=dtype, semantics=semantics, progress=progress))
    program = figures(result.forms)
    predicted = {"parameters": graph.parameters["parameters"], **graph.priced_by(DOCUMENT)}
    rows = []
    for quantity in QUANTITIES:
        difference = sympy.expand(program[quantity] - predicted[quantity])
        reason = _reason(graph, attention) if difference != 0 else ""
        rows.append(_row(quantity, predicted[quantity], program[quantity], difference, reason))
    ours, theirs = analytic_items(graph), traced_items(result)
    counts = [Counter[Any](), Counter[Any]()]
    for count, items in zip(counts, (ours, theirs), strict=True):
        for _, each, copies in items:
            count[each] += copies
    common = counts[0] & counts[1]
    kept = [sum([each * copies for _, each, copies in items]) for items in (ours, theirs)]
    left = [leftover(items, common) for items in (ours, theirs)]
    words = f"{sum(common.values()):,} tensors are the same; what is left on either side is listed" if any(left) else ""
    rows.append(_row("activation_bytes", kept[0], kept[1], sympy.expand(kept[1] - kept[0]), words))
    for sign, side, items in ((1, "program", left[1]), (-1, "analytic", left[0])):
        for name, each, copies in items:
            total = plain(sign * copies * each)
            rows.append({"quantity": f"only {side}", "what": name, "count": copies, "difference": total})
    exact = [row for row in rows[: len(QUANTITIES)] if row["difference"].expr != 0]
    explained = sum([row["difference"].expr for row in rows[len(QUANTITIES) + 1 :]])
    unexplained = sympy.expand(explained - rows[len(QUANTITIES)]["difference"].expr) != 0
    totals = {"quantities": len(QUANTITIES) + 1, "different": len(exact) + int(unexplained)}
    assumptions = {
        "method": result.method, "attention": attention, "dtype": dtype, "semantics": semantics,
        "implementation": "reference", "kernel": attention, "causal": "full", "convention": DOCUMENT.name,
        "counts": DOCUMENT.counts, "leaves_out": DOCUMENT.leaves_out, "ignored_keys": [],
    }  # fmt: skip
    extra = {"valid": conditions_in_words(result), "notes": result.notes}
    model = {"name": source.name, "class": source.kind}
    return Report("validate", model, {}, assumptions, totals, lambda: rows, extra=extra)


def _reason(graph: Analysis, attention: str) -> str:
    if attention == "flash" and graph.cfg.window is not None:
        return "a window: the analytic side prices the keys that a windowed kernel visits, the program's kernel all"
    return "the program computes something else"


def _row(quantity: str, predicted: Any, program: Any, difference: Any, reason: str) -> dict[str, Any]:
    return {
        "quantity": quantity, "analytic": plain(predicted), "program": plain(program), "difference": plain(difference),
        "reason": reason,
    }  # fmt: skip


def table_text(report: Report, width: int, colour: bool) -> str:
    """The report as text."""
    page = Page(width, colour)
    page.paragraph(
        f"tfcost validate {report.model['name']} --trace: the config's graph and {report.model['class']}", "bold"
    )
    for row in report.rows:
        if "analytic" not in row:
            continue
        page.write()
        same = row["difference"].expr == 0
        page.paragraph(f"{row['quantity']}: {'identical' if same else 'different'}", "bold" if same else "yellow")
        page.paragraph(f"analytic {row['analytic'].written()}", indent="  ", further="    ")
        if not same:
            page.paragraph(f"program  {row['program'].written()}", indent="  ", further="    ")
            page.paragraph(f"program - analytic = {row['difference'].written()}", indent="  ", further="    ")
        if row["reason"]:
            page.paragraph(row["reason"], "dim", indent="  ", further="    ")
    listed = [row for row in report.rows if "what" in row]
    if listed:
        page.write()
        columns = [
            Column("kept by one side only", wraps=True),
            Column("count", right=True),
            Column("bytes in all", right=True),
        ]
        add_table(page, columns, [
            [f"{row['quantity'].removeprefix('only ')}: {row['what']}", cell(row["count"]), row["difference"].written()]
            for row in listed
        ])  # fmt: skip
    page.write()
    for note in report.extra["notes"]:
        page.paragraph(f"Note: {note}", further="  ")
    if report.extra["valid"]:
        page.paragraph(f"Closed forms hold for {', '.join(report.extra['valid'])}")
    different = report.totals["different"]
    page.paragraph(f"{different} of {report.totals['quantities']} quantities differ" if different else
                   "parameters and FLOPs identical; bytes kept identical, or listed item by item", "bold")  # fmt: skip
    return page.text()
