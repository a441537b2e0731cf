"""Segments as a table: one a row, with their true times.

Milliseconds as integers, so that no locale's decimal sign can stand in the way.
"""

from pathlib import Path

from omnicli.data import Outcome, Segment
from omnicli.io.atomic import write_text
from omnicli.io.cues import milliseconds


def write(outcome: Outcome, folder: Path) -> Path | None:
    """`<stem>.tsv`: start, end, text, and the channel where channels were kept apart."""
    if outcome.transcript is None and outcome.status != "empty":
        return None
    segments = outcome.transcript.segments if outcome.transcript else ()
    split = any(s.channel for s in segments)
    rows = ["start\tend\ttext" + "\tchannel" * split, *(_row(s, split) for s in segments)]
    return write_text(folder / f"{outcome.stem}.tsv", "\n".join(rows) + "\n")


def _row(segment: Segment, split: bool) -> str:
    start = milliseconds(segment.start_s)
    end = max(milliseconds(segment.end_s), start + 1)
    text = " ".join(segment.text.split())  # no tab and no line break is left
    return f"{start}\t{end}\t{text}" + f"\t{segment.channel}" * split
