"""What is imported when: no sympy, numpy, torch or rich for numbers, and nothing heavy in the core."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import environment

import tfcost

PACKAGE = Path(tfcost.__file__).parent
HEAVY = ("sympy", "numpy", "torch", "rich", "transformers", "matplotlib", "fvcore", "pandas", "pydantic")


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after running ``code``."""
    report = "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    script = f"import sys\n{code}\n{report}"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment(), timeout=120
    )
    return set(done.stderr.split())


def heavy_after(*arguments: str, before: str = "") -> set[str]:
    """The heavy modules that a command line loads."""
    return loaded_by(f"{before}\nfrom tfcost.cli.main import main\nassert main({list(arguments)!r}) == 0") & set(HEAVY)


@pytest.mark.parametrize("command", ["flops", "params", "memory"])
@pytest.mark.parametrize("flags", [["--format", "json"], ["--csv"], ["--csv", "-N", "1,2"], ["--format", "markdown",
                                   "--no-formula"], ["--json", "--by", "op"]])  # fmt: skip
def test_numbers_need_nothing_heavy(command, flags):
    assert heavy_after(command, "gpt2", *flags) == set()


def test_what_fits_is_found_without_algebra():
    assert heavy_after("fit", "gpt2", "--device", "24GB", "--json") == set()
    assert heavy_after("fit", "gpt2", "--device", "24GB", "--json", "--formula") == {"sympy"}


def test_the_same_from_a_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert heavy_after("flops", str(tmp_path), "--json") == set()


@pytest.mark.parametrize("module", ["sympy", "numpy", "rich"])
def test_this_test_can_fail(module):
    pytest.importorskip(module)
    assert module in heavy_after("flops", "gpt2", "--json", before=f"import {module}")


def test_a_terminal_needs_rich_and_closed_forms_need_sympy():
    terminal = "import os; os.environ.pop('NO_COLOR', None); import tfcost.render as r; r._terminal = lambda: True"
    assert heavy_after("flops", "gpt2", "--no-formula") == set()
    assert heavy_after("flops", "gpt2", "--no-formula", before=terminal) == {"rich"}
    assert heavy_after("flops", "gpt2") == {"sympy"}
    assert heavy_after("flops", "gpt2", "--json", "--formula") == {"sympy"}


def test_help_and_version_need_no_more_than_typer_and_rich():
    for arguments in (["--help"], ["--version"], ["flops", "--help"], ["memory", "--help"]):
        assert heavy_after(*arguments) <= {"rich"}
    assert "typer" in loaded_by("from tfcost.cli.main import main\nmain(['flops', '--help'])")
    assert "typer" not in loaded_by("from tfcost.cli.main import main\nmain(['--help'])")


def test_importing_the_package_is_light():
    assert loaded_by("import tfcost") & {*HEAVY, "typer", "json", "dataclasses"} == set()
    assert loaded_by("import tfcost; tfcost.analyze('gpt2')") & {*HEAVY, "typer"} == set()
    assert loaded_by("import tfcost; tfcost.closed_form(None, 'forward_flops')") & set(HEAVY) == {"sympy"}


def imports_of(path: Path, everywhere: bool = False) -> set[str]:
    """The top-level modules that a file imports: when it is loaded, or (``everywhere``) inside functions too."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        for child in ast.iter_child_nodes(node):
            if everywhere or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


PYTORCH = ("validate/", "tracing/", "cli/validate.py", "cli/trace.py")
ALGEBRA = ("symbols.py", "notation.py", "crossings.py", "layer_table.py", "stages.py", "fit_formula.py")
HOMES = {"sympy": (*ALGEBRA, *PYTORCH), "rich": ("render.py", "validate/", "tracing/"), "typer": ("cli/",),
         "torch": PYTORCH,
         "transformers": PYTORCH, "matplotlib": PYTORCH, "fvcore": PYTORCH, "numpy": PYTORCH}  # fmt: skip
"""Where each of these may be imported at all, in functions too."""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_modules_are_imported_where_they_belong(path):
    home = path.relative_to(PACKAGE).as_posix()
    for module in imports_of(path, everywhere=True) & HOMES.keys():
        assert home.startswith(HOMES[module]), f"{home} imports {module}"


CORE = "graph ops blocks families convention config analysis models hf report units errors explain"


@pytest.mark.parametrize("name", CORE.split())
def test_the_core_imports_nothing_heavy_when_loaded(name):
    assert imports_of(PACKAGE / f"{name}.py") & {*HEAVY, "typer"} == set()


def test_these_readers_can_fail(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("import os\n\ndef f():\n    import torch.nn\n    from sympy import Symbol\n", encoding="utf-8")
    assert imports_of(path) == {"os"}
    assert imports_of(path, everywhere=True) == {"os", "torch", "sympy"}


def test_every_public_name_is_there_and_documented():
    for name in tfcost.__all__:
        value = getattr(tfcost, name)
        assert name == "__version__" or value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        tfcost.nope  # noqa: B018


def test_a_report_imports_json_only_when_it_is_written():
    assert json.loads(tfcost.analyze("gpt2").to_json())["schema"] == "tfcost.report/1"
