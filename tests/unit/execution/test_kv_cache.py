"""The cache against plain lists, row by row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnicli.execution.kv_cache import REACH_STEP, KVCache

ROWS, HEADS, WIDTH, CAPACITY = 3, 2, 2, 50

# per write: its padded size, and how much of that is real in each row
writes = st.lists(
    st.integers(1, 6).flatmap(
        lambda size: st.tuples(
            st.just(size), st.lists(st.integers(1, size), min_size=ROWS, max_size=ROWS)
        )
    ),
    min_size=1,
    max_size=8,
)


def play(plan):
    """A cache after these writes, and what each of its rows should hold."""
    cache = KVCache(2, (ROWS, HEADS, CAPACITY, WIDTH))
    rows = [[] for _ in range(ROWS)]
    number = 0
    for size, real in plan:
        fresh = torch.arange(number, number + ROWS * size, dtype=torch.float32).view(ROWS, size)
        number += ROWS * size
        new = fresh[:, None, :, None].expand(ROWS, HEADS, size, WIDTH)
        positions = cache.extend(size)
        for layer in range(2):
            cache.write(layer, new + layer, -new, positions)
        cache.advance(torch.tensor(real))
        for row, count in enumerate(real):
            rows[row] += fresh[row, :count].tolist()
    return cache, rows


def check(cache, rows):
    assert cache.lengths.tolist() == [len(row) for row in rows]
    for at, row in enumerate(rows):
        expected = torch.tensor(row)[None, :, None].expand(HEADS, len(row), WIDTH)
        for layer in range(2):
            assert torch.equal(cache.k[layer][at, :, : len(row)], expected + layer)
            assert torch.equal(cache.v[layer][at, :, : len(row)], -expected)


@given(writes)
def test_rows_hold_what_was_written_without_padding(plan):
    cache, rows = play(plan)
    check(cache, rows)
    assert cache.reach == sum(size for size, _ in plan)
    assert max(map(len, rows)) <= cache.readable <= CAPACITY


@given(writes, st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=5))
def test_keep_takes_rows_in_order_and_fork_leaves_the_original(plan, kept):
    cache, rows = play(plan)
    twin = cache.fork(torch.tensor(kept))
    check(twin, [rows[row] for row in kept])
    twin.k[0].zero_()
    check(cache, rows)
    cache.keep(torch.tensor(kept))
    check(cache, [rows[row] for row in kept])


def test_a_write_returns_what_attention_may_read():
    cache = KVCache(1, (1, 1, 100, 4))
    k, _ = cache.write(0, *torch.ones(2, 1, 1, 5, 4), cache.extend(5))
    assert k.shape[2] == REACH_STEP
    cache.advance(5)
    cache.extend(90)
    assert cache.readable == 96
    cache.extend(5)
    assert cache.readable == 100


def test_nothing_is_written_beyond_the_capacity():
    cache = KVCache(1, (1, 1, 8, 4))
    cache.extend(8)
    with pytest.raises(AssertionError, match="9 slots of 8"):
        cache.extend(1)


def test_bytes_are_those_of_keys_and_values():
    cache = KVCache(3, (2, 4, 10, 8), dtype=torch.bfloat16)
    assert cache.bytes == 2 * 3 * 2 * 4 * 10 * 8 * 2


def test_a_row_that_is_overwritten_is_as_if_it_had_been_there_alone():
    generator = torch.Generator().manual_seed(0)

    def filled(steps, rows=4):
        cache = KVCache(1, (rows, 2, 64, 8))
        for size in steps:
            positions = cache.extend(size)
            new = torch.randn(rows, 2, size, 8, generator=generator)
            cache.write(0, new, new, positions)
            cache.advance(size)
        return cache

    old, new = filled([20, 1, 1, 1]), filled([7, 1])
    kept = old.k[0][2].clone()
    old.put(torch.tensor([3, 0]), new)
    assert torch.equal(old.k[0][3], new.k[0][0])
    assert torch.equal(old.k[0][0], new.k[0][1])
    assert torch.equal(old.k[0][2], kept)
    assert old.lengths.tolist() == [8, 23, 23, 8]
    assert old.reaches == [8, 23, 23, 8]
    assert old.reach == 23


def test_a_cache_that_is_cleared_begins_anew():
    cache = KVCache(1, (4, 1, 8, 2))
    cache.write(0, torch.ones(4, 1, 3, 2), torch.ones(4, 1, 3, 2), cache.extend(3))
    cache.advance(3)
    cache.clear()
    assert (cache.reach, cache.lengths.tolist()) == (0, [0] * 4)
    k, _ = cache.write(0, 2 * torch.ones(4, 1, 2, 2), torch.ones(4, 1, 2, 2), cache.extend(2))
    cache.advance(2)
    assert (k[:, :, :2] == 2).all()
    more, _ = cache.write(0, 5 * torch.ones(4, 1, 1, 2), torch.ones(4, 1, 1, 2), cache.extend(1))
    assert (more[:, :, 2] == 5).all()
