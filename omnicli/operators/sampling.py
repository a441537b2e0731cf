"""Picking tokens from logits."""

import torch
from torch import Tensor


def inverse_cdf(logits: Tensor, uniform: Tensor) -> Tensor:
    """Sample without a wait for the device.

    logits [B, V] float32, uniform [B] in [0, 1) -> ids [B] int64: the first token whose cumulated
    probability exceeds the row's number. Tokens of probability 0 are never chosen.
    """
    cumulated = logits.softmax(dim=-1).double().cumsum(dim=-1)
    target = uniform.to(cumulated).unsqueeze(1) * cumulated[:, -1:]
    return (cumulated <= target).sum(dim=-1).clamp(max=logits.shape[1] - 1)


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make what a row has said before less likely: logits [B, V], seen [B, V] bool -> [B, V].

    Keskar et al., "CTRL", 2019: a positive logit is divided, a negative one multiplied.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """All but the k likeliest tokens are ruled out: [B, V] -> [B, V]."""
    least = logits.topk(min(k, logits.shape[1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The likeliest tokens whose probabilities sum to p stay: [B, V] -> [B, V].

    Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020. One always stays.
    """
    ordered, order = logits.sort(dim=-1)
    out = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
    out[:, -1] = False
    return logits.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)
