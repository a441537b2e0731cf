"""One stage after the other over a wave: the least memory, and the largest batches."""

from collections.abc import Sequence

from omnicli.execution.stage import StageSpec
from omnicli.scheduling.drive import Driver, drive
from omnicli.scheduling.openings import Openings
from omnicli.scheduling.wave import Gather, Keeper, Member, Route


def run(
    members: Sequence[Member],
    stages: Sequence[StageSpec],
    driver: Driver,
    keeper: Keeper,
    openings: Openings,
) -> None:
    """Take every member through every stage that it needs."""
    route = Route(stages, keeper)
    for spec in stages:
        gather = Gather(route, spec, members, driver)
        if gather.items:
            stage = openings.enter(spec, driver)
            drive(spec, stage, gather.items, driver, gather.deliver)
            del stage
            openings.leave()
    for member in members:
        if not member.done:  # an earlier run had made all that it needs
            keeper.finished(member)
