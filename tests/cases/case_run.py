"""Run a command in this process, and check what has to hold after every run."""

import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest

from omnicli import cli

BASE = "base"  # folder of the base set, in every input
ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "results.schema.json").read_text(encoding="utf-8"))
VALID = jsonschema.Draft202012Validator(SCHEMA)
SAME = (
    *("id", "status", "error", "warnings", "duration", "pred_text", "language", "segments"),
    *("response_text", "response_language", "response_kind", "summary_method"),
    *("audio_out", "audio_out_duration", "finish_reason", "scores", "audio_in"),
)
OWN_FILES = {"events.jsonl", "lock", "run.sqlite", "runs"}


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Case:
    """A run that was checked, and its lines by id."""

    ran: Ran
    out: Path
    lines: dict[str, dict]

    def __getitem__(self, name: str) -> dict:
        return self.lines[name]

    def text(self, name: str) -> str:
        """A transcript in small letters without punctuation."""
        return words(self.lines[name]["pred_text"])

    def warned(self, name: str) -> set[str]:
        """The words that warnings begin with."""
        return {told.partition(":")[0] for told in self.lines[name]["warnings"]}

    def failed(self, name: str) -> str | None:
        """The error's code."""
        line = self.lines[name]
        assert (line["status"] == "failed") == (line["error"] is not None)
        return line["error"] and line["error"]["code"]


def words(text: str) -> str:
    """Small letters and digits, single spaces."""
    kept = "".join(c.lower() if c.isalnum() else " " for c in text)
    return " ".join(kept.split())


# -- running


class Omni:
    """The command line in this process."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def __call__(self, *args, cwd: Path | None = None, stdin: str = "", **environ: str) -> Ran:
        argv = ["omni", *map(str, args)]
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("OMNI_")]:
                patch.delenv(name)
            for name, value in ({"OMNI_CACHE": self.cache} | environ).items():
                patch.setenv(name, str(value))
            if cwd is not None:
                patch.chdir(cwd)
            patch.setattr(sys, "argv", argv)
            with streams(stdin) as told, pytest.raises(SystemExit) as ended:
                cli.main()
        return Ran(ended.value.code or 0, *told)


@contextmanager
def streams(stdin: str) -> Iterator[list[str]]:
    """The descriptors 0 to 2 and their Python streams, led to files for a block.

    At its end the list holds what was written to stdout and to stderr.
    """
    told: list[str] = []
    before = sys.stdin, sys.stdout, sys.stderr
    with ExitStack() as open_:
        files = [open_.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(stdin.encode())
        files[0].seek(0)
        kept = [os.dup(n) for n in range(3)]
        for n, file in enumerate(files):
            os.dup2(file.fileno(), n)
        sys.stdin, sys.stdout, sys.stderr = (
            open(n, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - see `finally`
            for n, mode in enumerate(("r", "w", "w"))
        )
        try:
            yield told
        finally:
            for stream in (sys.stdin, sys.stdout, sys.stderr):
                stream.close()
            sys.stdin, sys.stdout, sys.stderr = before
            for n, real in enumerate(kept):
                os.dup2(real, n)
                os.close(real)
            for file in files[1:]:
                file.seek(0)
                told.append(file.read().decode("utf-8"))


# -- what has to hold


def check(
    omni: Omni,
    solo: Case | None,
    *args,
    count: int,
    code: int,
    again: tuple[str, ...] | None = None,
    **environ: str,
) -> Case:
    """Run it twice, quietly; everything of A.13 holds. `-o` must be among the arguments.

    `count` is the number of inputs. `again` are the second run's arguments if they differ.
    """
    out = Path(args[args.index("-o") + 1])
    ran = omni(*args, "--quiet", **environ)
    assert ran.code == code, ran.err
    case = settled(out, ran, solo, count=count, code=code)
    before, batches = files_of(out), events(out, "batch")
    second = omni(*(again or args), "--quiet", **environ)
    assert second.code == code, second.err
    assert events(out, "batch") == batches, "a rerun computes nothing"
    assert files_of(out) == before, "a rerun writes nothing"
    return case


def settled(out: Path, ran: Ran, solo: Case | None, *, count: int, code: int) -> Case:
    """What has to hold when a run is over."""
    case = Case(ran, out, results(out))
    assert len(case.lines) == len(read_lines(out / "results.jsonl")) == count
    if solo is not None:
        same_base(case, solo)
    nothing_left(out)
    strict(out)
    failed = [name for name, line in case.lines.items() if line["status"] == "failed"]
    assert code != 0 or not failed
    assert code != 3 or failed
    if code == 0:
        assert ran.err == ""
    else:
        assert all(f"failed: {name}: " in ran.err for name in failed[:10])
    return case


def same_base(case: Case, solo: Case) -> None:
    """The base set's results are those that it has alone."""
    for name, line in solo.lines.items():
        assert {f: case[name][f] for f in SAME} == {f: line[f] for f in SAME}
        for ending in (".txt", ".wav", ".summary.txt"):
            mine, theirs = (c.out / f"{c[name]['stem']}{ending}" for c in (case, solo))
            if theirs.exists():
                assert mine.read_bytes() == theirs.read_bytes(), mine


def nothing_left(out: Path) -> None:
    """No half-written files, nothing in flight."""
    assert not list(out.rglob("*.part"))
    assert {path.name for path in (out / ".omni").iterdir()} <= OWN_FILES
    with sqlite3.connect(f"file:{out / '.omni' / 'run.sqlite'}?mode=ro", uri=True) as db:
        assert db.execute("SELECT count(*) FROM in_flight").fetchone() == (0,)
    db.close()


def strict(out: Path) -> None:
    """All JSON is strict, and lines are as the schema has them."""
    for path in (*out.rglob("*.json"), *out.rglob("*.jsonl")):
        rows = read_lines(path) if path.suffix == ".jsonl" else [loads(path.read_text("utf-8"))]
        if path.name == "results.jsonl":
            for row in rows:
                VALID.validate(row)
    errors = out / "errors.jsonl"
    told = {row["id"] for row in read_lines(errors)} if errors.exists() else set()
    failed = [r for r in read_lines(out / "results.jsonl") if r["status"] == "failed"]
    assert told == {row["id"] for row in failed}


def loads(text: str):
    """Strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def read_lines(path: Path) -> list[dict]:
    """JSON Lines, every one whole."""
    text = path.read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return [loads(line) for line in text.split("\n")[:-1]]


def results(out: Path) -> dict[str, dict]:
    """The lines of a run by id."""
    return {row["id"]: row for row in read_lines(out / "results.jsonl")}


def events(out: Path, kind: str) -> list[dict]:
    """Events of one kind, of all runs."""
    path = out / ".omni" / "events.jsonl"
    return [e for e in read_lines(path) if e["event"] == kind] if path.exists() else []


def files_of(out: Path) -> dict[str, object]:
    """Results and when they were written; of those that are written every time, the content."""
    found: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_file() and not name.startswith(".omni/"):
            listing = name in ("results.jsonl", "errors.jsonl")
            found[name] = path.read_bytes() if listing else path.stat().st_mtime_ns
    return found


def put_base(base: Path, folder: Path) -> Path:
    """The base set, below a folder."""
    shutil.copytree(base, folder / BASE)
    return folder


def manifest(path: Path, base: Path, rows: list[dict], *, first: bool = True) -> Path:
    """A manifest of the base set, by the ids that it has in a folder, and of other rows."""
    known = [{"id": f"{BASE}/{p.name}", "audio_filepath": str(p)} for p in sorted(base.iterdir())]
    lines = [*known, *rows] if first else [*rows, *known]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
