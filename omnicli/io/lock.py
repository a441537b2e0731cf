"""A run holds its output folder until it ends, however it ends.

The kernel's flock goes with the process, so a dead holder never blocks. Where flock cannot be
trusted (network file systems), a lease does it: a file that only one can make, written to every
half minute, and dead when that has not happened for five. All times are those of the file server.

Only one may take over from a dead holder: who makes the file that is named after that holder's
token. Whoever was slower finds another token in the lease, and leaves it alone.
"""

import contextlib
import errno
import fcntl
import math
import os
import platform
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TextIO

from omnicli.errors import BusyError, RunError, UserError
from omnicli.observe import now_iso

TOUCH_S, DEAD_S = 30.0, 300.0
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_SOME_RUN = "another run"


class Lock:
    """The folder is ours."""

    def check(self) -> None:
        """Raises RunError if it is not any more."""


@contextmanager
def held(
    path: Path, *, network: bool, describe: str, touch_s: float = TOUCH_S, dead_s: float = DEAD_S
) -> Iterator[Lock]:
    """Hold the folder that `path` lies in; with `network`, by a lease.

    Raises BusyError if another run has it, and UserError where nothing can be written.
    """
    told = f"{describe} (process {os.getpid()} on {platform.node()}, since {now_iso()[:19]})"
    with _refusals(path):
        file = None if network else _flocked(path, told)
    if file is not None:
        with file:
            yield Lock()
        return
    with _leased(_lease_of(path), told, touch_s, dead_s) as lease:
        yield lease


def holder(path: Path, *, dead_s: float = DEAD_S) -> str | None:
    """Who holds the folder that `path` lies in; None if nobody does, or nobody can tell."""
    lease = _lease_of(path)
    with contextlib.suppress(OSError):
        found = _read(lease)
        if _now_there_s(lease) - found.touched_s < _patience_s(found.process, dead_s):
            return found.told or "a run"
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(300).strip() or "a run"
    return None


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot write to {path.parent}: {reason}") from error


def _flocked(path: Path, told: str) -> TextIO | None:
    """The file, locked and saying by whom; None where files cannot be locked."""
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(path.open("a+", encoding="utf-8", errors="replace"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise _busy(path, file.read(300)) from error
        except OSError as error:
            if error.errno in _NO_FLOCK:
                return None
            raise UserError(f"cannot lock {path}: {error.strerror}") from error
        file.truncate(0)
        file.write(f"{told}\n")
        file.flush()
        opened.pop_all()
    return file


def _busy(path: Path, by: str) -> BusyError:
    return BusyError(
        f"{path.parent.parent} is in use by {by.strip() or _SOME_RUN}",
        hint="wait until it ends, or choose another folder with -o",
    )


# -- the lease


@dataclass(frozen=True, slots=True)
class _Lease(Lock):
    """Our file, known by its first line."""

    path: Path
    token: str

    def check(self) -> None:
        try:
            is_ours = _token(self.path) == self.token
        except OSError as error:
            raise RunError(
                f"cannot tell whether {self.path.parent.parent} is still ours: {error.strerror}",
                hint="the same command goes on where this run stopped",
            ) from error
        if not is_ours:
            raise RunError(
                f"{self.path.parent.parent} was taken over by another run",
                hint="this machine stood still for minutes; run the same command again",
            )


@dataclass(frozen=True, slots=True)
class _Found:
    """A lease as it was read."""

    token: str
    process: str
    told: str
    touched_s: float  # since the epoch


def _lease_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lease")


@contextmanager
def _leased(path: Path, told: str, touch_s: float, dead_s: float) -> Iterator[_Lease]:
    lease = _Lease(path, secrets.token_hex(16))
    text = f"{lease.token}\n{_process()}\n{told}\n".encode()
    with _refusals(path):
        file = _made(path, text)
        if file is None:
            _retire(path, dead_s)
            file = _made(path, text)
    if file is None:
        raise _busy(path, _SOME_RUN)
    pid, over = os.getpid(), threading.Event()
    thread = threading.Thread(target=_touch, args=(file, text, over, touch_s), daemon=True)
    with file:
        try:
            thread.start()
            yield lease
        finally:
            if os.getpid() == pid:  # a forked child leaves, and its parent goes on
                over.set()
                if thread.ident is not None:
                    thread.join()
                _release(lease)


def _made(path: Path, text: bytes) -> FileIO | None:
    """Make the file if there is none: the one thing that is atomic everywhere."""
    try:
        file = FileIO(path, "x")
    except FileExistsError:
        return None
    try:
        file.write(text)
        os.fsync(file.fileno())
    except OSError:
        file.close()
        path.unlink(missing_ok=True)
        raise
    return file


def _touch(file: FileIO, text: bytes, over: threading.Event, touch_s: float) -> None:
    """Write through the open file: it stays ours, whatever lies under its name by now.

    Writing sets the time by the server's clock; setting it outright may take this machine's.
    """
    while not over.wait(touch_s):
        with contextlib.suppress(OSError):  # `check` will notice
            os.pwrite(file.fileno(), text, 0)
            os.fsync(file.fileno())


def _release(lease: _Lease) -> None:
    with contextlib.suppress(OSError):  # then it dies of itself
        if _token(lease.path) == lease.token:
            lease.path.unlink()


def _token(path: Path) -> str:
    """The first line; empty if there is no such file. Raises OSError."""
    try:
        return _read(path).token
    except FileNotFoundError:
        return ""


def _read(path: Path) -> _Found:
    with path.open(encoding="utf-8", errors="replace") as file:
        token, process, told, *_ = [*file.read(4096).splitlines(), "", "", ""]
        return _Found(token, process, told, os.fstat(file.fileno()).st_mtime)


# -- taking over


def _retire(path: Path, dead_s: float) -> None:
    """Remove a dead holder's lease; raises BusyError if it lives, or somebody else does that."""
    try:
        found = _read(path)
    except FileNotFoundError:
        return
    now_s = _now_there_s(path)
    if now_s - found.touched_s < _patience_s(found.process, dead_s):
        raise _busy(path, found.told)
    name = found.token[:32] if found.token.isalnum() else "broken"
    guard = path.with_name(f"{path.name}.{name}.taken")
    try:
        FileIO(guard, "x").close()
    except FileExistsError:
        _forget(guard, now_s - dead_s)
        raise _busy(path, _SOME_RUN) from None
    try:
        _remove(path, found.token)
    finally:
        guard.unlink(missing_ok=True)


def _forget(guard: Path, before_s: float) -> None:
    """Who died over a takeover must not stop those that come later."""
    with contextlib.suppress(FileNotFoundError):
        if guard.stat().st_mtime < before_s:
            guard.unlink()


def _remove(path: Path, token: str) -> None:
    """Remove the lease with that token and no other."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    if _token(path) != token:
        return
    with contextlib.suppress(FileNotFoundError):  # its holder was alive, and left
        path.rename(aside)
        if _token(aside) != token:  # and a new one came
            aside.rename(path)
            raise _busy(path, _SOME_RUN)
        aside.unlink()


def _now_there_s(path: Path) -> float:
    """The time, by the clock of the server that keeps the folder of `path`."""
    probe = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with FileIO(probe, "x") as file:
            file.write(b"?")
            os.fsync(file.fileno())
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _patience_s(process: str, dead_s: float) -> float:
    """For how long a holder may be silent before it counts as dead."""
    node, boot, numbers, pid, started, *_ = [*process.split(), *[""] * 5]
    if not boot or node != platform.node():
        return dead_s
    if boot != _boot_id():  # restarted since, or another machine of the same name
        return dead_s / 3
    if numbers != _pid_namespace():
        return dead_s
    return math.inf if started and _started(pid) == started else -math.inf


def _process() -> str:
    """This process as no other: machine, boot, whose numbers, number, and when it started."""
    pid = os.getpid()
    return f"{platform.node()} {_boot_id()} {_pid_namespace()} {pid} {_started(str(pid))}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    """In which namespace numbers of processes are counted: containers count for themselves."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "-"


def _started(pid: str) -> str:
    """When a process started, in ticks since boot (proc(5)); empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    state, *fields = text.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
