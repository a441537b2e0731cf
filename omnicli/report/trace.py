"""A run as a timeline for chrome://tracing and Perfetto.

The array form of the Trace Event Format ("Trace Event Format", Google): one track per stage, a
slice per batch and load, counters for memory and for the items that wait. Events are written as
they come; viewers accept the array without its end, so the file of a killed run is good too.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, cast

from omnicli.errors import UserError
from omnicli.observe import Event, Listener

PROCESS = 1
TICK_US = 1000  # times of day are whole milliseconds


@contextmanager
def tracing_to(path: Path, tell: Callable[[str], None] | None = None) -> Iterator[Listener]:
    """A listener that writes the file, packed if it ends in .gz.

    A trace that can no longer be written ends there, and not the run; `tell` hears of it. Raises
    UserError for a file that cannot be opened.
    """
    try:
        trace = _Trace(_opened(path))
    except OSError as error:
        raise UserError(f"cannot write the trace {path}: {error.strerror}") from error
    try:
        yield trace.take
    finally:
        trace.end()
        if trace.problem and tell:
            tell(f"the trace {path} is not complete: {trace.problem}")


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "wt", encoding="utf-8"))
    return path.open("w", encoding="utf-8")


class _Trace:
    def __init__(self, stream: TextIO) -> None:
        self.problem = ""
        self._stream = stream
        self._tracks: dict[str, int] = {}
        self._ends_us: dict[int, int] = {}  # track -> end of its last slice
        self._waiting: dict[str, float] = {}  # stage -> items
        self._told: set[str] = set()  # stages that tell themselves what waits
        self._begun = False

    def take(self, event: Event) -> None:
        """Write what an event shows, if anything."""
        kind = event["event"]
        if kind in ("batch", "load"):
            end_us = self._slice(event)
            self._count("memory", "rss", event.get("peak_rss_bytes"), end_us)
            self._count("gpu memory", "vram", event.get("vram_bytes"), end_us)
            if kind == "batch" and ("error" not in event or event["items"] == 1):
                self._queue(str(event["stage"]), -_number(event, "items"), end_us)
        elif kind == "stage":
            self._waiting.pop(str(event["stage"]), None)
            self._queue(str(event["stage"]), _number(event, "items"), _micros(str(event["ts"])))
        elif kind == "queue":
            self._waits(str(event["stage"]), event)
        elif kind in ("stalled", "warning"):
            place = {"ts": _micros(str(event["ts"])), "pid": PROCESS, "tid": 0}
            self._write({"ph": "i", "s": "p", "name": kind, **place})

    def end(self) -> None:
        """Close the array and the file."""
        try:
            with self._stream:
                if not self.problem:
                    self._stream.write("\n]\n" if self._begun else "[]\n")
        except OSError as error:
            self.problem = self.problem or str(error.strerror)

    def _slice(self, event: Event) -> int:
        """Write a slice; when it ends. Slices that overlap by rounding alone would be dropped."""
        stage = str(event["stage"])
        track = self._track(stage)
        begin_us = _micros(str(event["ts"]))
        last_us = self._ends_us.get(track, begin_us)
        if 0 < last_us - begin_us < TICK_US:
            begin_us = last_us
        wall_us = round(1e6 * _number(event, "wall_s"))
        name = stage if event["event"] == "batch" else f"load {stage}"
        place = {"ts": begin_us, "dur": wall_us, "pid": PROCESS, "tid": track}
        self._write({"ph": "X", "name": name, **place, "args": _args(event)})
        self._ends_us[track] = begin_us + wall_us
        return begin_us + wall_us

    def _waits(self, stage: str, event: Event) -> None:
        """What a stage itself says is waiting for it."""
        self._told.add(stage)
        at_us = _micros(str(event["ts"]))
        self._count(f"queue {stage}", "items", event["items"], at_us)
        self._count(f"queued bytes {stage}", "bytes", event["bytes"], at_us)

    def _queue(self, stage: str, more: float, at_us: int) -> None:
        """What must be waiting, by what has come and what is done."""
        if stage in self._told:
            return
        self._waiting[stage] = max(0.0, self._waiting.get(stage, 0.0) + more)
        self._count(f"queue {stage}", "items", self._waiting[stage], at_us)

    def _track(self, stage: str) -> int:
        if stage not in self._tracks:
            self._tracks[stage] = len(self._tracks) + 1
            place = {"pid": PROCESS, "tid": self._tracks[stage]}
            self._write({"ph": "M", "name": "thread_name", **place, "args": {"name": stage}})
        return self._tracks[stage]

    def _count(self, name: str, what: str, value: object, at_us: int) -> None:
        if isinstance(value, int | float):
            row = {"ph": "C", "name": name, "ts": at_us, "pid": PROCESS, "args": {what: value}}
            self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        if self.problem:
            return
        try:
            self._stream.write((",\n" if self._begun else "[\n") + json.dumps(row))
            self._stream.flush()
        except OSError as error:
            self.problem = str(error.strerror)
        self._begun = True


def _args(event: Event) -> dict[str, Any]:
    """What a slice shows when it is clicked on; no ids."""
    valid, padded = _number(event, "valid"), _number(event, "padded")
    waste = {"waste": round(1 - valid / padded, 4)} if padded else {}
    names = ("items", "valid", "padded", "audio_s", "estimated_bytes", "error")
    return {name: event[name] for name in names if name in event} | waste


def _number(event: Event, name: str) -> float:
    value = event.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _micros(ts: str) -> int:
    return round(1e6 * datetime.fromisoformat(ts).timestamp())
