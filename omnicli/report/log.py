"""A run's log: one line per record, text or JSON, in a file that may be rotated away at any time.

It is made from events, and no event holds what was said in a recording.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    "batch": "debug",
    "item": "debug",
    "warning": "warning",
    "stalled": "error",
}


@contextmanager
def logging_to(path: Path, *, form: str, level: str) -> Iterator[Listener]:
    """A listener that appends to the file."""
    if form not in FORMS:
        raise UserError(f"no log format {form!r}", hint=f"one of: {', '.join(FORMS)}")
    if level not in LEVELS:
        raise UserError(f"no log level {level!r}", hint=f"one of: {', '.join(LEVELS)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o640))
        handler = WatchedFileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"cannot write the log {path}: {error.strerror}") from error
    write = _json if form == "json" else _text

    def listen(event: Event) -> None:
        name = level_of(event)
        if LEVELS[name] >= LEVELS[level]:
            text = write(event, name)
            record = logging.LogRecord("omni", LEVELS[name], "", 0, text, None, None)
            handler.handle(record)

    try:
        yield listen
    finally:
        handler.close()


def level_of(event: Event) -> str:
    """How much an event matters."""
    failed = event.get("error") or event.get("status") == "failed" or event.get("exit_code")
    usual = _USUAL.get(str(event["event"]), "info")
    return "warning" if failed and usual in ("debug", "info") else usual


def _json(event: Event, level: str) -> str:
    row: dict[str, Fact] = {"ts": event["ts"], "level": level}
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
