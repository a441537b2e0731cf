"""All stages of a wave at a time: a thread each, and between them queues of ragged products.

The thinker runs ahead of the talker, and the talker ahead of the vocoder, up to so many bytes that
wait behind a stage: then its worker waits. The workers compute; whatever touches members, files,
the run log or the events is done here, by the thread that called `run`.
"""

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from queue import Empty, SimpleQueue

import torch

from omnicli.data import Batch, Failure, ItemKey, Product, Ticket
from omnicli.errors import OmniError
from omnicli.execution.stage import Stage, StageSpec
from omnicli.observe import clock_s
from omnicli.scheduling.drive import (
    MEMORY_SHARE,
    Driver,
    Hand,
    in_hand,
    in_place_of,
    is_full,
    plan,
    products_of,
    ticket_of,
)
from omnicli.scheduling.openings import Openings
from omnicli.scheduling.wave import Keeper, Member, Route, Station, split
from omnicli.scheduling.worker import Inbox, Made, Message, Over, Worker

POLL_S = 0.02  # how long nothing is looked at when no worker says anything
CHECK_S = 0.5  # how often at least it is asked whether the run is to go on
FIRST_LINGER_S = 0.1  # for more items, before it is known how long a batch takes
_STATES = ("busy", "starved", "blocked")  # of a worker: it computes, has no input, has no room


def run(
    members: Sequence[Member],
    stages: Sequence[StageSpec],
    driver: Driver,
    keeper: Keeper,
    openings: Openings,
) -> None:
    """Take every member through every stage that it needs."""
    line = _Line(stages, driver, keeper, openings)
    try:
        line.run(members)
    finally:
        line.close()
    del line
    openings.leave()


@dataclass(slots=True)
class _Waiting:
    """An item in a stage's queue."""

    ticket: Ticket
    size: int  # bytes: its share of what its member holds
    source: "_Lane | None"  # the stage that its member comes from


@dataclass(slots=True)
class _Lane:
    """A stage's queue, its worker, and the batch that it has in hand."""

    spec: StageSpec
    station: Station
    waiting: dict[ItemKey, _Waiting] = field(default_factory=dict)  # as they came
    cut: list[Batch] = field(default_factory=list)  # out of the queue: they are next, from the end
    worker: Worker | None = None
    stage: Stage | None = None
    hand: Hand | None = None
    held: ExitStack = field(default_factory=ExitStack)  # the batch in hand, on record
    mail: deque[Message] = field(default_factory=deque)  # from the worker, not taken yet
    behind: int = 0  # bytes that come from here and wait in other queues
    untold: list[Ticket] = field(default_factory=list)  # that no event has told of
    since_s: float | None = None  # when it first could have begun, had it not waited for more
    begun_s: float = 0.0
    linger_s: float = FIRST_LINGER_S
    state: str = ""
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_STATES, 0.0))

    @property
    def works(self) -> bool:
        """Whether anything is or will be made of what is here."""
        return bool(self.hand or self.cut or self.waiting)


class _Line:
    """The lanes of a wave."""

    def __init__(
        self, stages: Sequence[StageSpec], driver: Driver, keeper: Keeper, openings: Openings
    ) -> None:
        self.driver, self.openings = driver, openings
        self.route = Route(stages, keeper, self._arrived)
        self.lanes = {spec.name: _Lane(spec, Station(self.route, spec)) for spec in stages}
        self.inbox: Inbox = SimpleQueue()
        self.source: _Lane | None = None  # whose product is being delivered
        self.ending: OmniError | None = None  # why nothing new is begun
        self.tight = False  # a batch waits for memory that others hold
        self.checked_s = self.seen_s = clock_s()

    def run(self, members: Sequence[Member]) -> None:
        """Until all that came has left, or the batches in hand are done and nothing else may be."""
        self._admit(members)
        while self._goes_on():
            self._start()
            self._spend()
            self._listen()
            self._take()
            self._look()
        self._spend()
        self._tell_workers()
        if self.ending is not None:
            raise self.ending

    def close(self) -> None:
        """No thread stays, and nothing is on record as in hand."""
        workers = [lane.worker for lane in self.lanes.values() if lane.worker]
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.join()
        with ExitStack() as held:
            for lane in self.lanes.values():
                held.push(lane.held)
                if lane.hand is not None:
                    lane.hand.event["error"] = "abandoned"
            self.lanes.clear()  # and with them the stages

    def _goes_on(self) -> bool:
        if self.ending is not None:
            return any(lane.hand for lane in self.lanes.values())
        return any(lane.works for lane in self.lanes.values())

    def _check(self) -> bool:
        """Whether the run is to go on; if not, the batches in hand are still finished."""
        self.checked_s = clock_s()
        try:
            self.driver.check()
        except OmniError as error:
            self.ending = self.ending or error
        return self.ending is None

    def _look(self) -> None:
        """Whatever has to happen now and then."""
        if clock_s() - self.checked_s > CHECK_S:
            self._check()
        for lane in self.lanes.values():
            if lane.hand is not None and lane.mail:  # it has to wait, and is not stuck
                self.driver.beat(lane.hand.work)

    # -- members come

    def _admit(self, members: Sequence[Member]) -> None:
        """Everybody goes to the first stage that has something to do for them."""
        stages = self.route.stages
        first = {id(m): next((s.name for s in stages if s.name in m.needs), "") for m in members}
        for spec in stages:
            meant = [member for member in members if first[id(member)] == spec.name]
            split(spec, meant, self.driver, self._begin)
        for member in members:
            if not first[id(member)]:  # an earlier run had made all that it needs
                self._begin(member)

    def _begin(self, member: Member) -> None:
        self._look()
        if self.ending is None:
            self.route.begin(member)

    def _arrived(self, spec: StageSpec, member: Member) -> None:
        """A member halts: its items wait, and what it holds counts for where it comes from."""
        lane = self.lanes[spec.name]
        keys = lane.station.take(member)
        size = sum(member.held.values())
        for place, key in enumerate(keys):  # shares that are whole bytes, and together all
            share = size * (place + 1) // len(keys) - size * place // len(keys)
            ticket = ticket_of(spec, key, lane.station.items[key])
            lane.waiting[key] = _Waiting(ticket, share, self.source)
            lane.untold.append(ticket)
        if self.source is not None:
            self.source.behind += size

    # -- batches begin

    def _start(self) -> None:
        """Give work to the workers that have none, those at the end of the line first."""
        self.tight = False
        for lane in reversed(self.lanes.values()):
            while self._begins(lane):
                if not lane.cut:
                    self._cut(lane)
                if not self._fits(lane):
                    self.tight = True  # until then nobody begins, and nobody is held back
                    return
                batch = lane.cut.pop()
                deliver = partial(self._deliver, lane)
                instead = in_place_of(lane.spec, batch, self.driver, deliver)
                if instead is None:
                    self._give(lane, batch)
                else:
                    lane.cut += instead[::-1]

    def _begins(self, lane: _Lane) -> bool:
        """Whether a lane is to begin a batch now."""
        if lane.hand is not None or self._is_full(lane) or self.ending is not None:
            return False
        ready = bool(lane.cut) or (bool(lane.waiting) and self._has_enough(lane))
        return ready and self._check()

    def _has_enough(self, lane: _Lane) -> bool:
        """Whether it is of no use to wait for more items.

        Nobody waits longer than a batch takes: waiting at most doubles what it costs.
        """
        if lane.since_s is None:
            lane.since_s = clock_s()
        lanes = self.lanes.values()
        before = takewhile(lambda other: other is not lane, lanes)
        return (
            clock_s() - lane.since_s >= lane.linger_s
            or not any(other.works for other in before)
            or any(map(self._is_full, lanes))
            or bool(self._whole(lane, self._plan(lane)))
        )

    def _cut(self, lane: _Lane) -> None:
        """The next batch leaves the queue: a full one if there is one, that of the oldest item."""
        self._tell_come(lane)
        self._tell_queue(lane)
        batches = self._plan(lane)
        age = {key: place for place, key in enumerate(lane.waiting)}
        batch = min(
            self._whole(lane, batches) or batches,
            key=lambda one: min(age[ticket.key] for ticket in one.tickets),
        )
        for ticket in batch.tickets:
            found = lane.waiting.pop(ticket.key)
            if found.source is not None:
                found.source.behind -= found.size
        lane.cut.append(batch)
        self._tell_queue(lane)

    def _plan(self, lane: _Lane) -> list[Batch]:
        tickets = [one.ticket for one in lane.waiting.values()]
        return plan(lane.spec, tickets, self.driver.budget, self.driver.loop)

    def _whole(self, lane: _Lane, batches: Sequence[Batch]) -> list[Batch]:
        """Those that are not larger if more comes: full ones, and parts of what was too much."""
        spec, budget, loop = lane.spec, self.driver.budget, self.driver.loop
        bins = Counter(map(_bin, batches))
        return [b for b in batches if bins[_bin(b)] > 1 or is_full(spec, b, budget, loop)]

    def _fits(self, lane: _Lane) -> bool:
        """Whether the next batch fits beside those in hand; alone it is cut to what is left."""
        device = lane.spec.device
        hands = [one.hand for one in self.lanes.values() if one.hand and one.spec.device == device]
        others = [hand.batch.row_bytes for hand in hands]
        left = MEMORY_SHARE * self.driver.memory_left(device) - sum(others)
        return not others or lane.cut[-1].row_bytes <= left

    def _give(self, lane: _Lane, batch: Batch) -> None:
        if lane.worker is None:
            lane.stage = self.openings.enter(lane.spec, self.driver)
            lane.worker = Worker(lane.spec.name, self.inbox)
        assert lane.stage is not None
        lane.hand = lane.held.enter_context(in_hand(lane.spec, batch, self.driver))
        items = {ticket.key: lane.station.items[ticket.key] for ticket in batch.tickets}
        beat = partial(self.driver.beat, lane.hand.work)
        lane.begun_s, lane.since_s = clock_s(), None
        lane.worker.give(products_of(lane.spec, lane.stage, batch, items, self.driver, beat))

    # -- products come

    def _listen(self) -> None:
        """What the workers say goes to their lanes; waits a little for the first of it."""
        wait = True
        while True:
            try:
                name, message = self.inbox.get(timeout=POLL_S) if wait else self.inbox.get_nowait()
            except Empty:
                break
            self.lanes[name].mail.append(message)
            wait = False

    def _take(self) -> None:
        """Products go on to where there is room for them, what is furthest first."""
        for lane in reversed(self.lanes.values()):
            while lane.mail and not (isinstance(lane.mail[0], Made) and self._is_full(lane)):
                self._heard(lane, lane.mail.popleft())

    def _is_full(self, lane: _Lane) -> bool:
        """Whether no more of a lane's products may wait; an item larger than that is let in."""
        free = self.tight or self.ending is not None
        return lane.behind >= self.driver.waiting_bytes and not free

    def _heard(self, lane: _Lane, message: Message) -> None:
        assert lane.hand is not None and lane.worker is not None
        deliver = partial(self._deliver, lane)
        if isinstance(message, Made):
            lane.hand.made(message.index, message.product, message.seconds, deliver)
            lane.worker.taken()
        elif isinstance(message, Over):
            if message.error is not None:
                lane.cut += lane.hand.troubled(message.error, deliver)[::-1]
            lane.held.close()
            lane.hand, lane.linger_s = None, clock_s() - lane.begun_s
        else:
            raise message.error

    def _deliver(
        self, lane: _Lane, ticket: Ticket, product: Product | Failure, seconds: float
    ) -> None:
        self.source = lane
        del lane.station.items[ticket.key]
        with torch.inference_mode():  # as where products are made and taken in one thread
            lane.station.deliver(ticket, product, seconds)
        self.source = None

    # -- what is measured

    def _spend(self) -> None:
        """Whatever the workers did since the last time, and what they do now."""
        now_s = clock_s()
        past_s, self.seen_s = now_s - self.seen_s, now_s
        for lane in self.lanes.values():
            if lane.state:
                lane.spent_s[lane.state] += past_s
            lane.state = self._state(lane)

    def _state(self, lane: _Lane) -> str:
        if lane.worker is None:
            return ""
        if lane.hand is not None:
            return "blocked" if lane.mail else "busy"
        return "blocked" if lane.works and self._is_full(lane) else "starved"

    def _tell_come(self, lane: _Lane) -> None:
        """The items that have come since the last batch."""
        if lane.untold:
            audio_s = round(sum(ticket.audio_s for ticket in lane.untold), 3)
            items = len(lane.untold)
            self.driver.observer.emit("stage", stage=lane.spec.name, items=items, audio_s=audio_s)
            lane.untold.clear()

    def _tell_queue(self, lane: _Lane) -> None:
        """What waits: when a batch begins, with its items and without them."""
        size = sum(one.size for one in lane.waiting.values())
        self.driver.observer.emit(
            "queue", stage=lane.spec.name, items=len(lane.waiting), bytes=size
        )

    def _tell_workers(self) -> None:
        for lane in self.lanes.values():
            if lane.worker is not None:
                spent_s = {f"{state}_s": round(s, 6) for state, s in lane.spent_s.items()}
                self.driver.observer.emit("worker", stage=lane.spec.name, **spent_s)


def _bin(batch: Batch) -> tuple[int, int, int]:
    ticket = batch.tickets[0]
    return ticket.edge, ticket.row_bytes, ticket.apart
