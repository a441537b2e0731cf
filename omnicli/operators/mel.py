"""Whisper's log-mel spectrogram, for clips of any length.

The contract is that of openai/whisper `audio.py`: 16 kHz, windows of 25 ms every 10 ms, mel bands
after Slaney, log10 of the power, floored at 8 below the row's maximum, then scaled.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torchaudio.functional import melscale_fbanks

RATE_HZ = 16_000
HOP_SAMPLES = 160
WINDOW_SAMPLES = 400
FRAMES_PER_S = RATE_HZ // HOP_SAMPLES  # 100
_FLOOR = 1e-10  # power of silence
_RANGE = 8.0  # log10 units below the maximum that are kept


def log_mel(samples: Tensor, bands: int) -> Tensor:
    """samples [B, N] float32 at 16 kHz, N a multiple of 160 -> [B, bands, N / 160] float32.

    Zeros behind a clip change nothing before them, so a clip padded to its own edge gives the
    first frames of the same clip padded to 30 s; the maximum is the row's, not the batch's.
    """
    window = torch.hann_window(WINDOW_SAMPLES, device=samples.device)
    spectrum = torch.stft(
        samples, WINDOW_SAMPLES, HOP_SAMPLES, window=window, center=True, return_complex=True
    )
    power = spectrum[..., :-1].abs().square()
    mel = mel_filters(bands).to(samples.device) @ power
    log = mel.clamp(min=_FLOOR).log10()
    log = torch.maximum(log, log.amax(dim=(1, 2), keepdim=True) - _RANGE)
    return (log + 4.0) / 4.0


@lru_cache
def mel_filters(bands: int) -> Tensor:
    """Triangular mel filters after Slaney -> [bands, 201]."""
    filters: Tensor = melscale_fbanks(
        n_freqs=WINDOW_SAMPLES // 2 + 1,
        f_min=0.0,
        f_max=RATE_HZ / 2,
        n_mels=bands,
        sample_rate=RATE_HZ,
        norm="slaney",
        mel_scale="slaney",
    )
    return filters.T.contiguous()
