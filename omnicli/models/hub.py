"""Models that another program has fetched from the Hugging Face hub: looked up, never fetched.

The hub's cache keeps `models--ORG--NAME/snapshots/REVISION/` and names the current revision in
`refs/main` (huggingface.co/docs/huggingface_hub/guides/manage-cache).
"""

import re
from pathlib import Path

from omnicli.errors import UserError

ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_id(choice: str) -> bool:
    """Whether this reads like `org/name`."""
    return ID.fullmatch(choice) is not None


def snapshot(choice: str, hub: Path | None) -> Path:
    """The folder of a model in the hub's cache."""
    place = hub / f"models--{choice.replace('/', '--')}" if hub else None
    found = _current(place) if place else None
    if found is None:
        where = f"nor in {hub}" if hub else "and no Hugging Face cache is known"
        raise UserError(
            f"there is no folder {choice} here, {where}",
            hint=f"fetch it (hf download {choice} --local-dir FOLDER) and give the folder",
        )
    return found


def _current(place: Path) -> Path | None:
    ref = place / "refs" / "main"
    if ref.is_file():
        named = place / "snapshots" / ref.read_text(encoding="utf-8").strip()
        if named.is_dir():
            return named
    snapshots = [path for path in place.glob("snapshots/*") if path.is_dir()]
    return max(snapshots, key=lambda path: path.stat().st_mtime_ns, default=None)
