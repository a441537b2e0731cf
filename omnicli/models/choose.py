"""Which models a run needs, from the choices of its command line."""

from pathlib import Path

from omnicli.config import ModelChoice
from omnicli.errors import UserError
from omnicli.models.catalogue import Kind
from omnicli.models.store import Model, find

EMBEDDED_FAMILY = "cascade"
ROLES: dict[str, tuple[Kind, ...]] = {
    "transcribe": ("vad", "asr"),
    "respond": ("vad", "asr", "llm", "voice"),
    "say": ("voice",),
}


def choose(
    choice: ModelChoice,
    command: str,
    *,
    offline: bool = False,
    hub_cache: Path | None = None,
    progress: bool = True,
) -> tuple[str, dict[str, Model]]:
    """The family's name and its models by role; fetches and converts what is not there yet."""
    if choice.model != "embedded":
        raise UserError(f"no model named {choice.model!r}", hint="did you mean --model embedded?")
    assert choice.cache is not None, "the command line names the cache"
    wanted: dict[Kind, str | None] = {
        "asr": choice.asr_model,
        "llm": choice.llm_model,
        "voice": choice.voice,
        "vad": None,
    }
    found: dict[str, Model] = {}
    for role in ROLES[command]:
        found[role] = find(
            role,
            wanted[role],
            choice.cache,
            offline=offline,
            hub_cache=hub_cache,
            progress=progress,
        )
    return EMBEDDED_FAMILY, found
