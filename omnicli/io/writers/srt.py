"""Subtitles as SubRip, the form that every player reads."""

from pathlib import Path

from omnicli.data import Outcome
from omnicli.io.atomic import write_text
from omnicli.io.cues import Cue, cues_of, stamp

# SubRip knows no escapes, and players take `<b>` and `{anything}` for markup: look-alikes instead.
_MARKUP = (("-->", "->"), ("<", "‹"), ("{", "("), ("}", ")"))


def write(outcome: Outcome, folder: Path) -> Path | None:
    """`<stem>.srt`; empty when nobody speaks, none when nobody knows."""
    if outcome.transcript is None and outcome.status != "empty":
        return None
    cues = cues_of(outcome.transcript, name_channels=True) if outcome.transcript else ()
    text = "\n".join(_block(n, cue) for n, cue in enumerate(cues, start=1))
    return write_text(folder / f"{outcome.stem}.srt", text)


def _block(number: int, cue: Cue) -> str:
    text = "\n".join(cue.lines)
    for sign, instead in _MARKUP:
        text = text.replace(sign, instead)
    return f"{number}\n{stamp(cue.start_ms, ',')} --> {stamp(cue.end_ms, ',')}\n{text}\n"
