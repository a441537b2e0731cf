"""The streaming resampler against torchaudio over the whole signal."""

import pytest
import torch
import torchaudio
from hypothesis import given, settings
from hypothesis import strategies as st

from omnicli.operators.resample import DENSE_TAPS, StreamingResampler, resampled_length

# of every kind: down, up, equal, a large factor, and one with a filter bank too large to convolve
RATES = [(44_100, 16_000), (8_000, 16_000), (16_000, 22_050), (16_000, 16_000), (192_000, 16_000)]
SPARSE = (2_003, 1_000)


def stream(signal, blocks, from_hz, to_hz):
    resampler = StreamingResampler(from_hz, to_hz)
    made = [resampler.push(block) for block in signal.split(blocks, dim=1)]
    rest = resampler.flush()
    return torch.cat([*made, *([] if rest is None else [rest])], dim=1)


def at_once(signal, from_hz, to_hz):
    return torchaudio.functional.resample(signal.double(), from_hz, to_hz).float()


@pytest.mark.parametrize(("from_hz", "to_hz"), [*RATES, SPARSE])
def test_blocks_give_what_torchaudio_makes_of_the_whole_signal(from_hz, to_hz):
    signal = torch.randn(2, 20_011, generator=torch.Generator().manual_seed(1)) / 4
    sizes = [1, 7, 3000, 12_000, 5003]

    made = stream(signal, sizes, from_hz, to_hz)

    torch.testing.assert_close(made, at_once(signal, from_hz, to_hz), atol=1e-6, rtol=0)


def test_the_sparse_case_is_a_sparse_case():
    assert SPARSE[0] * SPARSE[1] > DENSE_TAPS


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(RATES),
    st.lists(st.integers(1, 700), min_size=1, max_size=12),
)
def test_the_cut_of_the_blocks_does_not_matter(rates, sizes):
    signal = torch.sin(torch.arange(sum(sizes)) * 0.3)[None]

    made = stream(signal, sizes, *rates)

    assert made.shape[1] == resampled_length(sum(sizes), *rates)
    torch.testing.assert_close(made, at_once(signal, *rates), atol=1e-6, rtol=0)


def test_after_a_flush_a_new_signal_begins():
    resampler = StreamingResampler(8_000, 16_000)
    signal = torch.randn(1, 500)

    first = torch.cat([resampler.push(signal), resampler.flush()], dim=1)
    second = torch.cat([resampler.push(signal), resampler.flush()], dim=1)

    assert torch.equal(first, second)
    assert resampler.flush() is None


def test_a_tone_keeps_its_pitch_and_level_and_one_above_the_new_range_is_gone():
    time_s = torch.arange(44_100) / 44_100
    tone = lambda hz: torch.sin(2 * torch.pi * hz * time_s)[None]  # noqa: E731

    low, high = (stream(tone(hz), 4096, 44_100, 16_000)[0, 500:-500] for hz in (1_000, 12_000))

    wanted = torch.sin(2 * torch.pi * 1_000 * torch.arange(16_000) / 16_000)[500:-500]
    assert (low - wanted).abs().max() < 5e-3
    assert high.abs().max() < 1e-2
