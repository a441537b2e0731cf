"""Run one open stage over all the items that need it: bucket, run, hand on, halve what fails."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnicli import plugins
from omnicli.data import Batch, Failure, ItemKey, Product, Ticket
from omnicli.errors import RequestError
from omnicli.execution.stage import MapStage, Stage, StageSpec
from omnicli.observe import Event, Observer, clock_s, peak_rss_bytes
from omnicli.scheduling.bucket import Budget, halves, pack, step_up
from omnicli.scheduling.policy import Policy

# What one item can do to a batch. Anything else (a full disk, a signal) ends the run.
TROUBLE = (RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, MemoryError)

Deliver = Callable[[Ticket, "Product | Failure", float], None]  # with the seconds it took


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What every stage's turn needs besides the stage."""

    budget: Budget
    observer: Observer
    loop: str = "lockstep"
    check: Callable[[], None] = lambda: None  # raises `Interrupted` between batches


def ticket_of(spec: StageSpec, key: ItemKey, item: Any) -> Ticket:
    """Measure an item."""
    return measured(spec, key, spec.length(item), spec.audio_s(item) if spec.audio_s else 0.0)


def measured(spec: StageSpec, key: ItemKey, length: int, audio_s: float) -> Ticket:
    """A ticket for an item of that length."""
    length = max(1, length)
    edge = max(length, spec.edge(length))
    return Ticket(key, length, edge, spec.row_bytes(edge), audio_s)


def plan(spec: StageSpec, tickets: Sequence[Ticket], budget: Budget) -> list[Batch]:
    """The batches that a stage will run."""
    rows = min(budget.max_rows, spec.max_rows)
    return pack(tickets, Budget(max_rows=rows, max_bytes=budget.max_bytes))


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
        left = _run_batch(spec, stage, batch, items, driver, deliver)
        pending += left[::-1]


def _run_batch(
    spec: StageSpec,
    stage: Stage,
    batch: Batch,
    items: Mapping[ItemKey, Any],
    driver: Driver,
    deliver: Deliver,
) -> list[Batch]:
    """Run one batch; what is left to do if it failed."""
    facts: Event = {
        "stage": spec.name,
        "items": len(batch.tickets),
        "valid": batch.valid,
        "padded": batch.padded,
        "audio_s": round(sum(t.audio_s for t in batch.tickets), 3),
        "estimated_bytes": sum(t.row_bytes for t in batch.tickets),
    }
    undelivered = dict.fromkeys(range(len(batch.tickets)))
    with driver.observer.span("batch", **facts) as event:
        start_s = clock_s()
        try:
            for i, product in _products(spec, stage, [items[t.key] for t in batch.tickets], driver):
                share_s = (clock_s() - start_s) / len(batch.tickets)
                del undelivered[i]
                deliver(batch.tickets[i], product, share_s)
        except (RequestError, *TROUBLE) as error:
            event["error"] = type(error).__name__
            return _after_trouble(spec, batch, list(undelivered), error, deliver)
        finally:
            event["peak_rss_bytes"] = peak_rss_bytes()
    return []


def _products(
    spec: StageSpec, stage: Stage, items: list[Any], driver: Driver
) -> Iterator[tuple[int, Product | Failure]]:
    """(index, product) of each item, as they are done. The fillers' products are dropped."""
    filled = items + [items[-1]] * (step_up(len(items), spec.fill_rows) - len(items))
    with torch.inference_mode():
        if isinstance(stage, MapStage):
            yield from zip(range(len(items)), stage.run(filled), strict=False)
            return
        policy: Policy = plugins.load("policy", spec.policy.name)(**spec.policy.options)
        seeds = [spec.seed(item) if spec.seed else 0 for item in filled]
        run = plugins.load("loop", driver.loop)
        yield from ((i, p) for i, p in run(stage, filled, seeds, policy) if i < len(items))


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


def failure_of(stage: str, error: Exception) -> Failure:
    """What is recorded about an item that could not be done."""
    if isinstance(error, RequestError):
        return Failure(code=error.code, stage=stage, message=str(error))
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return Failure(code="oom", stage=stage, message="not enough memory for this item alone")
    return Failure(code="internal", stage=stage, message=f"{type(error).__name__}: {error}")
