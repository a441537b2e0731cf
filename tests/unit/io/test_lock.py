"""A folder is held by one run, and by no dead one."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from omnicli.errors import BusyError, RunError, UserError
from omnicli.io import lock

HOLD = """
import sys, time
from pathlib import Path
from omnicli.io import lock
with lock.held(Path(sys.argv[1]), network=sys.argv[2] == "True", describe="omni test"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=[False, True], ids=["flock", "lease"])
def network(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    (tmp_path / ".omni").mkdir()
    return tmp_path / ".omni" / "lock"


@pytest.fixture
def lease(path):
    return path.with_name("lock.lease")


@pytest.fixture
def holder(path, network):
    command = [sys.executable, "-c", HOLD, str(path), str(network)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def hold(path, **more):
    return lock.held(path, **{"network": True, "describe": "me", **more})


def names(path):
    return sorted(p.name for p in path.parent.iterdir())


def leave(lease, process, age_s, token="0" * 32):
    """A lease as a holder would have left it."""
    lease.write_text(f"{token}\n{process}\nomni there\n")
    then = time.time() - age_s
    os.utime(lease, (then, then))


def mine(**other):
    """A process as leases name it: this one, but for what is given."""
    fields = dict(
        zip(("node", "boot", "numbers", "pid", "started"), lock._process().split(), strict=True)
    )
    return " ".join({**fields, **other}.values())


def test_a_second_one_is_kept_out_and_told_by_whom(path, network, holder):
    with pytest.raises(BusyError, match=f"omni test .process {holder.pid} on ") as refused:
        hold(path, network=network).__enter__()
    assert refused.value.exit_code == 75
    assert f"process {holder.pid}" in lock.holder(path)


def test_a_killed_holder_does_not_block(path, network, holder):
    holder.kill()
    holder.wait()
    assert lock.holder(path) is None
    with hold(path, network=network) as held:
        held.check()
    assert names(path) in (["lock"], [])


def test_nor_does_one_that_nobody_has_buried(path, network, holder):
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    with hold(path, network=network):
        pass


def test_a_holder_that_stands_still_on_this_machine_is_alive(path, lease, holder):
    holder.send_signal(signal.SIGSTOP)
    if lease.exists():
        os.utime(lease, (1, 1))
    with pytest.raises(BusyError):
        hold(path, network=lease.exists()).__enter__()


def test_it_is_free_when_the_holder_has_left(path, network):
    for _ in range(2):
        with hold(path, network=network) as held:
            held.check()
            assert "me (process" in lock.holder(path)
        assert lock.holder(path) is None


def test_it_is_free_when_the_holder_has_failed(path, network):
    with pytest.raises(ZeroDivisionError), hold(path, network=network):
        _ = 1 / 0
    with hold(path, network=network):
        pass


@pytest.mark.parametrize(
    ("process", "age_s", "is_alive"),
    [
        ("elsewhere boot pid:[1] 17 12345", 290, True),
        ("elsewhere boot pid:[1] 17 12345", 310, False),
        ("", 290, True),  # is being made
        ("", 310, False),
        (mine(boot="another"), 90, True),  # a machine of the same name
        (mine(boot="another"), 110, False),
        (mine(numbers="pid:[1]", pid="999999999"), 290, True),  # in another container
        (mine(numbers="pid:[1]", pid="999999999"), 310, False),
        (mine(pid="999999999"), 0, False),
        (mine(started="1"), 0, False),  # the number was given to another process
        (mine(), 10_000, True),
    ],
    ids=range(11),  # not the number of this process
)
def test_who_counts_as_alive(path, lease, process, age_s, is_alive):
    leave(lease, process, age_s)
    assert (lock.holder(path) is not None) is is_alive
    if is_alive:
        with pytest.raises(BusyError, match="omni there"):
            hold(path).__enter__()
        assert lease.read_text().startswith("0" * 32)
    else:
        with hold(path) as held:
            held.check()
    assert names(path) == (["lock.lease"] if is_alive else [])


def test_age_is_told_by_the_clock_of_the_files(path, lease, monkeypatch):
    leave(lease, "elsewhere boot pid:[1] 17 12345", 60)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    with pytest.raises(BusyError):
        hold(path).__enter__()


def test_a_lease_full_of_rubbish_dies_too(path, lease):
    lease.write_bytes(b"\0/../\xff" * 50)
    with pytest.raises(BusyError):
        hold(path).__enter__()
    os.utime(lease, (1, 1))
    with hold(path) as held:
        held.check()
    assert names(path) == []


@pytest.mark.parametrize("becomes", ["another", "gone"])
def test_a_holder_that_was_taken_over_notices(path, lease, becomes):
    with hold(path, touch_s=0.01) as held:
        lease.rename(lease.with_name("aside"))
        if becomes == "another":
            leave(lease, mine(), 1000)
        time.sleep(0.05)
        with pytest.raises(RunError, match="taken over"):
            held.check()
    if becomes == "another":
        assert lease.read_text().startswith("0" * 32), "it is not ours to remove"
        assert time.time() - lease.stat().st_mtime > 900, "nor to keep alive"


def test_a_holder_that_cannot_tell_stops_and_says_so(path, lease):
    with hold(path) as held:
        lease.unlink()
        lease.mkdir()  # cannot be read as a file
        with pytest.raises(RunError, match="cannot tell"):
            held.check()


def test_the_lease_is_touched(path, lease):
    with hold(path, touch_s=0.02):
        before = lease.read_bytes()
        os.utime(lease, (1, 1))
        deadline = time.time() + 5
        while lease.stat().st_mtime < 2 and time.time() < deadline:
            time.sleep(0.02)
        assert lease.stat().st_mtime > 2
        assert lease.read_bytes() == before


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_files_cannot_be_locked_a_lease_does_it(path, lease, monkeypatch, number):
    def refuses(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", refuses)
    with hold(path, network=False):
        assert lease.exists()
        with pytest.raises(BusyError, match=r"me .process"):
            hold(path, network=False).__enter__()


def test_a_folder_that_cannot_be_written_is_an_error_of_the_user(path, network):
    with pytest.raises(UserError, match="cannot write to"):
        hold(path.parent / "nowhere" / "lock", network=network).__enter__()


def test_a_full_disk_leaves_no_lease_behind(path, lease, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock.os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        hold(path).__enter__()
    assert names(path) == []


def test_a_forked_child_that_leaves_takes_nothing_along(path, lease):
    script = HOLD.replace(
        "    time.sleep(60)",
        "    import os\n"
        "    if os.fork() == 0:\n"
        "        sys.exit(0)\n"
        "    os.wait()\n"
        "    print(Path(sys.argv[1] + '.lease').exists())",
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(path), "True"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["held", "True"]
    assert not lease.exists()


def contend(path, go, barrier_s, counts):
    go.wait()
    end = time.monotonic() + barrier_s
    while time.monotonic() < end:
        try:
            with hold(path) as held:
                counts["inside"] += 1
                counts["most"] = max(counts["most"], counts["inside"])
                time.sleep(0.0005)
                held.check()
                counts["inside"] -= 1
                counts["held"] += 1
                leave(
                    path.with_name("dead"), "elsewhere boot pid:[1] 1 1", 1000, os.urandom(16).hex()
                )
                path.with_name("dead").rename(path.with_name("lock.lease"))  # as if killed
        except BusyError:
            continue


def test_of_many_that_take_over_one_wins(path, lease):
    counts = {"inside": 0, "most": 0, "held": 0}
    go = threading.Event()
    takers = [threading.Thread(target=contend, args=(path, go, 1.0, counts)) for _ in range(8)]
    leave(lease, "elsewhere boot pid:[1] 1 1", 1000)
    for taker in takers:
        taker.start()
    go.set()
    for taker in takers:
        taker.join()
    assert counts["most"] == 1
    assert counts["held"] > 10


def test_a_slow_taker_leaves_the_new_holder_alone(path, lease, monkeypatch):
    leave(lease, "elsewhere boot pid:[1] 1 1", 1000)
    quick = hold(path)
    remove = lock._remove

    def slowly(place, token):  # between its look at the dead lease and its removal
        monkeypatch.setattr(lock, "_remove", remove)
        lease.unlink()
        quick.__enter__().check()
        remove(place, token)

    monkeypatch.setattr(lock, "_remove", slowly)
    with pytest.raises(BusyError):
        hold(path).__enter__()
    assert lease.exists()
    quick.__exit__(None, None, None)
    assert names(path) == []


def test_a_lease_that_was_moved_by_mistake_is_given_back(path, lease, monkeypatch):
    leave(lease, "elsewhere boot pid:[1] 1 1", 1000)
    rename = type(path).rename

    def late(place, target):  # the dead one was alive, left, and another came
        monkeypatch.setattr(type(path), "rename", rename)
        leave(lease, mine(), 0, "1" * 32)
        return rename(place, target)

    monkeypatch.setattr(type(path), "rename", late)
    with pytest.raises(BusyError):
        hold(path).__enter__()
    assert lease.read_text().startswith("1" * 32)
    assert names(path) == ["lock.lease"]


def test_who_died_over_a_takeover_does_not_stop_those_that_come_later(path, lease):
    leave(lease, "elsewhere boot pid:[1] 1 1", 1000)
    guard = path.with_name(f"lock.lease.{'0' * 32}.taken")
    guard.touch()
    for _ in range(2):  # somebody is at it
        with pytest.raises(BusyError):
            hold(path).__enter__()
    os.utime(guard, (1, 1))
    with pytest.raises(BusyError):
        hold(path).__enter__()
    with hold(path) as held:
        held.check()
    assert names(path) == []
