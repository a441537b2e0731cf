"""The requests that pass the stages together, and what each of them still needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from omnicli.data import Failure, Inputs, ItemKey, Product, Request, Ticket
from omnicli.errors import RequestError
from omnicli.execution.stage import StageSpec
from omnicli.scheduling.drive import TROUBLE, Driver, failure_of
from omnicli.scheduling.watchdog import Work

SPLIT_MEMBERS = 64  # whose splitting is on record together


@dataclass(slots=True, kw_only=True)
class Member:
    """One request on its way through a wave."""

    request: Request
    inputs: Inputs = field(default_factory=Inputs)
    timings: dict[str, float] = field(default_factory=dict)  # stage -> s, its share
    failure: Failure | None = None
    needs: frozenset[str] = frozenset()  # stages that must run for it
    passed: set[str] = field(default_factory=set)  # stages that are behind it
    items: dict[str, Sequence[Any]] = field(default_factory=dict)  # stage -> split ahead of it
    done: bool = False


class Keeper(Protocol):
    """Who keeps what a wave makes; the job is one."""

    def settle(self, product: Product) -> Product:
        """The same product, perhaps with its tensors on disk instead of in memory."""

    def joined(self, member: Member, spec: StageSpec, product: Product) -> None:
        """A stage's product is whole."""

    def finished(self, member: Member) -> None:
        """All stages are through with a member, or it failed."""


def needed(stages: Sequence[StageSpec], inputs: Inputs) -> frozenset[str]:
    """Stages that must run so that the last one can: not those whose product is there already."""
    wanted = {stages[-1].name} if stages else set()
    for spec in reversed(stages):
        if spec.name in wanted and inputs.has(spec.name):
            wanted.discard(spec.name)
        elif spec.name in wanted:
            wanted.update(spec.reads)
    return frozenset(wanted)


def last_readers(stages: Sequence[StageSpec]) -> dict[str, list[str]]:
    """Stage -> the stages whose products nobody reads after it."""
    last: dict[str, str] = {}
    kept = {spec.name for spec in stages if spec.record}  # plain data, wanted for the results
    for spec in stages:
        for name in spec.reads:
            if name not in kept:
                last[name] = spec.name
    readers: dict[str, list[str]] = {}
    for name, reader in last.items():
        readers.setdefault(reader, []).append(name)
    return readers


class Gather:
    """One stage's items over all members of a wave, and their products on the way back.

    A member whose product is whole goes on at once through the stages that have no items for it,
    so that it is done when its last item is, and not when its wave is.
    """

    def __init__(
        self, stages: Sequence[StageSpec], members: Sequence[Member], keeper: Keeper, driver: Driver
    ) -> None:
        """For the first of the stages; the others are those behind it."""
        self.spec, *self._later = stages
        self.keeper = keeper
        self.items: dict[ItemKey, Any] = {}
        self._owner: dict[str, Member] = {}
        self._parts: dict[str, list[Product | None]] = {}
        spec = self.spec
        meant = [m for m in members if not m.done and spec.name in m.needs - m.passed]
        for some in _slices(meant, SPLIT_MEMBERS):
            ids = [member.request.request_id for member in some]
            work = Work(stage=f"{spec.name}.split", ids=ids, units=len(ids), audio_s=0.0)
            with driver.holding(work):
                for member in some:
                    self._split(member)

    def _split(self, member: Member) -> None:
        items = member.items.pop(self.spec.name, None)
        if items is None:
            items = self._items(self.spec, member)
        if member.failure is not None or items is None:
            return
        request_id = member.request.request_id
        self._owner[request_id] = member
        self._parts[request_id] = [None] * len(items)
        self.items |= {ItemKey(request_id, part): item for part, item in enumerate(items)}
        if not items:
            self._join(self.spec, member, [])
            self._go_on(member)

    def _items(self, spec: StageSpec, member: Member) -> Sequence[Any] | None:
        """What a stage has to do for a member; None if that failed."""
        try:
            return spec.split(member.request, member.inputs)
        except (RequestError, *TROUBLE) as error:
            self._fail(member, failure_of(spec.name, error))
            return None

    def _go_on(self, member: Member) -> None:
        """Through the stages behind this one, up to the first that has items for it."""
        for spec in self._later:
            if member.done:
                return
            if spec.name not in member.needs:
                continue
            items = self._items(spec, member)
            if items:
                member.items[spec.name] = items
            if items is None or items:
                return
            self._join(spec, member, [])
        self._finish(member)

    def deliver(self, ticket: Ticket, product: Product | Failure, seconds: float) -> None:
        """Take an item's product; join the member's when it was the last one."""
        member = self._owner[ticket.key.request_id]
        name = self.spec.name
        member.timings[name] = member.timings.get(name, 0.0) + seconds
        if member.failure is not None:
            return
        if isinstance(product, Failure):
            self._fail(member, product)
            return
        parts = self._parts[ticket.key.request_id]
        parts[ticket.key.part] = self.keeper.settle(product)
        whole = [p for p in parts if p is not None]
        if len(whole) == len(parts):
            self._join(self.spec, member, whole)
            self._go_on(member)

    def _join(self, spec: StageSpec, member: Member, parts: list[Product]) -> None:
        member.passed.add(spec.name)
        joined: tuple[Product, ...] = tuple(parts)
        if spec.join is not None:
            try:
                made = spec.join(member.request, member.inputs, parts)
            except (RequestError, *TROUBLE) as error:
                made = failure_of(spec.name, error)
            if isinstance(made, Failure):
                self._fail(member, made)
                return
            joined = () if made is None else (made,)
        member.inputs.put(spec.name, joined)
        for product in joined:
            self.keeper.joined(member, spec, product)

    def _fail(self, member: Member, failure: Failure) -> None:
        member.failure = failure
        self._finish(member)

    def _finish(self, member: Member) -> None:
        if not member.done:
            member.done = True
            self.keeper.finished(member)


def _slices(members: Sequence[Member], most: int) -> Iterator[Sequence[Member]]:
    for begin in range(0, len(members), most):
        yield members[begin : begin + most]
