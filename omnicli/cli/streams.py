"""The process's streams and signals: stdout is data, stderr is ours, and C libraries are kept out.

Libraries print to the file descriptors 1 and 2 whatever Python thinks. During a run both lead into
a file that is shown only if the run ends by an error. What omni says goes to a copy of stderr.
"""

import faulthandler
import io
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

from omnicli.errors import StoppedError

TAIL_BYTES = 10_000


def mend_streams() -> None:
    """UTF-8 whatever the locale; a stream that was closed leads nowhere, not into a later file."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


@contextmanager
def guarded() -> Iterator[TextIO]:
    """Keep the descriptors 1 and 2 from libraries for the length of a block; gives the real stderr.

    What they printed is shown if the block ends by an error.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with (
        tempfile.TemporaryFile() as noise,
        open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1) as talk,  # noqa: PTH123
    ):
        faulthandler.enable(file=talk, all_threads=False)
        for number in (1, 2):
            os.dup2(noise.fileno(), number)
        ended_well = False
        try:
            yield talk
            ended_well = True
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            faulthandler.disable()
            for number, real in enumerate(kept, start=1):
                os.dup2(real, number)
                os.close(real)
            if not ended_well:
                talk.write(_end_of(noise))


def _end_of(noise: IO[bytes]) -> str:
    noise.seek(max(0, noise.seek(0, os.SEEK_END) - TAIL_BYTES))
    return noise.read().decode("utf-8", "backslashreplace")


@contextmanager
def stopping(at_once: Path) -> Iterator[Callable[[], None]]:
    """A first signal asks for an orderly end, which `check` turns into an error; a second kills.

    `at_once` is a file that tells the next run that nothing crashed.
    """
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        if asked:
            if at_once.parent.is_dir():
                at_once.touch()
            os._exit(128 + number)
        asked.append(number)

    def check() -> None:
        if asked:
            raise StoppedError(asked[0])

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in handled}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
