"""The speech detector with random weights: company, blocks, levels."""

import math

import pytest
import torch

from omnicli.errors import UserError
from omnicli.execution.nets import silero
from omnicli.execution.nets.silero import (
    CONTEXT_SAMPLES,
    MAX_GAIN,
    Level,
    SileroVad,
    load_vad,
    speech_probabilities,
    window_count,
    window_peaks,
)
from omnicli.operators.speech_regions import WINDOW_SAMPLES

SIZES = [1, 511, 512, 513, 16_000, 40_000, 70_001, 100_000]


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    net = SileroVad().requires_grad_(False).eval()
    net.stft_conv.weight /= 4
    net.final_conv.weight *= 50  # so that probabilities differ from each other
    return net


@pytest.fixture(scope="module")
def tracks():
    chance = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=chance) * 0.1 for size in SIZES]


def heard(net, tracks):
    with torch.inference_mode():
        return speech_probabilities(net, tracks, [Level.of(t) for t in tracks])


def plain(net, samples):
    """One window after another, as the package does it."""
    samples = torch.cat([torch.zeros(CONTEXT_SAMPLES), samples])
    samples = torch.cat([samples, torch.zeros(-(len(samples) - CONTEXT_SAMPLES) % WINDOW_SAMPLES)])
    state, found = None, []
    for start in range(0, len(samples) - CONTEXT_SAMPLES, WINDOW_SAMPLES):
        x = samples[start : start + CONTEXT_SAMPLES + WINDOW_SAMPLES]
        x = torch.cat([x, x[-CONTEXT_SAMPLES - 1 : -1].flip(0)])
        real, imaginary = net.stft_conv(x[None]).chunk(2)
        x = torch.hypot(real, imaginary)
        for conv in (net.conv1, net.conv2, net.conv3, net.conv4):
            x = conv(x).relu()
        h, state = net.lstm(x.T, state)
        found.append(net.final_conv(h.T.relu()).sigmoid().flatten())
    return torch.cat(found)


def test_it_computes_what_the_plain_loop_computes(net, tracks):
    theirs = [plain(net, track) for track in tracks]
    ours = speech_probabilities(net, tracks, [Level()] * len(tracks))
    assert max(float(row.std()) for row in theirs if len(row) > 1) > 0.01
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_every_started_window_has_a_probability(net, tracks):
    rows = heard(net, tracks)
    assert [len(row) for row in rows] == [math.ceil(size / WINDOW_SAMPLES) for size in SIZES]
    assert all(((row >= 0) & (row <= 1)).all() for row in rows)


def test_the_company_in_a_batch_changes_no_bit(net, tracks):
    together = heard(net, tracks)
    for track, row in zip(tracks, together, strict=True):
        assert torch.equal(heard(net, [track])[0], row)
    backwards = heard(net, tracks[::-1])[::-1]
    assert all(torch.equal(a, b) for a, b in zip(together, backwards, strict=True))


def test_the_state_goes_from_block_to_block(net, tracks, monkeypatch):
    whole = heard(net, tracks)
    monkeypatch.setattr(silero, "BLOCK_WINDOWS", 20)
    for a, b in zip(heard(net, tracks), whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_what_comes_later_changes_nothing_before(net, tracks):
    long = tracks[-1]
    (early,) = speech_probabilities(net, [long[: 50 * WINDOW_SAMPLES]], [Level()])
    (late,) = speech_probabilities(net, [long], [Level()])
    torch.testing.assert_close(early, late[:50], atol=1e-6, rtol=0)


def test_no_tracks_and_empty_tracks(net, tracks):
    assert heard(net, []) == []
    empty, full = heard(net, [torch.zeros(0), tracks[4]])
    assert len(empty) == 0
    assert torch.equal(full, heard(net, [tracks[4]])[0])


@pytest.mark.parametrize("size", SIZES)
def test_peaks_are_the_largest_distances_from_the_offset(size):
    samples = torch.randn(size) + 0.3
    padded = torch.full((window_count(samples) * WINDOW_SAMPLES,), 0.3)
    padded[:size] = samples
    expected = (padded - 0.3).abs().view(-1, WINDOW_SAMPLES).amax(1)
    torch.testing.assert_close(window_peaks(samples, 0.3), expected)


def test_quiet_tracks_are_raised_and_loud_ones_are_left():
    tone = torch.sin(torch.arange(16_000) * 0.3)
    assert Level.of(tone * 0.8).gain == 1
    assert Level.of(tone * 0.01).gain == pytest.approx(50, rel=0.01)
    assert Level.of(tone * 1e-5).gain == MAX_GAIN
    assert Level.of(tone * 0.01 + 0.2).gain == pytest.approx(50, rel=0.01)
    assert Level.of(tone * 0.01 + 0.2).offset == pytest.approx(0.2, rel=0.01)


def test_a_click_does_not_count_as_loud():
    tone = torch.sin(torch.arange(16_000) * 0.3) * 0.01
    tone[5000:5100] = torch.tensor([1.0, -1.0]).repeat(50)
    assert Level.of(tone).gain == pytest.approx(50, rel=0.02)


@pytest.mark.parametrize("samples", [torch.zeros(0), torch.zeros(5000), torch.full((5000,), 0.5)])
def test_silence_has_no_level(samples):
    assert Level.of(samples).gain == 1


def test_weights_of_another_model_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"conv1.weight": torch.zeros(128, 129, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="lacks"):
        load_vad(tmp_path)
