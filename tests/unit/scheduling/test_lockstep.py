"""The loop alone, against a model that can be worked out by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from omnicli.execution.stage import LoopStage, StepOut
from omnicli.scheduling.loops import lockstep
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


class Countdown(LoopStage):
    """Says n, n - 1, …, 1 and then the end; knows each row by its state alone.

    Code k of a frame is its first code plus k: the second codebook looks at the one before it.
    """

    end_ids = frozenset({END})
    scored = True

    def __init__(self, books, most):
        self.books = books
        self.most = most
        self.state = None

    def limit(self, item):
        return self.most

    def start(self, items):
        self.state = CountdownState(torch.tensor(items))
        return self.state, self._out(self.state)

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
    ends = dict(lockstep.run(stage, items, [0] * len(items), policy or Greedy()))
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
        ends = dict(lockstep.run(stage, [5] * len(seeds), seeds, Sample(1.0)))
        return [ends[i].frames.tolist() for i in range(len(seeds))]

    together = frames([7, 8, 9, 7])
    assert together[0] == together[3] != together[1]
    assert frames([9])[0] == together[2]
