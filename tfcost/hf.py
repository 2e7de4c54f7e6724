"""A Hugging Face ``config.json`` as the fields of a :class:`tfcost.config.ModelConfig`.

One reader for every model type; what differs between types is data, in :mod:`tfcost.model_types`. Reading is strict:
what cannot be understood is refused by name, and a key that is not known is reported, never silently used or dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tfcost.errors import ConfigError, UnknownName
from tfcost.model_types import COMMON_INERT, MODEL_TYPES, Key, ModelType

MAX_CONFIG_BYTES = 16 * 2**20
"""No config comes near it: id2label of a 20,000-class model takes a megabyte."""

MAX_DIGITS = 30
"""More digits than any size has; also keeps a hostile file from costing quadratic time."""


class HFConfig(NamedTuple):
    """The fields that a config states, the keys that were not known, and its model type and class."""

    fields: dict[str, Any]
    ignored_keys: list[str]
    model_type: str
    architecture: str


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; :class:`ConfigError` (one line) for anything that is not a plain, finite object."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{path}: the key {_short(twice)} stands twice")
        return result

    def number(text: str) -> int:
        if len(text) > MAX_DIGITS:
            raise ConfigError(f"{path}: an integer of {len(text)} digits is not a size")
        return int(text)

    def real(text: str) -> float:
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise ConfigError(f"{path}: {_short(text)} is not a finite number")
        return value

    def constant(text: str) -> float:
        raise ConfigError(f"{path}: {text} is not a finite number")

    try:
        if path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise ConfigError(f"{path.parent}: the folder holds no config.json")
        if not path.is_file():
            raise ConfigError(f"{path}: " + ("not a regular file" if path.exists() else "no such file"))
        if (size := path.stat().st_size) > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path}: {size:,} bytes is too large for a config.json")
        text = path.read_text(encoding="utf-8-sig")
        value = json.loads(text, object_pairs_hook=pairs, parse_int=number, parse_float=real, parse_constant=constant)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a config.json holds an object, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false", int: "an integer",
             float: "a number", type(None): "null"}  # fmt: skip
    return names[type(value)]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check(name: str, key: Key, value: Any) -> None:
    """Raise unless ``value`` is of the kind that ``key`` holds."""
    if value is None:
        if not key.nullable:
            raise ConfigError(f"{name} must be {key.wants()}, not null")
        return
    if key.kind == "size":
        good = isinstance(value, int) and not isinstance(value, bool) and value >= key.least
    elif key.kind == "probability":
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
    elif key.kind == "flag":
        good = isinstance(value, bool)
    elif key.kind == "object":
        good = isinstance(value, dict)
    elif key.kind == "list":
        good = isinstance(value, list)
    else:
        good = isinstance(value, str) and (not key.choices or value in key.choices)
    if not good:
        raise ConfigError(f"{name} must be {key.wants()}, not {_short(value)}")


def read_keys(row: ModelType, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values of the keys that a type reads (defaults where absent), and the names of keys that are not known."""
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in config.items():
        canonical = row.aliases.get(name, name)
        if canonical in row.keys:
            if canonical in values and values[canonical] != value:
                raise ConfigError(f"{name} is {_short(value)} but {canonical} is {_short(values[canonical])}")
            _check(name, row.keys[canonical], value)
            values[canonical] = value
        elif canonical in row.must_be:
            allowed = row.must_be[canonical]
            if value not in allowed:
                shown = " or ".join(_short(each) for each in allowed)
                raise ConfigError(f"{name} {_short(value)} is not supported for this model type; supported: {shown}")
        elif canonical not in row.inert and canonical not in COMMON_INERT:
            ignored.append(name)
    for name, key in row.keys.items():
        values.setdefault(name, key.default)
    return values, ignored


def architecture_of(model_type: str, row: ModelType, config: Mapping[str, Any]) -> str:
    """The class whose head the model has: ``architectures[0]``, or the type's default."""
    stated = config.get("architectures")
    if stated is None:
        return next(iter(row.architectures))
    if not isinstance(stated, list) or not stated or not all(isinstance(each, str) for each in stated):
        raise ConfigError(f"architectures must be a list of class names, not {_short(stated)}")
    if stated[0] not in row.architectures:
        known = ", ".join(row.architectures)
        raise ConfigError(f"architectures {_short(stated[0])} is not supported for {model_type}; supported: {known}")
    return str(stated[0])


def from_hf(config: Mapping[str, Any]) -> HFConfig:
    """Read a config: its ``model_type`` names the row of :data:`tfcost.model_types.MODEL_TYPES` that understands it."""
    model_type = config.get("model_type")
    if isinstance(nested := config.get("text_config"), dict) and model_type not in MODEL_TYPES:
        inner = dict(nested)
        for inherited in ("architectures", "tie_word_embeddings"):
            if inherited in config:
                inner.setdefault(inherited, config[inherited])
        return from_hf(inner)
    if model_type is None:
        raise ConfigError("the config has no model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"model_type must be a string, not {_short(model_type)}")
    if model_type not in MODEL_TYPES:
        raise UnknownName("model_type", model_type, MODEL_TYPES)
    row = MODEL_TYPES[model_type]
    values, ignored = read_keys(row, config)
    architecture = architecture_of(model_type, row, config)
    stated = {key.field: values[name] for name, key in row.keys.items() if key.field}
    stated |= {**row.fixed, "model_type": model_type}
    head = row.architectures[architecture]
    stated |= head
    if row.finish is not None:
        row.finish(values, stated)
    if "classes" in head:
        stated["classes"] = _classes(config)
    return HFConfig(stated, ignored, model_type, architecture)


def _classes(config: Mapping[str, Any]) -> int:
    """Rows of a classifier, as transformers counts them: ``num_labels``, else the entries of ``id2label``, else 2."""
    count = config.get("num_labels")
    labels = config.get("id2label")
    if isinstance(count, int) and not isinstance(count, bool) and count > 0:
        return count
    if count is not None:
        raise ConfigError(f"num_labels must be a positive integer, not {_short(count)}")
    return len(labels) if isinstance(labels, dict) and labels else 2
