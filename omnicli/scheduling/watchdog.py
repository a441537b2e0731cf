"""Notices when work is stuck: no progress for ten times as long as it should take."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from omnicli.observe import clock_s

TIMES = 10  # the estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is in hand: a batch of a stage, or the splitting of requests into items."""

    stage: str
    ids: Sequence[str]
    units: int  # the stage's own
    audio_s: float


@dataclass(slots=True)
class _Watch:
    work: Work
    limit_s: float
    beat_s: float


class Watchdog:
    """A thread that looks at all that is in hand; `stalled` is called once, from that thread.

    The estimate is the stage's own measured time per unit; before there is one, the seconds of
    audio. `patience_s` is the least that anything is given.
    """

    def __init__(self, patience_s: float, stalled: Callable[[Work, float], None]) -> None:
        self._patience_s = patience_s
        self._stalled = stalled
        self._s_per_unit: dict[str, float] = {}
        self._watches: list[_Watch] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="watchdog")

    @contextmanager
    def watch(self, work: Work) -> Iterator[None]:
        """Watch a block of work; measures how long its units take."""
        rate = self._s_per_unit.get(work.stage)
        estimate_s = work.audio_s if rate is None else rate * work.units
        start_s = clock_s()
        watch = _Watch(work, max(self._patience_s, TIMES * estimate_s), start_s)
        self._watches = [*self._watches, watch]
        try:
            yield
        finally:
            self._watches = [one for one in self._watches if one is not watch]
            self._s_per_unit[work.stage] = (clock_s() - start_s) / max(1, work.units)

    def beat(self, work: Work | None = None) -> None:
        """Something moved: in that work, or in all of it."""
        now_s = clock_s()
        for watch in self._watches:
            if work is None or watch.work is work:
                watch.beat_s = now_s

    def _look(self) -> None:
        while not self._over.wait(min(1.0, self._patience_s / 4)):
            for watch in self._watches:
                idle_s = clock_s() - watch.beat_s
                if idle_s > watch.limit_s:
                    self._stalled(watch.work, idle_s)
                    return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
