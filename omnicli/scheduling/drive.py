"""Run one open stage over all the items that need it: bucket, run, hand on, halve what fails.

What is in hand is on record before it runs, and watched while it does, so neither a process that
dies nor one that hangs is a riddle to the next run.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
    waiting_bytes: int = 256 << 20  # of products behind one stage, where stages run at a time

    @contextmanager
    def holding(self, work: Work) -> Iterator[None]:
        """Work on record and under watch for the length of a block."""
        watched = self.watchdog.watch(work) if self.watchdog else nullcontext()
        with self.in_flight(work.stage, work.ids), watched:
            yield

    def beat(self, *work: Work) -> None:
        """Something moved inside a batch: of that work, or of all that is in hand."""
        if self.watchdog is not None:
            self.watchdog.beat(*work)


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
    return pack(tickets, _own(spec, budget), pool=_pool(spec, loop))


def is_full(spec: StageSpec, batch: Batch, budget: Budget, loop: str) -> bool:
    """Whether the plan would never put more into such a batch."""
    most = _own(spec, budget).rows(batch.tickets[0].row_bytes) * _pool(spec, loop)
    return len(batch.tickets) >= most


def _own(spec: StageSpec, budget: Budget) -> Budget:
    return replace(budget, max_rows=min(budget.max_rows, spec.max_rows))


def _pool(spec: StageSpec, loop: str) -> int:
    return spec.pool_rows if loop == "refill" else 1


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
        instead = in_place_of(spec, batch, driver, deliver)
        if instead is None:
            instead = _run_batch(spec, stage, batch, items, driver, deliver)
        pending += instead[::-1]


def in_place_of(
    spec: StageSpec, batch: Batch, driver: Driver, deliver: Deliver
) -> list[Batch] | None:
    """What is run in place of a batch that is too large for the memory that is left.

    None: it is not. An item that is too large by itself fails.
    """
    left = driver.memory_left(spec.device)
    if len(batch.tickets) > 1 and batch.row_bytes > _allowed_bytes(spec, driver):
        return halves(batch)
    if batch.row_bytes > left:
        message = f"needs about {batch.row_bytes >> 20} MiB, and {int(left) >> 20} MiB are left"
        deliver(batch.tickets[0], Failure(code="oom", stage=spec.name, message=message), 0.0)
        return []
    return None


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
    with in_hand(spec, batch, driver) as hand:
        start_s = clock_s()
        products = products_of(spec, stage, batch, items, driver)
        while (made := next_of(products)) is not None:
            if isinstance(made, Exception):
                return hand.troubled(made, deliver)
            hand.made(*made, clock_s() - start_s, deliver)
    return []


class Hand:
    """A batch in hand: what of it is not delivered yet."""

    def __init__(self, spec: StageSpec, batch: Batch, driver: Driver) -> None:
        self.spec, self.batch, self.driver = spec, batch, driver
        self.undelivered = dict.fromkeys(range(len(batch.tickets)))
        audio_s = sum(t.audio_s for t in batch.tickets)
        ids = list(dict.fromkeys(t.key.request_id for t in batch.tickets))
        self.work = Work(stage=spec.name, ids=ids, units=batch.padded, audio_s=audio_s)
        self.event: Event = {
            "stage": spec.name,
            "items": len(batch.tickets),
            "valid": batch.valid,
            "padded": batch.padded,
            "audio_s": round(audio_s, 3),
            "estimated_bytes": batch.row_bytes,
        }

    def made(self, i: int, product: Product | Failure, seconds: float, deliver: Deliver) -> None:
        """Hand a product on, so many seconds after the batch began."""
        del self.undelivered[i]
        deliver(self.batch.tickets[i], product, seconds / len(self.batch.tickets))

    def troubled(self, error: Exception, deliver: Deliver) -> list[Batch]:
        """What an item did to the batch, and what is to be run after it.

        The batch is halved until only the guilty item is left; that one fails.
        """
        self.event["error"] = type(error).__name__
        if is_oom(error):
            self.event["oom"] = True
            self.driver.too_much[self.spec.name] = self.batch.row_bytes
            torch.cuda.empty_cache()
        rest = Batch(tuple(self.batch.tickets[i] for i in self.undelivered))
        if len(rest.tickets) > 1:
            return halves(rest)
        for ticket in rest.tickets:
            deliver(ticket, failure_of(self.spec.name, error), 0.0)
        return []


@contextmanager
def in_hand(spec: StageSpec, batch: Batch, driver: Driver) -> Iterator[Hand]:
    """A batch on record, under watch and told of for the length of a block."""
    hand = Hand(spec, batch, driver)
    with driver.observer.span("batch", **hand.event) as event, driver.holding(hand.work):
        hand.event = event
        try:
            yield hand
        finally:
            event["peak_rss_bytes"] = peak_rss_bytes()
            if torch.cuda.is_available():
                event["vram_bytes"] = torch.cuda.max_memory_allocated()


def next_of(
    products: Iterator[tuple[int, Product | Failure]],
) -> tuple[int, Product | Failure] | Exception | None:
    """The next product, what an item did to the batch, or None at the end.

    Only what the stage raises is an item's doing; what `deliver` raises ends the run.
    """
    try:
        return next(products, None)
    except (RequestError, *TROUBLE) as error:
        return error


def products_of(
    spec: StageSpec,
    stage: Stage,
    batch: Batch,
    items: Mapping[ItemKey, Any],
    driver: Driver,
    beat: Callable[[], None] | None = None,
) -> Generator[tuple[int, Product | Failure], None, None]:
    """(index, product) of each item, as they are done; none of them holds numbers that are none."""
    for i, product in _products(spec, stage, batch, items, driver, beat or driver.beat):
        yield i, _sound(spec.name, product)


def _products(
    spec: StageSpec,
    stage: Stage,
    batch: Batch,
    items: Mapping[ItemKey, Any],
    driver: Driver,
    beat: Callable[[], None],
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
        for i, product in run(bent, filled, seeds, policies, slots=slots, beat=beat):
            if i < len(rows):
                yield i, product


def check_room(spec: StageSpec, driver: Driver) -> None:
    """RunError if a stage's weights cannot fit where it computes."""
    left = driver.memory_left(spec.device)
    if spec.weights_bytes and spec.weights_bytes > left:
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
