"""What a class of transformers takes, by the parameters of its forward; and what its values decide, said beforehand.

A traced tensor has no values. Where a class looks at them (is a token padding, which one is the last, which experts
does the router choose), the answer that the closed forms are for is given: no padding, one <eos> a row, top k experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from tfcost.errors import InputError
from tfcost.tracing.program import Feed
from tfcost.tracing.torch_private import TorchFunctionMode, torch

LONGEST = 2048
"""The length that is traced at unless one is asked for (or the model has fewer positions)."""

Inputs = tuple[dict[str, int], dict[str, str], Feed]
"""The letters with their sizes, the report's name of each, and how the inputs are made of them."""


def takes(cls: Any, name: str) -> bool:
    """Whether the forward of a class has a parameter of this name."""
    return name in inspect.signature(cls.forward).parameters


def reads_end_token(cls: Any) -> bool:
    """Whether a class classifies by the <eos> of its input, which decoder and encoder then share (BART, T5)."""
    return takes(cls, "decoder_input_ids") and cls.__name__.endswith("ForSequenceClassification")


def inputs_of(cls: Any, config: Any, dtype: Any, sizes: Mapping[str, int | None]) -> Inputs:
    """The inputs of a class: token ids, pixels, a spectrogram, or two of them."""
    batch, asked, source = sizes.get("batch") or 1, sizes.get("seq_len"), sizes.get("src_len")
    limit = positions(getattr(config, "text_config", None) or config)
    length = asked or min(LONGEST, limit or LONGEST)
    encoder = takes(cls, "decoder_input_ids")
    if source is not None and (not encoder or takes(cls, "input_features") or reads_end_token(cls)):
        raise InputError("--src-len needs an encoder and a decoder of text; this model has one length of text")
    makers: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
    if takes(cls, "input_features"):
        mels, frames = config.num_mel_bins, 2 * config.max_source_positions
        makers["input_features"] = lambda s: torch.zeros(s["b"], mels, frames, dtype=dtype)
    if takes(cls, "pixel_values"):
        channels, height, width = pixels(getattr(config, "vision_config", None) or config)
        makers["pixel_values"] = lambda s: torch.zeros(s["b"], channels, height, width, dtype=dtype)
    letters, inputs = {"b": batch}, {"b": "batch"}

    def text(parameter: str, letter: str, name: str, size: int) -> None:
        letters[letter], inputs[letter] = size, name
        makers[parameter] = lambda s: torch.zeros(s["b"], s[letter], dtype=torch.long)

    two = encoder and not reads_end_token(cls)
    if two:
        text("decoder_input_ids", "N" if "input_features" in makers else "T", "seq_len", length)
    if takes(cls, "input_ids"):
        if two:
            text("input_ids", "S", "src_len", source or length)
        else:
            text("input_ids", "N", "seq_len", length)
    if asked is not None and "seq_len" not in inputs.values():
        raise InputError("-N/--seq-len does not apply to a model without text")
    return letters, inputs, lambda s: ((), {name: make(s) for name, make in makers.items()})


def pixels(config: Any) -> tuple[int, int, int]:
    """Channels, rows and columns of an image model's image."""
    side = getattr(config, "image_size", 224)
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    return getattr(config, "num_channels", 3), height, width


def positions(config: Any) -> int | None:
    """How many positions a model has, by whatever name its config gives the number."""
    for name in ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 1:
            return value
    return None


@contextmanager
def values_decided(cls: Any) -> Iterator[None]:
    """Inside, what values would decide is decided: each row is one sequence without padding, tokens go to top k."""
    with ExitStack() as stack:
        stack.enter_context(unpacked())
        stack.enter_context(any_width())
        stack.enter_context(first_experts(inspect.getmodule(cls)))
        if reads_end_token(cls):
            stack.enter_context(OneEndToken())
        yield


@contextmanager
def replaced(owner: Any, changes: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Attributes of a module or class that are others inside, each made of the original; missing ones are left out."""
    before = {name: getattr(owner, name) for name in changes if hasattr(owner, name)}
    try:
        for name, original in before.items():
            setattr(owner, name, changes[name](original))
        yield
    finally:
        for name, original in before.items():
            setattr(owner, name, original)


@contextmanager
def unpacked() -> Iterator[None]:
    """Each row is one sequence without padding: transformers finds out from values, which do not exist here.

    With real tensors of that kind it comes to the same answer, and leaves the mask to a fused kernel.
    """
    from transformers import masking_utils

    def without_padding(original: Callable[..., bool]) -> Callable[..., bool]:
        return lambda padding_mask=None, *args, **kwargs: original(None, *args, **kwargs)

    changes: dict[str, Any] = {"find_packed_sequence_indices": lambda _: lambda position_ids: None}
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        changes[name] = without_padding
    with replaced(masking_utils, changes):
        yield


ALIGNED = 16
"""Bytes of which the rows of a grouped product's operands are a multiple, or PyTorch's kernel refuses them."""


@contextmanager
def any_width() -> Iterator[None]:
    """Experts of a width that the grouped kernel refuses use transformers' own loop over groups, of the same work."""
    from transformers.integrations import moe

    def can_use(original: Callable[..., bool]) -> Callable[..., bool]:
        def can_use_grouped_mm(input: Any, weight: Any, *args: Any, **kwargs: Any) -> bool:
            aligned = all(int(width) * weight.itemsize % ALIGNED == 0 for width in weight.shape[1:])
            return aligned and original(input, weight, *args, **kwargs)

        return can_use_grouped_mm

    with replaced(moe, {"_can_use_grouped_mm": can_use}):
        yield


class OneEndToken(TorchFunctionMode):  # type: ignore[misc]  # the base has no types
    """Each row of token ids has one <eos>: a mask of tokens picks one vector per row."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            mask = args[1][0]
            if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() == 2:
                rows = torch.arange(mask.shape[0], device=mask.device)
                return args[0][rows, torch.zeros_like(rows)]
        if getattr(func, "__name__", "").strip("_").startswith("unique_consecutive"):
            return args[0][:1]
        return func(*args, **(kwargs or {}))


@contextmanager
def first_experts(module: Any) -> Iterator[None]:
    """DBRX's loop over the experts that were hit: every token goes to the same top k, one product each as in the class.

    Its FLOPs and the bytes that it keeps are those of any choice, since a token has k experts in all of them.
    """
    cls = getattr(module, "DbrxExperts", None)
    if cls is None:
        yield
        return

    def looped(_: Any) -> Callable[..., Any]:
        def forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            flat = hidden_states.reshape(-1, self.hidden_size)
            total = torch.zeros_like(flat)
            tokens = torch.arange(flat.shape[0], device=flat.device)
            tables = [
                weight.view(-1, self.ffn_hidden_size, self.hidden_size)
                for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2)
            ]
            for chosen in range(top_k_index.shape[-1]):
                w1, v1, w2 = (table[chosen] for table in tables)
                states = self.mlp(flat[tokens], w1, v1, w2) * top_k_weights[tokens, chosen, None]
                total.index_add_(0, tokens, states)
            return total.view(hidden_states.shape[0], -1, self.hidden_size)

        return forward

    with replaced(cls, {"forward": looped}):
        yield
