"""How a token policy sees the world, and the randomness that belongs to a row."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Policy(Protocol):
    """Chooses the next token of every row."""

    def choose(self, logits: Tensor, draw: Callable[[], Tensor]) -> Tensor:
        """logits [B, V] float32 -> ids [B] int64.

        `draw()` gives one uniform number per row, [B] float32 in [0, 1), the next of that row's own
        stream; a policy that needs no chance never calls it.
        """


class Chance:
    """One stream of uniform numbers per row: company and resume change nothing."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def draw(self, rows: Sequence[int]) -> Tensor:
        """The next number of each of these rows -> [len(rows)] float32 in [0, 1)."""
        return torch.cat([torch.rand(1, generator=self._generators[row]) for row in rows])
