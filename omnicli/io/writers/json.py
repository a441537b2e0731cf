"""All that is known of one recording: its line of results.jsonl, made readable."""

import json
from pathlib import Path

from omnicli.data import Outcome
from omnicli.io.atomic import write_text
from omnicli.io.results import line


def write(outcome: Outcome, folder: Path) -> Path | None:
    """`<stem>.json`, for failed recordings too; it names no run, so equal results look equal."""
    text = json.dumps(line(outcome), ensure_ascii=False, allow_nan=False, indent=2)
    return write_text(folder / f"{outcome.stem}.json", f"{text}\n")
