"""All rows of a batch start together; a row that has ended leaves.

Rows leave in multiples of four, and not at every end: see `Rows.compact`. A row for which no token
can be chosen, since its logits are NaN or all masked, fails alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from omnicli.data import Failure, Product
from omnicli.execution.stage import LoopStage
from omnicli.scheduling.policy import Policy
from omnicli.scheduling.rows import Rows


def run(
    stage: LoopStage[Any, Any],
    items: Sequence[Any],
    seeds: Sequence[int],
    policies: Sequence[Policy],
    *,
    slots: int = 0,
    beat: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Product | Failure]]:
    """Grow every item to its end; yields (index into `items`, product) as rows end.

    `beat` is called once per step: something moves. The loop does not know what its stage is
    called: the stage of its own failures is left empty. `slots` says nothing here: all items run.
    """
    state, out = stage.start(items)
    rows = Rows(stage, items, seeds, policies)
    rows.index = list(range(len(items)))
    while True:
        frames, logprobs = rows.choose(out, state)
        for row in rows.grow(frames, logprobs):
            yield rows.finish(row, state)
        if not rows.alive:
            return
        if (kept := rows.compact()) is not None:
            state.keep(kept)
            frames = frames[kept]
        out = stage.step(frames, state)
        beat()
