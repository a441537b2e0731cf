"""The tables of the run log, and how older ones become today's."""

import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path

from omnicli.errors import UserError

SCHEMA = 2
_FIRST = """
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
# What leads from the schema before to this one.
_MIGRATIONS = {
    2: """
ALTER TABLE requests ADD COLUMN identity TEXT NOT NULL DEFAULT '';  -- of the file that was read
ALTER TABLE requests ADD COLUMN digest TEXT NOT NULL DEFAULT '';    -- of its content
ALTER TABLE requests ADD COLUMN versions TEXT NOT NULL DEFAULT '';  -- of the stages that made it
ALTER TABLE requests ADD COLUMN crashes INTEGER NOT NULL DEFAULT 0; -- with it in hand
ALTER TABLE requests ADD COLUMN crash_stage TEXT NOT NULL DEFAULT '';
ALTER TABLE products ADD COLUMN versions TEXT NOT NULL DEFAULT '';
CREATE TABLE in_flight (id TEXT PRIMARY KEY, stage TEXT NOT NULL) WITHOUT ROWID;
""",
}


def opened(path: Path, *, shared: bool = True) -> sqlite3.Connection:
    """The run log, its tables those of today.

    Where memory cannot be shared between processes (network file systems), `shared` is false: then
    nobody else can read the log while it is open, and it is not kept in SQLite's WAL form.
    """
    try:
        with ExitStack() as held:
            db = held.enter_context(closing(sqlite3.connect(path, isolation_level=None)))
            if not shared:
                db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute(f"PRAGMA journal_mode = {'WAL' if shared else 'TRUNCATE'}")
            db.execute(f"PRAGMA synchronous = {'NORMAL' if shared else 'FULL'}")
            _migrate(db, path)
            held.pop_all()
    except sqlite3.DatabaseError as error:
        hint = "move the folder away, or choose another one with -o"
        raise UserError(f"cannot open the run log {path}: {error}", hint=hint) from error
    return db


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    is_new = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None
    if is_new:
        db.executescript(f"BEGIN; {_FIRST} COMMIT;")
    row = db.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
    found = int(row[0]) if row else 1
    if found > SCHEMA:
        raise UserError(
            f"{path.parent.parent} was made by a newer version of omni (log {found})",
            hint="update omni, or choose another folder with -o",
        )
    for number in range(found + 1, SCHEMA + 1):
        db.executescript(
            f"BEGIN; {_MIGRATIONS[number]}"
            f"INSERT OR REPLACE INTO meta VALUES ('schema', '{number}'); COMMIT;"
        )
