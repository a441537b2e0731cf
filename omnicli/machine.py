"""What this machine allows the process: CPUs, memory, and what kind of disk a path lies on.

Containers and batch systems limit through control groups; Linux shows their files under
/sys/fs/cgroup (kernel documentation, admin-guide/cgroup-v2 and cgroup-v1). Other systems get the
plain figures.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
# Where flock, or the shared memory of SQLite's WAL (sqlite.org/wal.html), is not to be relied on.
NETWORK = frozenset(
    (
        # flock goes through a lock service that may be missing; mapped pages are not shared
        "nfs nfs4 cifs smb smb2 smb3 smbfs ncpfs afs davfs "
        # flock holds in the cluster or on one machine only, as somebody configured it
        "ceph lustre beegfs gpfs glusterfs ocfs2 gfs2 orangefs "
        # a folder of the host in a guest or a container: flock stops at the guest's border,
        # and some refuse to map a file that is written
        "9p virtiofs vboxsf vmhgfs drvfs fakeowner "
        # nobody has looked yet at what will be mounted here
        "autofs"
    ).split()
)
# FUSE: flock is for one machine unless the daemon does better, and mapping is up to it. These
# lie on local disks and do both.
LOCAL_FUSE = frozenset("fuse.fuse-overlayfs fuse.gocryptfs fuse.encfs".split())
_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number where there is no limit


def cpu_count(root: Path = ROOT) -> int:
    """CPUs that this process may use: by affinity, and by the quota of its control groups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = [*_quotas_v2(root), *_quotas_v1(root)]
    return max(1, min([allowed or 1, *map(math.ceil, quotas)]))


def memory_bytes(root: Path = ROOT) -> int:
    """Memory that this process may take in all."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *(limit for limit, _ in _memory_limits(root))])


def memory_left_bytes(root: Path = ROOT) -> int:
    """Memory that may still be taken, files that the system can drop from its cache counted."""
    lefts = [limit - used for limit, used in _memory_limits(root)]
    told = _text(root / "proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", told, re.MULTILINE)
    if found:
        lefts.append(int(found[1]) << 10)
    elif not lefts:
        lefts.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return max(0, min(lefts))


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes used that cannot be dropped) of every control group above the process."""
    for folder in _groups(root, ""):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            yield limit, used - _stat(folder, "inactive_file")
    for folder in _groups(root, "memory"):
        limit = _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _NO_LIMIT:
            yield limit, used - _stat(folder, "total_inactive_file")


def _quotas_v2(root: Path) -> Iterator[float]:
    for folder in _groups(root, ""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            yield int(quota) / int(period)


def _quotas_v1(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu"):
        quota = _number(folder / "cpu.cfs_quota_us")
        period = _number(folder / "cpu.cfs_period_us")
        if quota and period and quota > 0:
            yield quota / period


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's control group and of those above it; "" is version 2."""
    mount = root / "sys/fs/cgroup" / controller
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path, *_ = [*line.split(":", 2), "", ""]
        named = controllers.split(",") if controllers else [""]
        if controller not in named or (number == "0") != (controller == ""):
            continue
        folder = mount / path.lstrip("/")
        yield from (f for f in (folder, *folder.parents) if f.is_relative_to(mount) and f.is_dir())


def _stat(folder: Path, name: str) -> int:
    found = re.search(rf"^{name} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found else 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


# -- disks


@dataclass(frozen=True, slots=True)
class _Mount:
    number: str
    parent: str
    point: str
    kind: str


def filesystem_of(path: Path, root: Path = ROOT) -> str:
    """The type of the file system that a path lies on, or would; empty if that is not known."""
    real = os.path.realpath(path)
    mounts = [one for one in _mounts(root) if f"{real}/".startswith(f"{one.point.rstrip('/')}/")]
    numbers = {one.number for one in mounts}
    reached = [one for one in mounts if one.parent not in numbers - {one.number}]
    kind = ""
    while reached:  # as the kernel walks: the first mount on the way hides what was below it
        nearest = min(reversed(reached), key=lambda one: len(one.point))
        kind = nearest.kind
        mounts.remove(nearest)
        reached = [one for one in mounts if one.parent == nearest.number]
    return kind


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if after and len(fields) >= 5:
            point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
            yield _Mount(fields[0], fields[1], point, after.split(" ")[0])


def is_network(fstype: str) -> bool:
    """Whether other machines may write there too, so that locks and shared memory are doubtful.

    An unknown FUSE file system counts as one: a lease where a lock would do costs nothing.
    """
    is_fuse = fstype == "fuse" or fstype.startswith("fuse.")
    return fstype in NETWORK or (is_fuse and fstype not in LOCAL_FUSE)


def free_bytes(path: Path) -> int:
    """Bytes that may still be written there, in the deepest folder that exists. Raises OSError."""
    found = os.statvfs(standing(path))
    return found.f_bavail * found.f_frsize


def standing(path: Path) -> Path:
    """The path, or the deepest folder on the way to it that exists. Raises OSError."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
