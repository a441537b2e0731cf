"""How a token policy sees the world, and the randomness that belongs to a row."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

_BLOCK = 64  # numbers of a row that are drawn at a time


class Policy(Protocol):
    """Chooses the next token of every row."""

    penalty: float  # on what a row has said before; 1 is none

    def choose(
        self, logits: Tensor, draw: Callable[[], Tensor], seen: Tensor | None = None
    ) -> Tensor:
        """logits [B, V] float32 -> ids [B] int64.

        `draw()` gives one uniform number per row, [B] float32 in [0, 1), the next of that row's own
        stream; a policy that needs no chance never calls it. `seen` [B, V] bool is what each row
        has said before, None unless there is a `penalty`.
        """


class Chance:
    """One stream of uniform numbers per row: company and resume change nothing."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._numbers = torch.zeros(len(seeds), _BLOCK)
        self._used = torch.full((len(seeds),), _BLOCK)

    def draw(self, rows: Sequence[int]) -> Tensor:
        """The next number of each of these rows -> [len(rows)] float32 in [0, 1)."""
        at = torch.tensor(rows, dtype=torch.int64)
        for row in at[self._used[at] == _BLOCK].tolist():
            self._numbers[row] = torch.rand(_BLOCK, generator=self._generators[row])
            self._used[row] = 0
        drawn = self._numbers[at, self._used[at]]
        self._used[at] += 1
        return drawn
