"""What a run begins with: its input on record, its models found."""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from omnicli import models, plugins
from omnicli.config import Limits, ModelFolder, RunConfig
from omnicli.data import Inputs, Recording, Request
from omnicli.errors import UserError
from omnicli.execution.dtypes import device_of, dtype_of
from omnicli.execution.stage import Family, Settings
from omnicli.io.audio import probe
from omnicli.io.discover import read_inputs, root_of
from omnicli.io.manifest import BadLine, read_texts
from omnicli.io.store import Due, Origin, RunStore, stat_of
from omnicli.scheduling.bucket import Budget

MAX_PROBLEMS = 100  # bad lines that are named; the others are counted

Decode = Callable[[Request], Recording]


def opened_store(config: RunConfig, output_dir: Path) -> RunStore:
    """The run folder, held; an error if it belongs to another command or input."""
    return RunStore(
        output_dir,
        config.task.command,
        overwrite=config.resume.overwrite,
        root=root_of(
            config.inputs,
            files_from=config.files_from,
            audio_root=config.audio_root,
            texts=config.task.command == "say",
            output_dir=config.output_dir,
        ),
    )


def read_requests(config: RunConfig) -> Iterator[Request | BadLine]:
    """Whatever the command line names, as a stream."""
    if config.task.command == "say":
        return read_texts(config.inputs[0], sys.stdin)
    return read_inputs(
        config.inputs,
        stdin=sys.stdin,
        files_from=config.files_from,
        audio_root=config.audio_root,
        exclude=(config.output_dir,),
        recursive=config.recursive,
    )


def take_in(config: RunConfig, store: RunStore, *, keep: bool = True) -> None:
    """Stream the input into the run log; name all that is wrong with it, and then take nothing."""
    problems: list[str] = []
    more = 0
    for problem in _problems(read_requests(config), store):
        if len(problems) < MAX_PROBLEMS:
            problems.append(problem)
        else:
            more += 1
    if not problems:
        if keep:
            store.commit()
        return
    store.rollback()
    rest = [f"and {more} more"] if more else []
    told = "\n  ".join([*problems, *rest])
    raise UserError(
        f"bad lines in the input: {len(problems) + more}\n  {told}", hint="nothing was processed"
    )


def _problems(entries: Iterable[Request | BadLine], store: RunStore) -> Iterator[str]:
    bad: list[str] = []

    def good() -> Iterator[Request]:
        for entry in entries:
            if isinstance(entry, BadLine):
                bad.append(f"{entry.where}: {entry.what}")
            else:
                yield entry

    for problem in store.ingest(good()):
        yield from bad
        bad.clear()
        yield problem
    yield from bad


# -- the model


def load_family(config: RunConfig, device: str, decode: Decode) -> Family:
    """Find the checkpoints that the task needs, and cut them into stages. No weights are read."""
    choice = config.models
    name, folders = models.choose(choice, config.task.command, hub_cache=choice.hub_cache)
    settings = Settings(
        task=config.task,
        folders={
            role: ModelFolder(name=m.name, folder=m.folder, digest=m.digest)
            for role, m in folders.items()
        },
        device=device,
        dtype=dtype_of(choice.dtype, device),
        decode=decode,
        claimed_s=claimed_s,
        workers=config.limits.workers,
        voice=choice.voice,
        places={
            place.stage: (
                device_of(place.device),
                dtype_of(place.dtype or choice.dtype, place.device),
            )
            for place in choice.places
        },
    )
    family: Family = plugins.load("family", name)(settings)
    placed = [spec.name for spec in family.stages if spec.device]
    for place in choice.places:
        if place.stage not in placed:
            hint = f"known: {', '.join(placed) or 'none, since the model is not an omni model'}"
            raise UserError(f"no stage named {place.stage!r} can be placed", hint=hint)
    return family


def claimed_s(request: Request) -> float | None:
    """Seconds that the line or the file's header claims; for planning, never for results."""
    if request.duration_s is not None or request.audio is None:
        return request.duration_s
    return _probed(request.audio, stat_of(request.audio))


@lru_cache(maxsize=4096)
def _probed(path: Path, _stat: str) -> float | None:
    """Asked of the same file when its wave is cut, when it is bucketed, and for progress."""
    return probe(path)


# -- what decides a result


def fingerprint(config: RunConfig, family: Family) -> str:
    """All settings that decide what a request's files hold."""
    stages = [f"{spec.name}={spec.settings}" for spec in family.stages if spec.settings]
    return "; ".join([*stages, *sorted(config.writers), *sorted(family.models.values())])


def origins(family: Family) -> dict[str, Origin]:
    """What each stage's product depends on: its own settings and version and those before it."""
    settings: list[str] = []
    versions: list[str] = []
    made = {}
    for spec in family.stages:
        settings.append(f"{spec.name}={spec.settings}")
        if spec.version > 1:
            versions.append(f"{spec.name}={spec.version}")
        made[spec.name] = Origin(
            stage=spec.name, settings="; ".join(settings), versions=" ".join(versions)
        )
    return made


def resumed(store: RunStore, family: Family, made_from: dict[str, Origin], due: Due) -> Inputs:
    """What earlier runs made of a request and today's stages would make again as it is."""
    inputs = Inputs()
    for spec in family.stages:
        if spec.record is not None:
            made = store.product(due, made_from[spec.name], spec.record)
            if made is not None:
                inputs.put(spec.name, (made,))
    return inputs


# -- how much runs together


def budget_of(config: RunConfig) -> Budget:
    """What a batch may hold."""
    return Budget(max_rows=config.limits.max_rows, max_bytes=config.limits.batch_bytes)


def waves(
    due: Iterable[Due], limits: Limits, growth: Callable[[], float] = lambda: 1.0
) -> Iterator[list[Due]]:
    """Cut what is due into waves of so many items or so many claimed seconds.

    `growth` is asked all the time: waves become so many times larger.
    """
    items, wave_s = 0, 0.0

    def full(one: Due) -> bool:
        nonlocal items, wave_s
        items += 1
        if not one.crashes:  # it is alone anyway, and its header may be what is deadly
            wave_s += claimed_s(one.request) or 0.0
        return wave_s >= growth() * limits.wave_s or items >= growth() * limits.wave_items

    for wave in pages(due, sys.maxsize, full):
        yield wave
        items, wave_s = 0, 0.0


def pages(
    due: Iterable[Due], most: int, full: Callable[[Due], bool] = lambda one: False
) -> Iterator[list[Due]]:
    """Up to `most` together, or until one makes it `full`; what processes died over is alone."""
    page: list[Due] = []
    for one in due:
        if one.crashes and page:
            yield page
            page = []
        page.append(one)
        if full(one) or one.crashes or len(page) >= most:
            yield page
            page = []
    if page:
        yield page
