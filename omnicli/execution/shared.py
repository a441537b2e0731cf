"""One loaded thing for several stages: there while somebody uses it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Loads on the first use, frees after the last. Several threads may use it at a time."""

    def __init__(self, load: Callable[[], T]) -> None:
        self._load = load
        self._lock = Lock()
        self._users = 0
        self._value: T | None = None

    @contextmanager
    def use(self) -> Iterator[T]:
        """The value, for the length of a block."""
        with self._lock:
            value = self._load() if self._value is None else self._value
            self._value = value
            self._users += 1
        try:
            yield value
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._value = None
