"""The reference Transformer learns to translate: ``python -m tfcost.validate.translate [SENTENCE ...]``.

Trains an encoder-decoder on the German-English pairs of ``data/translation``, states the loss and how many held-out
sentences it translates exactly, and translates greedily. The model reads target words shifted right (``<start>`` first) and
is asked for the next word (``<end>`` last); padding is hidden from attention and left out of the loss. Adam with a
linear warm-up and clipped gradients: at a rate of 1e-3 the full size does not learn, at 1e-4 it does.

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
    sys.exit("error: this needs PyTorch; install the extra: pip install 'tfcost[torch]'")

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
    "small": Preset(hidden=64, heads=4, ffn_hidden=256, layers=2, epochs=40, batch=32, rate=3e-3, warmup=40),
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
    """Mean cross-entropy per real target word: ``source`` ``[b, S]`` and ``target`` ``[b, T]``, words only, then padding.

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
    """``rate * min(step / warmup, sqrt(warmup / step))`` for steps from 1: a line up, then the inverse square root."""
    return preset.rate * min(step / preset.warmup, math.sqrt(preset.warmup / step))


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
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total, batches = total + loss.item(), batches + 1
            progress(loss.item())
        losses.append(total / batches)
    return losses


@torch.no_grad()
def greedy_decode(model: Transformer, sources: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """The likeliest next word, again and again, until ``<end>`` or ``limit`` words: ids without start and end symbols."""
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
        """Last-layer maps of a sentence and its own translation: kind -> (``[h, N, M]``, query tokens, key tokens).

        Kinds are encoder, decoder and cross. Rows (queries) sum to one: maps are taken in eval mode, before dropout.
        """
        words = self.translate([sentence])[0]
        source, target = self.source.encode(sentence), [START, *self.target.encode(words)]
        maps = attention_maps(self.model, torch.tensor([source]), torch.tensor([target]))
        reads, writes = self.source.decode(source), self.target.decode(target)
        names = {
            "encoder": ("encoder", "attention", reads, reads),
            "decoder": ("decoder", "attention", writes, writes),
            "cross": ("decoder", "cross_attention", writes, reads),
        }
        layers = {side: max(int(name.split(".")[2]) for name in maps if name.startswith(side)) for side in names if side != "cross"}
        return {
            kind: (maps[f"{side}.layer.{layers[side]}.{module}"][0], queries, keys)
            for kind, (side, module, queries, keys) in names.items()
        }
