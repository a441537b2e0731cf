"""Commands in processes of their own, in an environment as cron gives it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


class Processes:
    """Starts them; whatever is left is killed in the end."""

    def __init__(self, cache: Path, cwd: Path) -> None:
        self.cache, self.cwd = cache, cwd
        self._started: list[subprocess.Popen] = []

    def __call__(self, *args, cwd: Path | None = None, **environ: str) -> subprocess.Popen:
        env = {"PATH": os.environ["PATH"], "OMNI_CACHE": str(self.cache)} | environ
        started = subprocess.Popen(
            [sys.executable, "-m", "omnicli", *map(str, args)],
            env=env,
            cwd=cwd or self.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._started.append(started)
        return started

    def close(self) -> None:
        """Let go of all."""
        for started in self._started:
            started.kill()
            started.communicate()


def finished(started: subprocess.Popen, within_s: float = 120) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    out, err = started.communicate(timeout=within_s)
    return started.returncode, out.decode("utf-8"), err.decode("utf-8")


def until(condition: Callable[[], object], within_s: float = 60) -> None:
    """Wait for it."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
