"""Which models a run needs, from the choices of its command line."""

from pathlib import Path

from omnicli import plugins
from omnicli.config import ModelChoice
from omnicli.errors import UserError
from omnicli.models.canonical import json_file
from omnicli.models.catalogue import Kind
from omnicli.models.hub import is_id
from omnicli.models.store import Model, find

EMBEDDED, EMBEDDED_FAMILY = "embedded", "cascade"
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
    assert choice.cache is not None, "the command line names the cache"
    if choice.model != EMBEDDED:
        return _omni(choice, choice.cache, offline=offline, hub_cache=hub_cache)
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


def _omni(
    choice: ModelChoice, cache: Path, *, offline: bool, hub_cache: Path | None
) -> tuple[str, dict[str, Model]]:
    """One model that does it all; speech is found by the embedded detector."""
    if not Path(choice.model).exists() and not is_id(choice.model):
        hint = "embedded, or the folder or hub id of an omni model"
        raise UserError(f"no model named {choice.model!r}", hint=f"--model is {hint}")
    for option, given in (("--asr-model", choice.asr_model), ("--llm-model", choice.llm_model)):
        if given:
            raise UserError(f"{option} is of no use with --model {choice.model}")
    whole = find("omni", choice.model, cache, offline=offline, hub_cache=hub_cache)
    return family_of(whole.folder), {
        "vad": find("vad", None, cache, offline=offline, hub_cache=hub_cache),
        "model": whole,
    }


def family_of(folder: Path) -> str:
    """The family whose name the `model_type` of a checkpoint begins with; the longest counts."""
    kind = str(json_file(folder / "config.json").get("model_type", ""))
    families = [name for name in plugins.names("family") if name != EMBEDDED_FAMILY]
    known = [name for name in families if kind.startswith(name)]
    if not known:
        raise UserError(
            f"{folder} holds a model of the type {kind!r}", hint=f"known: {', '.join(families)}"
        )
    return max(known, key=len)
