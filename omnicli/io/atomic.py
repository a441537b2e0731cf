"""Files that are there whole or not at all: written beside, put on the disk, then renamed."""

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

_PART = re.compile(r"\..+\.\d+\.part", re.DOTALL)


def part_of(path: Path) -> Path:
    """Where a file lies until it is whole: hidden, so that no scan takes it for a recording."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` at the end; after an error that is as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)  # there is none once it was renamed
    _sync_folder(path.parent)


@contextmanager
def replacing_text(path: Path) -> Iterator[TextIO]:
    """The same for UTF-8 text, whatever the locale."""
    with replacing(path) as raw:
        file = io.TextIOWrapper(raw, "utf-8", "backslashreplace")
        yield file
        file.detach()


def write_text(path: Path, text: str) -> Path:
    """Write UTF-8, whatever the locale; what that cannot hold (half a surrogate) is spelled out."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
    return path


def sweep(folder: Path) -> int:
    """Remove what a killed run left half written below `folder`; how many files that were.

    For the holder of the folder's lock only: a file that is being written looks the same.
    """
    parts = [p for p in folder.rglob(".*.part") if _PART.fullmatch(p.name) and p.is_file()]
    for part in parts:
        part.unlink(missing_ok=True)
    return len(parts)


def _sync_folder(folder: Path) -> None:
    """Put the new name on the disk too: the run log may call it done a moment later."""
    if os.name != "posix":
        return  # other systems cannot open a folder
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
