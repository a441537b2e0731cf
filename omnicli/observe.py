"""The only clock, and the events of a run.

An event is one line of `events.jsonl` and is shown to whoever listens (progress, tests).
"""

import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

Fact = str | int | float | None
Event = dict[str, Fact]
Listener = Callable[[Event], None]


def now_iso() -> str:
    """The time of day, RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def now_local_iso(ts: str) -> str:
    """A moment as people here write it, with the offset."""
    return datetime.fromisoformat(ts).astimezone().isoformat(timespec="milliseconds")


def clock_s() -> float:
    """Seconds of a clock that never goes back."""
    return time.perf_counter()


def peak_rss_bytes() -> int:
    """The most memory that this process has held, mapped files among it.

    Linux's `getrusage` counts what a large parent held before `exec`; its VmHWM does not (proc(5)).
    """
    try:
        told = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:  # no Linux
        told = ""
    if found := re.search(r"^VmHWM:\s+(\d+) kB", told, re.MULTILINE):
        return 1024 * int(found[1])
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib if sys.platform == "darwin" else 1024 * kib


def rss_bytes() -> int:
    """The memory that this process holds now, mapped files among it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # no Linux
        return peak_rss_bytes()
    return pages * resource.getpagesize()


class Observer:
    """Appends events to a file and passes them on."""

    def __init__(self, path: Path | None, listeners: tuple[Listener, ...] = ()) -> None:
        self._file = path.open("a", encoding="utf-8") if path else None
        self._listeners = listeners

    def emit(self, event: str, **facts: Fact) -> None:
        """Record an event now."""
        self._send({"event": event, "ts": now_iso(), **facts})

    @contextmanager
    def span(self, event: str, **facts: Fact) -> Iterator[Event]:
        """Time a block; what the block adds to the dict is written with it."""
        start_s = clock_s()
        line: Event = {"event": event, "ts": now_iso(), **facts}
        try:
            yield line
        finally:
            line["wall_s"] = round(clock_s() - start_s, 6)
            self._send(line)

    def _send(self, line: Event) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        for listener in self._listeners:
            listener(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
