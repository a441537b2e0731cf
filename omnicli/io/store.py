"""The run log: which requests there are, what became of them, and what they still need.

SQLite under `OUT/.omni/` is the truth; `results.jsonl` is written from it. A request is done when
its row says so under the same key: a hash of the line, of the file's size, time and inode, and of
the settings. Nothing here grows with the number of requests but the database.
"""

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Self, TextIO

from omnicli.data import Product, Request
from omnicli.errors import BusyError, UserError
from omnicli.io import records, stems
from omnicli.io.atomic import replacing, sweep
from omnicli.io.results import Line, to_json

SCHEMA = 1
DONE = ("ok", "empty")
PAGE = 500  # requests read at a time
_TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY,
    place INTEGER NOT NULL,             -- in the input of the run that saw it last
    seen INTEGER NOT NULL,              -- that run's number
    place_named TEXT NOT NULL,          -- "calls.jsonl:12"
    request TEXT NOT NULL,
    stem TEXT NOT NULL,
    stem_key TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL DEFAULT 'todo',
    key TEXT NOT NULL DEFAULT '',       -- under which the status holds
    result TEXT NOT NULL DEFAULT '',
    attempts INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS by_place ON requests (seen, place);
CREATE TABLE IF NOT EXISTS products (
    id TEXT NOT NULL, stage TEXT NOT NULL, key TEXT NOT NULL, product TEXT NOT NULL,
    PRIMARY KEY (id, stage)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A request that is due, and the key under which it will be done."""

    request: Request
    stem: str
    key: str
    again: bool = False  # an earlier run has left files of it


class RunStore:
    """One run folder, held by one run."""

    def __init__(self, output_dir: Path, command: str, *, overwrite: bool = False) -> None:
        self.output_dir = output_dir
        self.folder = output_dir / ".omni"
        self._speaks = command != "transcribe"
        self._make_folder()
        with ExitStack() as held:  # until here nothing is ours; an error lets go of everything
            held.enter_context(_locked(self.folder / "lock"))
            self._db = held.enter_context(closing(_opened(self.folder / "run.sqlite")))
            self._db.executescript(_TABLES)
            self._check_owner(command, overwrite)
            self._held = held.pop_all()
        if overwrite:
            self._db.execute("UPDATE requests SET status = 'todo', key = ''")
            self._db.execute("DELETE FROM products")
        if self._meta("running", "no") == "yes":  # the last run was killed
            sweep(self.output_dir)
        self._set_meta("running", "yes")
        self.number = int(self._meta("runs", "0")) + 1
        self._set_meta("runs", str(self.number))
        self._results: TextIO | None = None

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"cannot write to {self.output_dir}: {reason}") from error

    def _check_owner(self, command: str, overwrite: bool) -> None:
        schema = self._meta("schema", str(SCHEMA))
        if int(schema) > SCHEMA:
            raise UserError(
                f"{self.output_dir} was made by a newer version of omni (log {schema})",
                hint="update omni, or choose another folder with -o",
            )
        owner = self._meta("command", command)
        if owner != command and not overwrite:
            raise UserError(
                f"{self.output_dir} holds the results of `omni {owner}`",
                hint="choose another folder with -o, or --overwrite to replace them",
            )
        self._set_meta("schema", str(SCHEMA))
        self._set_meta("command", command)

    def _meta(self, name: str, default: str) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else default

    def _set_meta(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    # -- the input

    def ingest(self, requests: Iterable[Request]) -> Iterator[str]:
        """Take the input in; yields what is wrong with it. All or nothing: see `commit`."""
        self._db.execute("BEGIN")
        for request in requests:
            if (problem := self._take(request)) is not None:
                yield problem

    def commit(self) -> None:
        """Keep what was ingested."""
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        """Forget what was ingested."""
        self._db.execute("ROLLBACK")

    def _take(self, request: Request) -> str | None:
        name = request.request_id
        row = self._db.execute(
            "SELECT seen, place_named, request FROM requests WHERE id = ?", (name,)
        ).fetchone()
        text = records.dump(replace(request, index=0, where=""))
        if row is None:
            stem = self._free_stem(name)
            self._db.execute(
                "INSERT INTO requests (id, place, seen, place_named, request, stem, stem_key) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (name, request.index, self.number, request.where, text, stem, stems.key_of(stem)),
            )
        elif row[0] == self.number:
            return f"{request.where or name}: the id {name!r} is taken by {row[1] or 'another'}"
        else:
            self._db.execute(
                "UPDATE requests SET place = ?, seen = ?, place_named = ?, request = ? "
                "WHERE id = ?",
                (request.index, self.number, request.where, text, name),
            )
        return None

    def _free_stem(self, name: str) -> str:
        """A stem of its own; where speech is written, no WAV that lies there is replaced."""
        occupied: set[str] = set()
        while True:
            stem = stems.claim(name, lambda key: key in occupied or self._stem_taken(key))
            if not self._speaks or not stems.occupied(self.output_dir, stem):
                return stem
            occupied.add(stems.key_of(stem))

    def _stem_taken(self, key: str) -> bool:
        row = self._db.execute("SELECT 1 FROM requests WHERE stem_key = ?", (key,)).fetchone()
        return row is not None

    # -- what is due

    def due(self, settings: str, *, retry_failed: bool) -> Iterator[Due]:
        """Requests that this run must work on, in the input's order."""
        for request, stem, status, key, again in self._seen():
            now = key_of(request, settings)
            stands = key == now and (status in DONE or (status == "failed" and not retry_failed))
            if not stands:
                self._set_status(request.request_id, "todo")
                yield Due(request=request, stem=stem, key=now, again=again)

    def _set_status(self, request_id: str, status: str) -> None:
        self._db.execute("UPDATE requests SET status = ? WHERE id = ?", (status, request_id))

    def _seen(self) -> Iterator[tuple[Request, str, str, str, bool]]:
        last = -1
        while True:
            rows = self._db.execute(
                "SELECT place, request, stem, status, key, place_named, attempts FROM requests "
                "WHERE seen = ? AND place > ? ORDER BY place LIMIT ?",
                (self.number, last, PAGE),
            ).fetchall()
            for place, text, stem, status, key, where, attempts in rows:
                request = replace(records.load(Request, text), index=place, where=where)
                yield request, stem, status, key, attempts > 0
            if not rows:
                return
            last = rows[-1][0]

    def counts(self) -> dict[str, int]:
        """Requests of this run's input by status."""
        rows = self._db.execute(
            "SELECT status, count(*) FROM requests WHERE seen = ? GROUP BY status", (self.number,)
        )
        return dict(rows.fetchall())

    def failures(self, most: int) -> list[tuple[str, str, str]]:
        """The first failed requests of this run's input: id, code, message."""
        rows = self._db.execute(
            "SELECT id, json_extract(result, '$.error.code'), "
            "json_extract(result, '$.error.message') FROM requests "
            "WHERE seen = ? AND status = 'failed' ORDER BY place LIMIT ?",
            (self.number, most),
        )
        return [(str(a), str(b), str(c)) for a, b, c in rows]

    # -- products

    def product(self, request_id: str, stage: str, key: str, kind: type[Product]) -> Product | None:
        """A stage's product from an earlier run, if it was made under the same key."""
        row = self._db.execute(
            "SELECT product FROM products WHERE id = ? AND stage = ? AND key = ?",
            (request_id, stage, key),
        ).fetchone()
        return records.load(kind, row[0]) if row else None

    def put_product(self, request_id: str, stage: str, key: str, product: Product) -> None:
        """Keep a stage's product."""
        self._db.execute(
            "INSERT OR REPLACE INTO products VALUES (?, ?, ?, ?)",
            (request_id, stage, key, records.dump(product)),
        )

    def finish(self, due: Due, status: str, line: Line) -> None:
        """A request is done, or has failed: on record, then in results.jsonl."""
        text = to_json(line)
        self._db.execute(
            "UPDATE requests SET status = ?, key = ?, result = ?, attempts = attempts + 1 "
            "WHERE id = ?",
            (status, due.key, text, due.request.request_id),
        )
        if self._results is None:
            self._results = (self.output_dir / "results.jsonl").open("a", encoding="utf-8")
        self._results.write(text + "\n")
        self._results.flush()

    def write_results(self) -> None:
        """results.jsonl from the log, in the input's order.

        Requests that are no longer in the input keep their lines if they were done.
        """
        if self._results is not None:
            self._results.close()
            self._results = None
        rows = self._db.execute(
            "SELECT place, result FROM requests WHERE result != '' AND (seen = ? OR status IN "
            "('ok', 'empty')) ORDER BY seen = ? DESC, seen DESC, place",
            (self.number, self.number),
        )
        with replacing(self.output_dir / "results.jsonl") as file:
            for place, text in rows:
                file.write((_with_index(text, place) + "\n").encode())

    def close(self) -> None:
        """Let go of the folder."""
        if self._results is not None:
            self._results.close()
        self._set_meta("running", "no")
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def key_of(request: Request, settings: str) -> str:
    """What a result depends on: the line, the file as it lies there, the settings."""
    line = records.dump(replace(request, index=0, where=""))
    return _hash(line, _stat(request.audio), settings)


def _hash(*texts: str) -> str:
    joined = "\0".join(texts).encode("utf-8", "surrogateescape")
    return blake2b(joined, digest_size=16).hexdigest()


def _stat(path: Path | None) -> str:
    """A file's identity: size, time of change and inode."""
    if path is None:
        return ""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        return type(error).__name__
    return f"{found.st_size},{found.st_mtime_ns},{found.st_ino}"


def _with_index(text: str, place: int) -> str:
    line = json.loads(text)
    return text if line["index"] == place else to_json(line | {"index": place})


def _locked(path: Path) -> TextIO:
    """Hold the folder until the process ends, however it ends."""
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read(100).strip() or "another run"
        file.close()
        hint = "wait until it ends, or choose another folder with -o"
        raise BusyError(f"{path.parent.parent} is in use by {holder}", hint=hint) from error
    file.truncate(0)
    file.write(f"process {os.getpid()}\n")
    file.flush()
    return file


def _opened(path: Path) -> sqlite3.Connection:
    try:
        with ExitStack() as held:
            db = held.enter_context(closing(sqlite3.connect(path, isolation_level=None)))
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            held.pop_all()
    except sqlite3.DatabaseError as error:
        hint = "move the folder away, or choose another one with -o"
        raise UserError(f"cannot open the run log {path}: {error}", hint=hint) from error
    return db
