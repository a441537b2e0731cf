"""Where somebody speaks: probabilities to spans of speech, spans to clips for a model's window.

Pure functions of ints and floats; places are sample numbers at 16 kHz, half-open.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

RATE_HZ = 16_000
WINDOW_SAMPLES = 512  # one probability each
_DIP_WINDOWS = 2  # to either side, when the quietest place is looked for: 160 ms in all


class Span(NamedTuple):
    """A stretch of a recording, `end` not in it."""

    start: int
    end: int

    @property
    def samples(self) -> int:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRule:
    """When speech begins and ends.

    Thresholds, silence and padding are the silero-vad package's defaults. Its shortest speech is
    250 ms, which drops every third word of 0.2 s; of 90 such words 100 ms loses three.
    """

    enter: float = 0.5
    leave: float = 0.35
    min_speech_samples: int = RATE_HZ * 100 // 1000
    min_silence_samples: int = RATE_HZ * 100 // 1000
    pad_samples: int = RATE_HZ * 30 // 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRule:
    """What may become one clip."""

    window_samples: int = 30 * RATE_HZ  # no clip is longer
    gap_samples: int = 3 * RATE_HZ  # a pause of this length is not heard again
    pad_samples: int = RATE_HZ * 3 // 10  # heard before and after the speech

    @property
    def fill_samples(self) -> int:
        """How much speech a cut aims at: room for the padding stays."""
        return max(1, self.window_samples - 2 * self.pad_samples)


def speech_spans(
    probabilities: Sequence[float], total_samples: int, rule: SpeechRule
) -> list[Span]:
    """Stretches of speech in a recording, in order and apart from each other.

    The algorithm is `get_speech_timestamps` of https://github.com/snakers4/silero-vad (MIT).
    """
    spans = [
        span
        for span in _hysteresis(probabilities, total_samples, rule)
        if span.samples > rule.min_speech_samples
    ]
    return _padded(spans, total_samples, [rule.pad_samples] * len(spans))


def _hysteresis(
    probabilities: Sequence[float], total_samples: int, rule: SpeechRule
) -> Iterator[Span]:
    start: int | None = None
    end: int | None = None
    for window, probability in enumerate(probabilities):
        at = window * WINDOW_SAMPLES
        if probability >= rule.enter:
            start, end = at if start is None else start, None
        elif start is not None and probability < rule.leave:
            end = at if end is None else end
            if at - end >= rule.min_silence_samples:
                yield Span(start, end)
                start = end = None
    if start is not None:
        yield Span(start, total_samples)


def _padded(spans: Sequence[Span], total_samples: int, pads: Sequence[int]) -> list[Span]:
    """Widen each span by its pad, but into no more than half of the gap to a neighbour."""
    edges = [0, *(edge for span in spans for edge in span), total_samples]
    gaps = [end - start for start, end in zip(edges[::2], edges[1::2], strict=True)]
    rooms = [gaps[0], *(gap // 2 for gap in gaps[1:-1]), gaps[-1]]
    return [
        Span(span.start - min(pad, rooms[i]), span.end + min(pad, rooms[i + 1]))
        for i, (span, pad) in enumerate(zip(spans, pads, strict=True))
    ]


def cut_clips(
    spans: Sequence[Span], loudness: Sequence[float], total_samples: int, rule: ClipRule
) -> list[Span]:
    """Clips that hold all spans: in order, apart from each other, none longer than the window.

    `loudness` has one value per window of the grid. A span is cut only if it alone is too long.
    """
    cores = [
        core
        for group in _groups(spans, rule.gap_samples)
        for core in _pieces(group, loudness, rule)
    ]
    pads = [min(rule.pad_samples, (rule.window_samples - core.samples) // 2) for core in cores]
    return _padded(cores, total_samples, pads)


def _groups(spans: Sequence[Span], gap_samples: int) -> Iterator[list[Span]]:
    """Spans with shorter pauses between them belong together."""
    group: list[Span] = []
    for span in spans:
        if group and span.start - group[-1].end >= gap_samples:
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _pieces(group: list[Span], loudness: Sequence[float], rule: ClipRule) -> Iterator[Span]:
    """A group whole if it fits the window, else cut until the rest does."""
    while group[-1].end - group[0].start > rule.window_samples:
        piece, group = _first_piece(group, loudness, rule)
        yield piece
    yield Span(group[0].start, group[-1].end)


def _first_piece(
    group: list[Span], loudness: Sequence[float], rule: ClipRule
) -> tuple[Span, list[Span]]:
    """Cut at the longest pause within reach, else inside a span that is too long anyway, else
    at the last pause that the window allows."""
    start = group[0].start
    low, high = _reach(group[-1].end - start, rule.fill_samples)
    count = _longest_pause(group, start + low, start + high)
    if not count:
        before = sum(span.end < start + low for span in group)
        within = group[before]
        if within.samples > rule.window_samples:
            cut = _quietest(loudness, start + low, start + high)
            return Span(start, cut), [Span(cut, within.end), *group[before + 1 :]]
        count = sum(span.end <= start + rule.window_samples for span in group)
    return Span(start, group[count - 1].end), group[count:]


def _reach(length: int, fill: int) -> tuple[int, int]:
    """Where to cut first, from the start: around the length that makes all pieces equal."""
    equal = length / -(-length // fill)
    return max(1, round(equal / 2)), max(1, min(fill, round(equal * 3 / 2)))


def _longest_pause(group: Sequence[Span], low: int, high: int) -> int:
    """How many spans lie before the longest pause that begins in [low, high]; 0: there is none."""
    found = [
        (after.start - before.end, -count)
        for count, (before, after) in enumerate(pairwise(group), 1)
        if low <= before.end <= high
    ]
    return -max(found)[1] if found else 0


def _quietest(loudness: Sequence[float], low: int, high: int) -> int:
    """The place in [low, high] around which it is quietest, the most central of equals."""
    half = WINDOW_SAMPLES // 2
    places = range(-(-(low - half) // WINDOW_SAMPLES), (high - half) // WINDOW_SAMPLES + 1)
    middle = (low + high) // 2 // WINDOW_SAMPLES

    def cost(window: int) -> tuple[float, int]:
        around = loudness[max(0, window - _DIP_WINDOWS) : window + _DIP_WINDOWS + 1]
        return max(around, default=0.0), abs(window - middle)

    return min(places, key=cost) * WINDOW_SAMPLES + half if places else high
