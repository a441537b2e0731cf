"""Continuous batching: a fixed number of rows; a row that has ended is given to the next item.

Shapes stay as they are while anybody waits; then the loop runs out like `lockstep`. Items wait
until `ROWS` rows are free, since fewer would be prefilled alone, where kernels round differently.
Stages that cannot take rows in (`LoopStage.refills`) run in lockstep.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from omnicli.data import Failure, Product
from omnicli.execution.stage import LoopStage, StepOut
from omnicli.scheduling.policy import Policy
from omnicli.scheduling.rows import ROWS, Rows


def run(
    stage: LoopStage[Any, Any],
    items: Sequence[Any],
    seeds: Sequence[int],
    policies: Sequence[Policy],
    *,
    slots: int = 0,
    beat: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Product | Failure]]:
    """As `lockstep`, with at most `slots` rows at a time; 0 for all."""
    first = min(slots or len(items), len(items))
    waiting = deque(range(first, len(items)))
    state, out = stage.start(items[:first])
    rows = Rows(stage, items, seeds, policies)
    rows.index = list(range(first))
    while True:
        frames, logprobs = rows.choose(out, state)
        for row in rows.grow(frames, logprobs):
            yield rows.finish(row, state)
        if not waiting and not rows.alive:
            return
        if not waiting and (kept := rows.compact()) is not None:
            state.keep(kept)
            frames = frames[kept]
        if rows.alive:
            out = stage.step(frames, state)
        beat()
        free = rows.dead
        if waiting and len(free) >= min(ROWS, len(rows.index)):
            given = free[: len(waiting)]
            taken = [waiting.popleft() for _ in given]
            out = _let_in(stage, [items[i] for i in taken], given, state, out)
            for row, item in zip(given, taken, strict=True):
                rows.index[row] = item


def _let_in(
    stage: LoopStage[Any, Any], items: list[Any], rows: list[int], state: Any, out: StepOut
) -> StepOut:
    """Prefill items and put them in place of rows; the prediction for all rows."""
    filled = items + [items[-1]] * (-len(items) % ROWS)
    other, fresh = stage.start(filled)
    at = torch.tensor(rows, device=out.logits.device)
    state.put(at, other)
    logits = out.logits.index_copy(0, at, fresh.logits[: len(rows)])
    if out.hidden is None or fresh.hidden is None:
        return replace(out, logits=logits)
    hidden = out.hidden.index_copy(0, at, fresh.hidden[: len(rows)])
    return StepOut(logits, hidden)
