"""Programs that no config describes: the documents' own classes (mended), torch's Transformer, a CNN, an LSTM.

The hand-written ones are what people write while they learn: projections per head, a feed-forward of convolutions, one
block class for both sides. Their faults are mended here (scaling by the square root of a head's width, a decoder's own
causal attention, dropout before the norm).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PerHeadAttention(nn.Module):
    """Each head's width projected on its own: d_k x d_k matrices that all heads share."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head = heads, width // heads
        self.queries, self.keys, self.values = (nn.Linear(self.head, self.head, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        b, n, m = query.shape[0], query.shape[1], key.shape[1]
        q = self.queries(query.reshape(b, n, self.heads, self.head))
        k = self.keys(key.reshape(b, m, self.heads, self.head))
        v = self.values(value.reshape(b, m, self.heads, self.head))
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(self.head)
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        weights = torch.softmax(scores, dim=3)
        return self.out(torch.einsum("nhql,nlhd->nqhd", weights, v).reshape(b, n, -1))


class PerHeadBlock(nn.Module):
    """Attention per head, norms, and a feed-forward of two linear layers."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = PerHeadAttention(width, heads)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, x, x))
        return self.norm2(x + self.feed_forward(x))


class ConvolutionalFeedForward(nn.Module):
    """A feed-forward written as two convolutions of width 1, and its norm."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(width, inner, 1), nn.Conv1d(inner, width, 1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.conv1(x.transpose(1, 2)))).transpose(1, 2)
        return self.norm(x + y)


class SharedBlocks(nn.Module):
    """An encoder-decoder whose decoder layers are built of the encoder's block, with a causal attention before it."""

    def __init__(self, words: int, width: int, heads: int, inner: int, layers: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder = nn.ModuleList(PerHeadBlock(width, heads, inner) for _ in range(layers))
        self.own = nn.ModuleList(PerHeadAttention(width, heads) for _ in range(layers))
        self.cross = nn.ModuleList(PerHeadAttention(width, heads) for _ in range(layers))
        self.feed = nn.ModuleList(ConvolutionalFeedForward(width, inner) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.source(source), self.target(target)
        for block in self.encoder:
            memory = block(memory)
        length = target.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        for own, cross, feed in zip(self.own, self.cross, self.feed, strict=True):
            x = x + own(x, x, x, hidden)
            x = feed(x + cross(x, memory, memory))
        return self.head(x)


class Convolutional(nn.Module):
    """A small image classifier: strided, grouped and dilated convolutions, batch norm, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 24, 3, padding=2, dilation=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(24, 32, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


class Recurrent(nn.Module):
    """Two LSTM layers over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, 24)
        self.lstm = nn.LSTM(24, 20, num_layers=2, batch_first=True)
        self.head = nn.Linear(20, 97)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


class Products(nn.Module):
    """Every way to write a product: einsum, matrix-vector, broadcast, baddbmm, addmm, dot."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(12, 12))
        self.v = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bnd,de->bne", x, self.w)
        y = y @ self.w + torch.matmul(y, self.v).unsqueeze(-1)
        z = torch.baddbmm(x, y @ y.transpose(1, 2), x)
        z = torch.addmm(self.v, z.flatten(0, 1), self.w).view_as(x)
        return z * torch.dot(self.v, self.v) + torch.mv(self.w, self.v)


IDS = torch.long


def fixtures() -> dict[str, tuple[Any, Any, dict[Any, dict[int, str]]]]:
    """Each program: how to make it, example inputs, and its dynamic axes."""
    d, heads, inner = 48, 4, 112
    x = {0: {0: "b", 1: "N"}}
    two = {0: {0: "b", 1: "S"}, 1: {0: "b", 1: "T"}}

    def hidden(length: int = 21) -> Tensor:
        return torch.randn(3, length, d, requires_grad=True)

    def ids(length: int) -> Tensor:
        return torch.randint(0, 90, (3, length))

    def layer(**options: Any) -> nn.Module:
        return nn.TransformerEncoderLayer(d, heads, inner, batch_first=True, dropout=0.0, **options)

    return {
        "per_head_block": (lambda: PerHeadBlock(d, heads, inner), (hidden(),), x),
        "conv_feed_forward": (lambda: ConvolutionalFeedForward(d, inner), (hidden(),), x),
        "shared_blocks": (lambda: SharedBlocks(97, d, heads, inner, 2), (ids(29), ids(21)), two),
        "encoder_layer": (layer, (hidden(),), x),
        "encoder": (lambda: nn.TransformerEncoder(layer(), 3, enable_nested_tensor=False), (hidden(),), x),
        "decoder": (
            lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(d, heads, inner, 0.0, batch_first=True), 2),
            (hidden(21), hidden(29)), {0: {0: "b", 1: "T"}, 1: {0: "b", 1: "S"}},
        ),
        "transformer": (
            lambda: nn.Transformer(d, heads, 2, 2, inner, batch_first=True, dropout=0.1), (hidden(29), hidden(21)), two,
        ),
        "multihead": (
            lambda: Weights(d, heads), (hidden(),), x,
        ),
        "cnn": (Convolutional, (torch.randn(3, 3, 32, 32, requires_grad=True),), {0: {0: "b"}}),
        "lstm": (Recurrent, (ids(21),), x),
        "products": (Products, (torch.randn(3, 21, 12, requires_grad=True),), x),
    }  # fmt: skip


class Weights(nn.Module):
    """nn.MultiheadAttention that returns its weights: its unfused path, with baddbmm."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out = self.attention(x, x, x, need_weights=True)
        return out[0], out[1]
