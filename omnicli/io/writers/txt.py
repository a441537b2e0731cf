"""The transcript as plain text: one paragraph, or one a turn where channels were kept apart."""

from itertools import groupby
from pathlib import Path

from omnicli.data import Outcome, Transcript
from omnicli.io.atomic import write_text


def write(outcome: Outcome, folder: Path) -> Path | None:
    """`<stem>.txt`; empty when nobody speaks, none when nobody knows."""
    if outcome.transcript is None and outcome.status != "empty":
        return None
    text = _text(outcome.transcript) if outcome.transcript else ""
    return write_text(folder / f"{outcome.stem}.txt", f"{text}\n" if text else "")


def _text(transcript: Transcript) -> str:
    if not any(s.channel for s in transcript.segments):
        return transcript.text.strip()
    turns = groupby(transcript.segments, key=lambda s: s.channel)
    joined = ((c, " ".join(s.text.strip() for s in turn).strip()) for c, turn in turns)
    return "\n".join(f"{channel}: {text}" for channel, text in joined if text)
