"""What omni models begin with: clips to log-mel features, padded to what their encoder must see."""

import torch
from torch import Tensor

from omnicli.data import AudioClip
from omnicli.operators.mel import HOP_SAMPLES, log_mel

TAIL_SAMPLES = 2 * HOP_SAMPLES  # silence that the last window looks into


def features(clip: AudioClip, bands: int, *, least_frames: int = 1) -> Tensor:
    """A clip's log-mel frames [bands, F] float32, 100 per second: F covers every sample.

    A clip with fewer than `least_frames` is heard with silence behind it. Nothing depends on what
    other clips are heard with, as it does where a batch is padded to its longest.
    """
    frames = max(-(-len(clip.samples) // HOP_SAMPLES), least_frames)
    samples = clip.samples.new_zeros(1, frames * HOP_SAMPLES + TAIL_SAMPLES)
    samples[0, : len(clip.samples)] = clip.samples
    return log_mel(samples, bands)[0, :, :frames]


def packed(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Features side by side, as the encoders of Qwen-Omni take them.

    Rows [bands, F_i] -> ([bands, sum F], [B] int64 lengths).
    """
    return torch.cat(rows, dim=1), torch.tensor([row.shape[1] for row in rows])
