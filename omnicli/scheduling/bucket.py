"""Length buckets: which items run together. Pure, ints only.

A row's padded length is its *edge*, chosen by its own length alone, and a batch holds rows of one
edge. Cost is rows times bytes per row, as in lhotse's `TimeConstraint`; bins are half-open
`(previous, edge]`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from omnicli.data import Batch, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much one batch may hold; both limits apply."""

    max_rows: int
    max_bytes: int

    def rows(self, row_bytes: int) -> int:
        """Rows of that size that fit; one always does."""
        return max(1, min(self.max_rows, self.max_bytes // max(1, row_bytes)))


def pack(tickets: Iterable[Ticket], budget: Budget, *, pool: int = 1) -> list[Batch]:
    """Bins of one edge, each cut into batches of nearly equal size, the longest edge first.

    The order of the tickets inside an edge is kept: neighbours in a file stay together. With a
    `pool` above 1 a batch holds so many times the rows that run at a time.
    """
    bins: dict[tuple[int, int, int], list[Ticket]] = defaultdict(list)
    for ticket in tickets:
        bins[ticket.edge, ticket.row_bytes, ticket.apart].append(ticket)
    batches: list[Batch] = []
    for edge, row_bytes, apart in sorted(bins, reverse=True):
        rows, most = bins[edge, row_bytes, apart], budget.rows(row_bytes)
        for cut in even_cuts(rows, most * pool):
            batches.append(Batch(tuple(cut), slots=most if len(cut) > most else 0))
    return batches


def even_cuts(rows: Sequence[Ticket], most: int) -> Iterator[Sequence[Ticket]]:
    """Cut a sequence into as few pieces of at most `most` as can be, their sizes one apart."""
    pieces = -(-len(rows) // most)
    for i in range(pieces):
        yield rows[i * len(rows) // pieces : (i + 1) * len(rows) // pieces]


def halves(batch: Batch) -> list[Batch]:
    """Both halves of a batch that failed."""
    middle, slots = len(batch.tickets) // 2, batch.slots // 2
    return [Batch(batch.tickets[:middle], slots), Batch(batch.tickets[middle:], slots)]


def edge_of(length: int, edges: Sequence[int]) -> int:
    """The smallest edge that holds `length`; beyond the last one, the length itself."""
    return next((edge for edge in edges if length <= edge), length)


def step_up(length: int, step: int) -> int:
    """`length` rounded up to a multiple of `step`."""
    return -(-length // step) * step
