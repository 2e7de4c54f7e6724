"""Models by name, by ``config.json`` or by flags: :func:`load`, :func:`describe` and what-ifs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tfcost.config import ModelConfig, check, complete
from tfcost.data_files import data_path
from tfcost.errors import ConfigError, InputError, UnknownName, shown
from tfcost.hf import from_hf, read_json


class Model(NamedTuple):
    """A model as it was stated: where it came from, the fields it states, and the keys that were not understood.

    ``stored_dtype`` is the type of the checkpoint's weights, which changes no figure: ``--dtype`` does.
    """

    name: str
    stated: Mapping[str, Any]
    ignored_keys: tuple[str, ...] = ()
    source: str = ""
    published_parameters: int | None = None
    from_config: bool = True
    stored_dtype: str = ""

    def config(self, **what_if: Any) -> ModelConfig:
        """The complete config, with other values for some fields: what is stated stays, the rest is derived again."""
        check(what_if)
        return complete(overridden(self.stated, what_if))


LISTED_BY = "tfcost models"

DOCUMENT_MODEL = Model("", {}, from_config=False)
"""No model: the flags describe the document's."""

RECURRENT: Mapping[str, Any] = {"family": "recurrent", "arch": "decoder", "positions": "none", "dropout": 0.0}

LAYERS: Mapping[str, Mapping[str, Any]] = {
    "transformer": {"arch": "encoder"},
    "attention": {"arch": "encoder", "ffn_count": 0},
    "restricted": {"arch": "encoder", "ffn_count": 0},
    "rnn": {**RECURRENT, "cell": "rnn"},
    "lstm": {**RECURRENT, "cell": "lstm"},
    "gru": {**RECURRENT, "cell": "gru"},
    "conv": {**RECURRENT, "family": "convolutions", "kernel": 3},
}
"""Kinds of layers by name, of whatever width and depth the flags say: ``tfcost compare transformer lstm gru conv``."""

IMPLIED: dict[str, tuple[str, ...]] = {
    "layers": ("encoder_layers", "decoder_layers"),
    "arch": ("encoder_layers", "decoder_layers"),
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
def preset_files() -> dict[str, Path]:
    """The file of each preset by its name."""
    return {path.stem: path for path in sorted(data_path("models").glob("*.json"))}


@cache
def preset_names() -> dict[str, str]:
    """Every name and alias of a preset, and the preset's own name. Reads all files: aliases stand inside them."""
    names = {name: name for name in preset_files()}
    for name, path in preset_files().items():
        for alias in read_json(path).get("aliases", ()):
            names.setdefault(alias, name)
    return names


def preset(name: str) -> Model:
    """The preset of this name or alias, from ``data/models/NAME.json``."""
    wanted = name.lower()
    path = data_path("models", f"{wanted}.json")
    if not path.is_file():  # most names are a file's own, and need no look into the others
        if wanted not in preset_names():
            raise UnknownName("model", name, preset_names(), LISTED_BY)
        path = preset_files()[preset_names()[wanted]]
    entry = read_json(path)
    origin = {"source": entry["source"], "published_parameters": entry.get("published_parameters")}
    if "fields" in entry:
        return Model(path.stem, entry["fields"], **origin)
    return _from_config(path.stem, entry["config"])._replace(**origin)


def _from_config(name: str, config: Mapping[str, Any]) -> Model:
    """A model from a config. A key that cannot be printed is escaped, since warnings and reports are lines of text."""
    read = from_hf(config)
    ignored = tuple(key if key.isprintable() else repr(key)[1:-1] for key in read.ignored_keys)
    stored = config.get("dtype", config.get("torch_dtype"))
    return Model(name, read.fields, ignored, source=name, stored_dtype=stored if isinstance(stored, str) else "")


def load(path_or_name: str | os.PathLike[str]) -> Model:
    """A preset by name, or a ``config.json`` (or the folder that holds one) by path.

    A name wins over a folder of the same name unless it has a path separator. Raises :class:`UnknownName` or
    :class:`ConfigError`, one line each.
    """
    if not isinstance(path_or_name, (str, os.PathLike)) or isinstance(text := os.fspath(path_or_name), bytes):
        raise InputError(f"a model is a name, a path or a Model, not {type(path_or_name).__name__}")
    if not text or "\0" in text:
        raise ConfigError("the model's name is empty" if not text else "a path cannot hold a NUL character")
    separators = [sep for sep in (os.sep, os.altsep) if sep]
    if not isinstance(path_or_name, os.PathLike) and not any(sep in text for sep in separators):
        if text.lower() in LAYERS:
            return Model(text.lower(), LAYERS[text.lower()], from_config=False)
        try:
            return preset(text)
        except (UnknownName, OSError):  # a name can be too long for a file
            if not os.path.exists(text):
                if text.endswith(".json"):
                    raise ConfigError(f"{shown(text)}: no such file") from None
                raise UnknownName("model", text, preset_names(), LISTED_BY) from None
    return _from_config(text, read_json(Path(text)))
