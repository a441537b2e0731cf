"""A thread that computes one stage's batches, and does nothing else.

What touches files, the run log or the events is done by the thread that reads its `inbox`.
"""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Semaphore, Thread

from omnicli.data import Failure, Product
from omnicli.observe import clock_s
from omnicli.scheduling.drive import next_of

Products = Generator[tuple[int, Product | Failure], None, None]


@dataclass(frozen=True, slots=True)
class Made:
    """A product is there. The worker makes the next one, and holds it until this one is taken."""

    index: int
    product: Product | Failure
    seconds: float  # of work since its batch began


@dataclass(frozen=True, slots=True)
class Over:
    """The batch is over; `error` is what an item did to it."""

    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """The worker is over: something happened that is no item's doing."""

    error: BaseException


Message = Made | Over | Broken
Inbox = SimpleQueue[tuple[str, Message]]


class Worker:
    """Runs the batches that it is given, one at a time; what happens goes to `inbox`."""

    def __init__(self, stage: str, inbox: Inbox) -> None:
        self._stage, self._inbox = stage, inbox
        self._batches: SimpleQueue[Products | None] = SimpleQueue()
        self._room = Semaphore(1)
        self._stopped = False
        self._thread = Thread(target=self._work, daemon=True, name=f"stage {stage}")
        self._thread.start()

    def give(self, products: Products) -> None:
        """A batch, as the generator of its products."""
        self._batches.put(products)

    def taken(self) -> None:
        """A product has been taken: there is room for the next."""
        self._room.release()

    def stop(self) -> None:
        """End with the product in hand."""
        self._stopped = True
        self._batches.put(None)
        self._room.release()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def _work(self) -> None:
        try:
            while (products := self._batches.get()) is not None:
                with closing(products):
                    self._run(products)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that reads this
            self._tell(Broken(error))

    def _run(self, products: Products) -> None:
        begun_s = clock_s()
        while (made := next_of(products)) is not None:
            if isinstance(made, Exception):
                self._tell(Over(made))
                return
            seconds = clock_s() - begun_s
            self._room.acquire()
            if self._stopped:
                return
            begun_s = clock_s() - seconds  # what it had to wait is no work
            self._tell(Made(*made, seconds))
        self._tell(Over())

    def _tell(self, message: Message) -> None:
        self._inbox.put((self._stage, message))
