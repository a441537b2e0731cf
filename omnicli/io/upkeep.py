"""A run folder from outside: how far it is, and what of it can go."""

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from omnicli.errors import UserError
from omnicli.io import lock
from omnicli.io.atomic import replacing, sweep
from omnicli.io.schema import opened
from omnicli.machine import filesystem_of, is_network
from omnicli.observe import Event

TAIL_BYTES = 4 << 20  # of the events that are looked at


@dataclass(slots=True, kw_only=True)
class Status:
    """How a run folder stands."""

    output_dir: Path
    command: str = ""
    holder: str | None = None  # who works in it now
    counts: dict[str, int] = field(default_factory=dict)  # status -> requests of the last input
    codes: dict[str, int] = field(default_factory=dict)  # error code -> requests
    in_flight: tuple[str, ...] = ()
    events: list[Event] = field(default_factory=list)  # of the last run, the last of them
    locked: bool = False  # the log cannot be read now

    @property
    def running(self) -> bool:
        """Whether a run works in it."""
        return self.holder is not None


def read_status(output_dir: Path) -> Status:
    """Look at a run folder, also while a run works in it. Changes nothing."""
    folder = _run_folder(output_dir)
    status = Status(output_dir=output_dir, holder=lock.holder(folder / "lock"))
    try:
        with closing(
            sqlite3.connect(f"{(folder / 'run.sqlite').absolute().as_uri()}?mode=ro", uri=True)
        ) as db:
            _read_log(db, status)
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise UserError(f"cannot read the run log in {folder}: {error}") from error
        status.locked = True
    except sqlite3.DatabaseError as error:
        raise UserError(f"cannot read the run log in {folder}: {error}") from error
    status.events = list(_last_run(folder / "events.jsonl"))
    return status


def _run_folder(output_dir: Path) -> Path:
    folder = output_dir / ".omni"
    if not (folder / "run.sqlite").exists():
        raise UserError(f"{output_dir} is no output folder of omni", hint="name the folder of -o")
    return folder


def _read_log(db: sqlite3.Connection, status: Status) -> None:
    meta = dict(db.execute("SELECT name, value FROM meta").fetchall())
    status.command = meta.get("command", "")
    number = int(meta.get("runs", "0"))
    status.counts = dict(
        db.execute(
            "SELECT status, count(*) FROM requests WHERE seen = ? GROUP BY status", (number,)
        ).fetchall()
    )
    status.codes = dict(
        db.execute(
            "SELECT json_extract(result, '$.error.code'), count(*) FROM requests "
            "WHERE seen = ? AND status = 'failed' GROUP BY 1 ORDER BY 2 DESC",
            (number,),
        ).fetchall()
    )
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'in_flight'").fetchone():
        status.in_flight = tuple(row[0] for row in db.execute("SELECT id FROM in_flight"))


def _last_run(path: Path) -> Iterator[Event]:
    """The events since the last run began, as far as they are in the file's tail."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    found: list[Event] = []
    for text in lines:
        try:
            event = json.loads(text)
        except ValueError:  # cut at the tail's begin, or just being written
            continue
        if event.get("event") == "run":
            found.clear()
        found.append(event)
    yield from found


def clean(output_dir: Path, *, keep_runs: int) -> int:
    """Remove what earlier runs left besides results; how many bytes that frees.

    Summaries and events of all but the last `keep_runs` runs go, and what killed runs left half
    written. Results, and what later runs resume from, stay.
    """
    folder = _run_folder(output_dir)
    before = _size(folder)
    network = is_network(filesystem_of(output_dir))
    with lock.held(folder / "lock", network=network, describe="omni clean"):
        runs = sorted((folder / "runs").glob("*"), key=lambda path: path.stat().st_mtime)
        gone = runs[: max(0, len(runs) - keep_runs)]
        for path in gone:
            shutil.rmtree(path)
        _trim(folder / "events.jsonl", keep_runs)
        sweep(output_dir)
        with closing(opened(folder / "run.sqlite", shared=not network)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            db.execute("VACUUM")
    return before - _size(folder)


def _trim(path: Path, keep_runs: int) -> None:
    """Keep the events of the last runs."""
    if not path.exists():
        return
    with path.open("rb") as file:
        starts = [n for n, text in enumerate(file) if b'"event": "run"' in text]
    first = starts[-keep_runs] if 0 < keep_runs <= len(starts) else 0 if keep_runs else None
    if first == 0:
        return
    with path.open("rb") as old, replacing(path) as new:
        for n, text in enumerate(old):
            if first is not None and n >= first:
                new.write(text)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
