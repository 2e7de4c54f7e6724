"""The document's model traced with every size a letter (d, h, V, d_ff, the lengths), through our reference module.

``nn.Linear`` and ``nn.LayerNorm`` take symbolic sizes, so PyTorch itself derives ``24bNd² + 4bN²d`` and the rest. Heads
divide the width: it is built as h heads of width d_k, and d_k is written d/h in the closed forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfcost.config import ModelConfig
from tfcost.errors import InputError
from tfcost.models import DOCUMENT_MODEL
from tfcost.notation import symbol
from tfcost.tracing.sources import DTYPES, Source
from tfcost.tracing.torch_private import torch
from tfcost.tracing.weights import without_initialisation
from tfcost.validate.compare import reference_options
from tfcost.validate.reference import Transformer

EXAMPLE = {"hidden": 512, "heads": 8, "layers": 1}
"""Where nothing is stated: the base model of Vaswani et al. 2017, one layer of it."""


def from_document(fields: Mapping[str, Any], attention: str, dtype: str, sizes: Mapping[str, int | None]) -> Source:
    """The model that fields describe. Letters are b, N (or T and S), h, d_k, and V and d_ff where they are stated."""
    stated = {**EXAMPLE, **{key: value for key, value in fields.items() if value is not None}}
    cfg = DOCUMENT_MODEL.config(**stated)
    if cfg.positions == "learned" or cfg.kv_heads != cfg.heads:
        raise InputError("trace without a MODEL has no --positions learned and no --kv-heads: trace a config instead")
    two = cfg.arch == "encoder-decoder"
    length = sizes.get("seq_len") or 2048
    letters = {"b": sizes.get("batch") or 1, "T" if two else "N": length}
    inputs = {"b": "batch", "T" if two else "N": "seq_len"}
    if two:
        letters["S"], inputs["S"] = sizes.get("src_len") or length, "src_len"
    letters |= {"h": cfg.heads, "d_k": cfg.head_dim}
    inputs |= {"h": "heads", "d_k": "head_dim"}
    if "ffn_hidden" in fields:
        letters["d_ff"], inputs["d_ff"] = cfg.ffn_hidden, "ffn_hidden"
    if cfg.vocab is not None:
        letters["V"], inputs["V"] = cfg.vocab, "vocab"

    def build(given: Mapping[str, Any]) -> Any:
        with without_initialisation():
            return Transformer(
                **_options(cfg, given), attention="eager" if attention == "eager" else "sdpa", dtype=DTYPES[dtype]
            )

    def feed(given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def tokens(n: Any) -> Any:
            if cfg.vocab is None:
                return torch.zeros(given["b"], n, given["h"] * given["d_k"], dtype=DTYPES[dtype], requires_grad=True)
            return torch.zeros(given["b"], n, dtype=torch.long)

        return ((tokens(given["S"]), tokens(given["T"])) if two else (tokens(given["N"]),)), {}

    return Source(
        "document", "Transformer", build, feed, letters, inputs, frozenset(), [],
        written_as={"d_k": symbol("d") / symbol("h")}, derived={"d": cfg.hidden}, dtype=dtype,
    )  # fmt: skip


def _options(cfg: ModelConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The reference's arguments with letters in the place of sizes."""
    hidden = given["h"] * given["d_k"]
    options = reference_options(cfg) | {
        "hidden": hidden, "heads": given["h"], "kv_heads": given["h"], "head_dim": given["d_k"],
        "ffn_hidden": given.get("d_ff", 4 * hidden), "scale_embedding": False,  # a product with a number costs nothing
    }  # fmt: skip
    if cfg.vocab is not None:
        options["vocab"] = given["V"]
    return options
