"""Which recordings there are: from files, folders, patterns, lists and manifests to requests.

The order is that of the command line, and by name within a folder. Nothing is opened but manifests
and lists, and no file is asked for its size: ten thousand files take a fraction of a second.
"""

import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

from omnicli.data import Request
from omnicli.errors import UserError
from omnicli.io.audio import probe
from omnicli.io.manifest import (
    AUDIO_FIELDS,
    LINE_BYTES,
    Cursor,
    Entry,
    any_line,
    byte_stream,
    path_id,
    path_line,
    read_file,
    read_manifest,
    read_stream,
)
from omnicli.io.names import printable
from omnicli.io.stems import AUDIO_SUFFIXES

RUN_FOLDER = ".omni"  # a folder that holds it is an output folder of ours
STDIN = "-"
MANIFEST_SUFFIXES = (".jsonl", ".ndjson")
DURATION_DIGITS = 3

Kind = Literal["file", "folder", "manifest", "stdin", "list", "list from stdin"]


@dataclass(frozen=True, slots=True)
class _Source:
    """One thing that the command line names."""

    kind: Kind
    written: str = STDIN

    @property
    def path(self) -> str:
        """Absolute; links stay links."""
        return os.path.abspath(self.written)  # noqa: PTH100 - `resolve` would follow links


# -- everything that a command line names


def read_inputs(
    inputs: Sequence[str],
    *,
    stdin: TextIO | BinaryIO,
    files_from: Sequence[str] = (),
    audio_root: Path | None = None,
    exclude: Sequence[Path] = (),
    recursive: bool = True,
) -> Iterator[Entry]:
    """Requests in a fixed order, numbered from 0, and the lines that cannot be taken.

    `exclude` are folders not to descend into, such as this run's output. Raises UserError at once
    for what is not there; an unreadable folder becomes a request that will fail.
    """
    outputs = _Outputs(exclude)
    found, sources = _plan(inputs, files_from, outputs)
    return _read(sources, _Files(found, outputs, recursive), stdin, audio_root)


def _read(
    sources: Sequence[_Source], files: "_Files", stdin: TextIO | BinaryIO, audio_root: Path | None
) -> Iterator[Entry]:
    cursor = Cursor()
    root = os.path.abspath(audio_root or Path())  # noqa: PTH100
    for source in sources:
        cursor.base = root
        if source.kind in ("file", "folder"):
            yield from files.read(source, cursor)
        elif source.kind == "manifest":
            yield from read_manifest(Path(source.written), cursor, audio_root=audio_root)
        elif source.kind == "list":
            yield from read_file(Path(source.written), cursor, path_line)
        else:
            cursor.name = STDIN
            parse = any_line if source.kind == "stdin" else path_line
            yield from read_stream(byte_stream(stdin), cursor, parse)


def _plan(
    inputs: Sequence[str], files_from: Sequence[str], outputs: "_Outputs"
) -> tuple[list[str], list[_Source]]:
    """Folders that ids are relative to, and the sources, each once."""
    if not inputs and not files_from:
        raise UserError("no input", hint="files, folders, patterns, a manifest (*.jsonl), or -")
    bases: list[str] = []
    sources: list[_Source] = []
    for written in inputs:
        for source in _sources(written, outputs):
            sources.append(source)
            if source.kind in ("file", "folder"):
                bases.append(_base(written, source))
    for written in files_from:
        sources.append(_list_source(written))
    if sum(source.written == STDIN for source in set(sources)) > 1:
        raise UserError("stdin is named twice, as input and for --files-from")
    once = {(source.kind, source.path): source for source in reversed(sources)}
    return bases, list(reversed(once.values()))


def _sources(written: str, outputs: "_Outputs") -> list[_Source]:
    if written == STDIN:
        return [_Source("stdin")]
    if os.path.lexists(written):
        return [_checked(_Source(_kind(written), written), outputs)]
    if not glob.has_magic(written):
        raise UserError(
            f"{printable(written)} does not exist",
            hint="see the path, or quote it if it has spaces",
        )
    base = _static_folder(written)
    names = sorted(glob.glob(written, recursive=True))  # noqa: PTH207 - `**` as shells have it
    kept = [name for name in names if not outputs.lies_in(name, base)]
    if not kept:
        raise UserError(f"nothing matches {printable(written)}")
    return [_Source(_kind(name), name) for name in kept]


def _checked(source: _Source, outputs: "_Outputs") -> _Source:
    if source.kind == "folder" and outputs.is_one(os.path.realpath(source.written)):
        raise UserError(
            f"{printable(source.written)} is an output folder of omni, not one of recordings",
            hint="name the folder of recordings, and another one with -o; or remove its .omni",
        )
    return source


def _kind(written: str) -> Kind:
    path = Path(written)
    if path.is_dir():
        return "folder"
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(MANIFEST_SUFFIXES) or (name.endswith(".json") and _holds_lines(path)):
        return "manifest"
    return "file"


def _holds_lines(path: Path) -> bool:
    """Whether a `.json` file is a manifest, as NeMo names them, and not one document."""
    try:
        with path.open("rb") as file:
            row = json.loads(file.readline(LINE_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(row, dict) and any(name in row for name in AUDIO_FIELDS)


def _list_source(written: str) -> _Source:
    if written == STDIN:
        return _Source("list from stdin")
    path = Path(written)
    if not path.exists() or path.is_dir():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"the list {printable(written)} {what}", hint="one path per line")
    return _Source("list", written)


def _base(written: str, source: _Source) -> str:
    """The folder that the ids of a source are relative to, if there is no other source."""
    if written != source.written:  # a pattern: the same base however many files it matches
        return os.path.abspath(_static_folder(written))  # noqa: PTH100
    return source.path if source.kind == "folder" else os.path.dirname(source.path)  # noqa: PTH120


def _static_folder(pattern: str) -> str:
    """The part of a pattern before the first folder with a wildcard: `in/*/x.wav` -> `in`."""
    folder = pattern
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)  # noqa: PTH120
    return folder or os.curdir


def root_of(
    inputs: Sequence[str],
    *,
    files_from: Sequence[str] = (),
    audio_root: Path | None = None,
    texts: bool = False,
    output_dir: Path | None = None,
) -> str | None:
    """What the ids of an input are relative to; for texts to say, the file that holds them.

    None where that is of no consequence: a list of what failed, from the output folder itself.
    """
    if texts:
        return STDIN if inputs[0] == STDIN else printable(os.path.abspath(inputs[0]))  # noqa: PTH100
    here = os.path.abspath(audio_root or Path())  # noqa: PTH100
    bases = [here] if files_from else []
    for written in inputs:
        for source in _sources(written, _Outputs(())) if written != STDIN else ():
            if source.kind in ("file", "folder"):
                bases.append(_base(written, source))
            elif output_dir is None or not _lies_at(source.path, output_dir):
                bases.append(here if audio_root else os.path.dirname(source.path))  # noqa: PTH120
        if written == STDIN:
            bases.append(here)
    return printable(os.path.commonpath(bases)) if bases else None


def _lies_at(path: str, folder: Path) -> bool:
    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(folder)  # noqa: PTH120


# -- files and folders


class _Files:
    """Files and folders of one command line; their ids are relative to what they have in common."""

    def __init__(self, bases: Sequence[str], outputs: "_Outputs", recursive: bool) -> None:
        self._base = os.path.commonpath(bases) if bases else ""
        self._outputs = outputs
        self._recursive = recursive

    def read(self, source: _Source, cursor: Cursor) -> Iterator[Request]:
        """A file as one request, a folder as all recordings in it."""
        if source.kind == "file":
            yield self._request(source.path, source.written, cursor)
            return
        for inside in _walk(source.path, self._outputs, recursive=self._recursive):
            path, written = (
                f"{folder.rstrip('/')}/{inside}" if inside else folder
                for folder in (source.path, source.written)
            )
            yield self._request(path, written, cursor)

    def _request(self, path: str, written: str, cursor: Cursor) -> Request:
        inside = path.removeprefix(f"{self._base.rstrip('/')}/")
        request = Request(
            request_id=path_id(written if path == self._base else inside),
            index=cursor.index,
            where=printable(written),
            audio=Path(path),
            audio_filepath=written,
        )
        cursor.index += 1
        return request


class _Outputs:
    """Folders that runs write into: never taken for recordings."""

    def __init__(self, exclude: Iterable[Path]) -> None:
        self._excluded = {os.path.realpath(path) for path in exclude}
        self._known: dict[str, bool] = {}

    def is_one(self, folder: str) -> bool:
        """Whether a folder, its links resolved, is written to by this run or was by another."""
        return folder in self._excluded or os.path.lexists(f"{folder}/{RUN_FOLDER}")

    def lies_in(self, path: str, base: str) -> bool:
        """Whether a file lies in such a folder, or is one, below `base`."""
        top = os.path.realpath(base)
        real = os.path.realpath(path)
        while real.startswith(top) and real != top:
            if real not in self._known:
                self._known[real] = self.is_one(real)
            if self._known[real]:
                return True
            real = os.path.dirname(real)  # noqa: PTH120
        return False


def is_recording(name: str) -> bool:
    """Whether a file in a folder counts: a known suffix, and not hidden (`.wav`, `._x.wav`)."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in AUDIO_SUFFIXES  # noqa: PTH122


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder on the way: its path below the root ("" is the root), and that without links."""

    inside: str
    real: str
    is_link: bool = False


def _walk(root: str, outputs: _Outputs, *, recursive: bool = True) -> Iterator[str]:
    """Paths of recordings below the root, by name; of a folder that cannot be read, its own.

    A linked folder is followed unless it lies in one that is walked anyway.
    """
    top = _Folder("", os.path.realpath(root))
    walked = {top.real}
    pending = [_entries(root, top)]
    while pending:
        entry = next(pending[-1], None)
        if entry is None:
            pending.pop()
        elif isinstance(entry, str):
            yield entry
        elif recursive and not outputs.is_one(entry.real) and _is_new(entry, walked):
            pending.append(_entries(root, entry))


def _is_new(folder: _Folder, walked: set[str]) -> bool:
    """Whether no other way leads to a folder; a link's end is remembered."""
    if not folder.is_link:
        return folder.real not in walked
    if any(str(place) in walked for place in (folder.real, *Path(folder.real).parents)):
        return False
    walked.add(folder.real)
    return True


def _entries(root: str, folder: _Folder) -> Iterator[_Folder | str]:
    """Recordings and folders in a folder, by name."""
    try:
        with os.scandir(f"{root}/{folder.inside}") as found:
            entries = sorted(filter(None, map(_entry, found)))
    except OSError:
        yield folder.inside
        return
    front = f"{folder.inside}/" if folder.inside else ""
    for name, is_folder, is_link in entries:
        if not is_folder:
            yield front + name
        else:
            real = f"{folder.real.rstrip('/')}/{name}"
            yield _Folder(front + name, os.path.realpath(real) if is_link else real, is_link)


def _entry(entry: os.DirEntry[str]) -> tuple[str, bool, bool] | None:
    """Name, whether it is a folder, whether it is a link; None for what does not count."""
    if entry.name.startswith("."):
        return None
    try:
        is_folder = entry.is_dir()
    except OSError:  # a link into a place that may not be looked at
        is_folder = False
    if is_folder or is_recording(entry.name):
        return entry.name, is_folder, entry.is_symlink()
    return None


# -- building a manifest


@dataclass(slots=True)
class BuildReport:
    """What `omni manifest build` wrote."""

    recordings: int = 0
    total_s: float = 0.0
    unknown_length: int = 0  # written without a duration
    unreadable: int = 0  # folders


def build_manifest(
    folder: Path,
    out: TextIO,
    *,
    relative_to: Path | None = None,
    exclude: Sequence[Path] = (),
    recursive: bool = True,
) -> BuildReport:
    """Write a line for every recording below a folder; durations are those of the headers.

    Paths are relative to `relative_to` (the folder itself), where the manifest should lie; a
    recording outside of it is named by its absolute path.
    """
    if not folder.is_dir():
        raise UserError(f"{printable(str(folder))} is no folder")
    report = BuildReport()
    root = os.path.abspath(folder)  # noqa: PTH100
    start = f"{os.path.abspath(relative_to or folder).rstrip('/')}/"  # noqa: PTH100
    for inside in _walk(root, _Outputs(exclude), recursive=recursive):
        path = Path(root, inside)
        if path.is_dir():
            report.unreadable += 1
            continue
        duration_s = probe(path)
        out.write(_line(str(path).removeprefix(start), duration_s) + "\n")
        report.recordings += 1
        report.total_s += duration_s or 0.0
        report.unknown_length += duration_s is None
    return report


def _line(name: str, duration_s: float | None) -> str:
    row: dict[str, str | float] = {"audio_filepath": name}
    if duration_s is not None:
        row["duration"] = round(duration_s, DURATION_DIGITS)
    is_text = printable(name) == name  # else bytes that are no UTF-8 are written as \udcXX
    return json.dumps(row, ensure_ascii=not is_text)
