"""A run: waves of requests through the stages, everything kept, every ending told."""

import errno
import json
import platform
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from omnicli import __version__, machine, plugins
from omnicli.config import RunConfig
from omnicli.data import (
    Answer,
    Failure,
    Outcome,
    Product,
    Recording,
    Request,
    Transcript,
    Waveform,
)
from omnicli.errors import OmniError, RequestError, RunError, TimeUpError, UserError
from omnicli.execution.dtypes import device_of
from omnicli.execution.stage import Family, StageSpec
from omnicli.io.atomic import write_text
from omnicli.io.audio import decode
from omnicli.io.results import line
from omnicli.io.scratch import Scratch
from omnicli.io.stems import ANSWER_ENDINGS, FILE_ENDINGS
from omnicli.io.store import MAX_CRASHES, Due, RunStore, digest_of
from omnicli.job.inputs import (
    budget_of,
    claimed_s,
    fingerprint,
    load_family,
    opened_store,
    origins,
    pages,
    resumed,
    take_in,
    waves,
)
from omnicli.observe import Listener, Observer, clock_s, now_iso, rss_bytes
from omnicli.report.summary import RunSummary, Totals
from omnicli.scheduling.drive import TROUBLE, Driver, failure_of
from omnicli.scheduling.faults import Faults
from omnicli.scheduling.openings import Openings
from omnicli.scheduling.watchdog import Watchdog, Work
from omnicli.scheduling.wave import Member, needed

MAX_FAILURES = 10  # failures that the summary names
MAX_IDS = 100  # that an event names
PROBED_TOGETHER = 64
MAX_PENDING = 10_000  # files that are asked for their time
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOADING_SHARE, MAX_GROWTH = 0.1, 8.0  # of a wave's time; of waves, when loading takes more
KEEP_OPEN_SHARE = 0.25  # of memory: weights that stay loaded between waves
TEXT_BYTES, SPOKEN_BYTES = 16 << 10, 512 << 10  # that a result takes, for the estimate of space


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a run needs of the process that it runs in."""

    listeners: tuple[Listener, ...] = ()
    check: Callable[[], None] = lambda: None  # raises when the run is asked to stop
    give_up: Callable[[str], None] = lambda message: None  # ends the process: it is stuck
    ended: tuple[Callable[[RunSummary], None], ...] = ()  # are told, however it ended


def run_job(config: RunConfig, host: Host) -> RunSummary:
    """Inputs in, files out."""
    device = device_of(config.models.device)
    torch.set_num_threads(config.models.threads or machine.cpu_count())
    with _disk_trouble(config.output_dir), opened_store(config, config.output_dir) as store:
        take_in(config, store)
        if config.fail_if_empty and not store.counts():
            raise UserError("0 items in the input", hint="nothing was processed")
        totals = Totals()
        listeners: tuple[Listener, ...] = (totals, *host.listeners)
        with Observer(store.folder / "events.jsonl", listeners) as observer:
            decoder = _Decoder(config, _scratch(config, store))
            family = load_family(config, device, decoder)
            return _run(Job(config, store, family, observer, host, decoder), totals)


def _run(job: "Job", totals: Totals) -> RunSummary:
    store, observer = job.store, job.observer
    items = sum(store.counts().values())
    observer.emit(
        "run",
        run_id=job.run_id,
        command=job.config.task.command,
        items=items,
        device=job.family.device,
    )
    code = 1
    try:
        job.run()
        code = 3 if store.counts().get("failed") else 0
    except OmniError as error:
        code = error.exit_code
        raise
    finally:
        try:
            store.write_results()
        finally:  # on a full disk too
            summary = _ended(job, totals, code)
    return summary


def _ended(job: "Job", totals: Totals, code: int) -> RunSummary:
    """Tell everybody that the run is over."""
    wall_s = round(clock_s() - job.start_s, 3)
    job.observer.emit("end", run_id=job.run_id, exit_code=code, wall_s=wall_s)
    summary = _summary(job, totals, code, wall_s)
    for told in job.host.ended:
        told(summary)
    path = job.store.folder / "runs" / job.run_id / "summary.json"
    write_text(path, summary.to_json() + "\n")
    return summary


@contextmanager
def _disk_trouble(output_dir: Path) -> Iterator[None]:
    """A disk that is full or gone ends the run, and says so."""
    hint = "free some space and run the same command again"
    try:
        yield
    except sqlite3.OperationalError as error:
        raise RunError(f"cannot write the run log in {output_dir}: {error}", hint=hint) from error
    except OSError as error:
        if error.errno not in (*NO_SPACE, errno.EIO, errno.EROFS, errno.ESTALE):
            raise
        raise RunError(f"cannot write to {output_dir}: {error.strerror}", hint=hint) from error


def _scratch(config: RunConfig, store: RunStore) -> Path:
    folder = config.scratch or store.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot use {folder} as scratch: {error.strerror}") from error
    return folder


class _Decoder:
    """Decodes recordings, and takes the hash of each file while it is at it."""

    def __init__(self, config: RunConfig, scratch: Path) -> None:
        self.channels = config.task.channels
        self.scratch = scratch
        self.digests: dict[Path, str] = {}  # the wave's

    def __call__(self, request: Request) -> Recording:
        assert request.audio is not None
        recording = decode(
            request.audio,
            channels=self.channels,
            offset_s=request.offset_s,
            duration_s=request.duration_s if request.offset_s is not None else None,
            scratch=self.scratch,
        )
        if request.audio not in self.digests:
            self.digests[request.audio] = digest_of(request.audio)
        return recording


def _summary(job: "Job", totals: Totals, code: int, wall_s: float) -> RunSummary:
    counts, config = job.store.counts(), job.config
    pending = [due.request for due in islice(job.store.not_attempted(), MAX_PENDING)]
    return RunSummary(
        run_id=job.run_id,
        command=config.task.command,
        output_dir=config.output_dir,
        started=job.started,
        ended=now_iso(),
        wall_s=wall_s,
        exit_code=code,
        counts=counts,
        worked_on=job.worked_on,
        audio_s=round(totals.audio_s, 3),
        spoken_s=round(totals.spoken_s, 3),
        failures=tuple(job.store.failures(MAX_FAILURES)),
        totals=totals,
        backlog_items=counts.get("todo", 0) + counts.get("deferred", 0),
        backlog_s=round(sum(request.duration_s or 0.0 for request in pending), 3),
        oldest_pending_s=round(_oldest_s(pending), 1),
        device=job.family.device,
        host=platform.node(),
        models=job.family.models,
        versions={
            "omni": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        config=json.loads(json.dumps(asdict(config), default=str)),
    )


def _oldest_s(pending: Sequence[Request]) -> float:
    """Seconds since the oldest file that waits has come."""
    times = map(_changed_s, pending)
    return max(0.0, time.time() - min(filter(None, times), default=time.time()))


def _changed_s(request: Request) -> float | None:
    try:
        return request.audio.stat().st_mtime if request.audio else None
    except (OSError, ValueError):
        return None


class Job:
    """Waves of requests through the stages; keeps what they make (see `Keeper`)."""

    def __init__(
        self,
        config: RunConfig,
        store: RunStore,
        family: Family,
        observer: Observer,
        host: Host,
        decoder: _Decoder,
    ) -> None:
        self.config, self.store, self.family, self.observer = config, store, family, observer
        self.host, self.decoder = host, decoder
        self.start_s = clock_s()
        self.started = now_iso()
        self.run_id = f"{self.started[:19].replace(':', '')}-{store.number}"
        self.settings = fingerprint(config, family)
        self.origins = origins(family)
        self.versions = self.origins[family.stages[-1].name].versions
        self.scratch = Scratch(decoder.scratch, config.limits.held_bytes)
        self.driver = Driver(
            budget=budget_of(config),
            observer=observer,
            loop=config.loop,
            check=self.check,
            in_flight=store.in_flight,
            watchdog=Watchdog(config.limits.patience_s, self._stalled),
            faults=Faults(config.faults),
            memory_left=self._memory_left,
        )
        self.writers = [plugins.load("writer", name) for name in config.writers]
        self.most_failures = self._most_failures()
        self.due: dict[str, Due] = {}  # the wave's
        self.worked_on = self.failed = 0
        self.growth = 1.0  # of waves

    def run(self) -> None:
        """All waves; what no time is left for is deferred."""
        keep = self.family.weights_bytes < KEEP_OPEN_SHARE * machine.memory_bytes()
        openings = Openings(keep=keep)
        handover = plugins.load("handover", self.config.schedule)
        assert self.driver.watchdog is not None
        if self.config.models.device == "auto" and self.family.device == "cpu":
            self._warn("no GPU was found, so everything runs on the CPU (--device cpu knows that)")
        try:
            with self.driver.watchdog:
                for wave in self._waves():
                    self.check()
                    members = [self._member(due) for due in wave]
                    begun_s, loaded_s = clock_s(), openings.loading_s
                    handover(members, self.family.stages, self.driver, self, openings)
                    self._grow(clock_s() - begun_s, openings.loading_s - loaded_s, keep=keep)
        except TimeUpError as error:
            self._warn(str(error))
            for due in self.store.not_attempted():
                self._defer(due)
        finally:
            openings.close()
        self._tell_older()
        if replaced := self.store.replaced:
            self._warn(
                f"{replaced} results here were made with other settings and have been replaced; "
                "-o with another folder keeps both"
            )
        if left := self.store.counts().get("todo"):
            raise RunError(
                f"{left} items have no result",
                hint="the same command tries them again; if they stay, please report it",
            )

    def _grow(self, wave_s: float, loading_s: float, *, keep: bool) -> None:
        """Larger waves where weights are loaded for each of them, and that takes long."""
        if not keep and loading_s > LOADING_SHARE * wave_s:
            self.growth = min(MAX_GROWTH, 2 * self.growth)

    def check(self) -> None:
        """Between batches: whether the run is to go on."""
        self.host.check()
        self.store.lock.check()
        if self.most_failures is not None and self.failed >= self.most_failures:
            raise RunError(
                f"{self.failed} recordings failed: that is the limit",
                hint="see errors.jsonl; the same command goes on where this run stopped",
            )
        limit_s = self.config.stop.max_runtime_s
        if limit_s is not None and clock_s() - self.start_s > limit_s:
            raise TimeUpError

    def _waves(self) -> Iterator[list[Due]]:
        due = self.store.due(self.settings, self.versions, self.config.resume)
        for wave in waves(self._probed(due), self.config.limits, lambda: self.growth):
            self.due = {due.request.request_id: due for due in wave}
            self.decoder.digests.clear()
            self._check_space(wave)
            ready = []
            for one in wave:
                if one.crashes >= MAX_CRASHES:
                    self._crashed(one)
                elif _is_young(one.request, self.config.resume.min_age_s):
                    self._defer(one)
                else:
                    ready.append(one)
            yield ready

    def _probed(self, due: Iterable[Due]) -> Iterator[Due]:
        """Headers are read on record and under watch too: anything may stand in them."""
        for page in pages(due, PROBED_TOGETHER):
            ids = [one.request.request_id for one in page]
            with self.driver.holding(Work(stage="probe", ids=ids, units=len(ids), audio_s=0.0)):
                for one in page:
                    if one.crashes < MAX_CRASHES:
                        claimed_s(one.request)
            yield from page

    def _member(self, due: Due) -> Member:
        inputs = resumed(self.store, self.family, self.origins, due)
        return Member(request=due.request, inputs=inputs, needs=needed(self.family.stages, inputs))

    # -- as `Keeper`

    def settle(self, product: Product) -> Product:
        """See `Keeper`."""
        return self.scratch.settle(product)

    def joined(self, member: Member, spec: StageSpec, product: Product) -> None:
        """See `Keeper`."""
        if spec.record is not None:
            due = self.due[member.request.request_id]
            self.store.put_product(due, self.origins[spec.name], product)

    def finished(self, member: Member) -> None:
        """See `Keeper`: files first, then the record that says that they are there."""
        due = self.due[member.request.request_id]
        outcome = self._outcome(member, due)
        try:
            written = {write(outcome, self.config.output_dir) for write in self.writers}
            if due.again:
                self._remove_stale(outcome, written)
        except (OSError, RequestError, *TROUBLE) as error:
            outcome = self._unwritten(outcome, error)
        self._finish(due, outcome)

    def _finish(self, due: Due, outcome: Outcome) -> None:
        audio = due.request.audio
        digest = self.decoder.digests.get(audio, due.digest) if audio is not None else ""
        result = line(outcome, self.run_id)
        self.store.finish(due, outcome.status, result, versions=self.versions, digest=digest)
        self.worked_on += 1
        self.failed += outcome.failure is not None
        failure, spoken, heard = outcome.failure, outcome.waveform, outcome.transcript
        self.observer.emit(
            "item",
            id=due.request.request_id,
            status=outcome.status,
            code=failure.code if failure else None,
            stage=failure.stage if failure else None,
            warnings=",".join(dict.fromkeys(map(_flag, outcome.warnings))),
            audio_s=round(heard.decoded_s, 3) if heard else 0.0,
            spoken_s=round(spoken.samples / spoken.rate_hz, 3) if spoken else 0.0,
            text=heard.text if heard and self.config.log_content else None,
        )

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
        unspoken = answer is not None and bool(answer.warnings)
        heard = bool(transcript and transcript.text)
        made = (waveform is not None or unspoken) if says else heard
        return replace(
            self._bare(due, "failed" if member.failure else "ok" if made else "empty"),
            transcript=transcript,
            answer=answer,
            waveform=waveform,
            failure=member.failure,
            timings=member.timings,
        )

    def _bare(self, due: Due, status: str) -> Outcome:
        return Outcome(
            request=due.request,
            status=status,
            stem=Path(due.stem),
            models=self.family.models,
            device=self.family.device,
        )

    def _unwritten(self, outcome: Outcome, error: Exception) -> Outcome:
        """A result that cannot be written is a failed item; a full disk ends the run."""
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise error
        failure = failure_of("output", error)
        if isinstance(error, OSError):
            failure = Failure(code="unwritable", stage="output", message=str(error))
        return replace(
            outcome, status="failed", failure=failure, transcript=None, answer=None, waveform=None
        )

    # -- what is not worked on

    def _defer(self, due: Due) -> None:
        outcome = self._bare(due, "deferred")
        self.store.defer(due, line(outcome, self.run_id))
        self.observer.emit("item", id=due.request.request_id, status="deferred")

    def _crashed(self, due: Due) -> None:
        """What so many processes died over is not tried again by itself."""
        told = f"the process died {due.crashes} times with this in hand"
        failure = Failure(code="crash", stage=due.crash_stage, message=told)
        self._finish(due, replace(self._bare(due, "failed"), failure=failure))

    # -- trouble

    def _most_failures(self) -> int | None:
        stop, items = self.config.stop, sum(self.store.counts().values())
        if stop.max_failed_share is not None:
            return max(1, int(stop.max_failed_share * items))
        return stop.max_failures

    def _stalled(self, work: Work, idle_s: float) -> None:
        ids = ",".join(work.ids[:MAX_IDS])
        self.observer.emit("stalled", stage=work.stage, ids=ids, idle_s=round(idle_s, 3))
        self.host.give_up(
            f"{work.stage} made no progress for {idle_s:.0f} s; in hand: "
            f"{', '.join(work.ids[:MAX_FAILURES])}"
            f"{f' and {len(work.ids) - MAX_FAILURES} more' * (len(work.ids) > MAX_FAILURES)}"
        )

    def _memory_left(self, device: str | None) -> float:
        device = device or self.family.device
        if device != "cpu":
            left, _ = torch.cuda.mem_get_info(device)
            held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            return float(left + held)
        most = self.config.limits.max_bytes
        left = machine.memory_left_bytes()
        return float(left if most is None else min(left, most - rss_bytes()))

    def _check_space(self, wave: Sequence[Due]) -> None:
        """Warn before the work if its results may not fit; a disk that fills up ends the run."""
        speaks = "wav" in self.config.writers and self.config.task.speak
        output = len(wave) * (TEXT_BYTES + SPOKEN_BYTES * speaks)
        free = machine.free_bytes(self.config.output_dir)
        if free < output:
            self._warn(
                f"about {output / 1e6:.0f} MB are needed in {self.config.output_dir}, "
                f"{free / 1e6:.0f} MB are free"
            )

    def _tell_older(self) -> None:
        older = self.store.older
        if older.results and not self.config.resume.refresh:
            stages = ", ".join(sorted(older.stages))
            self._warn(
                f"{older.results} results were made by older versions of {stages}; "
                "--refresh makes them anew"
            )

    def _warn(self, message: str) -> None:
        self.observer.emit("warning", message=message)


def _flag(warning: str) -> str:
    """The word that tells a warning's kind: `suspect_text: runaway` is a runaway."""
    word, _, detail = warning.partition(": ")
    return detail if word == "suspect_text" else word


def _is_young(request: Request, min_age_s: float) -> bool:
    """Whether a file has changed so lately that it may still be arriving."""
    changed_s = _changed_s(request) if min_age_s else None
    return changed_s is not None and time.time() - changed_s < min_age_s
