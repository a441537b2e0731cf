"""The model cache on disk: whole folders only, made once, safe against two makers and kill -9.

    CACHE/KIND/NAME/            canonical files and manifest.json
    CACHE/KIND/.NAME.partial/   being made, by the holder of the lock
    CACHE/incoming/NAME/        files out of wheels, until all are there
    CACHE/hashes/               what files elsewhere hashed to
    CACHE/locks/

A folder appears under its name by one rename, after all its bytes are on the disk.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pwd import getpwuid

from omnicli.errors import UserError
from omnicli.models.canonical import WEIGHTS, Canonical, json_file
from omnicli.models.hashing import sha256
from omnicli.models.weights import write

MANIFEST = "manifest.json"
CONVERSION = 1  # raised when the canonical form changes: older folders are then made anew


def cache_dir(environ: Mapping[str, str]) -> Path:
    """$OMNI_CACHE, else the XDG cache, else the account's (cron may set no variable at all)."""
    if environ.get("OMNI_CACHE"):
        return Path(environ["OMNI_CACHE"]).absolute()
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():  # the specification wants a relative one ignored
        return xdg / "omni"
    return (Path(environ["HOME"]) if environ.get("HOME") else _account_home()) / ".cache" / "omni"


def _account_home() -> Path:
    try:
        return Path(getpwuid(os.getuid()).pw_dir)
    except KeyError as error:
        raise UserError(
            "no place for the model cache: this account has no home",
            hint="set OMNI_CACHE to a folder",
        ) from error


# ---------------------------------------------------------------------------------- manifests


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What lies in a canonical folder, recorded when it was made."""

    kind: str
    name: str
    licence: str
    digest: str  # SHA-256 of the source's weights
    conversion: int
    bytes: dict[str, int] = field(default_factory=dict)  # file -> size
    sha256: dict[str, str] = field(default_factory=dict)  # file -> hash


def manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder that is whole, as far as sizes tell; None if it must be made."""
    found = recorded(folder)
    if found is None or found.conversion != CONVERSION or changed_sizes(folder, found):
        return None
    return found


def recorded(folder: Path) -> Manifest | None:
    """The manifest of a folder, if it has a sound one, whatever has become of the files."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        found = json_file(folder / MANIFEST)
    except UserError:
        return None
    match found:
        case {
            "kind": str(kind),
            "name": str(name),
            "licence": str(licence),
            "digest": str(digest),
            "conversion": int(conversion),
            "bytes": dict(sizes),
            "sha256": dict(hashes),
        }:
            return Manifest(
                kind=kind,
                name=name,
                licence=licence,
                digest=digest,
                conversion=conversion,
                bytes=sizes,
                sha256=hashes,
            )
    return None


def changed_sizes(folder: Path, found: Manifest) -> list[str]:
    """Files that are missing or of another size."""
    return [name for name, size in found.bytes.items() if _size(folder / name) != size]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


# ------------------------------------------------------------------------------------- making


@contextmanager
def locked(cache: Path, key: str) -> Iterator[None]:
    """One maker at a time; the system lets go of the lock when its holder dies, however it dies."""
    with usable(cache):
        place = cache / "locks" / f"{key}.lock"
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@contextmanager
def usable(cache: Path) -> Iterator[None]:
    """Whatever the system refuses is the user's to mend: no room, no right, no such disk."""
    try:
        yield
    except OSError as error:
        where = error.filename or cache
        raise UserError(
            f"the model cache cannot be used: {where}: {error.strerror or error}",
            hint="make room, or set OMNI_CACHE to a folder that can be read and written",
        ) from error


def publish(
    folder: Path, model: Canonical, blank: Manifest, step: Callable[[int], object]
) -> Manifest:
    """Write a model under its final name, all or nothing. The caller holds the lock."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_files(partial, model)
    if model.weights:
        write(partial / WEIGHTS, model.weights, step)
    files = sorted(partial.iterdir())
    made = replace(
        blank,
        bytes={path.name: path.stat().st_size for path in files},
        sha256={path.name: sha256(path) for path in files},
    )
    _write_json(partial / MANIFEST, asdict(made))
    for path in partial.iterdir():
        _flush(path)
    _replace(folder, partial)
    return made


def _write_files(partial: Path, model: Canonical) -> None:
    for name, content in model.files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, partial / name)
        else:
            _write_json(partial / name, content)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _replace(folder: Path, partial: Path) -> None:
    """A damaged or outdated folder steps aside; who has its files open keeps them."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    partial.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
