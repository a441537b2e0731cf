"""The run log: which requests there are, what became of them, and what they still need.

SQLite under `OUT/.omni/` is the truth; `results.jsonl` is written from it. A request is done when
its row says so under the same key: a hash of the line, of the file's size, time and inode, and of
the settings. What is in hand is on record too: what an earlier process died over runs last and
alone. Nothing here grows with the number of requests but the database.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Self, TextIO

from omnicli.config import Resume
from omnicli.data import Product, Request
from omnicli.errors import UserError
from omnicli.io import lock, records, stems
from omnicli.io.atomic import replacing, sweep
from omnicli.io.results import Line, to_json
from omnicli.io.schema import opened
from omnicli.machine import filesystem_of, is_network

DONE = ("ok", "empty")
PAGE = 500  # requests read at a time
MAX_CRASHES = 3  # with a request in hand; then it has failed
HASH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A request that is due, and the key under which it will be done."""

    request: Request
    stem: str
    key: str
    identity: str = ""  # of the file
    digest: str = ""  # of its content, when it was last read
    again: bool = False  # an earlier run has left files of it
    refresh: bool = False  # what older versions of a stage made is made anew
    crashes: int = 0  # so many processes died with it in hand
    crash_stage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a stage's product depends on besides the request: all stages up to it."""

    stage: str
    settings: str
    versions: str  # of the code; only those above 1


@dataclass(frozen=True, slots=True)
class _Row:
    """A request as the log has it."""

    request: Request
    stem: str
    status: str
    key: str
    attempts: int
    identity: str
    digest: str
    versions: str
    crashes: int
    crash_stage: str


_COLUMNS = "stem, status, key, attempts, identity, digest, versions, crashes, crash_stage"


@dataclass(slots=True)
class Leftover:
    """What was found to have been made by older versions of stages."""

    results: int = 0
    stages: set[str] = field(default_factory=set)


class RunStore:
    """One run folder, held by one run."""

    def __init__(
        self,
        output_dir: Path,
        command: str,
        *,
        overwrite: bool = False,
        root: str | None = None,
    ) -> None:
        self.output_dir = output_dir
        self.folder = output_dir / ".omni"
        self.older = Leftover()
        self.replaced = 0  # results of the same file that other settings, or another line, made
        self._speaks = command != "transcribe"
        self._make_folder()
        network = is_network(filesystem_of(output_dir))
        with ExitStack() as held:  # until here nothing is ours; an error lets go of everything
            self.lock = held.enter_context(
                lock.held(self.folder / "lock", network=network, describe=f"omni {command}")
            )
            self._db = held.enter_context(
                closing(opened(self.folder / "run.sqlite", shared=not network))
            )
            self._check_owner(command, root, overwrite)
            if overwrite:
                self._db.execute("UPDATE requests SET status = 'todo', key = '', crashes = 0")
                self._db.execute("DELETE FROM products")
            self._recover()
            self.number = int(self._meta("runs", "0")) + 1
            self._set_meta("runs", str(self.number))
            self._held = held.pop_all()
        self._results: TextIO | None = None

    def _make_folder(self) -> None:
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)  # what was said is for its owner
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"cannot write to {self.output_dir}: {reason}") from error

    def _check_owner(self, command: str, root: str | None, overwrite: bool) -> None:
        owner, told = self._meta("command", command), self._done_told()
        if owner != command and not overwrite:
            raise UserError(
                f"{self.output_dir} holds the results of `omni {owner}`{told}",
                hint="choose another folder with -o, or --overwrite to replace them",
            )
        before = self._meta("root", root or "")
        if root is not None and before not in ("", root) and not overwrite:
            raise UserError(
                f"{self.output_dir} holds the results of another input, {before}{told}",
                hint="choose another folder with -o, or --overwrite to replace them",
            )
        self._set_meta("command", command)
        if root is not None:
            self._set_meta("root", root)

    def _done_told(self) -> str:
        done = self._db.execute("SELECT count(*) FROM requests WHERE result != ''").fetchone()[0]
        return f" ({done} of them)" if done else ""

    def _recover(self) -> None:
        """After a run that died: what it had in hand is under suspicion."""
        left = self.folder / "left-at-once"  # by a second signal: then nothing is
        if left.exists():
            self._db.execute("DELETE FROM in_flight")
            left.unlink()
        self._db.executescript(
            "BEGIN; UPDATE requests SET crashes = crashes + 1, crash_stage = "
            "(SELECT stage FROM in_flight WHERE in_flight.id = requests.id) "
            "WHERE id IN (SELECT id FROM in_flight); DELETE FROM in_flight; COMMIT;"
        )
        if self._meta("running", "no") == "yes":
            sweep(self.output_dir)
        self._set_meta("running", "yes")

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

    def due(self, settings: str, versions: str, resume: Resume) -> Iterator[Due]:
        """Requests that this run must work on: in the input's order, then what processes died over.

        `versions` are those of the stages that make a result today, as in `Origin`.
        """
        for row in self._seen():
            identity = self._identity(row, checksum=resume.checksum)
            now = key_of(row.request, identity, settings)
            if self._stands(row, now, versions, resume):
                continue
            changed = row.key not in ("", now) and identity == row.identity
            self.replaced += changed and row.status in DONE
            crashes = row.crashes
            if row.status == "failed":  # tried again: once more, if that is what it failed of
                crashes = min(crashes, MAX_CRASHES - 1)
            if (row.status, row.crashes) != ("todo", crashes):
                self._db.execute(
                    "UPDATE requests SET status = 'todo', crashes = ? WHERE id = ?",
                    (crashes, row.request.request_id),
                )
            yield Due(
                request=row.request,
                stem=row.stem,
                key=now,
                identity=identity,
                digest=row.digest,
                again=row.attempts > 0,
                refresh=resume.refresh,
                crashes=crashes,
                crash_stage=row.crash_stage,
            )

    def _stands(self, row: _Row, key: str, versions: str, resume: Resume) -> bool:
        if row.key != key or row.status not in (*DONE, "failed"):
            return False
        if row.status == "failed":
            return not resume.retry_failed
        if row.versions == versions:
            return True
        other = set(row.versions.split()) ^ set(versions.split())
        self.older.results += 1
        self.older.stages |= {one.partition("=")[0] for one in other}
        return not resume.refresh

    def _identity(self, row: _Row, *, checksum: bool) -> str:
        """What the file is known by; with `checksum`, the same as before if its content is."""
        stat = stat_of(row.request.audio)
        if not checksum or not row.digest or row.request.audio is None:
            return stat
        if digest_of(row.request.audio) == row.digest:
            return row.identity
        return stat if stat != row.identity else f"{stat},{digest_of(row.request.audio)}"

    def _seen(self) -> Iterator[_Row]:
        """This run's input; what crashed comes last, the least suspicious first."""
        yield from self._pages("crashes = 0")
        suspects = self._db.execute(
            "SELECT DISTINCT crashes FROM requests WHERE seen = ? AND crashes > 0 ORDER BY crashes",
            (self.number,),
        ).fetchall()
        for (crashes,) in suspects:
            yield from self._pages(f"crashes = {crashes}")

    def _pages(self, condition: str) -> Iterator[_Row]:
        last = -1
        while True:
            rows = self._db.execute(
                f"SELECT place, place_named, request, {_COLUMNS} FROM requests "
                f"WHERE seen = ? AND place > ? AND {condition} ORDER BY place LIMIT ?",
                (self.number, last, PAGE),
            ).fetchall()
            for place, where, text, *columns in rows:
                request = replace(records.load(Request, text), index=place, where=where)
                yield _Row(request, *columns)
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

    def not_attempted(self) -> Iterator[Due]:
        """Requests that are still to be worked on, and what a line about them needs."""
        for row in self._seen():
            if row.status in ("todo", "deferred"):
                yield Due(request=row.request, stem=row.stem, key="")

    def defer(self, due: Due, line: Line) -> None:
        """A request is left for a later run: its line says so."""
        self._db.execute(
            "UPDATE requests SET status = 'deferred', key = '', result = ? WHERE id = ?",
            (to_json(line), due.request.request_id),
        )

    # -- what is in hand

    @contextmanager
    def in_flight(self, stage: str, ids: Sequence[str]) -> Iterator[None]:
        """On record while a block runs; if the process dies in it, the next one knows of what.

        Several stages may be at it at a time, and end in any order. A request that is in the hands
        of two has left the first: what is on record is where it went.
        """
        self._db.execute("BEGIN")
        self._db.executemany(
            "INSERT OR REPLACE INTO in_flight VALUES (?, ?)", [(name, stage) for name in ids]
        )
        self._db.execute("COMMIT")
        try:
            yield
        finally:
            self._db.execute("BEGIN")
            self._db.executemany(
                "DELETE FROM in_flight WHERE id = ? AND stage = ?", [(name, stage) for name in ids]
            )
            self._db.execute("COMMIT")

    # -- products

    def product(self, due: Due, origin: Origin, kind: type[Product]) -> Product | None:
        """A stage's product from an earlier run, if it was made from the same under the same."""
        row = self._db.execute(
            "SELECT product, versions FROM products WHERE id = ? AND stage = ? AND key = ?",
            (
                due.request.request_id,
                origin.stage,
                key_of(due.request, due.identity, origin.settings),
            ),
        ).fetchone()
        if row is None or (due.refresh and row[1] != origin.versions):
            return None
        return records.load(kind, row[0])

    def has_products(self) -> bool:
        """Whether earlier runs have left any."""
        return self._db.execute("SELECT 1 FROM products LIMIT 1").fetchone() is not None

    def put_product(self, due: Due, origin: Origin, product: Product) -> None:
        """Keep a stage's product."""
        key = key_of(due.request, due.identity, origin.settings)
        self._db.execute(
            "INSERT OR REPLACE INTO products (id, stage, key, product, versions) "
            "VALUES (?, ?, ?, ?, ?)",
            (due.request.request_id, origin.stage, key, records.dump(product), origin.versions),
        )

    def finish(self, due: Due, status: str, line: Line, *, versions: str, digest: str) -> None:
        """A request is done, or has failed: on record, then in results.jsonl."""
        text = to_json(line)
        self._db.execute(
            "UPDATE requests SET status = ?, key = ?, result = ?, attempts = attempts + 1, "
            "identity = ?, digest = ?, versions = ?, crashes = ? WHERE id = ?",
            (
                *(status, due.key, text, due.identity, digest, versions),
                due.crashes if due.crashes >= MAX_CRASHES else 0,
                due.request.request_id,
            ),
        )
        if self._results is None:
            self._results = (self.output_dir / "results.jsonl").open("a", encoding="utf-8")
        self._results.write(text + "\n")
        self._results.flush()

    def write_results(self) -> None:
        """results.jsonl from the log, in the input's order, and errors.jsonl if anything failed.

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
        self._write_errors()

    def _write_errors(self) -> None:
        """The failed ones, as a manifest of their own: paths are absolute, ids as they were."""
        rows = self._db.execute(
            "SELECT request, result FROM requests WHERE seen = ? AND status = 'failed' "
            "ORDER BY place",
            (self.number,),
        )
        path = self.output_dir / "errors.jsonl"
        first = rows.fetchone()
        if first is None:
            path.unlink(missing_ok=True)
            return
        with replacing(path) as file:
            while first is not None:
                request, result = records.load(Request, first[0]), json.loads(first[1])
                file.write((to_json(_error_line(request, result)) + "\n").encode())
                first = rows.fetchone()

    def close(self) -> None:
        """Let go of the folder."""
        try:
            if self._results is not None:
                self._results.close()
            self._set_meta("running", "no")
        finally:  # on a full disk too
            self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def key_of(request: Request, identity: str, settings: str) -> str:
    """What a result depends on: the line, the file as it lies there, the settings."""
    line = records.dump(replace(request, index=0, where=""))
    joined = "\0".join((line, identity, settings)).encode("utf-8", "surrogateescape")
    return blake2b(joined, digest_size=16).hexdigest()


def stat_of(path: Path | None) -> str:
    """A file's identity: size, time of change and inode."""
    if path is None:
        return ""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        return type(error).__name__
    return f"{found.st_size},{found.st_mtime_ns},{found.st_ino}"


def digest_of(path: Path) -> str:
    """A hash of a file's content (BLAKE2b, 16 bytes); empty if it cannot be read."""
    digest = blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while block := file.read(HASH_BYTES):
                digest.update(block)
    except (OSError, ValueError):
        return ""
    return digest.hexdigest()


def _error_line(request: Request, result: Line) -> Line:
    """A failed line's own fields, where its recording is, and what was wrong."""
    line: Line = dict(request.raw) | {"id": request.request_id, "error": result["error"]}
    if request.audio is not None:
        line["audio_filepath"] = os.fspath(request.audio.absolute())
    else:
        line["text"] = request.speech_text
    return line


def _with_index(text: str, place: int) -> str:
    line = json.loads(text)
    return text if line["index"] == place else to_json(line | {"index": place})
