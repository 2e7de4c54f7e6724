"""The README is held to the program: every command and flag is in it, and every example prints what it shows.

``python tests/test_docs.py`` writes the outputs of the examples and the generated tables anew.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import environment

import tfcost
from tfcost.analysis import TOTALS
from tfcost.cli.main import COMMANDS
from tfcost.cli.options import GROUPS
from tfcost.cli.output import ENDINGS
from tfcost.convention import CONVENTIONS
from tfcost.model_types import MODEL_TYPES
from tfcost.models import preset_names
from tfcost.point import analyze
from tfcost.policy import RECIPES

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8") if README.is_file() else ""

WIDTH = "114"
"""The columns at which the examples are printed."""


# --- What is generated ------------------------------------------------------------------------------------------------


def pipe(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def flags_table() -> str:
    """The flags of :mod:`tfcost.cli.options`, group by group."""
    blocks = []
    for heading, flags in GROUPS.items():
        lines = [f"**{heading}**", "", pipe("flag", "meaning"), pipe("---", "---")]
        blocks.append("\n".join([*lines, *[pipe(f"`{flag.usage}`", flag.help) for flag in flags]]))
    return "\n\n".join(blocks)


def conventions_table() -> str:
    """The conventions of :mod:`tfcost.convention`."""
    lines = [pipe("name", "counts", "leaves out", "source"), pipe(*["---"] * 4)]
    rows = [pipe(f"`{name}`", each.counts, each.leaves_out, each.source) for name, each in CONVENTIONS.items()]
    return "\n".join([*lines, *rows])


def recipes_table() -> str:
    """The recipes of :mod:`tfcost.policy`, at the weights' usual size."""
    header = ("recipe", "weights", "gradients", "master", "optimizer", "in all", "source")
    lines = [pipe(*header), pipe("---", *["---:"] * 5, "---")]
    for name, each in RECIPES.items():
        sizes = each.per_parameter({"fp32-adam": 4, "fp8": 1}.get(name, 2)).values()
        lines.append(pipe(f"`{name}`", *[str(size) for size in (*sizes, sum(sizes))], each.source))
    return "\n".join(lines)


def measured_table() -> str:
    """Measured totals beside ours (``tests/data/memory_measured.json``), and the median of the differences."""
    cases = json.loads((Path(__file__).parent / "data" / "memory_measured.json").read_text(encoding="utf-8"))
    lines = [pipe("run", "measured", "tfcost", "difference", "source"), pipe("---", *["---:"] * 3, "---")]
    errors = []
    for case in cases:
        total = analyze(case["model"], command="memory", **case["given"]).totals["total_bytes"]
        ours = total / {"GiB": 2**30, "GB": 10**9}[case["unit"]]
        errors.append(abs(ours / case["measured"] - 1))
        unit = case["unit"]
        shown = f"{case['measured']} {unit}", f"{ours:.1f} {unit}", f"{ours / case['measured'] - 1:+.1%}"
        lines.append(pipe(case["what"], *shown, case["source"]))
    return "\n".join([*lines, "", f"The median error is {statistics.median(errors):.1%}."])


GENERATED: dict[str, Callable[[], str]] = {
    "flags": flags_table, "conventions": conventions_table, "recipes": recipes_table, "measured": measured_table,
}  # fmt: skip


def part(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: generated -->\n\n)(.*?)(\n\n<!-- /{name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_table_is_up_to_date(name):
    found = part(name).search(TEXT)
    assert found, f"README.md has no part {name}"
    assert found[2] == GENERATED[name](), "run: python tests/test_docs.py"


# --- Examples ---------------------------------------------------------------------------------------------------------

BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples(text: str) -> list[tuple[str, str]]:
    """The commands of the console blocks, each with the output that stands below it."""
    found = []
    for block in BLOCK.findall(text):
        first, *parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
        assert not first, f"a console block begins with a command, not with {first!r}"
        found += [(command, output) for command, _, output in (each.partition("\n") for each in parts)]
    return found


def output_of(command: str, folder: Path) -> str:
    """What a line of shell prints, stderr among it, in a folder of the examples' own."""
    script = f'tfcost() {{ "{sys.executable}" -m tfcost "$@"; }}; {command}'
    done = subprocess.run(
        ["bash", "-c", script], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        cwd=folder, env=environment(COLUMNS=WIDTH),
    )  # fmt: skip
    return done.stdout


def agrees(shown: str, printed: str) -> bool:
    """Whether an output is what is shown, where a line of three dots stands for any number of lines."""
    pattern = "".join(r"(?:.*\n)*" if line == "..." else re.escape(line) + r"\n" for line in shown.splitlines())
    return re.fullmatch(pattern, printed) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize(("command", "shown"), examples(TEXT), ids=[command for command, _ in examples(TEXT)])
def test_an_example_prints_what_it_shows(folder, command, shown):
    printed = output_of(command, folder)
    assert agrees(shown, printed), f"run: python tests/test_docs.py\n{printed}"


def test_three_dots_stand_for_lines_and_nothing_else_does():
    assert agrees("a\n...\nd\n", "a\nb\nc\nd\n")
    assert agrees("a\n...\n", "a\n")
    assert not agrees("a\n...\nd\n", "a\nb\n")
    assert not agrees("a\n", "a\nb\n")
    assert not agrees("a b\n", "a  b\n")
    assert not agrees("1.5\n", "1x5\n")


def test_the_python_examples_run(monkeypatch):
    monkeypatch.setattr(MODEL_TYPES, "added", {})  # one of them adds a family
    blocks = re.findall(r"^```pycon\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    assert blocks
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for number, block in enumerate(blocks):
        runner.run(doctest.DocTestParser().get_doctest(block, {}, f"README {number}", "README.md", 0))
    assert runner.summarize(verbose=False).failed == 0


# --- Completeness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_section_and_an_example(name):
    commands = [command for command, _ in examples(TEXT)]
    assert any(re.match(rf"(.*\| )?tfcost {name}\b", command) for command in commands)
    assert re.search(rf"^### `tfcost {name}`", TEXT, re.MULTILINE)


def test_every_key_of_a_report_is_explained():
    keys = {key for totals in TOTALS.values() for key in totals} | {"flash_recompute_flops"}
    for command in ("flops", "params", "memory"):
        for by in ("component", "op"):
            report = analyze("gpt2", command=command, by=by, formula=True).to_dict()
            keys |= {*report, *report["assumptions"], *(key for row in report["rows"] for key in row)}
            keys |= {*report["inputs"], "src_len", "grid", "crossovers", "remarks", "layers"}
    for key in sorted(keys):
        assert f"`{key}`" in TEXT, key


def test_every_field_of_the_model_is_a_flag_s_keyword_or_left_to_configs():
    assert "`model`" in TEXT
    for group in GROUPS.values():
        for flag in group:
            assert f"`{flag.usage}`".replace("|", r"\|") in TEXT


def test_every_ending_and_convention_is_named():
    for name in (*ENDINGS, *CONVENTIONS):
        assert f"`{name}`" in TEXT, name


def test_the_presets_are_listed_by_the_command_that_readers_are_sent_to():
    listed = output_of("tfcost models --csv", ROOT)
    names = {line.partition(",")[0] for line in listed.splitlines()[1:]}
    assert set(preset_names().values()) <= names
    assert "tfcost models" in TEXT


def test_every_exit_status_is_documented():
    for status in (0, 1, 2, 130):
        assert re.search(rf"^\| {status} \|", TEXT, re.MULTILINE)


def test_the_two_commands_of_a_fresh_machine():
    section = TEXT.partition("## Install")[2].partition("\n## ")[0]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    assert len(lines) == 2
    assert lines[0].startswith("pip install . && tfcost flops ")
    assert lines[1] == "pip install '.[test]' && pytest"
    ci = ROOT / ".ci" / "run"
    if ci.is_file():  # an sdist has none
        assert "'.[test]'" in ci.read_text(encoding="utf-8")


def test_a_table_stands_in_the_first_screen():
    first = "\n".join(TEXT.splitlines()[:30])
    assert "$ tfcost flops" in first
    assert "█" in first


def test_links_lead_somewhere():
    headings = {re.sub(r"[^\w\- ]", "", line.lstrip("# ")).strip().lower().replace(" ", "-")
                for line in TEXT.splitlines() if line.startswith("#")}  # fmt: skip
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert target.startswith("http") or target.lstrip("#") in headings or (ROOT / target).exists(), target


def rewrite() -> None:
    """Write the generated parts and the outputs of the examples anew; outputs that agree stay as they are."""
    text = TEXT
    for name, make in GENERATED.items():
        start, stop = re.search(part(name), text).span(2)
        text = text[:start] + make() + text[stop:]
    with tempfile.TemporaryDirectory() as home:
        for command, shown in examples(text):
            printed = output_of(command, Path(home))
            if not agrees(shown, printed):
                print(f"changed: {command}")
                text = text.replace(f"$ {command}\n{shown}", f"$ {command}\n{printed}", 1)
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.chdir(ROOT)
    assert Path(tfcost.__file__).is_file()
    rewrite()
