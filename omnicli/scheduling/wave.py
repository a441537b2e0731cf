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
    """One stage's items over all members of a wave, and their products on the way back."""

    def __init__(
        self, spec: StageSpec, members: Sequence[Member], keeper: Keeper, driver: Driver
    ) -> None:
        self.spec = spec
        self.keeper = keeper
        self.items: dict[ItemKey, Any] = {}
        self._owner: dict[str, Member] = {}
        self._parts: dict[str, list[Product | None]] = {}
        meant = [m for m in members if m.failure is None and spec.name in m.needs]
        for some in _slices(meant, SPLIT_MEMBERS):
            ids = [member.request.request_id for member in some]
            work = Work(stage=f"{spec.name}.split", ids=ids, units=len(ids), audio_s=0.0)
            with driver.holding(work):
                for member in some:
                    self._split(member)

    def _split(self, member: Member) -> None:
        try:
            items = self.spec.split(member.request, member.inputs)
        except (RequestError, *TROUBLE) as error:
            self._fail(member, failure_of(self.spec.name, error))
            return
        request_id = member.request.request_id
        self._owner[request_id] = member
        self._parts[request_id] = [None] * len(items)
        self.items |= {ItemKey(request_id, part): item for part, item in enumerate(items)}
        if not items:
            self._join(member, [])

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
            self._join(member, whole)

    def _join(self, member: Member, parts: list[Product]) -> None:
        joined: tuple[Product, ...] = tuple(parts)
        if self.spec.join is not None:
            try:
                made = self.spec.join(member.request, member.inputs, parts)
            except (RequestError, *TROUBLE) as error:
                made = failure_of(self.spec.name, error)
            if isinstance(made, Failure):
                self._fail(member, made)
                return
            joined = () if made is None else (made,)
        member.inputs.put(self.spec.name, joined)
        for product in joined:
            self.keeper.joined(member, self.spec, product)

    def _fail(self, member: Member, failure: Failure) -> None:
        member.failure = failure
        self.keeper.finished(member)


def _slices(members: Sequence[Member], most: int) -> Iterator[Sequence[Member]]:
    for begin in range(0, len(members), most):
        yield members[begin : begin + most]
