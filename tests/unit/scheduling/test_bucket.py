"""What must hold of batches for any workload."""

from hypothesis import given
from hypothesis import strategies as st

from omnicli.data import ItemKey, Ticket
from omnicli.scheduling.bucket import Budget, edge_of, halves, pack, step_up

lengths = st.lists(st.integers(1, 5000), max_size=200)
budgets = st.builds(Budget, max_rows=st.integers(1, 64), max_bytes=st.integers(1, 200_000))


def tickets(lengths):
    return [
        Ticket(ItemKey(f"r{i}"), n, step_up(n, 64), 10 * step_up(n, 64))
        for i, n in enumerate(lengths)
    ]


@given(lengths, budgets)
def test_every_ticket_is_in_exactly_one_batch(lengths, budget):
    packed = [t for b in pack(tickets(lengths), budget) for t in b.tickets]
    assert sorted(packed, key=str) == sorted(tickets(lengths), key=str)


@given(lengths, budgets)
def test_no_batch_is_over_budget_unless_alone(lengths, budget):
    for batch in pack(tickets(lengths), budget):
        assert len(batch.tickets) <= budget.max_rows
        taken = sum(t.row_bytes for t in batch.tickets)
        assert taken <= budget.max_bytes or len(batch.tickets) == 1


@given(lengths, budgets)
def test_all_rows_of_a_batch_share_their_edge(lengths, budget):
    for batch in pack(tickets(lengths), budget):
        assert len({t.edge for t in batch.tickets}) == 1
        assert batch.valid <= batch.padded


@given(lengths, budgets)
def test_a_bin_is_cut_into_batches_of_nearly_equal_size(lengths, budget):
    sizes: dict[int, list[int]] = {}
    for batch in pack(tickets(lengths), budget):
        sizes.setdefault(batch.tickets[0].edge, []).append(len(batch.tickets))
    assert all(max(s) - min(s) <= 1 for s in sizes.values())


@given(lengths, budgets)
def test_the_longest_edge_comes_first_and_neighbours_stay_together(lengths, budget):
    batches = pack(tickets(lengths), budget)
    edges = [b.tickets[0].edge for b in batches]
    assert edges == sorted(edges, reverse=True)
    for edge in set(edges):
        names = [int(t.key.request_id[1:]) for b in batches for t in b.tickets if t.edge == edge]
        assert names == sorted(names)


def test_halves_are_the_whole():
    [batch] = pack(tickets([5] * 7), Budget(max_rows=7, max_bytes=1 << 30))
    left, right = halves(batch)
    assert left.tickets + right.tickets == batch.tickets
    assert (len(left.tickets), len(right.tickets)) == (3, 4)


def test_edges_are_half_open():
    assert [edge_of(n, (4, 8)) for n in (1, 4, 5, 8, 9)] == [4, 4, 8, 8, 9]
