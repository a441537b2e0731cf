"""All rows of a batch start together; a row that has ended leaves.

Caches are copied only when fewer than three quarters of the rows live, and never to fewer than a
multiple of four rows: below that, kernels round differently and a row would feel its company.
A row for which no token can be chosen, since its logits are NaN or all masked, fails alone.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from omnicli.data import Failure, Product
from omnicli.execution.stage import LoopStage, RowEnd, StepOut
from omnicli.scheduling.bucket import step_up
from omnicli.scheduling.policy import Chance, Policy

ROWS = 4  # batches are multiples of this
NOT_FINITE = "not_finite"  # how a row ends for which no token can be chosen


def run(
    stage: LoopStage[Any, Any],
    items: Sequence[Any],
    seeds: Sequence[int],
    policy: Policy,
    *,
    beat: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Product | Failure]]:
    """Grow every item to its end; yields (index into `items`, product) as rows end.

    `beat` is called once per step: something moves. The loop does not know what its stage is
    called: the stage of its own failures is left empty.
    """
    state, out = stage.start(items)
    rows = _Rows(stage, items, seeds)
    while True:
        frames, logprobs = rows.choose(out, state, policy)
        for row in rows.grow(frames, logprobs):
            index, end = rows.index[row], rows.end(row)
            fails = end.reason == NOT_FINITE
            yield index, _failure(end) if fails else stage.finish(items[index], end, state, row)
        if not rows.alive:
            return
        if (kept := rows.compact()) is not None:
            state.keep(kept)
            frames = frames[kept]
        out = stage.step(frames, state)
        beat()


class _Rows:
    """The rows of the batch as the state holds them, the dead ones among them."""

    def __init__(
        self, stage: LoopStage[Any, Any], items: Sequence[Any], seeds: Sequence[int]
    ) -> None:
        self.stage = stage
        self.index = list(range(len(items)))  # row -> item
        self.limit = [stage.limit(item) for item in items]
        self.grown: list[list[Tensor]] = [[] for _ in items]  # per item, frames [K]
        self.logprob = [0.0] * len(items)
        self.reason = [""] * len(items)
        self.chance = Chance(seeds)

    @property
    def alive(self) -> list[int]:
        """Rows that still grow."""
        return [row for row, item in enumerate(self.index) if not self.reason[item]]

    def choose(self, out: StepOut, state: Any, policy: Policy) -> tuple[Tensor, list[float]]:
        """One frame for every row [B, K] int64, and the first code's logprob; 0 if not scored.

        It is NaN if a chosen logit is not finite.
        """
        chance = partial(self.chance.draw, self.index)
        first = policy.choose(out.logits, chance)[:, None]
        frames, chosen = first, out.logits.gather(1, first)
        for _ in range(1, self.stage.books):
            more = self.stage.next_book(frames, out, state)
            code = policy.choose(more, chance)[:, None]
            frames = torch.cat([frames, code], dim=1)
            chosen = torch.cat([chosen, more.gather(1, code)], dim=1)
        logprobs = torch.zeros_like(chosen[:, 0])
        if self.stage.scored:
            logprobs = chosen[:, 0] - out.logits.logsumexp(dim=1)
        return frames, logprobs.where(chosen.isfinite().all(dim=1), math.nan).tolist()

    def grow(self, frames: Tensor, logprobs: list[float]) -> list[int]:
        """Append a frame to each living row; the rows that ended by it."""
        ended = []
        host = frames.cpu()
        ids = host[:, 0].tolist()
        for row in self.alive:
            item = self.index[row]
            self.logprob[item] += logprobs[row]
            if math.isnan(logprobs[row]):
                self.reason[item] = NOT_FINITE
            elif ids[row] in self.stage.end_ids:
                self.reason[item] = "stop"
            else:
                self.grown[item].append(host[row])
                if len(self.grown[item]) >= self.limit[item]:
                    self.reason[item] = "length"
            if self.reason[item]:
                ended.append(row)
        return ended

    def end(self, row: int) -> RowEnd:
        """What became of a row."""
        item = self.index[row]
        grown, reason = self.grown[item], self.reason[item]
        frames = (
            torch.stack(grown) if grown else torch.zeros(0, self.stage.books, dtype=torch.int64)
        )
        steps = len(grown) + (reason == "stop")
        return RowEnd(frames=frames, reason=reason, logprob=self.logprob[item], steps=steps)

    def compact(self) -> Tensor | None:
        """The rows to keep, if it pays to drop the dead ones."""
        alive = self.alive
        target = max(ROWS, step_up(len(alive), ROWS))
        if len(alive) * 4 >= len(self.index) * 3 or target >= len(self.index):
            return None
        dead = [row for row in range(len(self.index)) if row not in set(alive)]
        kept = alive + dead[: target - len(alive)]
        self.index = [self.index[row] for row in kept]
        return torch.tensor(kept)


def _failure(end: RowEnd) -> Failure:
    message = f"its predictions are no numbers, {end.steps} tokens from the beginning"
    return Failure(code=NOT_FINITE, stage="", message=message)
