"""The only import of sympy: symbols, closed forms, crossovers, and formulas as the documents write them."""

from __future__ import annotations

from typing import Any

import sympy
from sympy import Expr, Symbol

from tfcost.analysis import TOTALS, Analysis, Options
from tfcost.blocks import Run
from tfcost.config import ModelConfig
from tfcost.graph import Size, least


@least.register(Expr)
def _(a: Expr, b: Size) -> Expr:
    return sympy.Min(a, b)


def symbol(name: str) -> Symbol:
    """A positive integer symbol."""
    return Symbol(name, positive=True, integer=True)


FIELD_SYMBOLS = {
    "hidden": "d", "heads": "h", "kv_heads": "h_kv", "head_dim": "d_k", "ffn_hidden": "d_ff", "vocab": "V",
    "src_vocab": "V_src", "max_positions": "N_max", "encoder_layers": "l_enc", "decoder_layers": "l_dec",
}  # fmt: skip
"""The symbol of each size of a model. Equal depths are both ``l``."""

LETTERS = ("b", "N", "T", "S", "M", "d", "d_k", "d_ff", "h", "h_kv", "V", "V_src", "N_max")
"""The order in which a product's letters are written: bNd, bN²h, bNdV."""

LENGTHS = frozenset("NTSM")


def symbolic_config(cfg: ModelConfig) -> tuple[ModelConfig, dict[Symbol, int]]:
    """The same model with symbols for sizes, and the value of each symbol.

    A size that follows from others in the usual way is written by them: d_k = d/h, h_kv = h, d_ff = 4d.
    """
    values: dict[Symbol, int] = {}

    def name(field: str) -> Symbol:
        made = symbol(FIELD_SYMBOLS[field])
        values[made] = getattr(cfg, field)
        return made

    d, h = name("hidden"), name("heads")
    changes: dict[str, Any] = {"hidden": d, "heads": h}
    changes["kv_heads"] = h if cfg.kv_heads == cfg.heads else name("kv_heads")
    changes["head_dim"] = d / h if cfg.heads * cfg.head_dim == cfg.hidden else name("head_dim")
    changes["ffn_hidden"] = 4 * d if cfg.ffn_hidden == 4 * cfg.hidden else name("ffn_hidden")
    for field in ("vocab", "src_vocab", "max_positions"):
        if getattr(cfg, field) is not None:
            changes[field] = name(field)
    if cfg.arch != "encoder-decoder" or cfg.encoder_layers == cfg.decoder_layers:
        layers = symbol("l")
        values[layers] = cfg.decoder_layers if "decoder" in cfg.arch else cfg.encoder_layers
        for field in ("encoder_layers", "decoder_layers"):
            if getattr(cfg, field):
                changes[field] = layers
    else:
        changes |= {field: name(field) for field in ("encoder_layers", "decoder_layers")}
    return cfg._replace(**changes), values


def symbolic_run(cfg: ModelConfig, run: Run) -> tuple[Run, dict[Symbol, int]]:
    """The same pass in b and N, or b, T and S where there are two lengths."""
    batch, length = symbol("b"), symbol("N" if run.src_len is None else "T")
    values = {batch: run.batch, length: run.seq_len}
    source = None
    if run.src_len is not None:
        source = symbol("S")
        values[source] = run.src_len
    return run._replace(batch=batch, seq_len=length, src_len=source), values


class ClosedForms:
    """The closed forms of one report: the same folds over the same graph, built on symbols."""

    def __init__(self, cfg: ModelConfig, run: Run, options: Options, command: str, by: str) -> None:
        symbolic, sizes = symbolic_config(cfg)
        passed, lengths = symbolic_run(cfg, run)
        self.values = {**lengths, **sizes}
        self.analysis = Analysis(symbolic, passed, options)
        self.command, self.by = command, by

    def totals(self) -> dict[str, Expr | None]:
        """The closed form of each total that has one, collected by the number of layers."""
        figures: dict[str, Any] = {**self.analysis.parameters, **self.analysis.flops, **self.analysis.memory}
        figures["forward_macs"] = figures["forward_flops"] / 2
        tokens = self.analysis.run.batch * self.analysis.run.seq_len
        figures["flops_per_token"] = sympy.expand(figures["forward_flops"] / tokens)
        figures["train_flops_per_token"] = sympy.expand(figures["train_flops"] / tokens)
        return {key: None if value is None else by_layers(value) for key, value in figures.items()}

    def row_formulas(self, rows: list[dict[str, Any]]) -> list[Expr]:
        """The closed form of each of the numeric rows: of one copy where the row has a count, as ``flops_each``."""
        figure = {"flops": "flops", "params": "parameters", "memory": "bytes"}[self.command]
        if self.by != "layer":
            return [sympy.expand(row[f"{figure}_each"]) for row in self.analysis.rows(self.command, self.by)]
        sums = {
            path: sympy.expand(sum(item.copies * item.figures[figure] for item in group))
            for path, _, group in self.analysis.layer_groups(self.analysis.items(self.command))
        }
        return [sums[path if (path := row["path"]) in sums else path.rpartition("/")[0]] for row in rows]


def by_layers(value: Size) -> Expr:
    """An expression expanded, then collected by the numbers of layers: ``l(24bNd² + 4bN²d) + 2bNdV``."""
    expression = sympy.expand(sympy.sympify(value))
    depths = [symbol(name) for name in ("l", "l_enc", "l_dec")]
    return sympy.collect(expression, [depth for depth in depths if depth in expression.free_symbols])
