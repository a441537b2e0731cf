"""Picking tokens from logits."""

from torch import Tensor


def inverse_cdf(logits: Tensor, uniform: Tensor) -> Tensor:
    """Sample without a wait for the device.

    logits [B, V] float32, uniform [B] in [0, 1) -> ids [B] int64: the first token whose cumulated
    probability exceeds the row's number. Tokens of probability 0 are never chosen.
    """
    cumulated = logits.softmax(dim=-1).double().cumsum(dim=-1)
    target = uniform.to(cumulated).unsqueeze(1) * cumulated[:, -1:]
    return (cumulated <= target).sum(dim=-1).clamp(max=logits.shape[1] - 1)
