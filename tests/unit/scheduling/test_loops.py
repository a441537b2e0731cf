"""The loop alone, against a model that can be worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnicli.data import Failure
from omnicli.execution.stage import LoopStage, RowEnd, StepOut
from omnicli.scheduling.loops import lockstep, refill
from omnicli.scheduling.policies.greedy import Greedy
from omnicli.scheduling.policies.sample import Sample

END, VOCAB = 0, 50


class CountdownState:
    def __init__(self, left):
        self.left = left
        self.kept = []

    def keep(self, rows):
        self.kept.append(len(rows))
        self.left = self.left[rows]

    def put(self, rows, other):
        self.left[rows] = other.left[: len(rows)]


class Countdown(LoopStage):
    """Says n, n - 1, …, 1 and then the end; knows each row by its state alone.

    Code k of a frame is its first code plus k: the second codebook looks at the one before it.
    """

    end_ids = frozenset({END})
    refills = scored = True

    def __init__(self, books, most):
        self.books = books
        self.most = most
        self.state = None

    def limit(self, item):
        return self.most

    def start(self, items):
        state = CountdownState(torch.tensor(items))
        self.state = self.state or state
        return state, self._out(state)

    def next_book(self, frames, last, state):
        return torch.nn.functional.one_hot((frames[:, -1] + 1) % VOCAB, VOCAB).float() * 99

    def step(self, frames, state):
        alive = state.left > 0
        assert frames[alive, 0].tolist() == state.left[alive].tolist(), "another row's frame"
        state.left = (state.left - 1).clamp(min=0)
        return self._out(state)

    def finish(self, item, end, state, row):
        return end

    def _out(self, state):
        return StepOut(torch.nn.functional.one_hot(state.left, VOCAB).float() * 99)


def grow(items, books=1, most=60, policy=None):
    stage = Countdown(books, most)
    ends = dict(lockstep.run(stage, items, [0] * len(items), [policy or Greedy()]))
    return [ends[i] for i in range(len(items))], stage.state.kept


counts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


@given(counts, st.integers(1, 60), st.integers(1, 4))
def test_each_row_says_its_own_and_stops_in_time(items, most, books):
    ends, _ = grow(items, books, most)
    for n, end in zip(items, ends, strict=True):
        whole = list(range(n, 0, -1))[:most]
        assert end.frames.tolist() == [
            [(first + k) % VOCAB for k in range(books)] for first in whole
        ]
        assert end.reason == ("length" if n >= most else "stop")
        assert end.steps == len(whole) + (end.reason == "stop")
        assert abs(end.logprob) < 1e-3, "every choice was certain"


@given(counts)
def test_rows_leave_and_never_fewer_than_four_or_an_odd_number_stay(items):
    _, kept = grow(items)
    assert all(n % 4 == 0 for n in kept)
    assert kept == sorted(kept, reverse=True)


def test_dead_rows_are_dropped_once_a_quarter_is_dead():
    _, kept = grow([1, 2, 3, 4, 30, 31, 32, 33])
    assert kept == [4]


class Noise(Countdown):
    """The same flat prediction for every row."""

    def step(self, frames, state):
        return self._out(state)

    def _out(self, state):
        return StepOut(torch.zeros(len(state.left), VOCAB))


def test_a_sampled_row_depends_on_its_seed_and_not_on_its_company():
    def frames(seeds):
        stage = Noise(1, 12)
        stage.end_ids = frozenset()
        ends = dict(lockstep.run(stage, [5] * len(seeds), seeds, [Sample(1.0)]))
        return [ends[i].frames.tolist() for i in range(len(seeds))]

    together = frames([7, 8, 9, 7])
    assert together[0] == together[3] != together[1]
    assert frames([9])[0] == together[2]


class Broken(Countdown):
    """A row that has counted down to `at` has logits that are all `bad`, in one of the books."""

    def __init__(self, books, bad, at, book):
        super().__init__(books, 60)
        self.bad, self.at, self.book = bad, at, book

    def step(self, frames, state):
        state.left = state.left.masked_fill(state.left == self.at, 0)  # dead by now
        return super().step(frames, state)

    def next_book(self, frames, last, state):
        logits = super().next_book(frames, last, state)
        return self._spoilt(logits, state) if frames.shape[1] == self.book else logits

    def _out(self, state):
        logits = super()._out(state).logits
        return StepOut(self._spoilt(logits, state) if self.book == 0 else logits)

    def _spoilt(self, logits, state):
        return logits.masked_fill((state.left == self.at)[:, None], self.bad)


@pytest.mark.parametrize("policy", [Greedy(), Sample(0.5)])
@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("book", [0, 1])
def test_a_row_without_a_choice_fails_alone_and_at_once(policy, scored, bad, book):
    items = [3, 9, 4, 2]
    stage = Broken(2, bad, 7, book)
    stage.scored = scored
    seeds = [1, 2, 3, 4]
    ends = dict(lockstep.run(stage, items, seeds, [policy]))
    assert [type(ends[i]) for i in range(4)] == [RowEnd, Failure, RowEnd, RowEnd]
    assert (ends[1].code, ends[1].stage) == ("not_finite", "")
    assert "2 tokens" in ends[1].message, "9 and 8 were said"
    sound = Countdown(2, 60)
    sound.scored = scored
    expected = dict(lockstep.run(sound, items, seeds, [policy]))
    for i in (0, 2, 3):
        assert torch.equal(ends[i].frames, expected[i].frames)
        assert (ends[i].logprob, ends[i].reason) == (expected[i].logprob, "stop")


def test_a_single_number_that_is_none_is_noticed_where_it_would_be_chosen():
    class OneNan(Noise):
        def _out(self, state):
            logits = super()._out(state).logits
            logits[1, 17] = math.nan
            return StepOut(logits)

    for scored, policy in ((False, Greedy()), (True, Greedy()), (True, Sample(1.0))):
        stage = OneNan(1, 5)
        stage.scored, stage.end_ids = scored, frozenset()
        ends = dict(lockstep.run(stage, [1, 2, 3, 4], [0] * 4, [policy]))
        assert [isinstance(ends[i], Failure) for i in range(4)] == [False, True, False, False]


def test_every_step_is_a_sign_of_life():
    beats = []
    list(lockstep.run(Countdown(1, 60), [5, 2], [0, 0], [Greedy()], beat=lambda: beats.append(1)))
    assert len(beats) == 5


# -- refill


@given(counts, st.integers(1, 60), st.integers(1, 4), st.sampled_from([0, 4, 8]))
def test_refilled_rows_say_what_they_say_in_lockstep(items, most, books, slots):
    stage = Countdown(books, most)
    expected = dict(lockstep.run(stage, items, [0] * len(items), [Greedy()]))
    stage = Countdown(books, most)
    ends = dict(refill.run(stage, items, [0] * len(items), [Greedy()], slots=slots))
    assert ends.keys() == expected.keys()
    for i, end in ends.items():
        assert torch.equal(end.frames, expected[i].frames)
        assert (end.reason, end.steps) == (expected[i].reason, expected[i].steps)


def test_a_freed_row_goes_to_the_next_item():
    beats = []
    items = [40, 1, 2, 3, *[5] * 12]
    stage = Countdown(1, 60)
    list(
        refill.run(
            stage, items, [0] * 16, [Greedy()], slots=8, beat=lambda: beats.append(len(beats))
        )
    )
    assert len(beats) < 45, "twice eight in lockstep would take as long as both longest rows"
    assert all(len(stage.state.left) <= 8 for _ in [0])


def test_refilled_rows_keep_their_own_chance():
    def frames(run, **how):
        stage = Noise(1, 12)
        stage.end_ids = frozenset()
        seeds = [3, 4, 5, 6, 7, 8, 9, 3]
        ends = dict(run(stage, [5] * 8, seeds, [Sample(0.9, 20, 0.9, 1.1)], **how))
        return [ends[i].frames.tolist() for i in range(8)]

    alone = frames(lockstep.run)
    assert frames(refill.run, slots=4) == alone
    assert alone[0] == alone[7]


def test_a_penalty_falls_on_what_the_row_itself_has_said():
    stage = Noise(1, 30)
    stage.end_ids, stage.seen_ids = frozenset(), frozenset({0, 1})
    ends = dict(lockstep.run(stage, [5] * 4, [0] * 4, [Greedy(1.5)]))
    for end in ends.values():
        assert end.frames[:, 0].tolist() == [0] * 30, "logits of 0 stay 0"

    class Flat(Noise):
        def _out(self, state):
            return StepOut(torch.full((len(state.left), VOCAB), 3.0))

    stage = Flat(1, 30)
    stage.end_ids, stage.seen_ids = frozenset(), frozenset({0, 1})
    ends = dict(lockstep.run(stage, [5] * 4, [0] * 4, [Greedy(1.5)]))
    for end in ends.values():
        assert end.frames[:, 0].tolist() == list(range(2, 32))
