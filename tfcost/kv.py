"""The KV cache: the keys and values of every layer that attends to what was generated, per token and in all.

Found in the graph: they are what QKᵀ and PV read. 2 l h_kv d_k elements per token; a layer with a window w needs the
last w tokens alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tfcost.blocks import Run
from tfcost.config import ModelConfig
from tfcost.errors import InputError
from tfcost.families import build
from tfcost.graph import Size, least
from tfcost.policy import KV_ITEMSIZE

READS = {"scores": "key", "weighted_sum": "value"}


class Cache(NamedTuple):
    """Keys or values of ``copies`` layers: bytes per token, and how many tokens are kept (None: all)."""

    path: str
    copies: Size
    bytes_each: Size
    window: Size | None
    tokens: Size | None = None
    """A number of tokens that does not grow (an encoder's output); None: those generated."""


def caches(cfg: ModelConfig, run: Run, dtype: str, expanded: bool = False) -> list[Cache]:
    """Every cache of a model, for one sequence.

    Latent attention caches its compressed vector and the key that turns, d_c + d_r elements once for keys and values
    (DeepSeek-V2, arXiv:2405.04434, table 1); ``expanded``: every head's keys and values, as plain attention would.
    """
    if cfg.arch == "encoder":
        raise InputError("an encoder generates nothing, so it has no KV cache; kv is for decoders and encoder-decoders")
    if cfg.bidirectional:
        raise InputError("this decoder is bidirectional: earlier keys change with later tokens, so nothing is cached")
    if cfg.family not in ("", "speech"):
        raise InputError("this model keeps no keys and values of earlier tokens; kv is for decoders that do")
    if cfg.attention_kind in ("linear", "lsh"):
        raise InputError(f"--attention-kind {cfg.attention_kind} keeps sums or buckets rather than keys and values")
    # The kernel does not matter: eager's products read keys and values as they are.
    latent = cfg.attention_kind == "latent"
    if latent:
        cfg = cfg._replace(
            absorbed=not expanded
        )  # absorbed, the keys are what is compressed, and the values part of it
    graph = build(cfg, run._replace(batch=1, attention="eager", context=0), KV_ITEMSIZE[dtype])
    windowed = cfg.window is not None
    found = []
    for op in graph.ops:
        if op.kind not in READS or op.path.startswith("encoder/"):
            continue
        if latent and not expanded and op.kind == "weighted_sum":
            continue
        tensor, scope = op.inputs[1], op.path.rpartition("/")[0]
        local = windowed and (cfg.local_layers is None or "local_" in op.path)
        across = scope.endswith("cross_attention")
        each = tensor.bytes if across else tensor.itemsize * _product(tensor.shape[:1] + tensor.shape[2:])
        if across:
            found.append(Cache(f"{scope}/{READS[op.kind]}", op.copies, each, None, 1))
        else:
            found.append(Cache(f"{scope}/{READS[op.kind]}", op.copies, each, cfg.window if local else None))
    return found


def _product(sizes: tuple[Size, ...]) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def cache_bytes(found: list[Cache], tokens: Size, windows: bool = True) -> Size:
    """Bytes of the caches of one sequence of so many tokens; ``windows=False``: as if every layer kept all of them."""
    total: Size = 0
    for cache in found:
        kept = tokens if cache.window is None or not windows else least(tokens, cache.window)
        total += cache.copies * cache.bytes_each * (kept if cache.tokens is None else cache.tokens)
    return total


def per_token(found: list[Cache], beyond_windows: bool = False) -> Size:
    """Bytes that one more token takes in all layers; beyond every window, in those layers that have none."""
    grows = [cache for cache in found if cache.tokens is None and not (beyond_windows and cache.window is not None)]
    return sum([cache.copies * cache.bytes_each for cache in grows])


def max_tokens(found: list[Cache], free: int, batch: int) -> int | None:
    """The most tokens, all sequences together, whose caches fit into ``free`` bytes; None where there is no limit.

    The sequences are as equal as can be. Without windows that is ``free`` less the fixed caches, by bytes per token.
    """
    fixed = batch * cache_bytes(found, 0)
    if not any(cache.window for cache in found):
        whole: int = max(free - fixed, 0) // per_token(found)
        return whole

    def needed(tokens: int) -> int:
        each, longer = divmod(tokens, batch)
        total: int = (batch - longer) * cache_bytes(found, each) + longer * cache_bytes(found, each + 1)
        return total

    widest = max(cache.window for cache in found if cache.window is not None)
    if per_token(found, True) == 0 and needed(batch * widest) <= free:
        return None
    low, high = 0, 1
    while needed(high) <= free:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= free else (low, middle)
    return low


def totals(found: list[Cache], run: Run, free: int | None, expanded: list[Cache] | None = None) -> dict[str, Any]:
    """The totals of ``tfcost kv``: of ``run.batch`` sequences of ``run.seq_len`` tokens."""
    sequence = cache_bytes(found, run.seq_len)
    figures: dict[str, Any] = {
        "kv_cache_bytes": run.batch * sequence, "kv_cache_bytes_per_sequence": sequence,
        "kv_cache_bytes_per_token": per_token(found),
    }  # fmt: skip
    if any(cache.window is not None for cache in found):
        figures["kv_cache_bytes_without_windows"] = run.batch * cache_bytes(found, run.seq_len, windows=False)
        figures["kv_cache_bytes_per_token_beyond_windows"] = per_token(found, beyond_windows=True)
    if expanded is not None:
        figures["kv_cache_bytes_expanded"] = run.batch * cache_bytes(expanded, run.seq_len)
    figures["max_tokens"] = None if free is None else max_tokens(found, free, run.batch)
    return figures
