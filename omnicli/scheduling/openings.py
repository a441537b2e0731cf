"""Stages that are open: whose weights are loaded."""

from contextlib import ExitStack

from omnicli.execution.stage import Stage, StageSpec
from omnicli.observe import clock_s
from omnicli.scheduling.drive import Driver, check_room


class Openings:
    """Stages that are open. Kept open between waves, or closed after each turn."""

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.loading_s = 0.0  # that all loading took
        self._stack = ExitStack()
        self._open: dict[str, Stage] = {}

    def enter(self, spec: StageSpec, driver: Driver) -> Stage:
        """The stage, loaded if it is not; RunError if its weights cannot fit."""
        assert spec.open is not None, f"{spec.name} has items but nothing to run them"
        if spec.name not in self._open:
            check_room(spec, driver)
            begun_s = clock_s()
            with driver.observer.span("load", stage=spec.name):
                self._open[spec.name] = self._stack.enter_context(spec.open())
            self.loading_s += clock_s() - begun_s
        return self._open[spec.name]

    def leave(self) -> None:
        """A turn is over."""
        if not self.keep:
            self.close()

    def close(self) -> None:
        """Free all weights."""
        self._open.clear()
        self._stack.close()
