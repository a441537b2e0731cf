"""What is kept of a recording's texts after the last round, and what is said about them.

Text that goes in circles, or that is longer than anyone can speak, was made up: it is left out.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from omnicli.data import AudioClip, Heard, Segment, Thought
from omnicli.errors import RequestError
from omnicli.execution.families.cascade.hearing import MAX_NO_SPEECH_PROB, MAX_UNCOVERED_S
from omnicli.execution.looping import before_loop

ENDLESS = frozenset({"runaway", "repetition"})
DOUBTFUL = ENDLESS | {"low_score", "credit_line"}
MAX_LOST = 0.5  # of the seconds of all clips; with more, there is no transcript
MOST_CHARS_PER_S = 40  # fast talkers reach 30
MIN_COVERAGE = 0.5  # of the speech that was found; below, the result carries a warning
MAX_TAIL_S = 5.0  # speech at a clip's end of which nothing is written down
TINY_SPEECH, LIKELY_SILENCE = 0.2, 0.5  # share of the recording; no_speech_prob

# What the training data's subtitles say where nobody speaks.
_CREDITS = frozenset(
    (
        "you",
        "please subscribe",
        "thanks for watching",
        "thank you for watching",
        "thank you so much for watching",
        "thanks for watching and see you next time",
        "thanks for watching please subscribe",
        "gracias por ver el video",
        "vielen dank fürs zuschauen",
        "merci davoir regardé cette vidéo",
        "obrigado por assistir",
        "спасибо за просмотр",
        "ご視聴ありがとうございました",
        "谢谢观看",
        "시청해주셔서 감사합니다",
    )
)
_CREDIT_SIGNS = ("amara.org", "untertitel im auftrag des zdf", "subtitles by", "transcription by")


# --- what is kept ---


def judged(thoughts: Sequence[Thought], heard: Heard) -> list[Thought]:
    """What is sound of each text; RequestError `runaway` if most of the speech is lost by that."""
    kept = [sound(thought, heard) for thought in thoughts]
    cut = [new for new, old in zip(kept, thoughts, strict=True) if new.text != old.text]
    cut = [thought for thought in cut if thought.problem in ENDLESS]
    lost_s = sum(_tail_s(thought, heard.clips[thought.clip]) for thought in cut)
    if lost_s > MAX_LOST * sum(clip.duration_s for clip in heard.clips):
        raise RequestError(
            "runaway",
            f"the text of {len(cut)} of {len(heard.clips)} clips runs on or repeats itself, "
            "whatever is tried",
        )
    return kept


def sound(thought: Thought, heard: Heard) -> Thought:
    """A text without what was made up."""
    if is_credit(thought, heard):
        return replace(thought, text="", segments=(), problem="credit_line")
    if thought.problem not in ENDLESS:
        return thought
    kept = before_loop(thought.text)
    if len(kept) > MOST_CHARS_PER_S * max(1.0, heard.clips[thought.clip].duration_s):
        kept = ""
    return thought if kept == thought.text else _shortened(thought, _letters(kept))


def is_credit(thought: Thought, heard: Heard) -> bool:
    """Whether a text is what subtitles end with, where hardly anybody speaks."""
    bare = re.sub(r"[^\w ]", "", thought.text.casefold()).strip()
    known = bare in _CREDITS or any(sign in thought.text.casefold() for sign in _CREDIT_SIGNS)
    rare = heard.speech_s < TINY_SPEECH * heard.decoded_s
    return known and (rare or thought.no_speech_prob > LIKELY_SILENCE)


def _shortened(thought: Thought, letters: int) -> Thought:
    """The first so many letters, spaces not counted, of a text and its segments."""
    segments: list[Segment] = []
    for segment in thought.segments:
        text = _first_letters(segment.text, letters)
        here, whole = _letters(text), _letters(segment.text)
        letters -= here
        if here:
            lasts_s = (segment.end_s - segment.start_s) * here / whole
            segments.append(replace(segment, text=text, end_s=round(segment.start_s + lasts_s, 3)))
    text = " ".join(segment.text for segment in segments)
    return replace(thought, text=text, segments=tuple(segments), finish_reason="length")


def _letters(text: str) -> int:
    return len("".join(text.split()))


def _first_letters(text: str, count: int) -> str:
    """The beginning of a text, up to its so manieth letter."""
    ends = [match.end() for match in re.finditer(r"\S", text)]
    return text[: ends[min(count, len(ends)) - 1]] if count and ends else ""


# --- what is said about it ---


def scores(thoughts: Sequence[Thought], heard: Heard) -> dict[str, float | str]:
    """The worst of each score over the clips: what a reviewer sorts by."""
    if not thoughts:
        return {}
    windows = {t.window for t in thoughts}
    covered_s = sum(map(_covered_s, thoughts))
    return {
        "avg_logprob": round(min(t.avg_logprob for t in thoughts), 4),
        "compression_ratio": round(max(t.compression_ratio for t in thoughts), 4),
        "no_speech_prob": round(max(t.no_speech_prob for t in thoughts), 4),
        "temperature": max(t.temperature for t in thoughts),
        "window": windows.pop() if len(windows) == 1 else "mixed",
        "coverage": round(min(1.0, covered_s / heard.speech_s), 4) if heard.speech_s else 1.0,
    }


def warnings(thoughts: Sequence[Thought], heard: Heard) -> tuple[str, ...]:
    """What a reader of the transcript should know."""
    return (
        *(f"suspect_text: {doubt}" for doubt in _doubts(thoughts)),
        *low_coverage(thoughts, heard),
    )


def doubts(translations: Sequence[Thought]) -> tuple[str, ...]:
    """The same of translations."""
    return tuple(f"suspect_translation: {doubt}" for doubt in _doubts(translations))


def _doubts(thoughts: Sequence[Thought]) -> list[str]:
    found = {t.problem for t in thoughts if t.problem in DOUBTFUL}
    if any(t.text and t.no_speech_prob > MAX_NO_SPEECH_PROB for t in thoughts):
        found.add("no_speech")
    return sorted(found)


def low_coverage(thoughts: Sequence[Thought], heard: Heard) -> tuple[str, ...]:
    """Speech without words: in the recording, else in one channel, else in single clips."""
    covered_s = sum(map(_covered_s, thoughts))
    if _low(covered_s, heard.speech_s):
        return (f"low_coverage: {covered_s:.1f} of {heard.speech_s:.1f} s of speech",)
    if channels := list(_low_channels(thoughts, heard)):
        return tuple(channels)
    clips = [heard.clips[t.clip] for t in thoughts if _leaves_out(t, heard.clips[t.clip])]
    if not clips:
        return ()
    first_s = min(clip.start_s for clip in clips)
    return (f"low_coverage: {len(clips)} of {len(heard.clips)} clips, first at {first_s:.1f} s",)


def _low_channels(thoughts: Sequence[Thought], heard: Heard) -> Iterator[str]:
    found_s: dict[str, float] = defaultdict(float)
    for clip in heard.clips:
        found_s[clip.channel] += clip.duration_s
    for channel, clips_s in sorted(found_s.items()):
        mine = [t for t in thoughts if heard.clips[t.clip].channel == channel]
        covered_s = sum(map(_covered_s, mine))
        if channel and _low(covered_s, clips_s):
            yield f"low_coverage: {covered_s:.1f} of {clips_s:.1f} s of speech, {channel} channel"


def _leaves_out(thought: Thought, clip: AudioClip) -> bool:
    """Whether a clip's words leave much of it out; not if the model hears nobody there."""
    if not thought.text and thought.no_speech_prob > MAX_NO_SPEECH_PROB:
        return False
    return _low(_covered_s(thought), clip.duration_s) or _tail_s(thought, clip) > MAX_TAIL_S


def _low(covered_s: float, speech_s: float) -> bool:
    return speech_s > MAX_UNCOVERED_S and covered_s < MIN_COVERAGE * speech_s


def _covered_s(thought: Thought) -> float:
    return sum(s.end_s - s.start_s for s in thought.segments)


def _tail_s(thought: Thought, clip: AudioClip) -> float:
    """What lies behind the last word of a clip."""
    end_s = thought.segments[-1].end_s if thought.segments else clip.start_s
    return clip.start_s + clip.duration_s - end_s
