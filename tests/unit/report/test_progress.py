"""Progress: counts and speeds from events, drawn only where they can be seen."""

import io

import pytest

from omnicli.report import progress as shown
from omnicli.report.progress import Tallies, progress

EVENTS = (
    {"event": "stage", "stage": "encode", "items": 4, "audio_s": 40.0},
    {"event": "batch", "stage": "encode", "items": 3, "audio_s": 30.0, "wall_s": 2.0},
    {"event": "load", "stage": "transcribe", "wall_s": 1.0},
    {"event": "batch", "stage": "encode", "items": 1, "audio_s": 10.0, "wall_s": 1.0, "error": "X"},
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_is_left_is_estimated_by_seconds_of_audio():
    tallies = Tallies()
    for event in EVENTS[:2]:
        tally = tallies.take(event)
    assert (tally.done, tally.items, tally.speed) == (3, 4, 15.0)
    assert tally.left_s == pytest.approx(10 / 15)
    assert str(tally) == "encode: 3/4 30/40 s, 15.0 x, 1 s left"


def test_a_batch_that_failed_is_time_but_no_progress():
    tallies = Tallies()
    for event in EVENTS:
        tallies.take(event)
    tally = tallies.by_stage["encode"]
    assert (tally.done, tally.done_s, tally.wall_s) == (3, 30.0, 3.0)


def feed(stream, **how):
    with progress(stream, **how) as listeners:
        for listen in listeners:
            for event in EVENTS:
                listen(dict(event))
    return stream.getvalue()


def test_off_a_terminal_there_are_whole_lines_now_and_then(monkeypatch):
    assert feed(io.StringIO(), mode="auto", plain=False) == ""
    monkeypatch.setattr(shown, "LINE_EVERY_S", 0.0)
    told = feed(io.StringIO(), mode="auto", plain=False)
    assert told.splitlines()[0] == "encode: 0/4 0/40 s, 0.0 x"
    assert "\r" not in told
    assert "\x1b" not in told


def test_a_terminal_gets_bars_and_a_dumb_one_plain_ones():
    assert "encode" in feed(Terminal(), mode="auto", plain=False)
    told = feed(Terminal(), mode="auto", plain=True)
    assert "encode" in told
    assert "\x1b[" not in told.replace("\x1b[A", "")


def test_off_is_off():
    assert feed(Terminal(), mode="off", plain=False) == ""
