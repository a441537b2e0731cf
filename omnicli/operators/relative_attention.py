"""Self-attention with learned offsets for the nearest neighbours (Shaw et al. 2018).

Positions at most W apart add an embedding of their distance to the key and to the value; all
others see each other without one. VITS and other text encoders use it in place of positions.
"""

import math

import torch
from torch import Tensor


def attend_near(
    q: Tensor, k: Tensor, v: Tensor, near: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    """q, k, v [B, H, T, D] -> [B, H, T, D].

    `near` are the embeddings of the distances -W .. W for keys and values, each
    [1 or H, 2W + 1, D]; mask [B, T] bool tells real positions.
    """
    near_k, near_v = near
    q = q / math.sqrt(q.shape[-1])
    distance, inside = _band(q.shape[-2], near_k.shape[-2] // 2, q.device)
    scores = q @ k.transpose(-2, -1)
    by_distance = q @ near_k.transpose(-2, -1)  # [B, H, T, 2W + 1]
    shape = scores.shape
    local = by_distance.gather(-1, distance.expand(shape)).masked_fill(~inside, 0)
    # -1e4, not -inf: a row of padding stays finite. Real rows give padding a weight of exactly 0.
    weights = (scores + local).masked_fill(~mask[:, None, None], -1e4).softmax(-1)
    return weights @ v + _near_weights(weights, near_k.shape[-2]) @ near_v


def _band(length: int, reach: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For every pair [T, T]: its distance as an index into 2W + 1, and whether it is near."""
    at = torch.arange(length, device=device)
    distance = at[None, :] - at[:, None] + reach
    return distance.clamp(0, 2 * reach), (distance >= 0) & (distance <= 2 * reach)


def _near_weights(weights: Tensor, distances: int) -> Tensor:
    """Weights [B, H, T, T] -> the weight at each near distance [B, H, T, 2W + 1]."""
    length = weights.shape[-1]
    at = torch.arange(length, device=weights.device)[:, None]
    other = at + torch.arange(distances, device=weights.device) - distances // 2
    near = weights.gather(-1, other.clamp(0, length - 1).expand(*weights.shape[:-1], -1))
    return near.masked_fill((other < 0) | (other >= length), 0)
