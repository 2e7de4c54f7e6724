"""Where a token stands: sinusoidal, learned and rotary positions.

Attention has no order of its own, so the order is added to the token vectors (sinusoidal, learned) or turned into the
queries and keys (rotary).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tfcost.errors import InputError

BASE = 10000.0
"""The longest wavelength is ``2 pi * BASE``: Vaswani et al. 2017, section 3.5; Su et al. 2021 use the same."""


def sinusoidal_table(
    length: int,
    width: int,
    *,
    start: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """``PE[pos, 2i] = sin(pos / 10000^(2i/d))``, ``PE[pos, 2i+1] = cos(pos / 10000^(2i/d))``: ``[length, width]``.

    Any width: an odd one ends with a sine that has no cosine. Positions are ``start .. start + length - 1``. For every
    offset k, the pair ``(PE[pos+k, 2i], PE[pos+k, 2i+1])`` is the pair at ``pos`` turned by the angle
    ``k / 10000^(2i/d)``, whatever ``pos`` is, so that a linear map can look k places away.

    Source: Vaswani et al. 2017, section 3.5.
    """
    # In float64: at position 100,000 a float32 angle is already wrong in its third decimal.
    position = torch.arange(start, start + length, dtype=torch.float64, device=device)
    column = torch.arange(width, device=device)
    exponent = (column - column % 2).to(torch.float64) / width
    angle = position[:, None] * BASE**-exponent
    return torch.where(column % 2 == 0, angle.sin(), angle.cos()).to(dtype)


def check_length(length: int, max_positions: int | None) -> None:
    """Raise ``InputError`` where a sequence is longer than the positions that there are."""
    if max_positions is not None and length > max_positions:
        raise InputError(f"a sequence of {length} tokens is longer than max_positions={max_positions}")


class SinusoidalPositions(nn.Module):
    """``x + PE``: ``[b, N, d] -> [b, N, d]``, with `sinusoidal_table`; no parameters, nothing kept for backward.

    The table is made for the length at hand, so any N works; ``max_positions`` only sets a limit.
    Raises ``InputError`` for a longer sequence.
    """

    def __init__(self, width: int, max_positions: int | None = None) -> None:
        super().__init__()
        self.width, self.max_positions = width, max_positions

    def forward(self, x: Tensor) -> Tensor:
        check_length(x.shape[-2], self.max_positions)
        return x + sinusoidal_table(x.shape[-2], self.width, dtype=x.dtype, device=x.device)


class LearnedPositions(nn.Module):
    """``x + W[:N]``: ``[b, N, d] -> [b, N, d]``, with one trained row per position (``max_positions * d`` parameters).

    A slice and not a look-up, so nothing is kept for backward. Raises ``InputError`` for a longer sequence.
    Source: Devlin et al. 2018 (BERT), Radford et al. 2019 (GPT-2).
    """

    def __init__(
        self,
        width: int,
        max_positions: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.weight = nn.Parameter(torch.empty(max_positions, width, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        check_length(x.shape[-2], self.max_positions)
        return x + self.weight[: x.shape[-2]]


class RotaryPositions(nn.Module):
    """Queries and keys turned by their position: ``[b, N, h, d_k]`` each, d_k even; no parameters.

    Element i of the first half of a head and element i of the second half are a pair, turned by the angle
    ``pos / 10000^(2i/d_k)``; a score then depends on the distance of query and key only.
    Kept for backward: the cosines and sines, ``N * d_k`` elements in all, as a rotation's gradient needs its angle but
    not its argument.

    Raises ``InputError`` for an odd ``d_k`` and for sequences beyond ``max_positions``.
    Source: Su et al. 2021 (RoFormer), with the halves as Llama pairs them.
    """

    def __init__(self, head_dim: int, max_positions: int | None = None) -> None:
        super().__init__()
        if head_dim % 2:
            raise InputError(f"rotary positions need an even head_dim, got {head_dim}")
        self.head_dim, self.max_positions = head_dim, max_positions

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        check_length(query.shape[1], self.max_positions)
        position = torch.arange(query.shape[1], dtype=torch.float64, device=query.device)
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=query.device) / self.head_dim
        angle = (position[:, None] * BASE**-exponent)[:, None, :]
        cos, sin = angle.cos().to(query.dtype), angle.sin().to(query.dtype)
        return _turn(query, cos, sin), _turn(key, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
