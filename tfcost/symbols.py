"""Symbols, closed forms, crossovers, and formulas as the documents write them, in sympy.

Where costs cross (:mod:`tfcost.crossings`), kinds of layers (:mod:`tfcost.layer_table`) and models of stages
(:mod:`tfcost.stages`) stand beside it; nothing else imports sympy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import sympy
from sympy import Expr, Symbol

from tfcost.analysis import Analysis, Options
from tfcost.blocks import Run
from tfcost.config import ModelConfig, choice
from tfcost.errors import UnknownName
from tfcost.graph import Size, doublings, least, round_up
from tfcost.models import DOCUMENT_MODEL, Model, load
from tfcost.point import ATTENTION, options_of
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


def symbol(name: str) -> Symbol:
    """A positive integer symbol."""
    return Symbol(name, positive=True, integer=True)


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

LETTERS = (
    "b", "N", "T", "S", "M", "k", "d", "d_k", "d_q", "d_c", "d_r", "d_v", "d_ff", "d_e", "d_s", "h", "h_kv", "E", "w",
    "t", "e", "V", "V_src", "N_max", "N_img", "N_lab", "F", "r", "m", "n_b", "n_c", "c", "C", "P", "d_p", "S_max",
)  # fmt: skip
"""The order in which a product's letters are written: bNd, bN²h, bNdV."""

LENGTHS = frozenset("NTSM")


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


class Formula(str):
    """A closed form as text that Python and sympy read, ``2*N**2*b*d``; ``expr`` is the expression behind it."""

    __slots__ = ("expr",)
    expr: Expr

    def written(self, style: str = "text") -> str:
        """The formula as the documents write it (:func:`written`)."""
        return written(self.expr, style)


def plain(value: Size) -> Formula:
    """An expression, collected by the numbers of layers, as a :class:`Formula`."""
    expr = by_layers(value)
    formula = Formula(expr)
    formula.expr = expr
    return formula


DEPTHS = tuple(map(symbol, "l l_enc l_dec l_local l_global l_dense l_sparse l_w l_img".split()))


@cache
def by_layers(value: Size) -> Expr:
    """An expression expanded, then collected by the numbers of layers: ``l*(24*N*b*d**2 + ...) + 2*N*V*b*d``."""
    # sympy.collect gives the same in five times the time.
    groups = terms_by_depth(sympy.sympify(value))
    collected = sympy.Add(*[depth * sympy.Add(*terms) for depth, terms in groups.items()])
    _TERMS[collected] = groups
    return collected


_TERMS: dict[Expr, dict[Expr, list[Expr]]] = {}
"""The terms of expressions that :func:`by_layers` collected: what is printed next need not be expanded again."""


def terms_by_depth(value: Expr) -> dict[Expr, list[Expr]]:
    """The terms of an expression, without the number of layers that they are multiplied by (1 where by none)."""
    if value in _TERMS:
        return _TERMS[value]
    groups: dict[Expr, list[Expr]] = {}
    for term in sympy.Add.make_args(sympy.expand(value)):
        letters = term.free_symbols
        depth = next((each for each in DEPTHS if each in letters), sympy.S.One)
        groups.setdefault(depth, []).append(term if depth is sympy.S.One else term / depth)
    return groups


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
    kernel = choice("--attention", attention or ("flash" if source.from_config else "eager"), ATTENTION)
    two = cfg.arch == "encoder-decoder" or cfg.cross_attention
    run = Run(
        symbol("b"), symbol("T" if two else "N"), symbol("S") if two else None, kernel,
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


def written(value: Expr, style: str = "text") -> str:
    """A formula as the documents write it: ``l(24bNd² + 4bN²d) + 2bNdV``; ``style`` "text" or "latex".

    Products are in the order of :data:`LETTERS`; sums go from the lowest power of a length to the highest; what is
    multiplied by the number of layers is in brackets.
    """
    groups = {
        depth: [(_order(term), _product(term, style)) for term in terms]
        for depth, terms in terms_by_depth(value).items()
    }
    parts = []
    for depth in sorted(groups, key=lambda each: (each == 1, str(each))):
        inner = _sum([text for _, text in sorted(groups[depth])])
        if depth == 1:
            parts.append(inner)
        elif len(groups[depth]) == 1 and not inner.startswith("-"):
            name = _name(depth, style)
            parts.append(name if inner == "1" else f"{name}·{inner}" if style == "text" else rf"{name} \cdot {inner}")
        else:
            left, right = ("(", ")") if style == "text" else (r"\left(", r"\right)")
            parts.append(f"{_name(depth, style)}{left}{inner}{right}")
    return _sum(parts)


def _sum(parts: list[str]) -> str:
    """Terms with their signs between them; one that is added stands first, where there is one."""
    first = next((index for index, part in enumerate(parts) if not part.startswith("-")), 0)
    text = parts[first] if parts else "0"
    for part in parts[:first] + parts[first + 1 :]:
        text += f" - {part[1:]}" if part.startswith("-") else f" + {part}"
    return text


def _order(term: Expr) -> tuple[Any, ...]:
    powers = term.as_powers_dict()
    degree = sum(power for base, power in powers.items() if str(base) in LENGTHS)
    letters = tuple(-int(powers.get(symbol(letter), 0)) for letter in LETTERS)
    return (int(degree), letters, str(term))


def _name(letter: Expr, style: str) -> str:
    text = str(letter)
    if style == "text" or "_" not in text:
        return text
    head, _, tail = text.partition("_")
    return f"{head}_{{{tail}}}" if len(tail) == 1 else rf"{head}_{{\mathrm{{{tail}}}}}"


def _power(base: Expr, power: int, style: str) -> str:
    if isinstance(base, sympy.ceiling) and base.args[0].has(sympy.log):
        text = _log(base.args[0], style)
    elif isinstance(base, sympy.ceiling):
        inner = written(base.args[0], style)
        text = f"⌈{inner}⌉" if style == "text" else rf"\lceil {inner} \rceil"
    elif isinstance(base, sympy.Add):
        inner = written(base, style)
        text = f"({inner})" if style == "text" else rf"\left({inner}\right)"
    elif isinstance(base, sympy.Min):
        inner = ", ".join(written(each, style) for each in sorted(base.args, key=str))
        text = f"min({inner})" if style == "text" else rf"\min({inner})"
    else:
        text = _name(base, style)
    if power == 1:
        return text
    return text + (str(power).translate(SUPERSCRIPT) if style == "text" else f"^{{{power}}}")


def _log(quotient: Expr, style: str) -> str:
    """⌈log₂ N⌉: a quotient of two logarithms, rounded up."""
    above, below = [each.args[0] for each in quotient.as_numer_denom()]
    inner, base = written(above, style), written(below, style)
    if style == "latex":
        return rf"\lceil \log_{{{base}}} {inner} \rceil"
    return f"⌈log{'₂' if base == '2' else f'_{base}'} {inner}⌉"


SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def _product(term: Expr, style: str) -> str:
    coefficient, rest = term.as_coeff_Mul()
    powers = rest.as_powers_dict() if rest != 1 else {}
    known = {symbol(letter): index for index, letter in enumerate(LETTERS)}
    order = sorted(powers, key=lambda base: (known.get(base, len(known)), str(base)))
    above = [_power(base, int(powers[base]), style) for base in order if powers[base] > 0]
    below = [_power(base, -int(powers[base]), style) for base in order if powers[base] < 0]
    numerator, denominator = int(coefficient.p), int(coefficient.q)
    top = _join(([] if abs(numerator) == 1 and above else [str(abs(numerator))]) + above, style)
    if denominator != 1:
        below.insert(0, str(denominator))
    sign = "-" if numerator < 0 else ""
    if not below:
        return sign + top
    bottom = _join(below, style)
    if style == "latex":
        return rf"{sign}\frac{{{top}}}{{{bottom}}}"
    return f"{sign}{top}/{bottom}" if len(below) == 1 else f"{sign}{top}/({bottom})"


def _join(factors: list[str], style: str) -> str:
    """Factors side by side; a name of several letters is set off by a dot, so that d·d_ff is not read as dd_ff."""
    text, after_long = "", False
    for factor in factors:
        long = len(factor.rstrip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻")) > 1 and not factor.isdigit() and style == "text"
        text += ("·" if text and (long or after_long) else " " if text and style == "latex" else "") + factor
        after_long = long
    return text
