"""What is traced: a preset or ``config.json`` as transformers builds it, a callable, a module, or our own reference.

Each becomes a :class:`Source`: how to build the module and its inputs from sizes, under fake tensors.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tfcost.errors import ConfigError, InputError, MissingExtra, TfcostError, UnknownName
from tfcost.hf import read_json
from tfcost.models import preset_names
from tfcost.tracing.model_inputs import inputs_of, positions, values_decided
from tfcost.tracing.program import Build, Feed
from tfcost.tracing.torch_private import torch
from tfcost.tracing.weights import built_on_meta, without_initialisation

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""How configs name the number of experts."""


class Source(NamedTuple):
    """A program to trace: ``letters`` are its sizes in this run, ``taken`` the numbers that no size should equal.

    ``inputs`` names the report's input of each letter: ``{"b": "batch", "N": "seq_len"}``. ``around`` is entered while
    the program runs. ``written_as`` are letters that the closed forms write by others, which ``derived`` gives sizes.
    ``limit`` is the greatest length that the model takes, where it has one.
    """

    name: str
    kind: str
    build: Build
    feed: Feed
    letters: dict[str, int]
    inputs: dict[str, str]
    taken: frozenset[int]
    notes: list[str]
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    written_as: Mapping[str, Any] = MappingProxyType({})
    derived: Mapping[str, int] = MappingProxyType({})
    dtype: str = "bf16"
    limit: int | None = None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra("trace needs transformers for a model: pip install 'transformers>=5.24,<5.25'") from None
    return transformers


def config_of(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and ``config.json`` of a preset or path."""
    wanted = spec.lower()
    separators = [sep for sep in (os.sep, os.altsep) if sep]
    if not any(sep in spec for sep in separators):
        names = preset_names()
        known = names.get(spec) or names.get(wanted)
        if known is not None:
            from tfcost.models import preset_files

            entry = read_json(preset_files()[known])
            if "config" not in entry:
                raise InputError(
                    f"{spec} is described by fields, not by a config: trace it by its flags (-d -h -l ...)"
                )
            return known, entry["config"]
        if not os.path.exists(spec):
            if spec.endswith(".json"):
                raise ConfigError(f"{spec}: no such file")
            raise UnknownName("model", spec, names)
    return spec, read_json(Path(spec))


def numbers_in(value: Any) -> set[int]:
    """Every integer of a config, however deep."""
    if isinstance(value, bool):
        return set()
    if isinstance(value, int):
        return {value}
    if isinstance(value, Mapping):
        return set().union(*map(numbers_in, value.values())) if value else set()
    if isinstance(value, (list, tuple)):
        return set().union(*map(numbers_in, value)) if value else set()
    return set()


def from_transformers(spec: str, attention: str, dtype: str, sizes: Mapping[str, int | None]) -> Source:
    """The class that a config names (or the type's own), built from the config alone: no download, no remote code."""
    name, stated = config_of(spec)
    transformers = _transformers()
    model_type = stated.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{name}: the config has no model_type")
    mapping = transformers.CONFIG_MAPPING
    if model_type not in mapping:
        raise UnknownName("model_type", model_type, mapping.keys())
    try:
        config = mapping[model_type].from_dict(copy.deepcopy(stated))
    except TfcostError:
        raise
    except Exception as error:  # whatever a config class checks
        raise ConfigError(
            f"{name}: transformers does not take this config: {' '.join(str(error).split())[:300]}"
        ) from None
    notes: list[str] = []
    cls = class_of(transformers, config, stated, notes)
    for each in (config, *[value for value in vars(config).values() if hasattr(value, "use_cache")]):
        if hasattr(each, "use_cache"):
            each.use_cache = False  # a cache is for generation; training and prefill have none
    if cls.__name__.endswith("ForSequenceClassification"):
        text = getattr(config, "text_config", None) or config
        for token in ("pad_token_id", "decoder_start_token_id"):  # the classes want them; no figure depends on which
            if getattr(text, token, None) is None:
                setattr(text, token, 0)
    kernel = "eager" if attention == "eager" else "sdpa"
    if kernel == "sdpa" and not getattr(cls, "_supports_sdpa", False):
        kernel = "eager"
        notes.append(f"{cls.__name__} has no fused attention: eager")
    if any(getattr(config, each, None) for each in EXPERTS) and getattr(cls, "_can_set_experts_implementation", bool)():
        # Its loop over the experts that were hit needs the router's values; grouped products need their number alone.
        config._experts_implementation = "grouped_mm"
        notes.append("experts as grouped products: each token in top_k of them, whatever the router chooses")

    def build(_: Mapping[str, Any]) -> Any:
        from transformers.initialization import no_init_weights

        try:
            with no_init_weights(), without_initialisation():
                module = built_on_meta(
                    lambda: cls._from_config(config, attn_implementation=kernel, dtype=DTYPES[dtype])
                )
        except Exception as error:  # whatever a class finds in its config
            words = " ".join(str(error).split())[:300]
            raise ConfigError(f"{name}: {cls.__name__} cannot be built from this config: {words}") from error
        module.tie_weights()  # left out with the initialisation
        if stated.get("tie_word_embeddings") is False:
            untie(module, notes)
        return module

    letters, inputs, feed = inputs_of(cls, config, DTYPES[dtype], sizes)
    return Source(
        name, cls.__name__, build, feed, letters, inputs, frozenset(numbers_in(config.to_dict())), notes,
        partial(values_decided, cls), dtype=dtype, limit=positions(getattr(config, "text_config", None) or config),
    )  # fmt: skip


def untie(module: Any, notes: list[str]) -> None:
    """Give the head a table of its own where the config says so and the class ties it all the same (T5 v1.1)."""
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    if head is not None and table is not None and head.weight is table.weight:
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
        text = "the config unties the head, which this version of the class ties: it has a table of its own here"
        if text not in notes:
            notes.append(text)


def class_of(transformers: Any, config: Any, stated: Mapping[str, Any], notes: list[str]) -> Any:
    """The class of ``architectures[0]``; without it the type's causal or conditional class, else its bare model."""
    from tfcost.model_types import MODEL_TYPES

    row = MODEL_TYPES.get(config.model_type)
    architectures = stated.get("architectures") or []
    wanted = architectures[0] if architectures else next(iter(row.architectures)) if row is not None else None
    if wanted is not None:
        wanted = row.renamed.get(wanted, wanted) if row is not None else wanted
        cls = getattr(transformers, wanted, None) if isinstance(wanted, str) else None
        if cls is None or not hasattr(cls, "_from_config"):
            raise ConfigError(f"architectures {str(wanted)[:60]!r}: transformers has no such class")
        if wanted.endswith("Model") and not isinstance(config, cls.config_class):
            # Named by the whole that it was part of: the language model alone is the type's bare model (Gemma3Model).
            bare = transformers.AutoModel._model_mapping[type(config)]
            notes.append(f"{wanted} takes a {cls.config_class.__name__}: this config is of its {bare.__name__}")
            return bare
        return cls
    autos = [transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel]
    if getattr(config, "is_encoder_decoder", False) or type(config) in transformers.AutoModelForMaskedLM._model_mapping:
        del autos[0]  # a decoder or a head beside what the type is
    for auto in autos:
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ConfigError(f"transformers has no model class for model_type {config.model_type!r}")


