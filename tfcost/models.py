"""Models by name, by ``config.json`` or by flags: :func:`load`, :func:`describe` and what-ifs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tfcost.config import ModelConfig, check, complete
from tfcost.data_files import data_path
from tfcost.errors import ConfigError, UnknownName
from tfcost.hf import from_hf, read_json


class Model(NamedTuple):
    """A model as it was stated: where it came from, the fields it states, and the keys that were not understood."""

    name: str
    stated: Mapping[str, Any]
    ignored_keys: tuple[str, ...] = ()
    source: str = ""
    published_parameters: int | None = None
    from_config: bool = True

    def config(self, **what_if: Any) -> ModelConfig:
        """The complete config, with other values for some fields: what is stated stays, the rest is derived again."""
        check(what_if)
        return complete(overridden(self.stated, what_if))


DOCUMENT_MODEL = Model("", {}, from_config=False)
"""No model: the flags describe the document's."""

IMPLIED: dict[str, tuple[str, ...]] = {
    "layers": ("encoder_layers", "decoder_layers"),
    "bias": ("attention_bias", "attention_output_bias", "ffn_bias", "norm_bias"),
    "head": ("classes", "next_sentence"),
}
"""A field that a what-if changes, and the stated fields that it says anew."""


def overridden(stated: Mapping[str, Any], what_if: Mapping[str, Any]) -> dict[str, Any]:
    """Stated fields with a what-if laid over them."""
    changes = {key: value for key, value in what_if.items() if value is not None}
    fields = dict(stated)
    for name, implied in IMPLIED.items():
        if name in changes:
            for each in implied:
                fields.pop(each, None)
    return fields | changes


@cache
def preset_names() -> dict[str, str]:
    """Every name and alias of a preset, and the file stem that holds it."""
    return {path.stem: path.stem for path in sorted(data_path("models").glob("*.json"))}


def preset(name: str) -> Model:
    """The preset of this name, from ``data/models/NAME.json``."""
    names = preset_names()
    if name.lower() not in names:
        raise UnknownName("model", name, names)
    entry = read_json(data_path("models", f"{names[name.lower()]}.json"))
    origin = {"source": entry["source"], "published_parameters": entry.get("published_parameters")}
    if "fields" in entry:
        return Model(name, entry["fields"], **origin)
    config = from_hf(entry["config"])
    return Model(name, config.fields, tuple(config.ignored_keys), **origin)


def load(path_or_name: str | os.PathLike[str]) -> Model:
    """A preset by name, or a ``config.json`` (or the folder that holds one) by path.

    A name wins over a folder of the same name unless it has a path separator. Raises :class:`UnknownName` or
    :class:`ConfigError`, one line each.
    """
    text = os.fspath(path_or_name)
    if not text or "\0" in text:
        raise ConfigError("the model's name is empty" if not text else "a path cannot hold a NUL character")
    separators = [sep for sep in (os.sep, os.altsep) if sep]
    path_like = isinstance(path_or_name, os.PathLike) or any(sep in text for sep in separators)
    if not path_like:
        # The file of that name first: most calls need no listing of the folder.
        if data_path("models", f"{text.lower()}.json").is_file() or text.lower() in preset_names():
            return preset(text)
        if not Path(text).exists():
            if text.endswith(".json"):
                raise ConfigError(f"{text}: no such file")
            raise UnknownName("model", text, preset_names())
    config = from_hf(read_json(Path(text)))
    return Model(text, config.fields, tuple(config.ignored_keys), source=text)
