"""Rotary positions (Su et al., "RoFormer", 2021), in the halves-apart layout of Llama checkpoints.

Pair j of a head is (x[j], x[j + d/2]); at position p it is turned by the angle p * frequency[j].
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """How Llama 3.1 stretches its context: slow pairs slower still, quick ones as they are."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


def frequencies(width: int, theta: float) -> Tensor:
    """Angle per position of each pair -> [width / 2] float32, on the CPU."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    return theta**-exponent


def scale_llama3(frequency: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Stretch frequencies [d/2] as Llama 3.1 does -> [d/2].

    A pair that turns more than `high_freq_factor` times within the original context stays, one
    that turns less than `low_freq_factor` times is slowed by `factor`, between them it is mixed.
    """
    cycles = scaling.original_positions * frequency / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    share = ((cycles - scaling.low_freq_factor) / width).clamp(0, 1)
    return frequency * (share + (1 - share) / scaling.factor)


def turns(positions: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine for `rotate`: positions [B, T], frequency [d/2] -> 2 x [B, 1, T, d/2]."""
    angles = (positions[..., None].float() * frequency)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair: x [B, H, T, d], cos and sin [B, 1, T, d/2] float32 -> [B, H, T, d]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
