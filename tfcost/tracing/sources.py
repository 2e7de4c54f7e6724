"""What is traced: a preset or ``config.json`` as transformers builds it, a callable, a module, or our own reference.

Each becomes a :class:`Source`: how to build the module and its inputs from sizes, under fake tensors.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tfcost.errors import ConfigError, InputError, MissingExtra, TfcostError, UnknownName
from tfcost.hf import read_json
from tfcost.models import preset_names
from tfcost.tracing.program import Build, Feed
from tfcost.tracing.torch_private import torch
from tfcost.tracing.weights import built_on_meta, without_initialisation

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

LONGEST = 2048
"""The length that is traced at unless one is asked for (or the model has fewer positions)."""


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""How configs name the number of experts."""


class Source(NamedTuple):
    """A program to trace: ``letters`` are its sizes in this run, ``taken`` the numbers that no size should equal.

    ``inputs`` names the report's input of each letter: ``{"b": "batch", "N": "seq_len"}``. ``around`` is entered while
    the program runs. ``written_as`` are letters that the closed forms write by others, which ``derived`` gives sizes.
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
    cls = class_of(transformers, config, stated)
    for each in (config, *[value for value in vars(config).values() if hasattr(value, "use_cache")]):
        if hasattr(each, "use_cache"):
            each.use_cache = False  # a cache is for generation; training and prefill have none
    notes: list[str] = []
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

        with no_init_weights(), without_initialisation():
            module = built_on_meta(lambda: cls._from_config(config, attn_implementation=kernel, dtype=DTYPES[dtype]))
        module.tie_weights()  # left out with the initialisation
        if stated.get("tie_word_embeddings") is False:
            untie(module, notes)
        return module

    letters, inputs, feed = _inputs(cls, config, DTYPES[dtype], sizes)
    return Source(
        name, cls.__name__, build, feed, letters, inputs, frozenset(numbers_in(config.to_dict())), notes, unpacked,
        dtype=dtype,
    )  # fmt: skip


def untie(module: Any, notes: list[str]) -> None:
    """Give the head a table of its own where the config says so and the class ties it all the same (T5 v1.1)."""
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    if head is not None and table is not None and head.weight is table.weight:
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
        text = "the config unties the head, which this version of the class ties: it has a table of its own here"
        if text not in notes:
            notes.append(text)


@contextmanager
def unpacked() -> Iterator[None]:
    """Each row is one sequence without padding: transformers finds out from values, which do not exist here.

    With real tensors of that kind it comes to the same answer, and leaves the mask to a fused kernel.
    """
    from transformers import masking_utils

    def without_padding(original: Callable[..., bool]) -> Callable[..., bool]:
        return lambda padding_mask=None, *args, **kwargs: original(None, *args, **kwargs)

    changes: dict[str, Any] = {"find_packed_sequence_indices": lambda position_ids: None}
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        if hasattr(masking_utils, name):
            changes[name] = without_padding(getattr(masking_utils, name))
    before = {name: getattr(masking_utils, name) for name in changes if hasattr(masking_utils, name)}
    try:
        for name in before:
            setattr(masking_utils, name, changes[name])
        yield
    finally:
        for name, original in before.items():
            setattr(masking_utils, name, original)


def class_of(transformers: Any, config: Any, stated: Mapping[str, Any]) -> Any:
    """The class of ``architectures[0]``; without it the type's causal or conditional class, else its bare model."""
    architectures = stated.get("architectures") or []
    if architectures:
        from tfcost.model_types import MODEL_TYPES

        row = MODEL_TYPES.get(config.model_type)
        wanted = architectures[0]
        wanted = row.renamed.get(wanted, wanted) if row is not None else wanted
        cls = getattr(transformers, wanted, None) if isinstance(wanted, str) else None
        if cls is None or not hasattr(cls, "_from_config"):
            raise ConfigError(f"architectures {str(architectures[0])[:60]!r}: transformers has no such class")
        return cls
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ConfigError(f"transformers has no model class for model_type {config.model_type!r}")


def _inputs(
    cls: Any, config: Any, dtype: Any, sizes: Mapping[str, int | None]
) -> tuple[dict[str, int], dict[str, str], Feed]:
    """The letters of a class's inputs with their values, and how the inputs are made of them."""
    main = getattr(cls, "main_input_name", "input_ids")
    text = getattr(config, "text_config", None) or config
    limit = _positions(text)
    batch = sizes.get("batch") or 1
    asked, source = sizes.get("seq_len"), sizes.get("src_len")
    length = asked or min(LONGEST, limit or LONGEST)
    two = bool(getattr(config, "is_encoder_decoder", False))

    def ids(b: Any, n: Any) -> Any:
        return torch.zeros(b, n, dtype=torch.long)

    pixels: Callable[[Any], Any] | None = None
    vision = getattr(config, "vision_config", None) or config
    if main == "pixel_values" or hasattr(config, "vision_config"):
        side = getattr(vision, "image_size", 224)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        channels = getattr(vision, "num_channels", 3)

        def pixels(b: Any) -> Any:
            return torch.zeros(b, channels, height, width, dtype=dtype)

    if main == "pixel_values":
        assert pixels is not None
        make = pixels
        return {"b": batch}, {"b": "batch"}, lambda s: ((), {"pixel_values": make(s["b"])})
    letters, inputs = {"b": batch, "N": length}, {"b": "batch", "N": "seq_len"}
    if main == "input_features":
        mels, frames = config.num_mel_bins, 2 * config.max_source_positions
        return (
            letters,
            inputs,
            lambda s: (
                (),
                {
                    "input_features": torch.zeros(s["b"], mels, frames, dtype=dtype),
                    "decoder_input_ids": ids(s["b"], s["N"]),
                },
            ),
        )
    if two:
        letters = {"b": batch, "T": length, "S": source or length}
        inputs = {"b": "batch", "T": "seq_len", "S": "src_len"}
        return letters, inputs, lambda s: (
            (), {"input_ids": ids(s["b"], s["S"]), "decoder_input_ids": ids(s["b"], s["T"])},
        )  # fmt: skip
    if source is not None:
        raise InputError("--src-len needs an encoder and a decoder; this model has one stack")
    image = pixels
    if image is not None:
        return letters, inputs, lambda s: ((), {"input_ids": ids(s["b"], s["N"]), "pixel_values": image(s["b"])})
    return letters, inputs, lambda s: ((), {"input_ids": ids(s["b"], s["N"])})


def _positions(config: Any) -> int | None:
    """How many positions a model has, by whatever name its config gives the number."""
    for name in ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 1:
            return value
    return None
