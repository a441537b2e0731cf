"""Limits of control groups and kinds of disks, read from files like the kernel's."""

import os

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


def test_without_groups_what_the_machine_has(root):
    assert machine.memory_left_bytes(root) == 8_000_000_000 // 1000 * 1024
    assert machine.cpu_count(root) == len(os.sched_getaffinity(0))
    assert machine.memory_left_bytes(root / "nowhere") > 0
    assert 0 < machine.memory_left_bytes() <= machine.memory_bytes() * 2


MOUNTS = r"""21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 0:40 / /data rw shared:1 - nfs4 server:/x rw
23 22 0:41 / /data/with\040space rw - ext4 /dev/sdb rw
24 21 0:42 / /over rw - ext4 /dev/sdc rw
25 21 0:43 / /over rw - fuse.sshfs host: rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/etc/x", "ext4", False),
        ("/data/calls/out", "nfs4", True),
        ("/database", "ext4", False),
        ("/data/with space/out", "ext4", False),
        ("/over/out", "fuse.sshfs", True),
    ],
)
def test_the_disk_that_a_path_lies_on(root, path, kind, network):
    (root / "proc/self/mountinfo").write_text(MOUNTS)
    found = machine.filesystem_of(machine.Path(path), root)
    assert found == kind
    assert machine.is_network(found) is network


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path):
    assert machine.free_bytes(tmp_path / "a" / "b") == pytest.approx(
        machine.free_bytes(tmp_path), rel=0.05
    )
