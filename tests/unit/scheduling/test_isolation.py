"""What one item does to a batch: memory, numbers that are none, faults, and work that is stuck."""

import threading
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch

from omnicli.config import faults_of
from omnicli.data import Draft, Failure, ItemKey, Ranking
from omnicli.errors import UserError
from omnicli.execution.stage import LoopStage, MapStage, StageSpec, StepOut
from omnicli.observe import Observer
from omnicli.scheduling.bucket import Budget
from omnicli.scheduling.drive import Driver, drive, is_oom
from omnicli.scheduling.faults import Faults
from omnicli.scheduling.watchdog import Watchdog, Work

ROW = 100  # bytes


class Echo(MapStage):
    """Says each item."""

    def __init__(self, most=99, error=None):
        self.most, self.error, self.sizes = most, error, []

    def run(self, items):
        self.sizes.append(len(items))
        if len(items) > self.most:
            raise self.error
        return [Draft(text=str(item), finish_reason="stop") for item in items]


class Count(LoopStage):
    """Counts down from each item: token n is followed by n - 1, and 0 ends the row."""

    end_ids = frozenset({0})

    class State:
        """Nothing but where each row stands."""

        def __init__(self, now):
            self.now = now

        def keep(self, rows):
            self.now = self.now[rows]

    def limit(self, item):
        return 20

    def start(self, items):
        state = self.State(torch.tensor(items))
        return state, self._out(state)

    def step(self, frames, state):
        state.now = frames[:, 0] - 1
        return self._out(state)

    def _out(self, state):
        return StepOut(torch.nn.functional.one_hot(state.now.clamp(min=0), 10).float().log())

    def finish(self, item, end, state, row):
        return Draft(text=str(end.frames[:, 0].tolist()), finish_reason=end.reason)


def run(items, stage, *, faults="", rows=8, **more):
    events, delivered = [], {}

    def deliver(ticket, product, seconds):
        assert ticket.key.request_id not in delivered
        delivered[ticket.key.request_id] = product

    spec = StageSpec(name="echo", open=nullcontext, fill_rows=1, row_bytes=lambda n: ROW)
    driver = Driver(
        budget=Budget(max_rows=rows, max_bytes=1 << 30),
        observer=Observer(None, (events.append,)),
        faults=Faults(faults_of(faults)),
        **more,
    )
    drive(spec, stage, {ItemKey(f"r{n}"): n for n in items}, driver, deliver)
    return delivered, events


def codes(delivered):
    return {n: p.code for n, p in delivered.items() if isinstance(p, Failure)}


# -- memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate"
                     " memory: you tried to allocate 40000 bytes."),
    ],
    ids=["python", "cuda", "cpu"],
)  # fmt: skip
def test_what_did_not_fit_is_halved_and_the_next_batches_with_it(error):
    stage = Echo(most=3, error=error)
    delivered, events = run(range(16), stage, rows=8)
    assert codes(delivered) == {}
    assert stage.sizes == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert sum(e.get("oom", False) for e in events if e["event"] == "batch") == 2


def test_other_errors_are_not_about_memory():
    assert not is_oom(RuntimeError("shapes do not match"))
    assert not is_oom(ValueError("out of memory"))


def test_batches_shrink_to_the_memory_that_is_left():
    stage = Echo()
    delivered, _ = run(range(8), stage, memory_left=lambda device: 2.5 * ROW)
    assert codes(delivered) == {}
    assert max(stage.sizes) == 2


def test_one_item_that_is_larger_than_what_is_left_fails_without_being_tried():
    stage = Echo()
    delivered, _ = run(range(3), stage, memory_left=lambda device: 0.5 * ROW)
    assert set(codes(delivered).values()) == {"oom"}
    assert stage.sizes == []


# -- numbers that are none


class Nan(MapStage):
    """Makes a product that is no number of item 3."""

    def run(self, items):
        return [Ranking(scores=(float("nan") if item == 3 else 1.0,)) for item in items]


def test_a_product_that_is_no_number_is_a_failure_of_its_own():
    delivered, _ = run(range(6), Nan())
    assert codes(delivered) == {"r3": "not_finite"}


# -- faults


@pytest.mark.parametrize(
    ("kind", "code", "stage"),
    [
        ("raise", "internal", Echo),
        ("raise", "internal", Count),
        ("oom", "oom", Echo),
        ("oom", "oom", Count),
        ("nan", "not_finite", Count),
    ],
)
def test_a_fault_harms_its_item_only(kind, code, stage):
    alone, _ = run([5], stage())
    delivered, _ = run(range(1, 8), stage(), faults=f"echo:r3:{kind}")
    assert codes(delivered) == {"r3": code}
    assert delivered["r5"] == alone["r5"]


def test_a_row_that_never_ends_is_cut_and_its_mates_are_not():
    delivered, _ = run(range(1, 6), Count(), faults="echo:r2:noend")
    assert delivered["r2"].finish_reason == "length"
    assert delivered["r4"] == Draft(text="[4, 3, 2, 1]", finish_reason="stop")


def test_faults_are_read_with_care():
    one, two = faults_of("talk:a:b:raise; *:x:oom>8")
    assert (one.request_id, one.kind) == ("a:b", "raise")
    assert (two.stage, two.rows) == ("*", 8)
    for wrong in ("talk", "talk:raise", "talk:a:explode", "talk:a:oom>x"):
        with pytest.raises(UserError):
            faults_of(wrong)


# -- work that is stuck


def test_what_is_in_hand_is_on_record_while_it_runs():
    record = []

    @contextmanager
    def in_flight(stage, ids):
        record.append((stage, tuple(ids)))
        yield
        record.append("over")

    run(range(4), Echo(), rows=2, in_flight=in_flight)
    assert record == [("echo", ("r0", "r1")), "over", ("echo", ("r2", "r3")), "over"]


def test_the_watchdog_tells_what_is_stuck():
    told, heard = [], threading.Event()

    def stalled(work, idle_s):
        told.append((work.stage, work.ids))
        heard.set()

    with Watchdog(0.2, stalled) as dog:
        work = Work(stage="talk", ids=["a", "b"], units=1, audio_s=0.0)
        with dog.watch(work):
            for _ in range(8):  # alive
                time.sleep(0.05)
                dog.beat()
            assert not told
            assert heard.wait(5)
    assert told == [("talk", ["a", "b"])]


def test_the_watchdog_gives_ten_times_what_a_unit_took():
    told = []
    with Watchdog(0.05, lambda work, idle_s: told.append(work)) as dog:
        with dog.watch(Work(stage="talk", ids=["a"], units=1, audio_s=10.0)):
            time.sleep(0.1)
        with dog.watch(Work(stage="talk", ids=["a"], units=2, audio_s=0.0)):
            time.sleep(0.5)
    assert not told


def test_the_loop_beats():
    beats = []

    class Dog(Watchdog):
        def beat(self):
            beats.append(1)

    with Dog(60, lambda work, idle_s: None) as dog:
        run([5], Count(), watchdog=dog)
    assert len(beats) >= 5


def test_what_delivery_raises_is_no_items_doing():
    """An item that was handed on and then lost would be missing without a word."""

    def deliver(ticket, product, seconds):
        raise ValueError("a writer's bug")

    spec = StageSpec(name="echo", open=nullcontext, fill_rows=1)
    driver = Driver(budget=Budget(max_rows=8, max_bytes=1 << 30), observer=Observer(None))
    with pytest.raises(ValueError, match="a writer's bug"):
        drive(spec, Echo(), {ItemKey("a"): 1, ItemKey("b"): 2}, driver, deliver)
