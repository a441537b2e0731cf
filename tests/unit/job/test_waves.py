"""How what is due is cut into waves."""

from omnicli.config import Limits
from omnicli.data import Request
from omnicli.io.store import Due
from omnicli.job.inputs import waves

LIMITS = Limits(wave_s=10.0, wave_items=4)


def due(durations, crashed=()):
    for n, seconds in enumerate(durations):
        request = Request(request_id=str(n), duration_s=seconds)
        yield Due(request=request, stem="", key="", crashes=int(n in crashed))


def sizes(durations, crashed=(), **how):
    return [len(wave) for wave in waves(due(durations, crashed), LIMITS, **how)]


def test_a_wave_holds_so_many_seconds_or_items():
    assert sizes([4.0] * 7) == [3, 3, 1]
    assert sizes([1.0] * 9) == [4, 4, 1]
    assert sizes([25.0, 1.0, 1.0]) == [1, 2]
    assert sizes([]) == []


def test_what_processes_died_over_is_alone():
    assert sizes([1.0] * 5, crashed={2}) == [2, 1, 2]


def test_waves_grow_while_they_come():
    growth = iter([1.0] * 6 + [2.0] * 99)
    assert sizes([4.0] * 12, growth=lambda: next(growth)) == [3, 5, 4]
