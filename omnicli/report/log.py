"""A run's log: one line per record, text or JSON, in a file that may be rotated away at any time.

It is made from events, and no event holds what was said in a recording.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path

from omnicli.errors import UserError
from omnicli.observe import Event, Fact, Listener, now_local_iso

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
FORMS = ("text", "json")
_USUAL = {
    "run": "info",
    "end": "info",
    "stage": "info",
    "load": "debug",
    "queue": "debug",
    "worker": "debug",
    "batch": "debug",
    "item": "debug",
    "warning": "warning",
    "stalled": "error",
}


@contextmanager
def logging_to(
    path: Path, *, form: str, level: str, tell: Callable[[str], None] | None = None
) -> Iterator[Listener]:
    """A listener that appends to the file.

    A log that can no longer be written does not end the run; `tell` hears of it, once. Raises
    UserError for wrong settings and for a file that cannot be opened.
    """
    if form not in FORMS:
        raise UserError(f"no log format {form!r}", hint=f"one of: {', '.join(FORMS)}")
    if level not in LEVELS:
        raise UserError(f"no log level {level!r}", hint=f"one of: {', '.join(LEVELS)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _Handler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"cannot write the log {path}: {error.strerror}") from error
    log = _Log(handler, form, LEVELS[level], tell)
    try:
        yield log.take
    finally:
        log.close()


class _Handler(WatchedFileHandler):
    """Nobody else may read the file, one made anew after rotation too; its errors are raised."""

    def _open(self) -> TextIOWrapper:
        opened = os.open(self.baseFilename, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o640)
        return os.fdopen(opened, "a", encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Called where an error of writing is being handled."""
        raise


@dataclass(slots=True)
class _Log:
    handler: _Handler
    form: str
    level: int
    tell: Callable[[str], None] | None
    run_id: str = ""  # of the run that began last
    whole: bool = True

    def take(self, event: Event) -> None:
        """Write what matters enough."""
        if event["event"] == "run":
            self.run_id = str(event["run_id"])
        name = level_of(event)
        if LEVELS[name] < self.level:
            return
        text = _json(event, name, self.run_id) if self.form == "json" else _text(event, name)
        try:
            self.handler.handle(logging.LogRecord("omni", LEVELS[name], "", 0, text, None, None))
        except OSError as error:
            self._lost(error)

    def close(self) -> None:
        """Write what is left."""
        try:
            self.handler.close()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        if self.whole and self.tell:
            self.tell(f"the log {self.handler.baseFilename} is not complete: {error.strerror}")
        self.whole = False


def level_of(event: Event) -> str:
    """How much an event matters."""
    failed = event.get("error") or event.get("status") == "failed" or event.get("exit_code")
    usual = _USUAL.get(str(event["event"]), "info")
    return "warning" if failed and usual in ("debug", "info") else usual


def _json(event: Event, level: str, run_id: str) -> str:
    row: dict[str, Fact] = {"ts": event["ts"], "level": level}
    row |= {"run_id": run_id} if run_id else {}
    row |= {k: v for k, v in event.items() if v is not None}
    if isinstance(wall_s := event.get("wall_s"), int | float):
        row["dur_ms"] = round(1000 * wall_s, 3)
    return json.dumps(row)


def _text(event: Event, level: str) -> str:
    facts = {k: v for k, v in event.items() if k not in ("ts", "event") and v is not None}
    return f"{now_local_iso(str(event['ts']))} {level:<7} {event['event']} {_told(facts)}".rstrip()


def _told(facts: Mapping[str, Fact]) -> str:
    """`name=value`, a text with anything unusual in it as JSON, so that a line stays a line."""
    return " ".join(f"{k}={v if _is_plain(v) else json.dumps(v)}" for k, v in facts.items())


def _is_plain(value: Fact) -> bool:
    return not isinstance(value, str) or (
        bool(value) and value.isprintable() and not set(value) & set(' "=')
    )
