"""The requests that pass the stages together, and what each of them still needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

from torch import Tensor

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
    held: dict[str, int] = field(default_factory=dict)  # stage -> bytes of what it made
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


class Route:
    """The way of members through the stages: joined at one, split for the next that has work.

    A member whose product is whole goes on at once through the stages that have no items for it,
    so that it is done when its last item is, and not when its wave is. `arrived` hears where it
    halts: its items are split, and wait in `Member.items`. What nobody reads behind the stages
    that a member has passed is forgotten, and at its end all that is no plain data.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        keeper: Keeper,
        arrived: Callable[[StageSpec, Member], None] = lambda spec, member: None,
    ) -> None:
        self.stages, self.keeper = stages, keeper
        self._arrived = arrived
        self._behind = {spec.name: stages[place:] for place, spec in enumerate(stages, start=1)}
        self._forgets = last_readers(stages)

    def items(self, spec: StageSpec, member: Member) -> Sequence[Any] | None:
        """What a stage has to do for a member; None if that failed."""
        try:
            return spec.split(member.request, member.inputs)
        except (RequestError, *TROUBLE) as error:
            self.fail(member, failure_of(spec.name, error))
            return None

    def begin(self, member: Member) -> None:
        """From the start to the first stage that has items for it."""
        self._walk(self.stages, member)

    def passed(self, spec: StageSpec, member: Member, parts: list[Product]) -> None:
        """A stage's parts are all there: join them and go on."""
        self._join(spec, member, parts)
        self._walk(self._behind[spec.name], member)

    def fail(self, member: Member, failure: Failure) -> None:
        """The member ends here."""
        member.failure = failure
        self._finish(member)

    def _walk(self, stages: Sequence[StageSpec], member: Member) -> None:
        for spec in stages:
            if member.done:
                return
            if spec.name not in member.needs:
                self._forget(spec, member)
                continue
            items = self.items(spec, member)
            if items:
                member.items[spec.name] = items
                self._arrived(spec, member)
            if items is None or items:
                return
            self._join(spec, member, [])
        self._finish(member)

    def _join(self, spec: StageSpec, member: Member, parts: list[Product]) -> None:
        member.passed.add(spec.name)
        joined: tuple[Product, ...] = tuple(parts)
        if spec.join is not None:
            try:
                made = spec.join(member.request, member.inputs, parts)
            except (RequestError, *TROUBLE) as error:
                made = failure_of(spec.name, error)
            if isinstance(made, Failure):
                self.fail(member, made)
                return
            joined = () if made is None else (made,)
        member.inputs.put(spec.name, joined)
        member.held[spec.name] = sum(map(tensor_bytes, joined))
        for product in joined:
            self.keeper.joined(member, spec, product)
        self._forget(spec, member)

    def _forget(self, spec: StageSpec, member: Member) -> None:
        for name in self._forgets.get(spec.name, ()):
            member.inputs.drop(name)
            member.held.pop(name, None)

    def _finish(self, member: Member) -> None:
        if not member.done:
            member.done = True
            self.keeper.finished(member)
            for spec in self.stages:
                if spec.record is None:
                    member.inputs.drop(spec.name)


class Station:
    """One stage, and the members that halt there: their items, and the products on the way back."""

    def __init__(self, route: Route, spec: StageSpec) -> None:
        self.route, self.spec = route, spec
        self.items: dict[ItemKey, Any] = {}
        self._owner: dict[str, Member] = {}
        self._parts: dict[str, list[Product | None]] = {}

    def take(self, member: Member) -> list[ItemKey]:
        """A member arrives: its items, split already or now."""
        items = member.items.pop(self.spec.name, None)
        if items is None:
            items = self.route.items(self.spec, member)
        if member.failure is not None or items is None:
            return []
        request_id = member.request.request_id
        self._owner[request_id] = member
        self._parts[request_id] = [None] * len(items)
        made = {ItemKey(request_id, part): item for part, item in enumerate(items)}
        self.items |= made
        if not items:
            self.route.passed(self.spec, member, [])
        return list(made)

    def deliver(self, ticket: Ticket, product: Product | Failure, seconds: float) -> None:
        """Take an item's product; join the member's when it was the last one."""
        member = self._owner[ticket.key.request_id]
        name = self.spec.name
        member.timings[name] = member.timings.get(name, 0.0) + seconds
        if member.failure is not None:
            return
        if isinstance(product, Failure):
            del self._parts[ticket.key.request_id]
            self.route.fail(member, product)
            return
        parts = self._parts[ticket.key.request_id]
        parts[ticket.key.part] = self.route.keeper.settle(product)
        whole = [p for p in parts if p is not None]
        if len(whole) == len(parts):
            del self._parts[ticket.key.request_id]
            self.route.passed(self.spec, member, whole)


class Gather(Station):
    """One stage's items over all members of a wave."""

    def __init__(
        self, route: Route, spec: StageSpec, members: Sequence[Member], driver: Driver
    ) -> None:
        super().__init__(route, spec)
        meant = [m for m in members if not m.done and spec.name in m.needs - m.passed]
        split(spec, meant, driver, self.take)


def split(
    spec: StageSpec, members: Sequence[Member], driver: Driver, take: Callable[[Member], object]
) -> None:
    """Let members be taken by a stage, some at a time on record and under watch."""
    for begin in range(0, len(members), SPLIT_MEMBERS):
        some = members[begin : begin + SPLIT_MEMBERS]
        ids = [member.request.request_id for member in some]
        with driver.holding(Work(stage=f"{spec.name}.split", ids=ids, units=len(ids), audio_s=0.0)):
            for member in some:
                take(member)


def tensor_bytes(value: object) -> int:
    """What the tensors of a product hold."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(map(tensor_bytes, value))
    if is_dataclass(value):
        return sum(tensor_bytes(getattr(value, field.name)) for field in fields(value))
    return 0
