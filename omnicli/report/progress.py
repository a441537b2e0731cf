"""How a run shows that it goes on: bars on a terminal, now and then a line elsewhere.

Time that is left is estimated from seconds of audio, not from files: batches are sorted by length.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from tqdm import tqdm

from omnicli.observe import Event, Listener, clock_s

LINE_EVERY_S = 60.0


@dataclass(slots=True)
class Tally:
    """How far one stage is, over all waves so far."""

    stage: str
    items: int = 0
    done: int = 0
    audio_s: float = 0.0
    done_s: float = 0.0
    wall_s: float = 0.0

    @property
    def speed(self) -> float:
        """Seconds of audio per second of work."""
        return self.done_s / self.wall_s if self.wall_s else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds of work that are left, by seconds of audio."""
        return (self.audio_s - self.done_s) / self.speed if self.speed else None

    def __str__(self) -> str:
        heard = f"{self.done_s:.0f}/{self.audio_s:.0f} s, {self.speed:.1f} x"
        audio = heard if self.audio_s else ""
        left = f", {self.left_s:.0f} s left" if self.left_s else ""
        return f"{self.stage}: {self.done}/{self.items} {audio}{left}".rstrip()


@dataclass(slots=True)
class Tallies:
    """One tally per stage, fed with events."""

    by_stage: dict[str, Tally] = field(default_factory=dict)

    def take(self, event: Event) -> Tally | None:
        """Count an event; the tally it changed."""
        if event["event"] not in ("stage", "batch"):
            return None
        tally = self.by_stage.setdefault(str(event["stage"]), Tally(str(event["stage"])))
        items, audio_s = _number(event["items"]), _number(event["audio_s"])
        if event["event"] == "stage":
            tally.items += round(items)
            tally.audio_s += audio_s
        else:
            tally.wall_s += _number(event["wall_s"])
            if "error" not in event:
                tally.done += round(items)
                tally.done_s += audio_s
        return tally


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


class View(Protocol):
    """Shows tallies."""

    def show(self, tally: Tally) -> None:
        """Something moved."""


class Bars:
    """One bar per stage, drawn by rich."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, tally: Tally) -> None:
        """See `View`."""
        if tally.stage not in self._tasks:
            self._tasks[tally.stage] = self._progress.add_task(tally.stage, note="")
        self._progress.update(
            self._tasks[tally.stage], total=tally.items, completed=tally.done, note=_note(tally)
        )


class PlainBars:
    """One tqdm bar after the other, for terminals that cannot move the cursor up."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: tqdm | None = None

    def show(self, tally: Tally) -> None:
        """See `View`."""
        if self._bar is None or self._bar.desc != f"{tally.stage}: ":
            self.close()
            self._bar = tqdm(desc=tally.stage, total=tally.items, file=self._stream, unit="item")
        self._bar.total = tally.items
        self._bar.n = tally.done
        self._bar.set_postfix_str(_note(tally), refresh=True)

    def close(self) -> None:
        """End the bar's line."""
        if self._bar is not None:
            self._bar.close()


class Lines:
    """A line about every minute: for logs and mails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_s = clock_s()

    def show(self, tally: Tally) -> None:
        """See `View`."""
        if clock_s() - self._last_s >= LINE_EVERY_S:
            self._last_s = clock_s()
            self._stream.write(f"{tally}\n")
            self._stream.flush()


def _note(tally: Tally) -> str:
    left = f"{tally.left_s:.0f} s left" if tally.left_s else ""
    return f"{tally.done_s:.0f} s audio {tally.speed:.1f}x {left}" if tally.audio_s else left


@contextmanager
def progress(stream: TextIO, *, mode: str, plain: bool) -> Iterator[tuple[Listener, ...]]:
    """Listeners for a run: `mode` is auto, on or off; `plain` if the terminal is a dumb one."""
    on = mode == "on" or (mode == "auto" and stream.isatty())
    if mode == "off":
        yield ()
    elif not on:
        yield (_listener(Lines(stream)),)
    elif plain:
        bars = PlainBars(stream)
        try:
            yield (_listener(bars),)
        finally:
            bars.close()
    else:
        columns = (TextColumn("{task.description:<16}", markup=False), BarColumn())
        counts = TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False)
        note = TextColumn("{task.fields[note]}", markup=False)
        console = Console(file=stream, highlight=False, markup=False)
        with Progress(*columns, counts, note, TimeElapsedColumn(), console=console) as drawn:
            yield (_listener(Bars(drawn)),)


def _listener(view: View) -> Listener:
    tallies = Tallies()

    def listen(event: Event) -> None:
        tally = tallies.take(event)
        if tally is not None:
            view.show(tally)

    return listen
