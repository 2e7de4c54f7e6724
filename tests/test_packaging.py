"""The wheel and the sdist: what is in them, and that an installed wheel runs away from the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import tfcost

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="not in a checkout or an sdist")


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    options = {"check": True, "capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run([sys.executable, *arguments], **options)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """An sdist, and the wheel that is built from that sdist."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT))
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def source_files(folder: str) -> set[str]:
    """The files below a folder of the checkout that are no caches."""
    found = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


def test_the_wheel_holds_the_package_and_its_data(distributions):
    names = set(zipfile.ZipFile(distributions[1]).namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == source_files("tfcost") | {f"tfcost/{name}" for name in source_files("data")}
    assert "tfcost/py.typed" in packed
    assert "tfcost/data/models/gpt2.json" in packed


def test_the_sdist_holds_what_builds_and_tests_it(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("tfcost", "data", "tests"):
        assert source_files(folder) <= names
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "PKG-INFO"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_metadata_says_what_is_needed(distributions):
    wheel = zipfile.ZipFile(distributions[1])
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    metadata = wheel.read(name).decode()
    assert re.search(r"^Requires-Python: >=3\.10$", metadata, re.MULTILINE)
    assert re.search(rf"^Version: {re.escape(tfcost.__version__)}$", metadata, re.MULTILINE)
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert sorted(needed) == ["rich", "sympy", "typer"]


@pytest.fixture(scope="module")
def installed(distributions, tmp_path_factory) -> Path:
    """The scripts of a virtual environment that has the wheel, and borrows its dependencies from this one."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False)
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    wheel = str(distributions[1])
    python("-m", "pip", "--python", str(scripts / "python"), "install", "--no-deps", "--no-index", "-q", wheel)
    (site,) = home.glob("lib/python*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "borrowed.pth").write_text("\n".join(borrowed), encoding="utf-8")
    return scripts


def ran(script: Path, *arguments: str, cwd: Path) -> str:
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "COLUMNS")}
    done = subprocess.run(
        [str(script), *arguments], check=True, capture_output=True, text=True, timeout=120, cwd=cwd, env=clean
    )
    assert done.stderr == ""
    return done.stdout


def test_an_installed_wheel_runs_away_from_the_checkout(installed, tmp_path):
    report = json.loads(ran(installed / "tfcost", "flops", "gpt2", "--json", cwd=tmp_path))
    assert report["totals"] == tfcost.analyze("gpt2", command="flops").totals
    assert ran(installed / "tfcost", "--version", cwd=tmp_path) == f"tfcost {tfcost.__version__}\n"
    as_module = ran(installed / "python", "-m", "tfcost", "flops", "gpt2", cwd=tmp_path)
    assert as_module == ran(installed / "tfcost", "flops", "gpt2", cwd=tmp_path)
    assert f"{report['totals']['forward_flops']:,}" in as_module
    home = ran(installed / "python", "-c", "import tfcost; print(tfcost.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(installed.parent)
    # Another project's data folder beside the caller, or in site-packages, is not taken for ours.
    (tmp_path / "data" / "models").mkdir(parents=True)
    assert json.loads(ran(installed / "tfcost", "flops", "gpt2", "--json", cwd=tmp_path)) == report


def test_the_change_log_lists_numbers_that_changed():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert "### Numbers changed" in section, section.splitlines()[0]
