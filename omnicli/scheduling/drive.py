"""Run one open stage over all the items that need it: bucket, run, hand on, halve what fails.

What is in hand is on record before it runs, and watched while it does, so neither a process that
dies nor one that hangs is a riddle to the next run.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from omnicli import plugins
from omnicli.config import PolicySpec
from omnicli.data import Batch, Failure, ItemKey, Product, Ticket
from omnicli.errors import RequestError, RunError
from omnicli.execution.stage import MapStage, Stage, StageSpec
from omnicli.observe import Event, Observer, clock_s, peak_rss_bytes
from omnicli.scheduling.bucket import Budget, halves, pack, step_up
from omnicli.scheduling.faults import Faults, spoilt
from omnicli.scheduling.policy import Policy
from omnicli.scheduling.watchdog import Watchdog, Work

# What one item can do to a batch. Anything else (a full disk, a signal) ends the run.
TROUBLE = (RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, MemoryError)
MEMORY_SHARE = 0.8  # of what is left: estimates are rough, and others want some too
# What torch says when the CPU's memory is not enough (c10/core/impl/alloc_cpu.cpp, oneDNN).
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")

Deliver = Callable[[Ticket, "Product | Failure", float], None]  # with the seconds it took


def _unrecorded(stage: str, ids: Sequence[str]) -> AbstractContextManager[None]:
    return nullcontext()


def _plenty(device: str | None) -> float:
    return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What every stage's turn needs besides the stage."""

    budget: Budget
    observer: Observer
    loop: str = "lockstep"
    check: Callable[[], None] = lambda: None  # raises `StoppedError` between batches
    in_flight: Callable[[str, Sequence[str]], AbstractContextManager[None]] = _unrecorded
    watchdog: Watchdog | None = None
    faults: Faults = field(default_factory=Faults)
    memory_left: Callable[[str | None], float] = _plenty  # bytes; None: the family's device
    too_much: dict[str, int] = field(default_factory=dict)  # stage -> bytes that did not fit

    @contextmanager
    def holding(self, work: Work) -> Iterator[None]:
        """Work on record and under watch for the length of a block."""
        watched = self.watchdog.watch(work) if self.watchdog else nullcontext()
        with self.in_flight(work.stage, work.ids), watched:
            yield

    def beat(self) -> None:
        """Something moved inside a batch."""
        if self.watchdog is not None:
            self.watchdog.beat()


def ticket_of(spec: StageSpec, key: ItemKey, item: Any) -> Ticket:
    """Measure an item."""
    ticket = measured(spec, key, spec.length(item), spec.audio_s(item) if spec.audio_s else 0.0)
    return replace(ticket, apart=spec.apart(item)) if spec.apart else ticket


def measured(spec: StageSpec, key: ItemKey, length: int, audio_s: float) -> Ticket:
    """A ticket for an item of that length."""
    length = max(1, length)
    edge = max(length, spec.edge(length))
    return Ticket(key, length, edge, spec.row_bytes(edge), audio_s)


def plan(
    spec: StageSpec, tickets: Sequence[Ticket], budget: Budget, loop: str = "lockstep"
) -> list[Batch]:
    """The batches that a stage will run."""
    rows = min(budget.max_rows, spec.max_rows)
    pool = spec.pool_rows if loop == "refill" else 1
    return pack(tickets, Budget(max_rows=rows, max_bytes=budget.max_bytes), pool=pool)


def drive(
    spec: StageSpec,
    stage: Stage,
    items: Mapping[ItemKey, Any],
    driver: Driver,
    deliver: Deliver,
) -> None:
    """Every item's product or failure is delivered exactly once."""
    tickets = [ticket_of(spec, key, item) for key, item in items.items()]
    pending = plan(spec, tickets, driver.budget)[::-1]
    total_s = sum(t.audio_s for t in tickets)
    driver.observer.emit("stage", stage=spec.name, items=len(tickets), audio_s=round(total_s, 3))
    while pending:
        driver.check()
        batch = pending.pop()
        if len(batch.tickets) > 1 and batch.row_bytes > _allowed_bytes(spec, driver):
            pending += halves(batch)[::-1]
        elif batch.row_bytes > driver.memory_left(spec.device):
            needed, left = batch.row_bytes >> 20, int(driver.memory_left(spec.device)) >> 20
            message = f"needs about {needed} MiB, and {left} MiB are left"
            deliver(batch.tickets[0], Failure(code="oom", stage=spec.name, message=message), 0.0)
        else:
            pending += _run_batch(spec, stage, batch, items, driver, deliver)[::-1]


def _allowed_bytes(spec: StageSpec, driver: Driver) -> float:
    """What a batch may take now: by the memory that is left, and by what was too much before."""
    left = MEMORY_SHARE * driver.memory_left(spec.device)
    too_much = driver.too_much.get(spec.name)
    return left if too_much is None else min(left, too_much / 2)


def _run_batch(
    spec: StageSpec,
    stage: Stage,
    batch: Batch,
    items: Mapping[ItemKey, Any],
    driver: Driver,
    deliver: Deliver,
) -> list[Batch]:
    """Run one batch; what is left to do if it failed."""
    audio_s = sum(t.audio_s for t in batch.tickets)
    facts: Event = {
        "stage": spec.name,
        "items": len(batch.tickets),
        "valid": batch.valid,
        "padded": batch.padded,
        "audio_s": round(audio_s, 3),
        "estimated_bytes": batch.row_bytes,
    }
    ids = list(dict.fromkeys(t.key.request_id for t in batch.tickets))
    work = Work(stage=spec.name, ids=ids, units=batch.padded, audio_s=audio_s)
    undelivered = dict.fromkeys(range(len(batch.tickets)))
    with driver.observer.span("batch", **facts) as event, driver.holding(work):
        start_s = clock_s()
        products = _products(spec, stage, batch, items, driver)
        try:
            while (made := _next(products)) is not None:
                if isinstance(made, Exception):
                    event["error"] = type(made).__name__
                    if is_oom(made):
                        event["oom"] = True
                        driver.too_much[spec.name] = batch.row_bytes
                        torch.cuda.empty_cache()
                    return _after_trouble(spec, batch, list(undelivered), made, deliver)
                i, product = made
                share_s = (clock_s() - start_s) / len(batch.tickets)
                del undelivered[i]
                deliver(batch.tickets[i], _sound(spec.name, product), share_s)
        finally:
            event["peak_rss_bytes"] = peak_rss_bytes()
            if torch.cuda.is_available():
                event["vram_bytes"] = torch.cuda.max_memory_allocated()
    return []


def _next(
    products: Iterator[tuple[int, Product | Failure]],
) -> tuple[int, Product | Failure] | Exception | None:
    """The next product, what an item did to the batch, or None at the end.

    Only what the stage raises is an item's doing; what `deliver` raises ends the run.
    """
    try:
        return next(products, None)
    except (RequestError, *TROUBLE) as error:
        return error


def _products(
    spec: StageSpec,
    stage: Stage,
    batch: Batch,
    items: Mapping[ItemKey, Any],
    driver: Driver,
) -> Iterator[tuple[int, Product | Failure]]:
    """(index, product) of each item, as they are done. The fillers' products are dropped."""
    keys = [t.key for t in batch.tickets]
    driver.faults.strike(spec.name, keys)
    rows = [items[key] for key in keys]
    filled = rows + [rows[-1]] * (step_up(len(rows), spec.fill_rows) - len(rows))
    with torch.inference_mode():
        if isinstance(stage, MapStage):
            made = list(zip(range(len(rows)), stage.run(filled), strict=False))
            bad = driver.faults.rows(spec.name, keys, "nan")
            yield from ((i, spoilt(p) if bad and bad[i] else p) for i, p in made)
            return
        policies = [policy_of(one) for one in (spec.policy, spec.inner_policy) if one]
        seeds = [spec.seed(item) if spec.seed else 0 for item in filled]
        run = plugins.load("loop", driver.loop if stage.refills else "lockstep")
        bent = driver.faults.bent(stage, spec.name, keys, rows)
        slots = step_up(batch.slots, spec.fill_rows)
        for i, product in run(bent, filled, seeds, policies, slots=slots, beat=driver.beat):
            if i < len(rows):
                yield i, product


def check_room(spec: StageSpec, driver: Driver) -> None:
    """RunError if a stage's weights cannot fit where it computes."""
    left = driver.memory_left(spec.device)
    if spec.weights_bytes > left:
        where = f" on {spec.device}" if spec.device else ""
        raise RunError(
            f"the weights of {spec.name} need {spec.weights_bytes / 2**30:.2f} GiB{where}, "
            f"and {left / 2**30:.2f} are left",
            hint="--place STAGE=DEVICE, --dtype bfloat16, or a smaller model",
        )


def policy_of(spec: PolicySpec) -> Policy:
    """The token policy that a spec names."""
    policy: Policy = plugins.load("policy", spec.name)(**spec.options)
    return policy


def _sound(stage: str, product: Product | Failure) -> Product | Failure:
    """The product, or a failure if one of its numbers is no number: nothing later would notice."""
    if isinstance(product, Failure):
        return product if product.stage else replace(product, stage=stage)
    for value in (getattr(product, f.name) for f in fields(product)):
        for one in value if isinstance(value, tuple) else (value,):
            if not _finite(one):
                return Failure(code="not_finite", stage=stage, message="its numbers are no numbers")
    return product


def _finite(value: object) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def _after_trouble(
    spec: StageSpec,
    batch: Batch,
    undelivered: list[int],
    error: Exception,
    deliver: Deliver,
) -> list[Batch]:
    """Halve the batch until only the guilty item is left; that one fails."""
    rest = Batch(tuple(batch.tickets[i] for i in undelivered))
    if len(rest.tickets) > 1:
        return halves(rest)
    for ticket in rest.tickets:
        deliver(ticket, failure_of(spec.name, error), 0.0)
    return []


def is_oom(error: Exception) -> bool:
    """Whether memory was not enough."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    told = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in told for words in _NO_MEMORY)


def failure_of(stage: str, error: Exception) -> Failure:
    """What is recorded about an item that could not be done."""
    if isinstance(error, RequestError):
        return Failure(code=error.code, stage=stage, message=str(error))
    if is_oom(error):
        return Failure(code="oom", stage=stage, message="not enough memory for this item alone")
    return Failure(code="internal", stage=stage, message=f"{type(error).__name__}: {error}")
