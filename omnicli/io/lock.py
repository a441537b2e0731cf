"""A run holds its output folder until it ends, however it ends.

The kernel's flock goes with the process, so a dead holder never blocks. Where flock cannot be
trusted (network file systems), a lease does it: a file that only one can make, touched every half
minute, and dead when it has not been touched for five.
"""

import contextlib
import errno
import fcntl
import os
import platform
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from omnicli.errors import BusyError, RunError, UserError
from omnicli.observe import now_iso

TOUCH_S, DEAD_S = 30.0, 300.0
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class Lock:
    """The folder is ours."""

    def check(self) -> None:
        """Raises RunError if it is not any more."""


@contextmanager
def held(
    path: Path, *, network: bool, describe: str, touch_s: float = TOUCH_S, dead_s: float = DEAD_S
) -> Iterator[Lock]:
    """Hold the folder of `path`; raises BusyError if another run does."""
    told = f"{describe} (process {os.getpid()} on {platform.node()}, since {now_iso()[:19]})"
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror}") from error
    with file:
        flocked = _flocked(file, path)
        file.truncate(0)
        file.write(f"{told}\n")
        file.flush()
        if flocked and not network:
            yield Lock()
            return
        with _leased(path.with_name(f"{path.name}.lease"), told, touch_s, dead_s) as lease:
            yield lease


def _flocked(file: TextIO, path: Path) -> bool:
    """Whether the file could be locked; an error if another run has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise _busy(path, file.read(300)) from error
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return False
        raise UserError(f"cannot lock {path}: {error.strerror}") from error
    return True


def _busy(path: Path, holder: str) -> BusyError:
    return BusyError(
        f"{path.parent.parent} is in use by {holder.strip() or 'another run'}",
        hint="wait until it ends, or choose another folder with -o",
    )


# -- the lease


@dataclass(frozen=True, slots=True)
class _Lease(Lock):
    """Our file, known by its first line."""

    path: Path
    token: str

    def check(self) -> None:
        if _token(self.path) != self.token:
            raise RunError(
                f"{self.path.parent.parent} was taken over by another run",
                hint="this machine stood still for minutes; run the same command again",
            )


@contextmanager
def _leased(path: Path, told: str, touch_s: float, dead_s: float) -> Iterator[_Lease]:
    lease = _Lease(path, secrets.token_hex(16))
    for _ in range(2):
        if _make(lease, told):
            break
        _retire(path, dead_s)
    else:
        raise _busy(path, "another run")
    over = threading.Event()
    thread = threading.Thread(target=_touch, args=(lease, over, touch_s), daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        over.set()
        thread.join()
        if _token(path) == lease.token:
            path.unlink(missing_ok=True)


def _make(lease: _Lease, told: str) -> bool:
    """Make the file if there is none: the one thing that is atomic everywhere."""
    text = f"{lease.token}\n{_process()}\n{told}\n"
    try:
        handle = os.open(lease.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return True


def _retire(path: Path, dead_s: float) -> None:
    """Move a dead holder's lease out of the way; raises BusyError if it lives."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        touched_s = path.stat().st_mtime
    except FileNotFoundError:
        return
    probe = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    probe.touch()  # by the file server's clock, as the lease is
    age_s = probe.stat().st_mtime - touched_s
    probe.unlink()
    process = lines[1] if len(lines) > 1 else ""
    if age_s < dead_s and not _is_gone(process):
        raise _busy(path, lines[2] if len(lines) > 2 else "another run")
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):  # another taker was quicker
        path.rename(aside)
        if _token(aside) != (lines[0] if lines else ""):
            aside.rename(path)  # that one's new lease: give it back
            raise _busy(path, "another run")
        aside.unlink()


def _touch(lease: _Lease, over: threading.Event, touch_s: float) -> None:
    while not over.wait(touch_s):
        if _token(lease.path) == lease.token:
            with contextlib.suppress(OSError):  # `check` will notice
                os.utime(lease.path)


def _token(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def _process() -> str:
    """This process as no other: machine, boot, number, and when it started."""
    pid = os.getpid()
    return f"{platform.node()} {_boot_id()} {pid} {_started(pid)}"


def _is_gone(process: str) -> bool:
    """Whether a process of this machine has ended; of other machines nobody knows."""
    node, _, rest = process.partition(" ")
    boot, _, rest = rest.partition(" ")
    pid, _, started = rest.partition(" ")
    if node != platform.node() or not pid.isdecimal() or not boot:
        return False
    return boot != _boot_id() or _started(int(pid)) != started


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started, in ticks since boot (proc(5)); empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]
