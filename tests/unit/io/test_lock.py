"""A folder is held by one run, and by no dead one."""

import os
import subprocess
import sys
import time

import pytest

from omnicli.errors import BusyError, RunError
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
def holder(path, network):
    command = [sys.executable, "-c", HOLD, str(path), str(network)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_one_is_kept_out_and_told_by_whom(path, network, holder):
    with pytest.raises(BusyError, match=f"omni test .process {holder.pid}"):
        lock.held(path, network=network, describe="me").__enter__()


def test_a_killed_holder_does_not_block(path, network, holder):
    holder.kill()
    holder.wait()
    with lock.held(path, network=network, describe="me") as mine:
        mine.check()
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock"]


def test_it_is_free_when_the_holder_has_left(path, network):
    for _ in range(2):
        with lock.held(path, network=network, describe="me") as mine:
            mine.check()


def other_machine(path, age_s):
    lease = path.with_name("lock.lease")
    lease.write_text("token\nelsewhere boot 17 12345\nomni there\n")
    then = time.time() - age_s
    os.utime(lease, (then, then))
    return lease


def test_a_lease_of_another_machine_lives_while_it_is_touched(path):
    other_machine(path, 60)
    with pytest.raises(BusyError, match="omni there"):
        lock.held(path, network=True, describe="me").__enter__()


def test_a_lease_that_nobody_touches_is_dead(path):
    other_machine(path, 400)
    with lock.held(path, network=True, describe="me") as mine:
        mine.check()


def test_a_process_of_this_number_that_started_later_is_another(path):
    lease = path.with_name("lock.lease")
    node, boot, pid, started = lock._process().split()
    lease.write_text(f"token\n{node} {boot} {pid} {int(started) + 1}\nomni there\n")
    with lock.held(path, network=True, describe="me"):
        pass


def test_a_holder_that_was_taken_over_notices(path):
    with lock.held(path, network=True, describe="me") as mine:
        path.with_name("lock.lease").write_text("another token\n\n\n")
        with pytest.raises(RunError, match="taken over"):
            mine.check()
    assert path.with_name("lock.lease").exists(), "the other's lease is not ours to remove"


def test_the_lease_is_touched(path):
    with lock.held(path, network=True, describe="me", touch_s=0.05):
        lease = path.with_name("lock.lease")
        os.utime(lease, (1, 1))
        deadline = time.time() + 5
        while lease.stat().st_mtime < 2 and time.time() < deadline:
            time.sleep(0.02)
        assert lease.stat().st_mtime > 2
