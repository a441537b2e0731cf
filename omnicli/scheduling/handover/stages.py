"""One stage after the other over a wave: the least memory, and the largest batches."""

from collections.abc import Sequence
from contextlib import ExitStack

from omnicli.execution.stage import Stage, StageSpec
from omnicli.scheduling.drive import Driver, drive
from omnicli.scheduling.wave import Gather, Keeper, Member, last_readers


class Openings:
    """Stages that are open. Kept open between waves, or closed after each turn."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._stack = ExitStack()
        self._open: dict[str, Stage] = {}

    def enter(self, spec: StageSpec) -> Stage:
        """The stage, loaded if it is not."""
        assert spec.open is not None, f"{spec.name} has items but nothing to run them"
        if spec.name not in self._open:
            self._open[spec.name] = self._stack.enter_context(spec.open())
        return self._open[spec.name]

    def leave(self) -> None:
        """The stage's turn is over."""
        if not self._keep:
            self.close()

    def close(self) -> None:
        """Free all weights."""
        self._open.clear()
        self._stack.close()


def run(
    members: Sequence[Member],
    stages: Sequence[StageSpec],
    driver: Driver,
    keeper: Keeper,
    openings: Openings,
) -> None:
    """Take every member through every stage that it needs."""
    forget = last_readers(stages)
    for place, spec in enumerate(stages):
        gather = Gather(stages[place:], members, keeper, driver)
        if gather.items:
            with driver.observer.span("load", stage=spec.name):
                stage = openings.enter(spec)
            drive(spec, stage, gather.items, driver, gather.deliver)
            del stage
            openings.leave()
        for name in forget.get(spec.name, ()):
            for member in members:
                member.inputs.drop(name)
    for member in members:
        if not member.done:  # an earlier run had made all that it needs
            keeper.finished(member)
