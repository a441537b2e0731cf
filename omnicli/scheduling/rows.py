"""The rows of a loop: what each has grown, how it is chosen, when it has ended."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from omnicli.data import Failure, Product
from omnicli.execution.stage import LoopStage, RowEnd, StepOut
from omnicli.scheduling.bucket import step_up
from omnicli.scheduling.policy import Chance, Policy

ROWS = 4  # loops run multiples of this: below, kernels round differently and rows feel company
NOT_FINITE = "not_finite"  # how a row ends for which no token can be chosen


class Rows:
    """Which item is in which row of the state, and what has become of every item."""

    def __init__(
        self,
        stage: LoopStage[Any, Any],
        items: Sequence[Any],
        seeds: Sequence[int],
        policies: Sequence[Policy],
    ) -> None:
        """`policies`: of a frame's first code and of the others; one may be both."""
        self.stage, self.items = stage, items
        self.policies = policies
        self.index: list[int] = []  # row -> item
        self.limit = [stage.limit(item) for item in items]
        self.grown: list[list[Tensor]] = [[] for _ in items]  # per item, frames [K]
        self.logprob = [0.0] * len(items)
        self.reason = [""] * len(items)
        self.chance = Chance(seeds)
        self._seen: Tensor | None = None  # [items, V] bool

    @property
    def alive(self) -> list[int]:
        """Rows that still grow."""
        return [row for row, item in enumerate(self.index) if not self.reason[item]]

    @property
    def dead(self) -> list[int]:
        """Rows that could be given to others."""
        return [row for row, item in enumerate(self.index) if self.reason[item]]

    def choose(self, out: StepOut, state: Any) -> tuple[Tensor, list[float]]:
        """One frame for every row [B, K] int64, and the first code's logprob; 0 if not scored.

        It is NaN if a chosen logit is not finite.
        """
        draw = partial(self.chance.draw, self.index)
        first = self._first(out.logits, draw)[:, None]
        frames, chosen = first, out.logits.gather(1, first)
        for _ in range(1, self.stage.books):
            more = self.stage.next_book(frames, out, state)
            code = self.policies[-1].choose(more, draw)[:, None]
            frames = torch.cat([frames, code], dim=1)
            chosen = torch.cat([chosen, more.gather(1, code)], dim=1)
        logprobs = torch.zeros_like(chosen[:, 0])
        if self.stage.scored:
            logprobs = chosen[:, 0] - out.logits.logsumexp(dim=1)
        return frames, logprobs.where(chosen.isfinite().all(dim=1), math.nan).tolist()

    def _first(self, logits: Tensor, draw: Callable[[], Tensor]) -> Tensor:
        policy = self.policies[0]
        if policy.penalty == 1:
            return policy.choose(logits, draw)
        if self._seen is None:
            self._seen = logits.new_zeros(len(self.items), logits.shape[1], dtype=torch.bool)
            self._seen[:, list(self.stage.seen_ids)] = True
        items = torch.tensor(self.index, device=logits.device)
        chosen = policy.choose(logits, draw, self._seen[items])
        self._seen[items, chosen] = True
        return chosen

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

    def finish(self, row: int, state: Any) -> tuple[int, Product | Failure]:
        """An ended row's item and its product."""
        item, end = self.index[row], self.end(row)
        if end.reason == NOT_FINITE:
            message = f"its predictions are no numbers, {end.steps} tokens from the beginning"
            return item, Failure(code=NOT_FINITE, stage="", message=message)
        return item, self.stage.finish(self.items[item], end, state, row)

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
        """The rows to keep, if it pays to drop the dead ones.

        Caches are copied only when fewer than three quarters of the rows live.
        """
        alive = self.alive
        target = max(ROWS, step_up(len(alive), ROWS))
        if len(alive) * 4 >= len(self.index) * 3 or target >= len(self.index):
            return None
        kept = alive + self.dead[: target - len(alive)]
        self.index = [self.index[row] for row in kept]
        return torch.tensor(kept)
