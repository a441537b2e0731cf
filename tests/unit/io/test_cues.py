"""Cues: whatever the segments are like, players can show them."""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnicli.data import Segment, Transcript
from omnicli.io import cues

times_s = st.floats(0, 40, allow_nan=False).map(lambda t: round(t, 2))
texts = st.lists(
    st.text("abc", min_size=1, max_size=12) | st.sampled_from(["日本語の文字列", "é" * 60]),
    max_size=60,
).map(" ".join)


@st.composite
def segments(draw):
    start_s, length_s = draw(times_s), draw(times_s)
    channel = draw(st.sampled_from(["", "left", "right"]))
    return Segment(start_s=start_s, end_s=start_s + length_s, text=draw(texts), channel=channel)


def transcript_of(parts, decoded_s=0.0):
    parts = tuple(parts)
    text = " ".join(s.text for s in parts)
    return Transcript(
        text=text,
        language="en",
        language_probability=1.0,
        segments=parts,
        decoded_s=decoded_s,
    )


@given(st.lists(segments(), max_size=12), st.booleans())
def test_cues_are_in_order_and_small(parts, name_channels):
    made = cues.cues_of(transcript_of(parts), name_channels=name_channels)
    assert all(c.start_ms < c.end_ms for c in made)
    assert all(a.start_ms <= b.start_ms for a, b in pairwise(made))
    assert all(1 <= len(c.lines) <= cues.CUE_LINES for c in made)
    assert all(columns(line) <= cues.LINE_COLUMNS for c in made for line in c.lines)


@given(st.lists(segments(), max_size=12))
def test_cues_are_apart_but_for_those_of_two_voices(parts):
    named = cues.cues_of(transcript_of(parts), name_channels=True)
    assert all(a.end_ms <= b.start_ms for a, b in pairwise(named))
    voices = cues.cues_of(transcript_of(parts), name_channels=False)
    for channel in ("", "left", "right"):
        own = [c for c in voices if c.channel == channel]
        assert all(a.end_ms <= b.start_ms for a, b in pairwise(own))


@given(st.lists(segments(), max_size=12), st.booleans())
def test_no_letter_is_lost(parts, name_channels):
    made = cues.cues_of(transcript_of(parts), name_channels=name_channels)
    shown = "".join(
        re.sub(r"^(- )?((left|right):( |$))?", "", line) for c in made for line in c.lines
    )
    said = "".join(s.text for s in parts)
    assert sorted(shown.replace(" ", "")) == sorted(said.replace(" ", ""))


@given(st.lists(segments(), max_size=6), st.just(0.0) | st.floats(0.1, 90))
def test_no_cue_outlasts_the_recording(parts, decoded_s):
    made = cues.cues_of(transcript_of(parts, decoded_s), name_channels=False)
    last_s = max((s.end_s for s in parts if s.text.strip()), default=0)
    limit_ms = round((decoded_s or last_s) * 1000)
    assert all(c.start_ms >= 0 and c.end_ms <= max(limit_ms, len(made)) for c in made)


@given(texts, times_s, times_s)
def test_the_words_of_one_segment_stay_in_order(text, start_s, length_s):
    part = Segment(start_s=start_s, end_s=start_s + length_s, text=text)
    made = cues.cues_of(transcript_of([part], decoded_s=100), name_channels=False)
    shown = "".join(line for c in made for line in c.lines)
    assert shown.replace(" ", "") == text.replace(" ", "")


def test_orderly_short_segments_keep_their_times():
    parts = [
        Segment(start_s=0.0, end_s=2.5, text="Hello there."),
        Segment(start_s=2.5, end_s=2.6, text="Yes."),
        Segment(start_s=3600.0, end_s=3601.5, text="Bye."),
    ]
    made = cues.cues_of(transcript_of(parts), name_channels=False)
    assert [(c.start_ms, c.end_ms) for c in made] == [(0, 2500), (2500, 2600), (3600000, 3601500)]


def test_a_long_segment_is_cut_in_proportion_to_its_letters():
    text = " ".join(["abcd"] * 51)  # 204 letters, 254 columns: seven lines, four cues
    made = cues.cues_of(
        transcript_of([Segment(start_s=10.0, end_s=30.4, text=text)]), name_channels=False
    )
    assert len(made) == 4
    assert made[0].start_ms == 10_000 and made[-1].end_ms == 30_400
    assert all(a.end_ms == b.start_ms for a, b in pairwise(made))
    letters = [sum(len(line) for line in c.lines) for c in made]
    for cue, n in zip(made, letters, strict=True):
        assert cue.end_ms - cue.start_ms == pytest.approx(20_400 * n / sum(letters), abs=1)


def test_two_who_speak_at_once_share_a_cue_or_have_voices():
    parts = [
        Segment(start_s=0.0, end_s=4.0, text="We could meet on Monday", channel="left"),
        Segment(start_s=0.2, end_s=3.0, text="yes", channel="right"),
        Segment(start_s=4.5, end_s=6.0, text="or on Tuesday", channel="left"),
    ]
    named = cues.cues_of(transcript_of(reversed(parts)), name_channels=True)
    assert [(c.start_ms, c.end_ms, c.lines) for c in named] == [
        (0, 4000, ("- left: We could meet on Monday", "- right: yes")),
        (4500, 6000, ("left: or on Tuesday",)),
    ]
    voices = cues.cues_of(transcript_of(reversed(parts)), name_channels=False)
    assert [(c.start_ms, c.end_ms, c.channel, c.lines) for c in voices] == [
        (0, 4000, "left", ("We could meet on Monday",)),
        (200, 3000, "right", ("yes",)),
        (4500, 6000, "left", ("or on Tuesday",)),
    ]


def test_long_turns_at_once_are_paired_line_by_line():
    words = "we could all meet here on Monday at nine " * 3
    parts = [
        Segment(start_s=0.0, end_s=10.0, text=words, channel="left"),
        Segment(start_s=0.4, end_s=10.4, text=words, channel="right"),
    ]
    made = cues.cues_of(transcript_of(parts), name_channels=True)
    for cue in made:
        assert [line.split(":")[0] for line in cue.lines] == ["- left", "- right"]
        assert cue.end_ms - cue.start_ms > 1500


def test_a_cue_that_is_talked_over_can_still_be_read():
    parts = [
        Segment(start_s=0.0, end_s=6.0, text="We could meet on Monday"),
        Segment(start_s=0.2, end_s=3.0, text="yes"),
        Segment(start_s=4.0, end_s=6.0, text="or on Tuesday"),
    ]
    made = cues.cues_of(transcript_of(reversed(parts)), name_channels=True)
    assert [(c.start_ms, c.end_ms) for c in made] == [(0, 1000), (1000, 3000), (4000, 6000)]


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (
            "Please bring your insurance card and the papers to me on Friday. The new office is "
            "right behind the station.",
            "Friday.",
        ),
        (
            "Please bring the insurance card and the papers to the old office of Dr. Smith on "
            "Maple Street before noon on any day.",
            "Dr. Smith",
        ),
        (
            "Please bring the old insurance papers to the office on Friday. Really. Then you can "
            "come back here and ask for me.",
            "Really.",
        ),
    ],
)
def test_a_cue_does_not_end_with_the_first_word_of_a_sentence(text, ends):
    part = Segment(start_s=0, end_s=9, text=text)
    first = cues.cues_of(transcript_of([part]), name_channels=False)[0]
    assert " ".join(first.lines).endswith(ends)


def test_lines_are_as_few_as_they_can_be_and_even():
    lines = cues.wrapped("the quick brown fox jumps over the lazy dog again")  # 49 columns
    assert len(lines) == 2
    assert max(map(len, lines)) <= 26


def test_wide_letters_take_two_columns_and_accents_none():
    assert [len(line) for line in cues.wrapped("語" * 50)] == [21, 21, 8]
    assert len(cues.wrapped("e\u0301" * 42)) == 1


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [(0, "00:00:00.000"), (3_599_999, "00:59:59.999"), (360_000_001, "100:00:00.001")],
)
def test_hours_are_always_there(time_ms, text):
    assert cues.stamp(time_ms, ".") == text


@pytest.mark.parametrize("time_s", [math.nan, math.inf, -1.0])
def test_a_time_that_is_none_counts_as_the_beginning(time_s):
    assert cues.milliseconds(time_s) == 0


def columns(line):
    """Counted by itself: the wide script here is Japanese, the accents stand alone."""
    return sum(2 if "\u3040" <= letter <= "\u9fff" else 1 for letter in line)
