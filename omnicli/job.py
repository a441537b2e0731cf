"""A run from end to end: the one place where the parts are put together."""

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from omnicli import models, plugins
from omnicli.config import Limits, ModelFolder, RunConfig
from omnicli.data import (
    Answer,
    Failure,
    ItemKey,
    Outcome,
    Product,
    Recording,
    Request,
    Transcript,
    Waveform,
)
from omnicli.errors import RequestError, RunError, UserError
from omnicli.execution.dtypes import device_of, dtype_of
from omnicli.execution.stage import Family, Settings, StageSpec
from omnicli.io.audio import decode, probe
from omnicli.io.discover import read_inputs
from omnicli.io.manifest import BadLine, read_texts
from omnicli.io.results import line
from omnicli.io.scratch import Scratch
from omnicli.io.stems import ANSWER_ENDINGS, FILE_ENDINGS
from omnicli.io.store import Due, RunStore, key_of
from omnicli.observe import Listener, Observer, clock_s, now_iso
from omnicli.scheduling.bucket import Budget
from omnicli.scheduling.drive import Driver, measured, plan
from omnicli.scheduling.handover.stages import Openings
from omnicli.scheduling.wave import Member, needed

MAX_PROBLEMS = 100  # bad lines that are named; the others are counted
MAX_FAILURES = 10  # failures that the summary names
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
KEEP_OPEN_SHARE = 0.25  # of memory: weights that stay loaded between waves


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run did."""

    run_id: str
    output_dir: Path
    counts: dict[str, int]  # status -> requests of the whole input
    worked_on: int  # requests of this run
    audio_s: float
    spoken_s: float
    wall_s: float
    failures: list[tuple[str, str, str]] = field(default_factory=list)  # id, code, message

    def __str__(self) -> str:
        told = ", ".join(f"{count} {status}" for status, count in sorted(self.counts.items()))
        new = f"{self.worked_on} worked on now" if self.worked_on else "nothing to do"
        heard = f", {self.audio_s:.1f} s of audio" if self.audio_s else ""
        spoken = f", {self.spoken_s:.1f} s spoken" if self.spoken_s else ""
        speed = f", {self.audio_s / self.wall_s:.1f} x real time" if self.audio_s else ""
        return (
            f"{told or '0 items'} ({new}{heard}{spoken} in {self.wall_s:.1f} s{speed})\n"
            f"results: {self.output_dir / 'results.jsonl'}"
        )

    @property
    def exit_code(self) -> int:
        """3 while failures stand."""
        return 3 if self.counts.get("failed") else 0


def run_job(
    config: RunConfig, *, listeners: tuple[Listener, ...] = (), check: Callable[[], None]
) -> Summary:
    """Inputs in, files out. `check` raises between batches when the run is asked to stop."""
    start_s = clock_s()
    device = device_of(config.models.device)
    with RunStore(config.output_dir, config.task.command, overwrite=config.overwrite) as store:
        take_in(config, store)
        family = load_family(config, device, store.folder)
        observer = Observer(store.folder / "events.jsonl", listeners)
        with observer:
            job = Job(config, store, family, observer, check)
            try:
                job.run()
            finally:
                store.write_results()
        return Summary(
            run_id=job.run_id,
            output_dir=config.output_dir,
            counts=store.counts(),
            worked_on=job.worked_on,
            audio_s=round(job.audio_s, 3),
            spoken_s=round(job.spoken_s, 3),
            wall_s=round(clock_s() - start_s, 3),
            failures=store.failures(MAX_FAILURES),
        )


# -- the plan


@dataclass(slots=True, kw_only=True)
class StagePlan:
    """What one stage would run; lengths are forecast from claimed seconds."""

    stage: str
    items: int = 0
    batches: int = 0
    valid: int = 0
    padded: int = 0
    peak_bytes: int = 0  # activations and caches of the largest batch

    def add(self, spec: StageSpec, seconds: Sequence[float], budget: Budget) -> None:
        """One wave's recordings."""
        assert spec.forecast is not None
        lengths = [n for s in seconds for n in spec.forecast(s)]
        tickets = [measured(spec, ItemKey(str(i)), n, 0.0) for i, n in enumerate(lengths)]
        for batch in plan(spec, tickets, budget):
            self.items += len(batch.tickets)
            self.batches += 1
            self.valid += batch.valid
            self.padded += batch.padded
            self.peak_bytes = max(self.peak_bytes, sum(t.row_bytes for t in batch.tickets))

    def __str__(self) -> str:
        padding = 1 - self.valid / self.padded if self.padded else 0.0
        mib = self.peak_bytes / (1 << 20)
        return f"{self.stage:<12} {self.items:>9} {self.batches:>9} {padding:>9.1%} {mib:>9.0f} MiB"


@dataclass(slots=True, kw_only=True)
class Plan:
    """What a run would do."""

    requests: int = 0  # in the input
    due: int = 0
    audio_s: float = 0.0
    unknown: int = 0  # recordings of which nobody says how long they are
    waves: int = 0
    weights_bytes: int = 0
    stages: list[StagePlan] = field(default_factory=list)

    def __str__(self) -> str:
        unknown = f", {self.unknown} of unknown length" if self.unknown else ""
        head = (
            f"{self.requests} items, {self.due} due, {self.audio_s / 3600:.2f} h of audio{unknown}"
            f"\n{self.waves} waves, {self.weights_bytes / (1 << 20):.0f} MiB of weights\n"
            f"\n{'stage':<12} {'items':>9} {'batches':>9} {'padding':>9} {'a batch':>9}"
        )
        return "\n".join([head, *map(str, self.stages)])


def plan_job(config: RunConfig) -> Plan:
    """What `run_job` would do, from what lines and headers claim. Leaves the folder as it was."""
    device = device_of(config.models.device)
    there = (config.output_dir / ".omni").is_dir()
    with TemporaryDirectory() as elsewhere:
        place = config.output_dir if there else Path(elsewhere)
        with RunStore(place, config.task.command) as store:
            take_in(config, store, keep=False)
            family = load_family(config, device, place)
            made = _planned(config, store, family)
            store.rollback()
            return made


def _planned(config: RunConfig, store: RunStore, family: Family) -> Plan:
    forecast = [spec for spec in family.stages if spec.forecast is not None]
    made = Plan(
        requests=sum(store.counts().values()),
        weights_bytes=family.weights_bytes,
        stages=[StagePlan(stage=spec.name) for spec in forecast],
    )
    budget = budget_of(config)
    due = store.due(fingerprint(config, family), retry_failed=config.retry_failed)
    for wave in waves(due, config.limits):
        claims = [claimed_s(one.request) for one in wave]
        seconds = [s for s in claims if s]
        made.waves += 1
        made.due += len(wave)
        made.audio_s += sum(seconds)
        made.unknown += len(claims) - len(seconds)
        for stage, spec in zip(made.stages, forecast, strict=True):
            stage.add(spec, seconds, budget)
    return made


# -- the input


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


def load_family(config: RunConfig, device: str, scratch: Path) -> Family:
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
        decode=_decoder(config, scratch),
        claimed_s=claimed_s,
        workers=config.limits.workers,
    )
    family: Family = plugins.load("family", name)(settings)
    return family


def _decoder(config: RunConfig, scratch: Path) -> Callable[[Request], Recording]:
    def decoded(request: Request) -> Recording:
        assert request.audio is not None
        return decode(
            request.audio,
            channels=config.task.channels,
            offset_s=request.offset_s,
            duration_s=request.duration_s if request.offset_s is not None else None,
            scratch=scratch,
        )

    return decoded


def claimed_s(request: Request) -> float | None:
    """Seconds that the line or the file's header claims; for planning, never for results."""
    if request.duration_s is not None:
        return request.duration_s
    return probe(request.audio) if request.audio is not None else None


# -- the run


class Job:
    """Waves of requests through the stages; keeps what they make (see `Keeper`)."""

    def __init__(
        self,
        config: RunConfig,
        store: RunStore,
        family: Family,
        observer: Observer,
        check: Callable[[], None],
    ) -> None:
        self.config, self.store, self.family, self.observer = config, store, family, observer
        self.run_id = f"{now_iso()[:19].replace(':', '')}-{store.number}"
        self.settings = fingerprint(config, family)
        self.depends = dependences(family)
        self.scratch = Scratch(store.folder, config.limits.held_bytes)
        self.driver = Driver(budget=budget_of(config), observer=observer, check=check)
        self.writers = [plugins.load("writer", name) for name in config.writers]
        self.due: dict[str, Due] = {}  # the wave's
        self.worked_on = 0
        self.audio_s = 0.0
        self.spoken_s = 0.0

    def run(self) -> None:
        """All waves."""
        keep = self.family.weights_bytes < KEEP_OPEN_SHARE * _memory_bytes()
        openings = Openings(keep=keep)
        handover = plugins.load("handover", self.config.schedule)
        try:
            due = self.store.due(self.settings, retry_failed=self.config.retry_failed)
            for wave in waves(due, self.config.limits):
                self.driver.check()
                self.due = {due.request.request_id: due for due in wave}
                members = [self._member(due.request) for due in wave]
                handover(members, self.family.stages, self.driver, self, openings)
        finally:
            openings.close()

    def _member(self, request: Request) -> Member:
        member = Member(request=request)
        for spec in self.family.stages:
            if spec.record is not None:
                key = key_of(request, self.depends[spec.name])
                made = self.store.product(request.request_id, spec.name, key, spec.record)
                if made is not None:
                    member.inputs.put(spec.name, (made,))
        member.needs = needed(self.family.stages, member.inputs)
        return member

    # -- as `Keeper`

    def settle(self, product: Product) -> Product:
        """See `Keeper`."""
        return self.scratch.settle(product)

    def joined(self, member: Member, spec: StageSpec, product: Product) -> None:
        """See `Keeper`."""
        if spec.record is not None:
            request = member.request
            key = key_of(request, self.depends[spec.name])
            self.store.put_product(request.request_id, spec.name, key, product)

    def finished(self, member: Member) -> None:
        """See `Keeper`: files first, then the record that says that they are there."""
        due = self.due[member.request.request_id]
        outcome = self._outcome(member, due)
        try:
            written = {write(outcome, self.config.output_dir) for write in self.writers}
            if due.again:
                self._remove_stale(outcome, written)
        except (OSError, RequestError) as error:
            outcome = self._unwritten(outcome, error)
        self.store.finish(due, outcome.status, line(outcome, self.run_id))
        self._count(outcome)

    def _remove_stale(self, outcome: Outcome, written: set[Path | None]) -> None:
        """An earlier answer must not lie beside a new result as if it belonged to it."""
        answers = (*(f"{ending}.txt" for ending in ANSWER_ENDINGS), ".wav")
        stale = answers if outcome.failure is None else (*answers, *FILE_ENDINGS)
        for ending in dict.fromkeys(stale):
            path = self.config.output_dir / f"{outcome.stem}{ending}"
            if path not in written:
                path.unlink(missing_ok=True)

    def _outcome(self, member: Member, due: Due) -> Outcome:
        transcript = member.inputs.one("transcript", Transcript)
        answer = member.inputs.one("answer", Answer)
        waveform = member.inputs.one("vocode", Waveform)
        says = self.config.task.command == "say"
        made = waveform is not None if says else bool(transcript and transcript.text)
        return Outcome(
            request=member.request,
            status="failed" if member.failure else "ok" if made else "empty",
            stem=Path(due.stem),
            transcript=transcript,
            answer=answer,
            waveform=waveform,
            failure=member.failure,
            timings=member.timings,
            models=self.family.models,
            device=self.family.device,
        )

    def _unwritten(self, outcome: Outcome, error: OSError | RequestError) -> Outcome:
        """A result that cannot be written is a failed item; a full disk ends the run."""
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise RunError(
                f"no space left in {self.config.output_dir}: {error.strerror}",
                hint="free some space and run the same command again",
            ) from error
        code = error.code if isinstance(error, RequestError) else "unwritable"
        failure = Failure(code=code, stage="write", message=str(error))
        return Outcome(
            request=outcome.request,
            status="failed",
            stem=outcome.stem,
            failure=failure,
            timings=outcome.timings,
            models=outcome.models,
            device=outcome.device,
        )

    def _count(self, outcome: Outcome) -> None:
        self.worked_on += 1
        if outcome.transcript is not None:
            self.audio_s += outcome.transcript.decoded_s
        if outcome.waveform is not None:
            self.spoken_s += outcome.waveform.samples / outcome.waveform.rate_hz
        self.observer.emit("item", id=outcome.request.request_id, status=outcome.status)


def waves(due: Iterable[Due], limits: Limits) -> Iterator[list[Due]]:
    """Cut what is due into waves of so many items or so many claimed seconds."""
    wave: list[Due] = []
    wave_s = 0.0
    for one in due:
        wave.append(one)
        wave_s += claimed_s(one.request) or 0.0
        if wave_s >= limits.wave_s or len(wave) >= limits.wave_items:
            yield wave
            wave, wave_s = [], 0.0
    if wave:
        yield wave


def budget_of(config: RunConfig) -> Budget:
    """What a batch may hold."""
    return Budget(max_rows=config.limits.max_rows, max_bytes=config.limits.batch_bytes)


def fingerprint(config: RunConfig, family: Family) -> str:
    """All settings that decide what a request's files hold."""
    stages = [f"{spec.name}={spec.settings}" for spec in family.stages if spec.settings]
    return "; ".join([*stages, *sorted(config.writers), *sorted(family.models.values())])


def dependences(family: Family) -> dict[str, str]:
    """Stage -> the settings that its product depends on: its own and all before it."""
    told = [f"{spec.name}={spec.settings}" for spec in family.stages]
    return {spec.name: "; ".join(told[: i + 1]) for i, spec in enumerate(family.stages)}


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
