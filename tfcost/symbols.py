"""Models in symbols, their closed forms and crossovers, in sympy.

How formulas are written (:mod:`tfcost.notation`), where costs cross (:mod:`tfcost.crossings`), kinds of layers
(:mod:`tfcost.layer_table`) and models of stages (:mod:`tfcost.stages`) stand beside it; nothing else imports sympy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import sympy
from sympy import Expr, Symbol

from tfcost.analysis import Analysis, Options
from tfcost.blocks import Run
from tfcost.config import ModelConfig
from tfcost.errors import UnknownName
from tfcost.graph import Size, doublings, least, round_up
from tfcost.models import DOCUMENT_MODEL, Model, load
from tfcost.notation import LENGTHS, Formula, by_layers, plain, symbol
from tfcost.point import kernel_asked, options_of
from tfcost.policy import as_run
from tfcost.rows import layer_groups


@least.register(Expr)
def _(a: Expr, b: Size) -> Expr:
    return sympy.Min(a, b)


@round_up.register(Expr)
def _(a: Expr, multiple: int) -> Expr:
    return multiple * sympy.ceiling(a / multiple)


@doublings.register(Expr)
def _(n: Expr) -> Expr:
    return sympy.ceiling(sympy.log(n, 2))


FIELD_SYMBOLS = {
    "hidden": "d", "heads": "h", "kv_heads": "h_kv", "head_dim": "d_k", "ffn_hidden": "d_ff", "vocab": "V",
    "src_vocab": "V_src", "max_positions": "N_max", "encoder_layers": "l_enc", "decoder_layers": "l_dec",
    "window": "w", "embedding_size": "e", "bottleneck": "t", "layer_sets": "l_w", "local_layers": "l_local",
    "dense_layers": "l_dense", "experts": "E", "experts_per_token": "k", "expert_hidden": "d_e",
    "shared_expert_hidden": "d_s", "query_rank": "d_q", "kv_rank": "d_c", "rope_dim": "d_r", "value_dim": "d_v",
    "channels": "c", "classes": "C", "window_side": "w", "projection_size": "P", "source_positions": "S_max",
    "pooler_size": "d_p", "features": "m", "hashes": "r", "buckets": "n_b", "chunk_length": "n_c", "kernel": "k",
}  # fmt: skip
"""The symbol of each size of a model. Equal depths are both ``l``."""

OPTIONAL = (
    "vocab", "src_vocab", "max_positions", "window", "embedding_size", "bottleneck", "layer_sets", "experts",
    "shared_expert_hidden", "query_rank", "kv_rank", "rope_dim", "classes", "window_side",
    "projection_size", "source_positions", "pooler_size", "features", "buckets", "chunk_length", "kernel",
)  # fmt: skip
"""Sizes that a model may lack: None, or 0."""

def symbolic_config(cfg: ModelConfig, suffix: str = "") -> tuple[ModelConfig, dict[Symbol, int]]:
    """The same model with symbols for sizes, and the value of each symbol that has one.

    A size that follows from others in the usual way is written by them: d_k = d/h, h_kv = h, d_ff = 4d. ``suffix`` is
    on the letters of another tower: ``d_img``.
    """
    values: dict[Symbol, int] = {}

    def name(field: str, letter: str = "") -> Symbol:
        made = symbol((letter or FIELD_SYMBOLS[field]) + suffix)
        if isinstance(value := getattr(cfg, field), int):
            values[made] = value
        return made

    d, h = name("hidden"), name("heads")
    changes: dict[str, Any] = {"hidden": d, "heads": h}
    changes["kv_heads"] = h if cfg.kv_heads == cfg.heads else name("kv_heads")
    changes["head_dim"] = d / h if cfg.heads * cfg.head_dim == cfg.hidden else name("head_dim")
    changes["ffn_hidden"] = 4 * d if cfg.ffn_hidden == 4 * cfg.hidden else name("ffn_hidden")
    changes |= {field: name(field) for field in OPTIONAL if getattr(cfg, field) not in (None, 0)}
    if cfg.hashes not in (None, 1):  # one round needs no weights of its own
        changes["hashes"] = name("hashes")
    if cfg.experts is not None:
        same = cfg.expert_hidden == cfg.ffn_hidden
        changes["expert_hidden"] = changes["ffn_hidden"] if same else name("expert_hidden")
        changes["experts_per_token"] = name("experts_per_token")
    if cfg.value_dim is not None:
        changes["value_dim"] = changes["head_dim"] if cfg.value_dim == cfg.head_dim else name("value_dim")
    if cfg.patches is not None or cfg.source_positions is not None:
        changes["channels"] = name("channels")
    if cfg.stages:
        from tfcost.stages import symbolic_stages

        changes["stages"] = symbolic_stages(cfg, d, h, symbol("N"))
    if cfg.tower is not None:
        tower, more = symbolic_config(cfg.tower, "_img")
        changes["tower"] = tower._replace(projection_size=changes["projection_size"])
        values |= more
    if suffix and cfg.patches is not None:
        # The tokens of another tower are no input of the pass: their number is a size of the model.
        changes["patches"] = symbol(f"N{suffix}") - cfg.prefix_tokens
        values[symbol(f"N{suffix}")] = cfg.patches + cfg.prefix_tokens
    stacks = [field for field in ("encoder_layers", "decoder_layers") if field.partition("_")[0] in cfg.arch]
    equal = all(getattr(cfg, field) == getattr(cfg, stacks[0]) for field in stacks)
    if cfg.window is not None and cfg.local_layers is not None:
        # Two kinds of layers are two numbers of layers.
        rest = symbol("l_global")
        values[rest] = getattr(cfg, stacks[0]) - cfg.local_layers
        changes |= {"local_layers": name("local_layers"), stacks[0]: name("local_layers") + rest}
    elif cfg.dense_layers is not None:
        rest = symbol("l_sparse")
        values[rest] = getattr(cfg, stacks[0]) - cfg.dense_layers
        changes |= {"dense_layers": name("dense_layers"), stacks[0]: name("dense_layers") + rest}
    elif not cfg.stages:
        changes |= {field: name(field, "l" if equal else "") for field in stacks}
    return cfg._replace(**changes), values


def symbolic_run(cfg: ModelConfig, run: Run) -> tuple[Run, dict[Symbol, int]]:
    """The same pass in b and N, or b, T and S where there are two lengths, and F frames where they are not 2S."""
    batch, length = symbol("b"), symbol("N" if run.src_len is None else "T")
    values = {batch: run.batch, length: run.seq_len}
    source = frames = None
    if run.src_len is not None:
        source = symbol("S")
        values[source] = run.src_len
    if run.frames is not None:
        frames = symbol("F")
        values[frames] = run.frames
        if source is not None and values[frames] == 2 * values[source]:
            del values[frames]
            frames = 2 * source
    labels = None if run.labels is None else symbol("N_lab")
    if labels is not None:
        values[labels] = run.labels
    return run._replace(batch=batch, seq_len=length, src_len=source, frames=frames, labels=labels), values


class ClosedForms:
    """The closed forms of one report: the same folds over the same graph, built on symbols."""

    def __init__(self, cfg: ModelConfig, run: Run, options: Options, command: str, by: str) -> None:
        symbolic, sizes = symbolic_config(cfg)
        passed, lengths = symbolic_run(cfg, run)
        self.values = {**lengths, **sizes}
        self.analysis = Analysis(symbolic, passed, options)
        self.analysis.at = self.value_of
        self.command, self.by = command, by

    def value_of(self, size: Size) -> Size:
        """What an expression is at the sizes of the model and the pass that this form was asked for."""
        value = size.xreplace(self.values) if isinstance(size, Expr) else size
        return int(value) if isinstance(value, sympy.Integer) else value

    def totals(self, keys: Iterable[str] | None = None) -> dict[str, Expr]:
        """The closed form of those of ``keys`` (default: all totals) that have one, collected by layers."""
        analysis = self.analysis
        figures: dict[str, Any] = {
            **analysis.parameters,
            **analysis.with_ratios(analysis.flops, analysis.options.convention),
        }
        if keys is None or not {*figures, "flash_recompute_flops"} >= set(keys):  # what nobody asks for is not derived
            figures |= analysis.memory
        figures["flash_recompute_flops"] = analysis.kernel_recompute
        if analysis.comparisons != 0:
            figures["sort_comparisons"] = analysis.comparisons
        wanted = figures if keys is None else keys
        return {key: by_layers(figures[key]) for key in wanted if figures.get(key) is not None}

    def formulas(self, keys: Iterable[str] | None = None) -> dict[str, Formula]:
        """:meth:`totals` as text."""
        return {key: plain(value) for key, value in self.totals(keys).items()}

    def row_formulas(self, rows: list[dict[str, Any]]) -> list[Formula]:
        """The closed form of each of the numeric rows: of one copy where the row has a count, as ``flops_each``."""
        figure = {"flops": "flops", "params": "parameters", "memory": "bytes"}[self.command]
        if self.by != "layer":
            return [plain(row[f"{figure}_each"]) for row in self.analysis.rows(self.command, self.by)]
        sums = {
            path: plain(sum(item.copies * item.figures[figure] for item in group))
            for path, _, group in layer_groups(self.analysis, self.analysis.items(self.command))
        }
        return [sums[path if (path := row["path"]) in sums else path.rpartition("/")[0]] for row in rows]


def symbolic_model(model: str | os.PathLike[str] | Model | None, fields: dict[str, Any]) -> tuple[ModelConfig, Model]:
    """A model's config, with symbols for the sizes that nothing states (d, h, l and V)."""
    source = DOCUMENT_MODEL if model is None else model if isinstance(model, Model) else load(model)
    if not source.from_config:
        stated = {key for key, value in fields.items() if value is not None}
        missing: dict[str, Any] = {"hidden": symbol("d"), "heads": symbol("h")}
        if "image_size" not in stated:
            missing["vocab"] = symbol("V")
        if not stated & {"layers", "encoder_layers", "decoder_layers"}:
            missing["layers"] = symbol("l")
        unknown = {key: letter for key, letter in missing.items() if key not in stated}
        source = source._replace(stated={**unknown, **source.stated})
    return source.config(**fields), source


def closed_forms(
    model: str | os.PathLike[str] | Model | None = None,
    *,
    attention: str | None = None,
    causal: str = "full",
    dtype: str = "bf16",
    convention: str = "document",
    implementation: str = "document",
    semantics: str | None = None,
    by: str = "component",
    command: str = "flops",
    **fields: Any,
) -> ClosedForms:
    """The closed forms of a model, or of the document's (``model=None``) with whatever structure ``fields`` state."""
    options = options_of(dtype, convention, causal, implementation, semantics, fields)
    for length in ("batch", "seq_len", "src_len"):
        fields.pop(length, None)  # a closed form holds for every b and N
    cfg, source = symbolic_model(model, fields)
    cfg = as_run(cfg, options.running)
    two = cfg.arch == "encoder-decoder" or cfg.cross_attention
    run = Run(
        symbol("b"), symbol("T" if two else "N"), symbol("S") if two else None,
        kernel_asked(attention, source),
        context=options.running.context,
    )  # fmt: skip
    if cfg.source_positions is not None:
        run = run._replace(frames=2 * symbol("S"))
    return ClosedForms(cfg, run, options, command, by)


def closed_form(model: str | os.PathLike[str] | Model | None, quantity: str, **options: Any) -> Expr:
    """The closed form of one total, as a sympy expression in positive integer symbols (:func:`symbol`).

    ``closed_form(None, "forward_flops")`` is ``l*(4*N**2*b*d + 24*N*b*d**2) + 2*N*V*b*d``. ``quantity`` is a key of
    ``totals`` (README); ``options`` are those of :func:`tfcost.analyze`. Raises :class:`~tfcost.errors.UnknownName`
    for another key, and for one that has no closed form here (``activation_bytes_per_layer`` where layers differ).
    """
    forms = closed_forms(model, **options)
    if quantity not in (found := forms.totals([quantity])):
        raise UnknownName("quantity", quantity, forms.totals())
    return found[quantity]


def ranges(value: Expr) -> dict[str, Expr]:
    """A closed form with a window's ``min(N, w)``, as one without for each range: N <= w and N > w.

    Empty where there is no window.
    """
    windows = value.atoms(sympy.Min)
    if not windows:
        return {}
    within, beyond = {}, {}
    conditions: tuple[list[str], list[str]] = ([], [])
    for least_of in sorted(windows, key=str):
        length = next(each for each in least_of.args if each.is_Symbol and str(each) in LENGTHS)
        window = next(each for each in least_of.args if each != length)
        within[least_of], beyond[least_of] = length, window
        conditions[0].append(f"{length} <= {window}")
        conditions[1].append(f"{length} > {window}")
    return {
        " and ".join(conditions[0]): by_layers(value.xreplace(within)),
        " and ".join(conditions[1]): by_layers(value.xreplace(beyond)),
    }


def beyond_windows(value: Expr) -> Expr:
    """A closed form for lengths beyond every window."""
    return list(ranges(value).values())[-1] if ranges(value) else value


class Crossover(NamedTuple):
    """The length at which a layer's quadratic part has grown to its linear part; None where one of them is zero."""

    what: str
    length: Expr | None
    against: str = "the rest of a layer"


def crossovers(forms: ClosedForms) -> list[Crossover]:
    """Where the score square overtakes the rest of a layer: FLOPs at N = 6d, saved bytes at N = 34d/(5h).

    Of a model that has layers with and without a window, a layer without; with windows alone no square grows. Of one
    that has dense layers and layers with experts, a layer with experts.
    """
    analysis = forms.analysis
    n = symbol("N")
    same = {symbol("T"): n, symbol("S"): n}
    paths = [repeat.path for repeat in analysis.graph.repeats]
    unlimited = [path for path in paths if "global" in path] or paths
    sparse = [path for path in unlimited if "sparse" in path] or unlimited
    inside = tuple(path + "/" for path in sparse)
    flops = sum(item.figures["flops"] for item in analysis.items("flops") if item.path.startswith(inside))
    kept = sum(item.figures["bytes"] for item in analysis.items("memory") if item.path.startswith(inside))
    found = []
    for what, total in (("forward FLOPs", flops), ("bytes kept for backward", kept)):
        expression = sympy.expand(beyond_windows(sympy.sympify(total)).subs(same))
        square, linear = expression.coeff(n, 2), expression.coeff(n, 1)
        found.append(Crossover(what, None if square == 0 or linear == 0 else sympy.cancel(linear / square)))
    return found
