"""A Hugging Face ``config.json`` as the fields of a :class:`tfcost.config.ModelConfig`.

One reader for every model type; what differs between types is data, in :mod:`tfcost.model_types`. Reading is strict:
what cannot be understood is refused by name, and a key that is not known is reported, never silently used or dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tfcost.errors import ConfigError, UnknownName, shown
from tfcost.model_types import COMMON_INERT, COMMON_MUST_BE, LABELS, MODEL_TYPES, Key, ModelType, Nested

MAX_CONFIG_BYTES = 16 * 2**20
"""No config comes near it: id2label of a 20,000-class model takes a megabyte."""

MAX_DIGITS = 30
"""More digits than any size has; also keeps a hostile file from costing quadratic time."""


INHERITED = ("architectures", "tie_word_embeddings", "quantization_config", "num_labels", "id2label")
"""Keys that a multimodal config states beside its ``text_config``, for the whole."""

WRAPPER_INERT = frozenset(
    """boi_token_index eoi_token_index boi_token_id eoi_token_id image_token_index image_token_id mm_tokens_per_image
    video_token_index video_token_id text_config""".split()
)
"""Keys of a multimodal config that say nothing of its language model or of other parts of it."""


class HFConfig(NamedTuple):
    """The fields that a config states, the keys that were not known, its model type and class, and its quantization."""

    fields: dict[str, Any]
    ignored_keys: list[str]
    model_type: str
    architecture: str
    quantization: Mapping[str, Any] | None = None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; :class:`ConfigError` (one line) for anything that is not a plain, finite object."""

    where = shown(path)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{where}: the key {_short(twice)} stands twice")
        return result

    def number(text: str) -> int:
        if len(text) > MAX_DIGITS:
            raise ConfigError(f"{where}: an integer of {len(text)} digits is not a size")
        return int(text)

    def real(text: str) -> float:
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise ConfigError(f"{where}: {_short(text)} is not a finite number")
        return value

    def constant(text: str) -> float:
        raise ConfigError(f"{where}: {text} is not a finite number")

    try:
        if path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise ConfigError(f"{shown(path.parent)}: the folder holds no config.json")
        if not path.is_file():
            raise ConfigError(f"{where}: " + ("not a regular file" if path.exists() else "no such file"))
        if (size := path.stat().st_size) > MAX_CONFIG_BYTES:
            raise ConfigError(f"{where}: {size:,} bytes is too large for a config.json")
        text = path.read_text(encoding="utf-8-sig")
        value = json.loads(text, object_pairs_hook=pairs, parse_int=number, parse_float=real, parse_constant=constant)
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not a text file in UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a config.json holds an object, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false", int: "an integer",
             float: "a number", type(None): "null"}  # fmt: skip
    return names[type(value)]


def _short(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:  # the reader takes a few levels more than the writer
        return f"{_kind(value)}, nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."


def _check(name: str, key: Key, value: Any) -> None:
    """Raise unless ``value`` is of the kind that ``key`` holds."""
    if value is None:
        if not key.nullable:
            raise ConfigError(f"{name} must be {key.wants()}, not null")
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key.kind == "size":
        good = isinstance(value, int) and number and value >= key.least
    elif key.kind == "probability":
        good = number and 0 <= value < 1
    elif key.kind == "number":
        good = number
    elif key.kind == "flag":
        good = isinstance(value, bool)
    elif key.kind in ("list", "object"):
        good = isinstance(value, list if key.kind == "list" else dict)
    elif key.kind == "sides":
        sides = value if isinstance(value, list) and len(value) == 2 else [value]
        good = all(isinstance(side, int) and not isinstance(side, bool) and side >= 1 for side in sides)
    else:
        good = isinstance(value, str) and (not key.choices or value in key.choices)
    if not good:
        raise ConfigError(f"{name} must be {key.wants()}, not {_short(value)}")


class Read(NamedTuple):
    """What was read of one object: the values of all its keys, the fields that they state, and keys not known."""

    values: dict[str, Any]
    stated: dict[str, Any]
    ignored: list[str]


def read_keys(table: ModelType | Nested, config: Mapping[str, Any], prefix: str = "") -> Read:
    """The values of the keys that a table reads, with defaults where they are absent (null is not absent).

    A key may stand under its own name and an alias; two values that differ are an error, since classes of different
    age would use different ones.
    """
    values: dict[str, Any] = {}
    ignored: list[str] = []
    must_be = {**COMMON_MUST_BE, **table.must_be}
    for name, value in config.items():
        canonical = table.aliases.get(name, name)
        if canonical in table.keys:
            if canonical in values and values[canonical] != value:
                raise ConfigError(
                    f"{prefix}{name} is {_short(value)} but {prefix}{canonical} is {_short(values[canonical])}"
                )
            _check(prefix + name, table.keys[canonical], value)
            values[canonical] = value
        elif canonical in must_be:
            if not any(
                value == each and isinstance(value, bool) == isinstance(each, bool) for each in must_be[canonical]
            ):
                shown = " or ".join(_short(each) for each in must_be[canonical])
                raise ConfigError(
                    f"{prefix}{name} {_short(value)} is not supported for this model type; supported: {shown}"
                )
        elif not (
            canonical in table.inert
            or canonical in COMMON_INERT
            or canonical in table.nested
            or canonical.removesuffix("_dict") in table.parts
        ):
            ignored.append(prefix + name)
    for name, key in table.keys.items():
        values.setdefault(name, key.default)
    stated = {key.field: values[name] for name, key in table.keys.items() if key.field}
    for name, inner in table.nested.items():
        value = config.get(name)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{prefix}{name} must be an object or null, not {_short(value)}")
        read = read_keys(inner, value or {}, f"{prefix}{name}.")
        values |= {f"{name}.{key}": each for key, each in read.values.items()}
        stated |= read.stated
        ignored += read.ignored
    for name, part in table.parts.items():
        # An older form of the same key: where it is there it says everything, defaults included (CLIP).
        name_used = name if config.get(f"{name}_dict") is None else f"{name}_dict"
        value = config.get(name_used)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{prefix}{name_used} must be an object or null, not {_short(value)}")
        values[name] = read = read_keys(part, value or {}, f"{prefix}{name_used}.")
        ignored += read.ignored
    return Read(values, stated, ignored)


def architecture_of(model_type: str, row: ModelType, config: Mapping[str, Any]) -> str:
    """The class whose head the model has: ``architectures[0]``, or the type's default."""
    stated = config.get("architectures")
    if stated is None or stated == []:
        return next(iter(row.architectures))
    if not isinstance(stated, list) or not all(isinstance(each, str) for each in stated):
        raise ConfigError(f"architectures must be a list of class names, not {_short(stated)}")
    name = row.renamed.get(stated[0], stated[0])
    if name not in row.architectures:
        known = ", ".join(row.architectures)
        raise ConfigError(f"architectures {_short(stated[0])} is not supported for {model_type}; supported: {known}")
    return name


def from_hf(config: Mapping[str, Any]) -> HFConfig:
    """Read a config: its ``model_type`` names the row of :data:`tfcost.model_types.MODEL_TYPES` that understands it."""
    model_type = config.get("model_type")
    if not isinstance(model_type, (str, type(None))):
        raise ConfigError(f"model_type must be a string, not {_short(model_type)}")
    if isinstance(nested := config.get("text_config"), dict) and model_type not in MODEL_TYPES:
        return _from_wrapper(config, nested)
    if model_type is None:
        raise ConfigError("the config has no model_type")
    if model_type not in MODEL_TYPES:
        raise UnknownName("model_type", model_type, MODEL_TYPES)
    row = MODEL_TYPES[model_type]
    values, stated, ignored = read_keys(row, config)
    architecture = architecture_of(model_type, row, config)
    stated |= {**row.fixed, "model_type": model_type, **row.architectures[architecture]}
    if row.finish is not None:
        row.finish(values, stated)
    if stated.get("classes") == LABELS:
        stated["classes"] = _labels(row, config)
    quantization = _quantization(config)
    if quantization is not None:
        ignored.remove("quantization_config")
    return HFConfig(stated, ignored, model_type, architecture, quantization)


def _from_wrapper(config: Mapping[str, Any], nested: Mapping[str, Any]) -> HFConfig:
    """The language model of a multimodal config; the keys of the other parts are reported as left out."""
    if isinstance(nested.get("text_config"), dict):
        raise ConfigError("text_config stands inside a text_config: which of the models is meant?")
    inner = dict(nested)
    for inherited in INHERITED:
        if inherited in config:
            inner.setdefault(inherited, config[inherited])
    if config.get("architectures") is not None:
        inner["architectures"] = _language_class(config["architectures"], inner.get("model_type"))
    read = from_hf(inner)
    outer = [key for key in config if key not in {*COMMON_INERT, *INHERITED, *WRAPPER_INERT}]
    return read._replace(ignored_keys=[f"text_config.{key}" for key in read.ignored_keys] + outer)


def _language_class(architectures: Any, model_type: Any) -> Any:
    """The class of the language model alone: with logits where the whole model generates text, else bare."""
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    row = MODEL_TYPES[model_type] if isinstance(model_type, str) and model_type in MODEL_TYPES else None
    if not isinstance(name, str) or row is None or name in {**row.architectures, **row.renamed}:
        return architectures
    generates = name.endswith(("ForConditionalGeneration", "ForCausalLM", "LMHeadModel"))
    if not generates and not name.endswith("Model"):
        return architectures
    return [next((known for known, head in row.architectures.items() if head["head"] is generates), name)]


def _labels(row: ModelType, config: Mapping[str, Any]) -> int:
    """Rows of a classifier, as transformers counts them: the entries of ``id2label``, else ``num_labels``, else 2."""
    labels, count = config.get("id2label"), config.get("num_labels")
    if labels is not None:
        if not isinstance(labels, dict) or not labels:
            raise ConfigError(f"id2label must be an object that is not empty, not {_short(labels)}")
        return len(labels)
    if count is None:
        return row.labels
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"num_labels must be a positive integer, not {_short(count)}")
    return count


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """``quantization_config`` where it is understood: its method, and bits where it says them."""
    stated = config.get("quantization_config")
    if not isinstance(stated, dict):
        return None
    method = stated.get("quant_method")
    bits = {"load_in_4bit": 4, "_load_in_4bit": 4, "load_in_8bit": 8, "_load_in_8bit": 8}
    stated_bits = stated.get("bits", next((count for key, count in bits.items() if stated.get(key) is True), None))
    if not isinstance(method, str) or not (stated_bits is None or isinstance(stated_bits, int)):
        return None
    return {"method": method, "bits": stated_bits}
