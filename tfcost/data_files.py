"""Where the data files are: inside an installed package, or beside it in a checkout."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tfcost.errors import TfcostError


@cache
def data_root() -> Path:
    """The folder that holds ``models/``, ``hardware/`` and the rest.

    A wheel carries it as ``tfcost/data``. In a checkout (and so in an editable install) it is ``data/`` beside the
    package, which counts only with a ``pyproject.toml`` there, so that an unrelated ``data`` folder in site-packages is
    never taken for it.
    """
    package = Path(__file__).resolve().parent
    if (inside := package / "data").is_dir():
        return inside
    beside = package.parent / "data"
    if beside.is_dir() and (package.parent / "pyproject.toml").is_file():
        return beside
    raise TfcostError(f"tfcost's data files are missing: neither {inside} nor {beside} exists; reinstall tfcost")


def data_path(*parts: str) -> Path:
    """The path of a data file: ``data_path("models", "gpt2.json")``. The file itself need not exist."""
    return data_root().joinpath(*parts)
