"""A plug-in is a file: its name is the file's name, its value is one object inside.

A family that is too large for a file is a folder.

    kind       folder                            object
    family     omnicli/execution/families/       `load(config, cache) -> Family`
    handover   omnicli/scheduling/handover/      `run(wave, stages, driver) -> None`
    loop       omnicli/scheduling/loops/         `run(stage, items, seeds, policy) -> Iterator`
    policy     omnicli/scheduling/policies/      `build(**options) -> Policy`
    writer     omnicli/io/writers/               `write(outcome, folder) -> Path | None`

Another package adds one with an entry point in the group `omnicli.<kind>`.
"""

from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from omnicli.errors import UserError

Kind = Literal["family", "handover", "loop", "policy", "writer"]

_HOME: dict[Kind, tuple[str, str]] = {
    "family": ("omnicli.execution.families", "load"),
    "handover": ("omnicli.scheduling.handover", "run"),
    "loop": ("omnicli.scheduling.loops", "run"),
    "policy": ("omnicli.scheduling.policies", "build"),
    "writer": ("omnicli.io.writers", "write"),
}


def names(kind: Kind) -> tuple[str, ...]:
    """Names of all plug-ins of a kind; imports none of them."""
    spec = find_spec(_HOME[kind][0])
    assert spec is not None and spec.submodule_search_locations is not None
    places = [Path(place) for place in spec.submodule_search_locations]
    files = {path.stem for place in places for path in place.glob("*.py")}
    folders = {path.parent.name for place in places for path in place.glob("*/__init__.py")}
    outside = entry_points(group=f"omnicli.{kind}").names
    return tuple(sorted({n for n in files | folders if not n.startswith("_")} | outside))


def load(kind: Kind, name: str) -> Any:
    """The plug-in's object, imported now."""
    known = names(kind)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise UserError(f"no {kind} named {name!r}", hint=hint)
    for entry in entry_points(group=f"omnicli.{kind}", name=name):
        return entry.load()
    package, attribute = _HOME[kind]
    return getattr(import_module(f"{package}.{name}"), attribute)
