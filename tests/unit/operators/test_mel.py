"""Log-mel against the reference's feature extractor."""

import pytest
import torch
from transformers import WhisperFeatureExtractor

from omnicli.operators.mel import RATE_HZ, log_mel


def noisy_speech(seconds, seed=0):
    """Bursts of coloured noise: loud, soft and silent stretches."""
    noise = torch.randn(round(seconds * RATE_HZ), generator=torch.Generator().manual_seed(seed))
    slow = torch.sin(torch.arange(len(noise)) / 3000.0).clamp(min=0)
    return 0.3 * slow * torch.cumsum(noise, 0).sin()


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("seconds", [0.4, 3.21, 29.99])
def test_frames_are_those_of_the_clip_padded_to_30_s(seconds, bands):
    clip = noisy_speech(seconds)
    reference = WhisperFeatureExtractor(feature_size=bands)
    expected = reference(clip.numpy(), sampling_rate=RATE_HZ, return_tensors="pt").input_features

    edge = min(30.0, -(-seconds // 0.64) * 0.64 + 1.28)
    padded = torch.zeros(1, round(edge * RATE_HZ))
    padded[0, : len(clip)] = clip
    ours = log_mel(padded, bands)

    torch.testing.assert_close(ours, expected[..., : ours.shape[2]], atol=1e-4, rtol=0)


def test_the_maximum_is_the_rows_own():
    soft, loud = noisy_speech(2.0) * 0.01, noisy_speech(2.0, seed=1)
    together = log_mel(torch.stack([soft, loud]), 80)
    assert torch.equal(together[0], log_mel(soft[None], 80)[0])
