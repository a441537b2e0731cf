"""One stage's turn: everything is delivered once, and the guilty item is found."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnicli.data import Draft, Failure, ItemKey
from omnicli.errors import RequestError, StoppedError
from omnicli.execution.stage import MapStage, StageSpec
from omnicli.observe import Observer
from omnicli.scheduling.bucket import Budget
from omnicli.scheduling.drive import Driver, drive

BUDGET = Budget(max_rows=8, max_bytes=1 << 30)


class Echo(MapStage):
    """Says each item; raises if a bad one is among them."""

    def __init__(self, bad, error):
        self.bad, self.error, self.sizes = bad, error, []

    def run(self, items):
        self.sizes.append(len(items))
        if any(item in self.bad for item in items):
            raise self.error
        return [Draft(text=str(item), finish_reason="stop") for item in items]


def run(items, stage, check=lambda: None, fill=4):
    events, delivered = [], {}

    def deliver(ticket, product, seconds):
        assert ticket.key not in delivered, "delivered twice"
        assert seconds >= 0
        delivered[ticket.key] = product

    spec = StageSpec(
        name="echo",
        open=nullcontext,
        length=lambda n: n,
        edge=lambda n: -(-n // 4) * 4,
        fill_rows=fill,
    )
    driver = Driver(budget=BUDGET, observer=Observer(None, (events.append,)), check=check)
    drive(spec, stage, {ItemKey(f"r{n}"): n for n in items}, driver, deliver)
    return {key.request_id: product for key, product in delivered.items()}, events


numbers = st.sets(st.integers(1, 60), max_size=40)


@given(numbers, numbers)
def test_the_bad_items_fail_and_nobody_else(items, bad):
    delivered, _ = run(items, Echo(bad, RuntimeError("no")))
    assert delivered.keys() == {f"r{n}" for n in items}
    failed = {name for name, product in delivered.items() if isinstance(product, Failure)}
    assert failed == {f"r{n}" for n in items & bad}
    assert all(delivered[f"r{n}"].text == str(n) for n in items - bad)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("too_odd", "odd"), "too_odd"),
        (torch.OutOfMemoryError("17 GiB"), "oom"),
        (MemoryError(), "oom"),
        (ValueError("x"), "internal"),
    ],
)
def test_a_failure_names_its_kind_and_stage(error, code):
    delivered, events = run([1], Echo({1}, error))
    assert (delivered["r1"].code, delivered["r1"].stage) == (code, "echo")
    [batch] = [e for e in events if e["event"] == "batch"]
    assert batch["error"] == type(error).__name__


def test_an_error_that_is_no_items_fault_ends_the_run():
    with pytest.raises(OSError, match="disk"):
        run([1, 2], Echo({1}, OSError("disk")))


def test_batches_are_filled_to_a_multiple_of_four_rows():
    stage = Echo(set(), None)
    delivered, events = run([1, 2, 3, 5], stage)
    assert stage.sizes == [4, 4]
    assert len(delivered) == 4
    assert [e["items"] for e in events if e["event"] == "batch"] == [1, 3]


def test_a_stop_is_heard_between_batches():
    stage, checks = Echo(set(), None), []

    def check():
        checks.append(1)
        if len(checks) == 2:
            raise StoppedError(15)

    with pytest.raises(StoppedError) as stopped:
        run(range(1, 41), stage, check)
    assert stopped.value.exit_code == 143
    assert len(stage.sizes) == 1
