"""What is traced: a preset or ``config.json`` as transformers builds it, a callable, a module, or our own reference.

Each becomes a :class:`Source`: how to build the module and its inputs from sizes, under fake tensors.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    limit: int | None = None


FAN = "_calculate_fan_in_and_fan_out"


@contextmanager
def without_initialisation() -> Iterator[None]:
    """Weights are never read, so that nothing need fill them: ``torch.nn.init`` does nothing inside."""
    init = torch.nn.init
    names = [
        name for name in dir(init) if name.endswith("_") and not name.startswith("_") and callable(getattr(init, name))
    ]
    before = {name: getattr(init, name) for name in (*names, FAN)}
    try:
        for name in names:
            setattr(init, name, lambda tensor, *args, **kwargs: tensor)
        # Its root would be taken of a symbolic size, and fix it.
        setattr(init, FAN, lambda tensor: (1, 1))
        yield
    finally:
        for name, function in before.items():
            setattr(init, name, function)


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

        with no_init_weights(), without_initialisation():
            module = cls._from_config(config, attn_implementation=kernel, dtype=DTYPES[dtype])
        module.tie_weights()  # left out with the initialisation
        if stated.get("tie_word_embeddings") is False:
            untie(module, notes)
        return module

    letters, inputs, feed = inputs_of(cls, config, DTYPES[dtype], sizes)
    return Source(
        name, cls.__name__, build, feed, letters, inputs, frozenset(numbers_in(config.to_dict())), notes,
        partial(values_decided, cls), limit=positions(getattr(config, "text_config", None) or config),
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


Dynamic = Mapping[Any, Mapping[int, str]]
"""Which axes are letters: ``{0: {0: "b", 1: "N"}}`` by position or ``{"input_ids": {0: "b"}}`` by name."""


def from_callable(spec: str) -> Source:
    """``package.module:callable``: what it returns, called under fake tensors. Importing it runs the person's code."""
    module_name, _, attribute = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise InputError(f"{spec}: no module named {error.name!r}") from None
    except AttributeError:
        raise InputError(f"{spec}: {module_name} has no {attribute!r}") from None
    except TfcostError:
        raise
    except Exception as error:  # the person's own code
        raise InputError(f"{spec}: importing it fails: {type(error).__name__}: {str(error)[:200]}") from None
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise InputError(f"{spec} is not callable; it must return (module, inputs, dynamic)")
    return from_factory(spec, found)


def from_factory(name: str, make: Callable[[], Any]) -> Source:
    """A callable that returns ``(module, inputs)`` or ``(module, inputs, dynamic)``; it is called for each trace."""

    def made() -> tuple[Any, Any, Dynamic]:
        with without_initialisation():
            result = make()
        if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], torch.nn.Module):
            raise InputError(
                f"{name} must return (module, inputs) or (module, inputs, dynamic), with a torch.nn.Module"
            )
        return result[0], result[1], result[2] if len(result) == 3 else {}

    from tfcost.tracing.torch_private import fake_mode

    with fake_mode(False):
        module, inputs, dynamic = made()
    letters = letters_of(inputs, dynamic)
    held: dict[str, Any] = {}

    def build(_: Mapping[str, Any]) -> Any:
        held["module"], held["inputs"], held["dynamic"] = made()
        return held["module"]

    def feed(s: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments(held["inputs"], held["dynamic"], s)

    inputs_of = {
        letter: {"b": "batch", "N": "seq_len", "T": "seq_len", "S": "src_len"}.get(letter, letter) for letter in letters
    }
    taken = frozenset(size for p in module.parameters() for size in p.shape)
    return Source(name, type(module).__name__, build, feed, letters, inputs_of, taken, [])


def _named(inputs: Any) -> list[tuple[Any, Any]]:
    if isinstance(inputs, Mapping):
        return list(inputs.items())
    if isinstance(inputs, torch.Tensor):
        return [(0, inputs)]
    if isinstance(inputs, (tuple, list)):
        return list(enumerate(inputs))
    raise InputError(f"inputs must be tensors, a tuple of them or a dict by name, not {type(inputs).__name__}")


def letters_of(inputs: Any, dynamic: Dynamic) -> dict[str, int]:
    """The letters of some inputs with the sizes that the example has; one letter has one size."""
    given = dict(_named(inputs))
    letters: dict[str, int] = {}
    for key, axes in dynamic.items():
        if key not in given:
            raise InputError(f"dynamic names the input {key!r}; the inputs are {', '.join(map(str, given))}")
        for axis, letter in axes.items():
            if not isinstance(axis, int) or not 0 <= axis < given[key].dim():
                raise InputError(f"dynamic: input {key!r} has {given[key].dim()} axes, and no axis {axis!r}")
            size = int(given[key].shape[axis])
            if letters.setdefault(str(letter), size) != size:
                raise InputError(f"dynamic: {letter} is {letters[str(letter)]} in one input and {size} in {key!r}")
    return letters


def arguments(inputs: Any, dynamic: Dynamic, sizes: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs like the example's with the sizes of the letters; their values are never looked at."""

    def resized(key: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        axes = dynamic.get(key, {})
        shape = [sizes[str(axes[axis])] if axis in axes else int(size) for axis, size in enumerate(value.shape)]
        fresh = torch.empty(shape, dtype=value.dtype)
        return fresh.requires_grad_() if value.requires_grad else fresh

    made = [(key, resized(key, value)) for key, value in _named(inputs)]
    if isinstance(inputs, Mapping):
        return (), dict(made)
    return tuple(value for _, value in made), {}


def from_module(module: Any, inputs: Any, dynamic: Dynamic) -> Source:
    """A module that exists, with example inputs; inside a trace its weights are fake ones, then its own again."""
    from tfcost.tracing.torch_private import as_fake_tensor

    letters = letters_of(inputs, dynamic)
    inputs_of = {
        letter: {"b": "batch", "N": "seq_len", "T": "seq_len", "S": "src_len"}.get(letter, letter) for letter in letters
    }
    taken = frozenset(int(size) for p in module.parameters() for size in p.shape)

    def build(_: Mapping[str, Any]) -> Any:
        return as_fake(module, as_fake_tensor)

    def feed(s: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments(inputs, dynamic, s)

    return Source(type(module).__name__, type(module).__name__, build, feed, letters, inputs_of, taken, [])


@contextmanager
def as_fake(module: Any, convert: Callable[[Any], Any]) -> Iterator[Any]:
    """A module whose parameters and buffers are, inside, fake ones of the same shapes; its own are put back."""
    known: dict[int, Any] = {}
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for each in module.modules():
            for group in (each._parameters, each._buffers):
                for name, tensor in group.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in known:
                        fake = convert(tensor.detach())
                        if isinstance(tensor, torch.nn.Parameter):
                            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                        known[id(tensor)] = fake
                    undo.append((group, name, tensor))
                    group[name] = known[id(tensor)]
        yield module
    finally:
        for group, name, tensor in undo:
            group[name] = tensor
