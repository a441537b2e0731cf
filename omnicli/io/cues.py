"""Cues for subtitle files: short, in order, one speaker's apart from each other.

At most two lines of 42 columns is what streaming services ask for (Netflix, "Timed Text Style
Guide: General Requirements"). Some players do not wrap, and some refuse cues that overlap. So two
who speak at once share a cue, a line each, unless the file's format knows voices.
"""

import math
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from omnicli.data import Segment, Transcript
from omnicli.execution.sentences import split_sentences

LINE_COLUMNS = 42
CUE_LINES = 2
READABLE_MS = 1000  # what a cue keeps for itself when another one begins during it
DASH = "- "  # before each of two speakers in one cue
SHARED = 0.25  # of the shorter one's time: two lines that overlap by more are shown together
STRAY_WORDS = 2  # of a sentence: no cue ends with so few of its first words
_ENDED = re.compile(r"""[.!?…。！？]["'”’»)\]]*$""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cue:
    """Some lines, and when they are shown: `start_ms` < `end_ms`."""

    start_ms: int
    end_ms: int
    lines: tuple[str, ...]
    channel: str = ""


def cues_of(transcript: Transcript, *, name_channels: bool) -> tuple[Cue, ...]:
    """All cues by time.

    With `name_channels` the text begins with its channel and no cue overlaps another. Without, each
    channel is a voice: only the cues of one channel are apart.
    """
    segments = [s for s in transcript.segments if s.text.strip()]
    last_s = max((s.end_s for s in segments), default=0.0)
    limit_ms = milliseconds(transcript.decoded_s or last_s)
    if name_channels:
        return _in_order(_shared(segments), limit_ms)
    channels = sorted({s.channel for s in segments})
    voices = [[c for s in segments if s.channel == name for c in _split(s)] for name in channels]
    cues = [cue for voice in voices for cue in _in_order(voice, limit_ms)]
    return tuple(sorted(cues, key=lambda c: c.start_ms))


def _in_order(cues: Sequence[Cue], limit_ms: int) -> tuple[Cue, ...]:
    return _squeezed(_apart(cues), max(limit_ms, len(cues)))


def milliseconds(time_s: float) -> int:
    """The only place where a transcript's seconds become milliseconds: nearest, never below 0."""
    return max(0, round(time_s * 1000)) if math.isfinite(time_s) else 0


def stamp(time_ms: int, point: str) -> str:
    """`HH:MM:SS.mmm`: hours are always there, and may need more than two digits."""
    minutes, rest_ms = divmod(time_ms, 60_000)
    seconds, rest_ms = divmod(rest_ms, 1000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}{point}{rest_ms:03d}"


def wrapped(text: str, most_columns: int = LINE_COLUMNS) -> list[str]:
    """As few lines as the width allows, and those about equally long."""
    lines = _wrapped(text, most_columns)
    words = [columns for _, columns in _words(text, most_columns)]
    total = sum(words) + len(words) - 1
    narrowest = max([*words, -(-total // max(1, len(lines)))], default=most_columns)
    for columns in range(narrowest, most_columns):
        if len(narrower := _wrapped(text, columns)) == len(lines):
            return narrower
    return lines


def _shared(segments: Sequence[Segment]) -> list[Cue]:
    """Cues that begin with their channel's name; two turns at the same time are put into one."""
    over = _talked_over(segments)
    cues = [c for i, s in enumerate(segments) for c in (_turn(s) if i in over else _named(s))]
    made: list[Cue] = []
    for cue in sorted(cues, key=lambda c: c.start_ms):
        if made and _share(made[-1], cue):
            made[-1] = _both(made[-1], cue)
        else:
            made.append(cue)
    return made


def _label(segment: Segment) -> str:
    return f"{segment.channel}: " if segment.channel else ""


def _named(segment: Segment) -> Iterator[Cue]:
    """A turn that nobody talks over: its first cue has the name."""
    return _split(replace(segment, text=_label(segment) + segment.text))


def _turn(segment: Segment) -> Iterator[Cue]:
    """A turn that is talked over: single lines, each with the name."""
    label = _label(segment)
    for cue in _split(segment, LINE_COLUMNS - len(DASH) - len(label), 1):
        yield replace(cue, lines=(label + cue.lines[0],))


def _talked_over(segments: Sequence[Segment]) -> set[int]:
    """Places of the segments during which another channel speaks."""
    order = sorted(range(len(segments)), key=lambda i: segments[i].start_s)
    starts_s = [segments[i].start_s for i in order]
    found: set[int] = set()
    for at, i in enumerate(order):
        during = order[at + 1 : bisect_left(starts_s, segments[i].end_s, lo=at + 1)]
        others = [j for j in during if segments[j].channel != segments[i].channel]
        found.update([i, *others] if others else [])
    return found


def _share(before: Cue, cue: Cue) -> bool:
    """Whether two speakers' lines are shown together: they overlap for a part of their time."""
    overlap_ms = min(before.end_ms, cue.end_ms) - cue.start_ms
    shorter_ms = min(before.end_ms - before.start_ms, cue.end_ms - cue.start_ms)
    alone = len(before.lines) == len(cue.lines) == 1 and before.channel != cue.channel
    return alone and overlap_ms > SHARED * shorter_ms


def _both(before: Cue, cue: Cue) -> Cue:
    speakers = sorted((before, cue), key=lambda c: c.channel)
    lines = tuple(DASH + one.lines[0] for one in speakers)
    end_ms = max(before.end_ms, cue.end_ms)
    return Cue(start_ms=before.start_ms, end_ms=end_ms, lines=lines)


def _split(segment: Segment, columns: int = LINE_COLUMNS, lines: int = CUE_LINES) -> Iterator[Cue]:
    """Cut a long segment; each cue gets its share of the time by its characters."""
    blocks = list(_blocks(segment.text, columns, lines))
    begin_ms, end_ms = milliseconds(segment.start_s), milliseconds(segment.end_s)
    ends = list(accumulate((sum(map(len, block)) for block in blocks), initial=0))
    edges = [begin_ms + (end_ms - begin_ms) * e // ends[-1] for e in ends]
    for block, (start, end) in zip(blocks, pairwise(edges), strict=True):
        yield Cue(start_ms=start, end_ms=end, lines=tuple(block), channel=segment.channel)


def _blocks(text: str, columns: int, most_lines: int) -> Iterator[list[str]]:
    """The lines of each cue."""
    while text:
        lines = wrapped(text, columns)
        here, rest = " ".join(lines[:most_lines]), " ".join(lines[most_lines:])
        if rest and (stray := _stray(here)):
            here, rest = here[: -len(stray)].rstrip(), f"{stray} {rest}"
        yield wrapped(here, columns)
        text = rest


def _stray(text: str) -> str:
    """The first words of a sentence that a text ends with, if they are few."""
    *before, last = split_sentences(text)
    few = bool(before) and len(last.split()) <= STRAY_WORDS
    return last if few and not _ENDED.search(last) else ""


def _apart(cues: Sequence[Cue]) -> list[Cue]:
    """Put starts in order: a cue that begins during another waits until that one was readable."""
    placed: list[Cue] = []
    for cue in sorted(cues, key=lambda c: c.start_ms):
        start = cue.start_ms
        if placed:
            before = placed[-1]
            shown = before.end_ms - before.start_ms
            start = max(start, before.start_ms + min(shown, READABLE_MS))
        placed.append(replace(cue, start_ms=start, end_ms=max(cue.end_ms, start + 1)))
    return placed


def _squeezed(cues: Sequence[Cue], limit_ms: int) -> tuple[Cue, ...]:
    """Put ends in order, the last first: none after the limit, or after the next one's start."""
    fitting: list[Cue] = []
    for cue in reversed(cues):
        end = min(cue.end_ms, limit_ms)
        limit_ms = min(cue.start_ms, end - 1)
        fitting.append(replace(cue, start_ms=limit_ms, end_ms=end))
    return tuple(reversed(fitting))


def _wrapped(text: str, most_columns: int) -> list[str]:
    """Fill line after line."""
    lines: list[str] = []
    room = 0
    for word, columns in _words(text, most_columns):
        if lines and columns < room:
            lines[-1] += f" {word}"
            room -= columns + 1
        else:
            lines.append(word)
            room = most_columns - columns
    return lines


def _words(text: str, most_columns: int) -> Iterator[tuple[str, int]]:
    """Words with their columns; what is too wide (or a script without spaces) comes in pieces."""
    for word in text.split():
        piece, columns = "", 0
        for letter in word:
            if columns + (wide := _columns(letter)) > most_columns:
                yield piece, columns
                piece, columns = "", 0
            piece, columns = piece + letter, columns + wide
        yield piece, columns


def _columns(letter: str) -> int:
    """2 for a Chinese, Japanese or Korean letter, 0 for an accent that sits on the one before."""
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
