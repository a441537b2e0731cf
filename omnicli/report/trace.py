"""A run as a timeline for chrome://tracing and Perfetto.

The array form of the Trace Event Format ("Trace Event Format", Google): one track per stage, a
slice per batch and load, counters for memory and queue. Events are written as they come; viewers
accept the array without its end, so the file of a killed run is good too.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, cast

from omnicli.errors import UserError
from omnicli.observe import Event, Listener

PROCESS = 1


@contextmanager
def tracing_to(path: Path) -> Iterator[Listener]:
    """A listener that writes the file, packed if it ends in .gz."""
    with ExitStack() as held:
        try:
            stream = held.enter_context(_opened(path))
        except OSError as error:
            raise UserError(f"cannot write the trace {path}: {error.strerror}") from error
        trace = _Trace(stream)
        yield trace.take
        trace.end()


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "wt", encoding="utf-8"))
    return path.open("w", encoding="utf-8")


class _Trace:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._tracks: dict[str, int] = {}
        self._begun = False

    def take(self, event: Event) -> None:
        """Write what an event shows, if anything."""
        kind = event["event"]
        if kind in ("batch", "load"):
            stage = str(event["stage"])
            wall_us = round(1e6 * _number(event, "wall_s"))
            begin_us = _micros(str(event["ts"]))
            name = stage if kind == "batch" else f"load {stage}"
            common = {"pid": PROCESS, "tid": self._track(stage)}
            self._write(
                {"ph": "X", "name": name, "ts": begin_us, "dur": wall_us, **common}
                | {"args": _args(event)}
            )
            self._count("memory", "rss", event.get("peak_rss_bytes"), begin_us + wall_us)
            self._count("gpu memory", "vram", event.get("vram_bytes"), begin_us + wall_us)
        elif kind == "stage":
            name = f"queue {event['stage']}"
            self._count(name, "items", event["items"], _micros(str(event["ts"])))
        elif kind in ("stalled", "warning"):
            place = {"ts": _micros(str(event["ts"])), "pid": PROCESS, "tid": 0}
            self._write({"ph": "i", "s": "p", "name": kind, **place})

    def end(self) -> None:
        """Close the array."""
        self._stream.write("\n]\n" if self._begun else "[]\n")

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
        self._stream.write((",\n" if self._begun else "[\n") + json.dumps(row))
        self._stream.flush()
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
