"""The reference Transformer learns to translate: ``python -m tfcost.validate.translate [SENTENCE ...]``.

Trains an encoder-decoder on the German-English pairs of ``data/translation``, states the loss and how many held-out
sentences it translates exactly, and translates greedily. The model reads target words shifted right (``<start>``
first) and is asked for the next word (``<end>`` last); padding is hidden from attention and left out of the loss. Adam
with a linear warm-up and clipped gradients: at a rate of 1e-3 the full size does not learn, at 1e-4 it does.

Source of the recipe: Vaswani et al. 2017, section 5; of the decoding: always the likeliest next word.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from tfcost.data_files import data_path
from tfcost.errors import InputError, MissingExtra, OutputError, TfcostError

try:
    import torch
    from torch import Tensor
    from torch.nn.functional import cross_entropy

    from tfcost.validate.reference import Transformer, attention_maps, padding_mask
except ModuleNotFoundError as error:
    if __name__ != "__main__" or error.name != "torch":
        raise
    print("tfcost: this needs torch: pip install '.[torch]' in tfcost's folder", file=sys.stderr)
    sys.exit(2)

PAD, START, END, UNKNOWN = 0, 1, 2, 3
SPECIAL = ("<pad>", "<start>", "<end>", "<unk>")
CLASSIC = "ich mochte ein bier"
"""The documents' example; "i want a beer"."""

Pair = tuple[list[str], list[str]]


@dataclass(frozen=True)
class Preset:
    """Shape of the model and its training; ``rate`` is the peak of the learning rate, ``warmup`` the steps up to it."""

    hidden: int
    heads: int
    ffn_hidden: int
    layers: int
    epochs: int
    batch: int
    rate: float
    warmup: int
    dropout: float = 0.1


PRESETS = {
    # The documents' model: d_k = 512 / 8 = 64.
    "full": Preset(hidden=512, heads=8, ffn_hidden=2048, layers=6, epochs=20, batch=32, rate=1e-4, warmup=40),
    "small": Preset(hidden=64, heads=4, ffn_hidden=256, layers=2, epochs=40, batch=32, rate=1e-3, warmup=40),
}


class Vocabulary:
    """Words and their ids; the first four ids are ``<pad> <start> <end> <unk>``."""

    def __init__(self, sentences: Iterable[Sequence[str]]) -> None:
        self.words = [*SPECIAL, *sorted({word for sentence in sentences for word in sentence})]
        self._ids = {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, sentence: Sequence[str]) -> list[int]:
        """Ids of the words; of ``<unk>`` for a word that training never showed (and for the special symbols)."""
        return [max(self._ids.get(word, UNKNOWN), UNKNOWN) for word in sentence]

    def decode(self, ids: Iterable[int]) -> list[str]:
        return [self.words[i] for i in ids]


def read_pairs(path: Path) -> list[Pair]:
    """The sentence pairs of a file: a heading, then ``german<TAB>english`` lines, words separated by spaces.

    Raises ``InputError`` for a file that cannot be read, has a line without exactly two sentences, or has no pairs.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    pairs: list[Pair] = []
    for number, line in enumerate(lines[1:], start=2):
        sides = [side.split() for side in line.split("\t")]
        if len(sides) != 2 or not all(sides):
            raise InputError(f"{path}, line {number}: expected german<TAB>english, got {line[:60]!r}")
        pairs.append((sides[0], sides[1]))
    if not pairs:
        raise InputError(f"{path} has no sentence pairs")
    return pairs


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Ids of unequal length as one tensor ``[b, longest]``, filled up with ``<pad>``."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


def build_model(preset: Preset, source: Vocabulary, target: Vocabulary) -> Transformer:
    """The post-norm ReLU encoder-decoder of Vaswani et al. with its own head; eager, so that it has attention maps."""
    return Transformer(
        arch="encoder-decoder",
        hidden=preset.hidden,
        heads=preset.heads,
        layers=preset.layers,
        ffn_hidden=preset.ffn_hidden,
        activation="relu",
        pre_norm=False,
        src_vocab=len(source),
        vocab=len(target),
        tied=False,
        dropout=preset.dropout,
        embedding_dropout=preset.dropout,
    )


def batch_loss(model: Transformer, source: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy per real target word: ``source`` ``[b, S]``, ``target`` ``[b, T]``, words and then padding.

    The decoder reads ``<start> w1 .. wT`` and is asked for ``w1 .. wT <end>``, each row's ``<end>`` after its own last
    word. Padding is neither attended to nor asked for.
    """
    start = torch.full_like(target[:, :1], START)
    inputs = torch.cat([start, target], dim=1)
    lengths = (target != PAD).sum(1, keepdim=True)
    wanted = torch.cat([target, torch.full_like(start, PAD)], dim=1).scatter(1, lengths, END)
    logits = model(
        source,
        inputs,
        src_key_padding_mask=padding_mask(source, PAD),
        tgt_key_padding_mask=padding_mask(inputs, PAD),
    )
    return cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD)


def learning_rate(step: int, preset: Preset) -> float:
    """``rate * min(step / warmup, 1)`` for steps from 1: a line up, then level; a few hundred steps need no decay."""
    return preset.rate * min(step / preset.warmup, 1.0)


def train(
    model: Transformer,
    pairs: Sequence[tuple[list[int], list[int]]],
    preset: Preset,
    seed: int,
    progress: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """Train in place; the mean loss of every epoch. ``progress`` is called with the loss after each step.

    The order of the pairs comes from ``seed``; dropout comes from torch's own generator.
    """
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    shuffle = torch.Generator().manual_seed(seed)
    model.train()
    losses, step = [], 0
    for _ in range(preset.epochs):
        order = torch.randperm(len(pairs), generator=shuffle).tolist()
        total, batches = 0.0, 0
        for first in range(0, len(order), preset.batch):
            chosen = [pairs[i] for i in order[first : first + preset.batch]]
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, preset)
            loss = batch_loss(model, pad([source for source, _ in chosen]), pad([target for _, target in chosen]))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total, batches = total + loss.item(), batches + 1
            progress(loss.item())
        losses.append(total / batches)
    return losses


@torch.no_grad()
def greedy_decode(model: Transformer, sources: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """The likeliest next word, again and again, until ``<end>`` or ``limit`` words: ids, without start and end.

    Raises ``InputError`` for a model that is not an encoder-decoder with a head.
    """
    if model.encoder is None or model.decoder is None or model.head is None:
        raise InputError("only an encoder-decoder with a vocabulary can translate")
    training = model.training
    model.eval()
    source = pad(sources)
    hidden = padding_mask(source, PAD)
    memory = model.encoder(source, key_padding_mask=hidden)
    out = torch.full((len(sources), 1), START)
    done = torch.zeros(len(sources), dtype=torch.bool)
    while out.shape[1] <= limit and not done.all():
        logits = model.head(model.decoder(out, memory, memory_key_padding_mask=hidden)[:, -1])
        # Symbols that are no words are never written; <end> stops a row and pads it from then on.
        logits[:, [PAD, START]] = -torch.inf
        word = logits.argmax(-1).masked_fill(done, PAD)
        done |= word == END
        out = torch.cat([out, word[:, None]], dim=1)
    model.train(training)
    return [[i for i in row if i not in (PAD, START, END)] for row in out.tolist()]


@dataclass
class Translator:
    """A model and the two vocabularies that it was trained with."""

    model: Transformer
    source: Vocabulary
    target: Vocabulary
    limit: int = 20

    def translate(self, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """Greedy translations, at most ``limit`` words each. Raises ``InputError`` for an empty sentence."""
        if not all(sentences):
            raise InputError("cannot translate an empty sentence")
        ids = greedy_decode(self.model, [self.source.encode(sentence) for sentence in sentences], self.limit)
        return [self.target.decode(row) for row in ids]

    def exact_matches(self, pairs: Sequence[Pair]) -> int:
        """How many of the pairs are translated word for word as given."""
        translated = self.translate([source for source, _ in pairs])
        return sum(mine == wanted for mine, (_, wanted) in zip(translated, pairs, strict=True))

    def attention(self, sentence: Sequence[str]) -> dict[str, tuple[Tensor, list[str], list[str]]]:
        """Maps of a sentence and its own translation: kind -> (``[layers, h, N, M]``, query tokens, key tokens).

        Kinds are encoder, decoder and cross. Rows (queries) sum to one: maps are taken in eval mode, before dropout.
        """
        words = self.translate([sentence])[0]
        source, target = self.source.encode(sentence), [START, *self.target.encode(words)]
        maps = attention_maps(self.model, torch.tensor([source]), torch.tensor([target]))

        def of(side: str, module: str) -> Tensor:
            names = (f"{side}.layer.{i}.{module}" for i in range(len(maps)))
            return torch.stack([maps[name][0] for name in names if name in maps])

        reads, writes = self.source.decode(source), self.target.decode(target)
        return {
            "encoder": (of("encoder", "attention"), reads, reads),
            "decoder": (of("decoder", "attention"), writes, writes),
            "cross": (of("decoder", "cross_attention"), writes, reads),
        }


def fit(
    pairs: Sequence[Pair], preset: Preset, seed: int, progress: Callable[[float], None] = lambda loss: None
) -> tuple[Translator, list[float]]:
    """Train a new model on ``pairs``: the translator and the mean loss of every epoch; the same for the same seed."""
    torch.manual_seed(seed)
    source, target = Vocabulary(s for s, _ in pairs), Vocabulary(t for _, t in pairs)
    translator = Translator(build_model(preset, source, target), source, target)
    ids = [(source.encode(s), target.encode(t)) for s, t in pairs]
    return translator, train(translator.model, ids, preset, seed, progress)


def plot_attention(maps: dict[str, tuple[Tensor, list[str], list[str]]], folder: Path) -> list[Path]:
    """One PNG per kind of attention in ``folder``, a panel per layer (down) and head (across).

    In a panel queries go down and keys across, each with its own tokens. Raises ``MissingExtra`` without matplotlib,
    ``OutputError`` where a file cannot be written.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    written = []
    for kind, (weights, queries, keys) in maps.items():
        layers, heads = weights.shape[:2]
        highest = weights.max().item()  # one scale per picture; a large model on a small task looks everywhere a little
        figure = Figure(figsize=(1 + 1.9 * heads, 0.8 + 1.9 * layers), layout="constrained")
        for i, row in enumerate(figure.subplots(layers, heads, squeeze=False)):
            for j, panel in enumerate(row):
                image = panel.imshow(weights[i, j].numpy(), vmin=0, vmax=highest, cmap="viridis")
                panel.set_title(f"layer {i}, head {j}", fontsize=8)
                panel.set_xticks(range(len(keys)), keys, rotation=60, ha="right", fontsize=7)
                panel.set_yticks(range(len(queries)), queries, fontsize=7)
        figure.colorbar(image, ax=figure.axes, shrink=0.6, label="attention weight")
        figure.suptitle(f"{kind} attention: queries down, keys across", fontsize=10)
        path = folder / f"{kind}-attention.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=100)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
        written.append(path)
    return written


def check_matplotlib() -> None:
    """Raise ``MissingExtra`` where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra("--plot needs matplotlib: pip install '.[plot]' in tfcost's folder") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10**6):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 999999, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2^63 - 1, got {text!r}")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 1, got {text!r}")
    return value


def _arguments() -> _Parser:
    parser = _Parser(
        prog="python -m tfcost.validate.translate",
        description="Train the reference Transformer on toy German-English pairs and translate with it.",
        allow_abbrev=False,
    )
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help=f"German sentences (default: {CLASSIC!r})")
    parser.add_argument("--preset", choices=PRESETS, default="full", help="size and training (default: full)")
    parser.add_argument("--epochs", type=_count, metavar="N", help="passes over the pairs (default: the preset's)")
    parser.add_argument("--rate", type=_rate, metavar="R", help="peak learning rate (default: the preset's)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of weights, order and dropout (default: 0)")
    parser.add_argument("--max-words", type=_count, default=20, metavar="N", help="longest translation (default: 20)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of train.tsv and held_out.tsv (default: ours)")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write attention maps as PNG (needs matplotlib)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def run(options: argparse.Namespace) -> None:
    """The whole program: train, measure on held-out pairs, translate, plot; prints to stdout, progress to stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if options.plot is not None:
        check_matplotlib()
    folder = options.data if options.data is not None else data_path("translation")
    pairs, held_out = read_pairs(folder / "train.tsv"), read_pairs(folder / "held_out.tsv")
    sentences = [sentence.split() for sentence in options.sentences or [CLASSIC]]
    if not all(sentences):
        raise InputError("cannot translate an empty sentence")
    preset = PRESETS[options.preset]
    preset = replace(preset, epochs=options.epochs or preset.epochs, rate=options.rate or preset.rate)
    known = {word for source, _ in pairs for word in source}
    for word in sorted({word for sentence in sentences for word in sentence} - known):
        print(f"warning: {word!r} is not among the training words and is read as <unk>", file=sys.stderr)
    began = time.perf_counter()
    columns = (TextColumn("training"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=options.quiet) as bar:
        task = bar.add_task("training", total=preset.epochs * -(-len(pairs) // preset.batch), loss=math.nan)
        translator, losses = fit(pairs, preset, options.seed, lambda loss: bar.update(task, advance=1, loss=loss))
    if not options.quiet:
        # Not on stdout, which is the same for the same seed.
        print(f"trained in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    translator.limit = options.max_words
    model = translator.model
    right = translator.exact_matches(held_out)
    print(
        f"model     encoder-decoder, d={preset.hidden} d_ff={preset.ffn_hidden} h={preset.heads} "
        f"{preset.layers}+{preset.layers} layers, {sum(p.numel() for p in model.parameters()):,} parameters"
    )
    print(f"training  {len(pairs)} pairs, {preset.epochs} epochs, seed {options.seed}")
    print(f"loss      {losses[0]:.4f} in the first epoch, {losses[-1]:.4f} in the last")
    print(f"held out  {right} of {len(held_out)} sentences translated exactly ({right / len(held_out):.1%})")
    for sentence, words in zip(sentences, translator.translate(sentences), strict=True):
        print(f"{' '.join(sentence)} -> {' '.join(words)}")
    if options.plot is not None:
        for path in plot_attention(translator.attention(sentences[0]), options.plot):
            print(f"wrote     {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 bad input (one line on stderr), 130 interrupted."""
    try:
        run(_arguments().parse_args(arguments))
    except TfcostError as error:
        print(f"tfcost: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
