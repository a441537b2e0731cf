"""Made-up text is left out, and speech without words is told."""

import pytest
import torch

from omnicli.data import AudioClip, Heard, Segment, Thought
from omnicli.errors import RequestError
from omnicli.execution.families.cascade import judging

RATE_HZ = 100
LOOP = "Please come on Monday, thanks" + " and bye and so on" * 9
ENDLESS = ["runaway", "repetition"]


def heard(*lengths_s, channels=None, decoded_s=None):
    """Clips of these lengths, one behind the other."""
    starts_s = [sum(lengths_s[:i]) for i in range(len(lengths_s))]
    clips = tuple(
        AudioClip(
            samples=torch.zeros(round(length_s * RATE_HZ)),
            rate_hz=RATE_HZ,
            start_s=start_s,
            channel=channels[i] if channels else "",
        )
        for i, (start_s, length_s) in enumerate(zip(starts_s, lengths_s, strict=True))
    )
    return Heard(
        clips=clips,
        decoded_s=decoded_s or sum(lengths_s),
        speech_s=sum(lengths_s),
        source_rate_hz=RATE_HZ,
        source_channels=1,
    )


def thought(recording, clip, text, *, share=1.0, **fields):
    """A text that covers that share of its clip, from the beginning."""
    place = recording.clips[clip]
    end_s = place.start_s + share * place.duration_s
    words = Segment(start_s=place.start_s, end_s=end_s, text=text, channel=place.channel)
    made = {
        "text": text,
        "segments": (words,) if text else (),
        "clip": clip,
        "task": "transcribe",
        "window": "short",
        "temperature": 0.0,
        "avg_logprob": -0.2,
        "compression_ratio": 1.2,
        "no_speech_prob": 0.1,
        "finish_reason": "stop",
    }
    return Thought(**(made | fields))


def test_sound_texts_stay_as_they_are():
    recording = heard(10, 20)
    texts = [thought(recording, 0, "Hello."), thought(recording, 1, LOOP, problem="low_score")]
    assert judging.judged(texts, recording) == texts


@pytest.mark.parametrize("problem", ENDLESS)
def test_a_text_that_goes_in_circles_is_cut(problem):
    recording = heard(10, 20)
    texts = [thought(recording, 0, LOOP, problem=problem), thought(recording, 1, "Hello.")]
    first, second = judging.judged(texts, recording)
    assert first.text == "Please come on Monday, thanks and bye and so on"
    assert [s.text for s in first.segments] == [first.text]
    assert 1 < first.segments[0].end_s < 5, "its share of the ten seconds"
    assert (first.finish_reason, first.problem) == ("length", problem)
    assert second == texts[1]
    assert judging.warnings([first, second], recording)[0] == f"suspect_text: {problem}"


def test_segments_behind_the_cut_are_gone():
    recording = heard(30, 40)
    parts = [(0, 4, "Please come."), (4, 8, "Thank you all."), (8, 12, "Thank you all.")]
    parts += [(12, 30, "Thank you all. Thank you all.")]
    segments = tuple(Segment(start_s=a, end_s=b, text=t) for a, b, t in parts)
    text = " ".join(s.text for s in segments)
    looped = thought(recording, 0, text, segments=segments, problem="repetition")
    kept, _ = judging.judged([looped, thought(recording, 1, "Hello.")], recording)
    left = [(s.end_s, s.text) for s in kept.segments]
    assert left == [(4, "Please come."), (8, "Thank you all.")]
    assert kept.text == "Please come. Thank you all."


@pytest.mark.parametrize("problem", ENDLESS)
def test_a_recording_of_which_most_is_lost_has_failed(problem):
    recording = heard(10, 10, 6)
    texts = [thought(recording, i, "no" * 80, problem=problem) for i in (0, 1)]
    texts.append(thought(recording, 2, "Hello."))
    with pytest.raises(RequestError) as caught:
        judging.judged(texts, recording)
    assert caught.value.code == "runaway"
    assert "2 of 3 clips" in str(caught.value)


def test_faster_than_anyone_speaks_is_made_up_even_without_a_circle():
    recording = heard(10, 20)
    fast = " ".join(str(i) for i in range(1000, 1100))  # 500 letters in ten seconds
    for text, kept in ((fast, ""), (fast[:390], fast[:390])):
        long = thought(recording, 0, text, problem="runaway", finish_reason="length")
        first, _ = judging.judged([long, thought(recording, 1, "Hello.")], recording)
        assert (first.text, first.finish_reason) == (kept, "length")


@pytest.mark.parametrize(
    ("text", "decoded_s", "no_speech_prob", "kept"),
    [
        ("Thanks for watching!", 60, 0.1, False),
        ("Thanks for watching!", 4, 0.1, True),
        ("Thanks for watching!", 4, 0.6, False),
        ("Subtitles by the Amara.org community", 60, 0.1, False),
        ("Thanks for watching the house.", 60, 0.9, True),
    ],
)
def test_credit_lines_are_dropped_where_hardly_anybody_speaks(
    text, decoded_s, no_speech_prob, kept
):
    recording = heard(3, decoded_s=decoded_s)
    [made] = judging.judged([thought(recording, 0, text, no_speech_prob=no_speech_prob)], recording)
    assert made.text == (text if kept else "")
    told = judging.warnings([made], recording)
    assert ("suspect_text: credit_line" in told) is not kept


def test_coverage_is_the_share_of_speech_that_has_words():
    recording = heard(10, 30)
    texts = [thought(recording, 0, "Hello."), thought(recording, 1, "Well.", share=0.5)]
    assert judging.scores(texts, recording)["coverage"] == 25 / 40
    more = [thought(recording, 0, "Hello."), thought(recording, 1, "Well.", share=1.2)]
    assert judging.scores(more, recording)["coverage"] == 1.0
    assert judging.scores([], heard()) == {}


@pytest.mark.parametrize(
    ("shares", "channels", "told"),
    [
        ((1.0, 0.9, 0.8, 1.0), None, None),
        ((0.1, 0.0, 1.0, 0.0), None, "low_coverage: 11.0 of 40.0 s of speech"),
        ((1.0, 0.0, 1.0, 1.0), None, "low_coverage: 1 of 4 clips, first at 10.0 s"),
        ((1.0, 1.0, 0.4, 1.0), None, "low_coverage: 1 of 4 clips, first at 20.0 s"),
        ((1.0, 0.2, 1.0, 0.5), ("left", "right", "left", "right"),
         "low_coverage: 7.0 of 20.0 s of speech, right channel"),
    ],
)  # fmt: skip
def test_speech_without_words_is_told(shares, channels, told):
    recording = heard(10, 10, 10, 10, channels=channels)
    texts = [
        thought(recording, i, "Words." if share else "", share=share)
        for i, share in enumerate(shares)
    ]
    assert judging.warnings(texts, recording) == ((told,) if told else ())


def test_a_clip_that_ends_early_is_told_though_most_of_it_has_words():
    recording = heard(20, 10)
    texts = [thought(recording, 0, "Words.", share=0.7), thought(recording, 1, "More.")]
    assert judging.warnings(texts, recording) == ("low_coverage: 1 of 2 clips, first at 0.0 s",)


def test_a_clip_where_the_model_hears_nobody_is_no_gap():
    recording = heard(10, 10, 10)
    texts = [thought(recording, i, "Words.") for i in (0, 1)]
    texts.append(thought(recording, 2, "", no_speech_prob=0.9))
    assert judging.warnings(texts, recording) == ()


def test_words_where_the_model_hears_nobody_are_doubted():
    recording = heard(10, 10)
    texts = [thought(recording, 0, "Oh.", no_speech_prob=0.7), thought(recording, 1, "Words.")]
    assert judging.warnings(texts, recording) == ("suspect_text: no_speech",)
    assert judging.doubts(texts) == ("suspect_translation: no_speech",)
