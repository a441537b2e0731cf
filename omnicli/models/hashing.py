"""SHA-256 of files, remembered in the cache: a large model is not read anew on every start."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omnicli.errors import UserError
from omnicli.models.canonical import json_file

SHORT = 12  # hex digits that stand for a model in results


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_files(paths: Sequence[Path], cache: Path) -> str:
    """Of one file its SHA-256; of several one over theirs, in this order."""
    found = [_remembered(path.resolve(), cache) for path in paths]
    return found[0] if len(found) == 1 else of_text("".join(found))


def of_text(text: str) -> str:
    """Of a text's UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def _remembered(path: Path, cache: Path) -> str:
    """Read again only when size or time have changed; an unwritable cache is no obstacle."""
    state = path.stat()
    seen = {"path": str(path), "bytes": state.st_size, "modified_ns": state.st_mtime_ns}
    note = cache / "hashes" / f"{of_text(str(path))}.json"
    noted = _noted(note)
    if noted.items() >= seen.items() and isinstance(noted.get("sha256"), str):
        return str(noted["sha256"])
    digest = sha256(path)
    with suppress(OSError):
        _write(note, json.dumps({**seen, "sha256": digest}))
    return digest


def _noted(note: Path) -> dict[str, object]:
    try:
        return json_file(note)
    except UserError:
        return {}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
