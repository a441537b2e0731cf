"""Subtitles as WebVTT (W3C), the form that browsers read."""

from html import escape
from pathlib import Path

from omnicli.data import Outcome
from omnicli.io.atomic import write_text
from omnicli.io.cues import Cue, cues_of, stamp


def write(outcome: Outcome, folder: Path) -> Path | None:
    """`<stem>.vtt`; without cues when nobody speaks, none when nobody knows."""
    if outcome.transcript is None and outcome.status != "empty":
        return None
    cues = cues_of(outcome.transcript, name_channels=False) if outcome.transcript else ()
    text = "\n".join(["WEBVTT\n", *map(_block, cues)])
    return write_text(folder / f"{outcome.stem}.vtt", text)


def _block(cue: Cue) -> str:
    voice = f"<v {cue.channel}>" if cue.channel else ""
    text = escape("\n".join(cue.lines), quote=False)  # so there is no `-->` in it either
    return f"{stamp(cue.start_ms, '.')} --> {stamp(cue.end_ms, '.')}\n{voice}{text}\n"
