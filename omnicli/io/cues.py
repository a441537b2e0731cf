"""Cues for subtitle files: short, in order, apart from each other.

At most two lines of 42 columns is what streaming services ask for (Netflix, "Timed Text Style
Guide: General Requirements"). Some players do not wrap, and some refuse cues that overlap.
"""

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from omnicli.data import Segment, Transcript

LINE_COLUMNS = 42
CUE_LINES = 2
READABLE_MS = 1000  # what a cue keeps for itself when another one begins during it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cue:
    """Some lines, and when they are shown: `start_ms` < `end_ms`."""

    start_ms: int
    end_ms: int
    lines: tuple[str, ...]
    channel: str = ""


def cues_of(transcript: Transcript, *, name_channels: bool) -> tuple[Cue, ...]:
    """All cues by time, none overlapping; with `name_channels` the text begins with its channel."""
    segments = [s for s in transcript.segments if s.text.strip()]
    cues = [c for s in segments for c in _split(s, name_channel=name_channels)]
    last_s = max((s.end_s for s in segments), default=0.0)
    limit_ms = milliseconds(transcript.decoded_s or last_s)
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


def _split(segment: Segment, *, name_channel: bool) -> Iterator[Cue]:
    """Cut a long segment; each cue gets its share of the time by its characters."""
    prefix = f"{segment.channel}: " if name_channel and segment.channel else ""
    lines = wrapped(prefix + segment.text)
    blocks = [lines[i : i + CUE_LINES] for i in range(0, len(lines), CUE_LINES)]
    begin_ms, end_ms = milliseconds(segment.start_s), milliseconds(segment.end_s)
    ends = list(accumulate((sum(map(len, block)) for block in blocks), initial=0))
    edges = [begin_ms + (end_ms - begin_ms) * e // ends[-1] for e in ends]
    for block, (start, end) in zip(blocks, pairwise(edges), strict=True):
        yield Cue(start_ms=start, end_ms=end, lines=tuple(block), channel=segment.channel)


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
