"""Limits of control groups and kinds of disks, read from files like the kernel's."""

import os
from pathlib import Path

import pytest

from omnicli import machine


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable:    8000000 kB\n")
    return tmp_path


def group(root, path, **files):
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_group_above_the_process_decides(root):
    (root / "proc/self/cgroup").write_text("0::/user/job\n")
    group(root, "", cpu__max="max 100000")
    group(root, "user", memory__max="4000000000", memory__current="3000000000")
    group(
        root,
        "user/job",
        memory__max="max",
        memory__current="1",
        cpu__max="150000 100000",
        memory__stat="anon 5\ninactive_file 7\n",
    )
    assert machine.memory_left_bytes(root) == 1_000_000_000
    assert machine.cpu_count(root) == min(2, len(os.sched_getaffinity(0)))
    assert machine.memory_bytes(root) == 4_000_000_000


def test_what_the_cache_can_drop_counts_as_left(root):
    (root / "proc/self/cgroup").write_text("0::/\n")
    group(
        root,
        "",
        memory__max="1000",
        memory__current="900",
        memory__stat="inactive_file 400\nactive_file 9\n",
    )
    assert machine.memory_left_bytes(root) == 500


def test_control_groups_of_the_first_version(root):
    (root / "proc/self/cgroup").write_text("4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n")
    group(root, "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="5")
    group(root, "memory/a", memory__limit_in_bytes="2000", memory__usage_in_bytes="500")
    group(root, "cpu/a", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    assert machine.memory_left_bytes(root) == 1500
    assert machine.cpu_count(root) == 1
    group(root, "cpu/a", cpu__cfs_quota_us="-1")
    assert machine.cpu_count(root) == len(os.sched_getaffinity(0))


def test_in_a_container_the_groups_lie_elsewhere_than_they_are_named(root):
    (root / "proc/self/cgroup").write_text("0::/docker/a1\n4:memory:/docker/a1\n")
    group(root, "", memory__max="3000", memory__current="1000")
    group(root, "memory", memory__limit_in_bytes="2000", memory__usage_in_bytes="500")
    assert machine.memory_left_bytes(root) == 1500
    assert machine.memory_bytes(root) == 2000


def test_a_group_above_its_limit_has_nothing_left(root):
    (root / "proc/self/cgroup").write_text("0::/\n")
    group(root, "", memory__max="1000", memory__current="1200", cpu__max="1000 100000")
    assert machine.memory_left_bytes(root) == 0
    assert machine.cpu_count(root) == 1


def test_without_groups_what_the_machine_has(root):
    assert machine.memory_left_bytes(root) == 8_000_000_000 // 1000 * 1024
    assert machine.cpu_count(root) == len(os.sched_getaffinity(0))
    assert machine.memory_left_bytes(root / "nowhere") > 0
    assert 0 < machine.memory_left_bytes() <= machine.memory_bytes() * 2


MOUNTS = r"""23 31 0:21 / /proc rw - proc proc rw
31 1 8:1 / / rw - ext4 /dev/sda1 rw
22 31 0:40 / /data rw shared:1 - nfs4 server:/x rw
33 22 0:41 / /data/with\040space rw - xfs /dev/sdb rw
24 31 0:42 / /over rw - ext4 /dev/sdc rw
25 24 0:43 / /over rw - fuse.sshfs host: rw
26 31 0:44 / /hidden/deep rw - cifs //server/x rw
27 31 0:45 / /hidden rw - btrfs /dev/sdd rw
28 31 0:46 / /auto rw - autofs systemd-1 rw
29 28 0:47 / /auto rw - ext4 /dev/sde rw
30 31 0:48 / /later rw - autofs systemd-1 rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/etc/x", "ext4", False),
        ("/data", "nfs4", True),
        ("/data/calls/out", "nfs4", True),
        ("/database", "ext4", False),
        ("/data/with space/out", "xfs", False),
        ("/over/out", "fuse.sshfs", True),
        ("/hidden/deep/out", "btrfs", False),
        ("/auto/out", "ext4", False),
        ("/later/out", "autofs", True),
    ],
)
def test_the_disk_that_a_path_lies_on(root, path, kind, network):
    (root / "proc/self/mountinfo").write_text(MOUNTS)
    found = machine.filesystem_of(Path(path), root)
    assert found == kind
    assert machine.is_network(found) is network


def test_the_disk_behind_a_link(root, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "link").symlink_to(disk)
    mounts = f"1 1 0:1 / / rw - rootfs rootfs rw\n2 1 0:2 / {disk} rw - nfs server:/x rw\n"
    (root / "proc/self/mountinfo").write_text(mounts)  # the first is its own parent
    assert machine.filesystem_of(tmp_path / "link/not/there", root) == "nfs"
    assert machine.filesystem_of(tmp_path / "else", root) == "rootfs"


def test_a_root_that_is_no_mount_of_its_own(root):
    (root / "proc/self/mountinfo").write_text("9 4 0:9 / /data rw - nfs server:/x rw\n")
    assert machine.filesystem_of(Path("/data/out"), root) == "nfs"
    assert machine.filesystem_of(Path("/etc"), root) == ""
    assert machine.filesystem_of(Path("/etc"), root / "nowhere") == ""


NETWORK = """nfs nfs4 cifs smb3 smbfs ncpfs 9p ceph glusterfs lustre afs beegfs gpfs virtiofs
    fuse fuse.sshfs fuse.rclone fuse.s3fs fuse.glusterfs fuse.not-seen-before"""
LOCAL = "ext4 xfs btrfs zfs overlay tmpfs fuseblk fuse.fuse-overlayfs apfs vfat"


def test_which_disks_other_machines_may_write():
    assert [kind for kind in NETWORK.split() if not machine.is_network(kind)] == []
    assert [kind for kind in (*LOCAL.split(), "") if machine.is_network(kind)] == []


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path):
    assert machine.free_bytes(tmp_path / "a" / "b") == pytest.approx(
        machine.free_bytes(tmp_path), rel=0.05
    )
