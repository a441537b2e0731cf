"""Between ragged lists and padded batches."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_to(items: Sequence[Tensor], size: int) -> tuple[Tensor, Tensor]:
    """Right-pad with zeros: B tensors [T_i, ...] -> ([B, size, ...], lengths [B] int64)."""
    lengths = torch.tensor([len(x) for x in items], device=items[0].device)
    padded = items[0].new_zeros(len(items), size, *items[0].shape[1:])
    for row, item in zip(padded, items, strict=True):
        row[: len(item)] = item
    return padded, lengths


def unpad(padded: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Undo `pad_to`: [B, T, ...] -> B tensors [T_i, ...], copies that do not hold the batch."""
    return [row[:n].clone() for row, n in zip(padded, lengths, strict=True)]
