"""Manifests: JSON Lines in NeMo's dialect, read as a stream; docs/manifests.md describes them.

Everything here is a generator over lines: memory does not grow with a manifest, and a line that is
wrong becomes a `BadLine` while the others go on.
"""

import gzip
import io
import json
import math
import os
import sqlite3
import sys
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TextIO, cast

from omnicli.config import SAY
from omnicli.data import Json, Request
from omnicli.errors import UserError
from omnicli.io.audio import probe
from omnicli.io.names import CONTROL, printable

AUDIO_FIELDS = ("audio_filepath", "file_name", "path", "audio")
ID_FIELDS = ("id", "custom_id", "utt_id")
LANGUAGE_FIELDS = ("language", "lang")
FIELDS = (
    *(*AUDIO_FIELDS, *ID_FIELDS, *LANGUAGE_FIELDS),
    *("offset", "duration", "text", "prompt", "say", "voice", "seed", "speak"),
)
LINE_BYTES = 16 << 20  # a longer line is no line
DEPTH = 64  # of nested lists and objects
ID_CHARACTERS = 1024
HASH_DIGITS = 16
LONGEST_S = 1e7  # four months: a longer duration is a mistake
BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"
CLAIM_SHARE = 0.05  # a claimed duration is off if it differs by more than this share
CLAIM_S = 0.1  # and by more than this
MOST_NAMED = 100  # troubles that a report names; all are counted

_PLAIN = (str, int, bool, type(None))
_UTF8 = sys.getfilesystemencoding() == "utf-8"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be taken: where it stands ("calls.jsonl:12") and what is wrong with it."""

    where: str
    what: str


Entry = Request | BadLine


@dataclass(slots=True)
class Cursor:
    """Where the reading stands."""

    index: int = 0  # requests so far, over all inputs
    name: str = ""  # of the source, as its reader wrote it
    number: int = 0  # of the line, from 1
    base: str = ""  # folder that relative paths start from

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.name}:{self.number}"


Parse = Callable[[bytes, Cursor], Request]


# -- names


def native(text: str) -> str:
    """A path from a UTF-8 manifest in the form in which this process names files."""
    if "\0" in text:
        raise ValueError("a path cannot hold a NUL character")
    return text if _UTF8 or text.isascii() else os.fsdecode(text.encode("utf-8", "surrogateescape"))


def path_id(name: str) -> str:
    """The id of a file without one: its relative path; a very long one ends in a hash."""
    text = printable(name)
    if len(text) <= ID_CHARACTERS:
        return text
    digest = sha256(text.encode()).hexdigest()[:HASH_DIGITS]
    return f"{text[: ID_CHARACTERS - HASH_DIGITS - 1]}~{digest}"


def locate(name: str, base: str) -> Path:
    """The file that a manifest names. Accents composed in another way on disk are found too."""
    path = os.path.join(base, name)  # noqa: PTH118 - a million times, and str is what it takes
    return Path(path if name.isascii() else _on_disk(path))


def _on_disk(path: str) -> str:
    """The path as it is spelt on disk, if just one name in a folder is the same after NFC."""
    if os.path.lexists(path):
        return path
    folder, name = os.path.split(path)
    if not name:
        return path
    parent = _on_disk(folder)
    try:
        same = _composed(parent, Path(parent).stat().st_mtime_ns)
    except OSError:
        return path
    names = same.get(unicodedata.normalize("NFC", name), ())
    return os.path.join(parent, names[0]) if len(names) == 1 else path  # noqa: PTH118


@lru_cache(maxsize=16)
def _composed(folder: str, _changed_ns: int) -> dict[str, tuple[str, ...]]:
    """The names in a folder by their composed form."""
    found: dict[str, tuple[str, ...]] = {}
    for name in os.listdir(folder):  # noqa: PTH208 - names, not paths
        key = unicodedata.normalize("NFC", name)
        found[key] = (*found.get(key, ()), name)
    return found


# -- lines


def read_manifest(path: Path, cursor: Cursor, *, audio_root: Path | None = None) -> Iterator[Entry]:
    """The lines of a JSONL file, packed or not. Relative paths start from its folder."""
    cursor.base = os.path.abspath(audio_root or path.parent)  # noqa: PTH100 - links stay links
    yield from read_file(path, cursor, manifest_line)


def read_file(path: Path, cursor: Cursor, parse: Parse) -> Iterator[Entry]:
    """The lines of a file, packed with gzip or not."""
    cursor.name = printable(str(path))
    with _opened(path) as stream:
        yield from read_stream(stream, cursor, parse)


def read_stream(stream: BinaryIO, cursor: Cursor, parse: Parse) -> Iterator[Entry]:
    """One request per line; blank lines are skipped."""
    for cursor.number, line in enumerate(_lines(stream), start=1):
        if isinstance(line, str):
            yield BadLine(cursor.where, line)
            continue
        if not line or line.isspace():
            continue
        try:
            request = parse(line, cursor)
        except (ValueError, RecursionError) as error:
            yield BadLine(cursor.where, _reason(error))
            continue
        cursor.index += 1
        yield request


def byte_stream(stream: TextIO | BinaryIO) -> BinaryIO:
    """The bytes of a stream: stdin's own, or those of a text that is in memory."""
    if not isinstance(stream, io.TextIOBase):
        return cast(BinaryIO, stream)
    inner = getattr(stream, "buffer", None)
    if inner is not None:
        return cast(BinaryIO, inner)
    return io.BytesIO(stream.read().encode("utf-8", "surrogateescape"))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {printable(str(path))}: {error.strerror}") from error
    with stream:
        if not stream.peek(2).startswith(GZIP):
            yield stream
            return
        with gzip.GzipFile(fileobj=stream) as packed:
            yield cast(BinaryIO, io.BufferedReader(packed))


def _lines(stream: BinaryIO) -> Iterator[bytes | str]:
    """Lines without their ends; a text where there is trouble instead of a line."""
    try:
        first = True
        while line := stream.readline(LINE_BYTES + 1):
            if first:
                line, first = line.removeprefix(BOM), False
            if len(line) > LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(LINE_BYTES)
                yield f"longer than {LINE_BYTES >> 20} MiB"
                continue
            yield line.rstrip(b"\r\n")
    except (EOFError, zlib.error, OSError) as error:
        yield f"cannot be read on from here: {error}"


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} (column {error.colno})"
    if isinstance(error, UnicodeError):
        return "not UTF-8"
    if isinstance(error, RecursionError):
        return f"nested deeper than {DEPTH} levels"
    return str(error)


# -- what a line says


def manifest_line(line: bytes, cursor: Cursor) -> Request:
    """A JSON object that names a recording."""
    row = _row(line)
    written = _first_text(row, AUDIO_FIELDS)
    if not written:
        raise ValueError(_without_audio(row))
    name = native(written)
    offset_s = _offset_s(row)
    return Request(
        request_id=_given_id(row) or _made_id(name, cursor.base, offset_s),
        index=cursor.index,
        where=cursor.where,
        audio=locate(name, cursor.base),
        audio_filepath=written,
        offset_s=offset_s,
        duration_s=_duration_s(row, selects=offset_s is not None),
        reference=_text(row, "text"),
        language=_first_text(row, LANGUAGE_FIELDS),
        prompt=_text(row, "prompt"),
        say=_say(row),
        voice=_text(row, "voice") or None,
        seed=_seed(row),
        speak=_flag(row, "speak"),
        raw=_strict(row, DEPTH),
    )


def path_line(line: bytes, cursor: Cursor) -> Request:
    """A path and nothing else."""
    name = os.fsdecode(line)
    if "\0" in name:
        raise ValueError("a path cannot hold a NUL character")
    return Request(
        request_id=_made_id(name, cursor.base, None),
        index=cursor.index,
        where=cursor.where,
        audio=Path(cursor.base, name),
        audio_filepath=name,
    )


def any_line(line: bytes, cursor: Cursor) -> Request:
    """A JSON object or a path: an object begins with a brace."""
    return (manifest_line if line.lstrip().startswith(b"{") else path_line)(line, cursor)


def text_line(line: bytes, cursor: Cursor) -> Request:
    """Something to say: plain text, or a JSON object with a `text`."""
    if not line.lstrip().startswith(b"{"):
        return _spoken({}, line.decode("utf-8"), cursor)
    return spoken_line(line, cursor)


def spoken_line(line: bytes, cursor: Cursor) -> Request:
    """A JSON object with a `text` to say."""
    row = _row(line)
    text = _text(row, "text")
    if text is None:
        raise ValueError(f"no text{_hint(row, ('text',))}")
    return _spoken(row, text, cursor)


def _spoken(row: Row, text: str, cursor: Cursor) -> Request:
    output = _text(row, "output_file")
    stem = path_id(str(PurePath(output).with_suffix(""))) if output else ""
    return Request(
        request_id=_given_id(row) or stem or f"line-{cursor.number:06d}",
        index=cursor.index,
        where=cursor.where,
        speech_text=text,
        language=_first_text(row, LANGUAGE_FIELDS),
        voice=_text(row, "voice") or None,
        seed=_seed(row),
        raw=_strict(row, DEPTH),
    )


def _row(line: bytes) -> Row:
    row = json.loads(line.decode("utf-8"))
    if not isinstance(row, dict):
        hint = "; an array must be split into lines" if isinstance(row, list) else ""
        raise ValueError(f"not a JSON object{hint}")
    return row


def _strict(value: Any, depth: int) -> Any:
    """Without NaN and Infinity, which JSON does not know, and without bottomless nesting."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, dict | list):
        return value
    if not depth:
        raise ValueError(f"nested deeper than {DEPTH} levels")
    if isinstance(value, list):
        return [_strict(one, depth - 1) for one in value]
    return {
        name: one if type(one) in _PLAIN else _strict(one, depth - 1) for name, one in value.items()
    }


def _wrong(name: str, wanted: str, value: Json) -> ValueError:
    shown = json.dumps(value)
    return ValueError(f"{name}: {wanted} is expected, not {shown[:40]}")


def _text(row: Row, name: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong(name, "a text", value)
    return value


def _first_text(row: Row, names: Iterable[str]) -> str | None:
    return next((text for name in names if (text := _text(row, name))), None)


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong(name, "a number", value)
    try:
        return float(value)
    except ValueError:
        raise _wrong(name, "a number", value) from None
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def _offset_s(row: Row) -> float | None:
    offset_s = _number(row, "offset")
    if offset_s is not None and not 0 <= offset_s <= LONGEST_S:
        raise ValueError(f"offset: {offset_s} is no place in a recording")
    return offset_s


def _duration_s(row: Row, *, selects: bool) -> float | None:
    """Beside an offset it selects and must be right; alone it is a claim, and nonsense is none."""
    duration_s = _number(row, "duration")
    if duration_s is None or 0 < duration_s <= LONGEST_S:
        return duration_s
    if selects:
        raise ValueError(f"duration: {duration_s} selects nothing")
    return None


def _seed(row: Row) -> int | None:
    value = row.get("seed")
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or (type(value) is int and 0 <= value < 1 << 63):
        return value
    raise _wrong("seed", "a whole number from 0 on", value)


def _flag(row: Row, name: str) -> bool | None:
    value = row.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise _wrong(name, "true or false", value)


def _say(row: Row) -> str | None:
    value = _text(row, "say") or None
    if value is not None and value not in SAY:
        raise ValueError(f"say: {value!r} is none of {', '.join(SAY)}")
    return value


def _given_id(row: Row) -> str | None:
    for name in ID_FIELDS:
        value = row.get(name)
        if value is not None:
            return _checked_id(name, value)
    return None


def _checked_id(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _wrong(name, "a text", value)
    text = str(value)
    if not text.strip():
        raise ValueError(f"{name}: it is empty")
    if len(text) > ID_CHARACTERS:
        raise ValueError(f"{name}: longer than {ID_CHARACTERS} characters")
    if CONTROL.search(text):
        raise ValueError(f"{name}: it holds control characters")
    text.encode("utf-8")
    return text


def _made_id(name: str, base: str, offset_s: float | None) -> str:
    """The path, relative where it lies below the base; `path#offset` for a part of a file."""
    inside = name.removeprefix(f"{base.rstrip('/')}/")
    if "//" in inside or "/." in inside or inside.startswith("."):
        inside = os.path.normpath(inside)
    if offset_s is None:
        return path_id(inside)
    return path_id(f"{inside}#{repr(offset_s).removesuffix('.0')}")


def _without_audio(row: Row) -> str:
    return f"no {AUDIO_FIELDS[0]}{_hint(row, FIELDS)}"


def _hint(row: Row, fields: tuple[str, ...]) -> str:
    """The first field whose name is nearly one of ours."""
    for name in row:
        near = None if name in FIELDS else _nearest(name[:ID_CHARACTERS].lower(), fields)
        if near:
            return f"; did you mean {near!r} by {name!r}?"
    return ""


@lru_cache(maxsize=1024)
def _nearest(name: str, fields: tuple[str, ...]) -> str | None:
    return next(iter(get_close_matches(name, fields, n=1, cutoff=0.75)), None)


# -- texts to say


def read_texts(source: str, stdin: TextIO | BinaryIO) -> Iterator[Entry]:
    """What `omni say` is to say: lines of text or JSON objects, from a file or (`-`) stdin."""
    cursor = Cursor()
    if source == "-":
        cursor.name = "-"
        return read_stream(byte_stream(stdin), cursor, text_line)
    path = Path(source)
    if not path.exists() or path.is_dir():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{printable(source)} {what}", hint="a file of lines to say, or -")
    is_jsonl = path.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson"))
    return read_file(path, cursor, spoken_line if is_jsonl else text_line)


# -- checking


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that a check found: where, and what."""

    where: str
    what: str


@dataclass(slots=True)
class Troubles:
    """How many there are of a kind, and the first of them."""

    count: int = 0
    first: list[Trouble] = field(default_factory=list)

    def add(self, where: str, what: str) -> None:
        """Count one; name it if it is among the first hundred."""
        self.count += 1
        if len(self.first) < MOST_NAMED:
            self.first.append(Trouble(where, what))


@dataclass(slots=True, kw_only=True)
class CheckReport:
    """What `omni manifest check` found out."""

    requests: int = 0
    total_s: float = 0.0  # of audio, where its length could be told
    bad_lines: Troubles = field(default_factory=Troubles)
    missing: Troubles = field(default_factory=Troubles)
    duplicates: Troubles = field(default_factory=Troubles)
    unknown_length: Troubles = field(default_factory=Troubles)
    wrong_duration: Troubles = field(default_factory=Troubles)

    @property
    def usable(self) -> bool:
        """Whether a run would take the manifest."""
        return not self.bad_lines.count and not self.duplicates.count


def check_manifest(path: Path, *, audio_root: Path | None = None) -> CheckReport:
    """Read a manifest as a run would, and look at every file's header. Nothing is decoded."""
    report = CheckReport()
    length_s = lru_cache(maxsize=64)(probe)  # lines that share a file mostly stand together
    entries = read_manifest(path, Cursor(), audio_root=audio_root)
    with closing(sqlite3.connect("")) as seen:  # on disk as it grows: any number of ids
        seen.execute("CREATE TABLE seen (id TEXT PRIMARY KEY, place TEXT) WITHOUT ROWID")
        for entry in entries:
            if isinstance(entry, BadLine):
                report.bad_lines.add(entry.where, entry.what)
                continue
            report.requests += 1
            _check_id(report, entry, seen)
            _check_file(report, entry, length_s)
    return report


def _check_id(report: CheckReport, request: Request, seen: sqlite3.Connection) -> None:
    name = request.request_id
    try:
        seen.execute("INSERT INTO seen VALUES (?, ?)", (name, request.where))
    except sqlite3.IntegrityError:
        place = seen.execute("SELECT place FROM seen WHERE id = ?", (name,)).fetchone()[0]
        report.duplicates.add(request.where, f"the id {name!r} is taken by {place}")


def _check_file(
    report: CheckReport, request: Request, probed: Callable[[Path], float | None]
) -> None:
    assert request.audio is not None
    shown = printable(str(request.audio))
    if not request.audio.exists():
        report.missing.add(request.where, shown)
        return
    length_s = probed(request.audio)
    if length_s is None:
        report.unknown_length.add(request.where, shown)
        return
    rest_s = max(0.0, length_s - (request.offset_s or 0.0))
    claimed_s = request.duration_s
    selects = request.offset_s is not None and claimed_s is not None
    report.total_s += min(rest_s, claimed_s) if selects and claimed_s is not None else rest_s
    if claimed_s is not None and claim_is_off(claimed_s, rest_s, selects=selects):
        report.wrong_duration.add(request.where, f"{claimed_s:g} s, but there are {rest_s:.3f} s")


def claim_is_off(claimed_s: float, real_s: float, *, selects: bool = False) -> bool:
    """Whether a duration differs by more than 5 % and 0.1 s; a selection may leave a rest."""
    off_s = claimed_s - real_s if selects else abs(claimed_s - real_s)
    return off_s > max(CLAIM_S, CLAIM_SHARE * real_s)
