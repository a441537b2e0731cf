"""Products that wait on disk are the same as in memory, and leave nothing behind."""

import gc

import torch

from omnicli.data import Encoded, Waveform
from omnicli.io.scratch import Scratch


def encoded(n, dtype=torch.bfloat16):
    return Encoded(embeds=torch.randn(n, 512).to(dtype), clip=0, valid_frames=n)


def test_within_the_budget_a_product_stays_as_it_is(tmp_path):
    scratch, product = Scratch(tmp_path, 1 << 20), encoded(100)
    assert scratch.settle(product).embeds is product.embeds
    assert scratch.held_bytes == 100 * 512 * 2


def test_beyond_the_budget_it_is_mapped_and_equal(tmp_path):
    scratch = Scratch(tmp_path, 0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        product = encoded(100, dtype)
        settled = scratch.settle(product)
        assert settled.embeds is not product.embeds
        assert torch.equal(settled.embeds, product.embeds)
        assert settled.embeds.dtype == dtype
    assert scratch.held_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_pieces_are_spilled_one_by_one(tmp_path):
    scratch = Scratch(tmp_path, 100_000)
    pieces = tuple(torch.randn(20_000) for _ in range(3))
    wave = Waveform(pieces=pieces, rate_hz=22_050, peak=1.0, samples=60_000)
    settled = scratch.settle(wave)
    assert scratch.held_bytes == 80_000
    assert scratch.spilled_bytes == 160_000
    assert all(torch.equal(a, b) for a, b in zip(settled.pieces, pieces, strict=True))


def test_what_is_forgotten_is_no_longer_held(tmp_path):
    scratch = Scratch(tmp_path, 1 << 30)
    product = scratch.settle(encoded(1000))
    assert scratch.held_bytes > 0
    del product
    gc.collect()
    assert scratch.held_bytes == 0
