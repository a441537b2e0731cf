"""The summary, reply or other answer as plain text."""

from pathlib import Path

from omnicli.data import Outcome
from omnicli.io.atomic import write_text

_NAMES = {"prompt": "answer"}  # `<stem>.prompt.txt` would promise the question


def write(outcome: Outcome, folder: Path) -> Path | None:
    """`<stem>.summary.txt`, `.reply.txt`, `.translation.txt`, `.transcript.txt`, `.answer.txt`."""
    answer = outcome.answer
    if answer is None or not answer.text.strip():
        return None
    name = _NAMES.get(answer.kind, answer.kind)
    return write_text(folder / f"{outcome.stem}.{name}.txt", f"{answer.text.strip()}\n")
