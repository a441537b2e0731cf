"""Spans against the silero-vad package; clips by their properties."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnicli.operators.speech_regions import (
    RATE_HZ,
    WINDOW_SAMPLES,
    ClipRule,
    Span,
    SpeechRule,
    cut_clips,
    speech_spans,
)

RULE = ClipRule()


@pytest.fixture(scope="module")
def their_spans():
    threads = torch.get_num_threads()
    from silero_vad.utils_vad import get_speech_timestamps_from_probs

    torch.set_num_threads(threads)  # the import sets it to one for the whole process
    return get_speech_timestamps_from_probs


levels = st.sampled_from([0.0, 0.2, 0.34, 0.35, 0.4, 0.49, 0.5, 0.9, 1.0])


@settings(deadline=None)
@given(
    st.lists(levels, max_size=80),
    st.integers(1, WINDOW_SAMPLES),
    st.sampled_from([0, 30, 100, 250]),
    st.sampled_from([0, 32, 100, 500]),
    st.sampled_from([0, 30, 400]),
)
def test_spans_are_those_of_the_package(
    their_spans, probabilities, rest, speech_ms, silence_ms, pad_ms
):
    total = max(0, (len(probabilities) - 1) * WINDOW_SAMPLES + rest)
    rule = SpeechRule(
        min_speech_samples=speech_ms * RATE_HZ // 1000,
        min_silence_samples=silence_ms * RATE_HZ // 1000,
        pad_samples=pad_ms * RATE_HZ // 1000,
    )
    theirs = their_spans(
        list(probabilities),
        min_speech_duration_ms=speech_ms,
        min_silence_duration_ms=silence_ms,
        speech_pad_ms=pad_ms,
        audio_length_samples=total,
    )
    ours = speech_spans(probabilities, total, rule)
    # Where two pads meet in an odd gap, the package's floats leave the last sample to either side.
    assert len(ours) == len(theirs)
    for span, other in zip(ours, theirs, strict=True):
        assert abs(span.start - other["start"]) <= 1
        assert abs(span.end - other["end"]) <= 1


@st.composite
def recordings(draw):
    """Spans with pauses between them, the whole length, and a loudness for every window."""
    pauses = st.integers(1, 5 * RATE_HZ) | st.integers(1, RATE_HZ // 2)
    lengths = st.integers(1, 5 * RATE_HZ) | st.integers(20 * RATE_HZ, 70 * RATE_HZ)
    at, spans = draw(st.integers(0, 2 * RATE_HZ)), []
    for pause, length in draw(st.lists(st.tuples(pauses, lengths), max_size=14)):
        spans.append(Span(at + pause, at + pause + length))
        at = spans[-1].end
    total = at + draw(st.integers(0, 2 * RATE_HZ))
    chance = random.Random(draw(st.integers(0, 99)))
    return spans, [chance.random() for _ in range(-(-total // WINDOW_SAMPLES))], total


rules = st.builds(
    ClipRule,
    window_samples=st.sampled_from([6, 15, 30]).map(lambda s: s * RATE_HZ),
    gap_samples=st.sampled_from([1, 3]).map(lambda s: s * RATE_HZ),
    pad_samples=st.sampled_from([0, 4800]),
)


@settings(deadline=None)
@given(recordings(), rules)
def test_clips_are_ordered_apart_inside_and_fit_the_window(recording, rule):
    _, _, total = recording
    clips = cut_clips(*recording, rule)
    assert all(0 <= c.start < c.end <= total for c in clips)
    assert all(a.end <= b.start for a, b in pairwise(clips))
    assert all(c.samples <= rule.window_samples for c in clips)


@settings(deadline=None)
@given(recordings(), rules)
def test_a_span_lies_in_one_clip_unless_it_is_too_long_and_none_of_it_is_lost(recording, rule):
    clips = cut_clips(*recording, rule)
    for span in recording[0]:
        holders = [c for c in clips if c.start < span.end and span.start < c.end]
        assert len(holders) == 1 or span.samples > rule.window_samples
        assert holders[0].start <= span.start and span.end <= holders[-1].end
        assert all(a.end == b.start for a, b in pairwise(holders))


@settings(deadline=None)
@given(recordings(), rules)
def test_every_clip_holds_speech_and_no_long_pause(recording, rule):
    spans = recording[0]
    for clip in cut_clips(*recording, rule):
        inside = [s for s in spans if s.start < clip.end and clip.start < s.end]
        assert inside
        pauses = [b.start - a.end for a, b in pairwise(inside)]
        assert all(pause < rule.gap_samples for pause in pauses)


@settings(deadline=None)
@given(recordings(), rules)
def test_what_fits_the_window_without_long_pauses_is_one_clip(recording, rule):
    spans, loudness, total = recording
    spans = [s for s in spans if s.end - spans[0].start <= rule.window_samples]
    pauses = [b.start - a.end for a, b in pairwise(spans)]
    if not spans or max(pauses, default=0) >= rule.gap_samples:
        return
    (clip,) = cut_clips(spans, loudness, total, rule)
    pad = min(rule.pad_samples, (rule.window_samples - (spans[-1].end - spans[0].start)) // 2)
    assert clip == Span(max(0, spans[0].start - pad), min(total, spans[-1].end + pad))


@settings(deadline=None)
@given(recordings(), st.integers(1, 20 * RATE_HZ))
@example(([Span(0, RATE_HZ)], [0.0] * 32, RATE_HZ), 5)
def test_what_follows_a_long_pause_changes_nothing_before_it(recording, more):
    spans, loudness, total = recording
    later = Span(total + RULE.gap_samples, total + RULE.gap_samples + more)
    windows = -(-later.end // WINDOW_SAMPLES)
    longer = cut_clips(
        [*spans, later], loudness + [0.5] * (windows - len(loudness)), later.end, RULE
    )
    alone = cut_clips(spans, loudness, total, RULE)
    # The last clip may be padded further where the recording goes on.
    kept = longer[: len(alone)]
    assert kept[:-1] == alone[:-1]
    assert [c.start for c in kept] == [c.start for c in alone]


def seconds(*spans):
    return [Span(round(a * RATE_HZ), round(b * RATE_HZ)) for a, b in spans]


def cut_s(spans, total_s, loudness=None):
    loudness = loudness or [1.0] * round(total_s * RATE_HZ / WINDOW_SAMPLES + 1)
    clips = cut_clips(spans, loudness, round(total_s * RATE_HZ), RULE)
    return [(round(c.start / RATE_HZ, 2), round(c.end / RATE_HZ, 2)) for c in clips]


def test_a_short_recording_is_one_clip_from_a_little_before_to_a_little_after():
    assert cut_s(seconds((1, 2), (2.5, 6), (8, 9)), 10) == [(0.7, 9.3)]
    assert cut_s(seconds((0, 2), (2.5, 9.9)), 10) == [(0, 10)]
    assert cut_s(seconds((0, 29.9)), 29.9) == [(0, 29.9)]


def test_a_long_pause_is_not_heard():
    assert cut_s(seconds((1, 2), (6, 7)), 10) == [(0.7, 2.3), (5.7, 7.3)]
    assert cut_s(seconds((1, 2), (5, 6)), 10) == [(0.7, 2.3), (4.7, 6.3)]
    assert cut_s(seconds((1, 2), (4.9, 6)), 10) == [(0.7, 6.3)]


def test_words_between_short_pauses_stay_together():
    words = seconds((1, 1.2), (2.7, 2.9), (4.4, 4.6))
    assert cut_s(words, 10) == [(0.7, 4.9)]


def test_the_longest_pause_within_reach_is_where_it_is_cut():
    spans = seconds((0, 9), (9.1, 14), (15.5, 18), (18.3, 26), (26.5, 34))
    assert cut_s(spans, 34) == [(0, 14.3), (15.2, 34)]


def test_no_crumb_is_left_at_either_end():
    spans = seconds((0, 1), (2.9, 15), (15.2, 28), (29.9, 31))
    assert cut_s(spans, 31) == [(0, 15.1), (15.1, 31)]


def test_speech_without_a_pause_is_cut_where_it_is_quietest():
    loudness = [1.0] * round(40 * RATE_HZ / WINDOW_SAMPLES)
    quiet = round(17 * RATE_HZ / WINDOW_SAMPLES)
    loudness[quiet - 2 : quiet + 3] = [0.1] * 5
    (_, cut), (again, end) = cut_s(seconds((0, 40)), 40, loudness)
    assert abs(cut - 17) < 0.05
    assert (again, end) == (cut, 40)


def test_a_span_that_just_fits_the_window_stays_whole():
    assert cut_s(seconds((0, 29.8), (30, 33)), 33) == [(0, 29.9), (29.9, 33)]
    assert cut_s(seconds((0, 1), (2, 31.8)), 31.8) == [(0, 1.3), (1.9, 31.8)]


def test_a_span_that_is_too_long_is_cut_with_its_neighbours():
    (first, second) = cut_s(seconds((0, 1), (1.5, 33), (33.2, 34)), 34)
    assert 8 < first[1] < 26 and second == (first[1], 34)


def test_even_noise_is_cut_into_halves():
    (_, cut), _ = cut_s(seconds((0, 40)), 40)
    assert abs(cut - 20) < 0.5


def test_no_speech_gives_no_clips():
    assert cut_clips([], [], 0, RULE) == []
    assert speech_spans([], 0, SpeechRule()) == []
    assert speech_spans([0.49] * 100, 51_200, SpeechRule()) == []


def test_a_blip_is_no_speech_but_a_word_of_a_fifth_of_a_second_is():
    rule = replace(SpeechRule(), pad_samples=0)
    quiet = [0.0] * 20
    assert speech_spans([*quiet, *[1.0] * 3, *quiet], 43 * WINDOW_SAMPLES, rule) == []
    (word,) = speech_spans([*quiet, *[1.0] * 6, *quiet], 46 * WINDOW_SAMPLES, rule)
    assert word == Span(20 * WINDOW_SAMPLES, 26 * WINDOW_SAMPLES)
