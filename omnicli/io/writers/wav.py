"""The spoken answer as PCM16 mono."""

import wave
from collections.abc import Iterator
from contextlib import closing
from errno import EEXIST
from pathlib import Path

import torch
from torch import Tensor

from omnicli.data import Outcome, Waveform
from omnicli.errors import RequestError
from omnicli.io.atomic import replacing

FULL_SCALE = 32768  # of a 16-bit sample, as libsndfile and torchaudio read it
PEAK = 0.99  # louder than this is turned down as a whole: clipping would be heard
BLOCK_SAMPLES = 1 << 16  # what is in memory at a time; pieces may be memory-mapped


def write(outcome: Outcome, folder: Path) -> Path | None:
    """`<stem>.wav`, written block by block."""
    waveform, source = outcome.waveform, outcome.request.audio
    if waveform is None or waveform.samples == 0:
        return None
    path = folder / f"{outcome.stem}.wav"
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise FileExistsError(EEXIST, "the answer would replace the recording itself", str(path))
    _save(path, waveform)
    return path


def _save(path: Path, waveform: Waveform) -> None:
    """The `wave` module and not libsndfile, whose "System error" does not tell a full disk."""
    with replacing(path) as file, closing(wave.open(file, "wb")) as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(waveform.rate_hz)
        out.setnframes(waveform.samples)
        for block in _blocks(waveform):
            out.writeframesraw(block.numpy().astype("<i2", copy=False).tobytes())
        assert out.getnframes() == waveform.samples, (out.getnframes(), waveform.samples)


def _blocks(waveform: Waveform) -> Iterator[Tensor]:
    """The samples as int16, [T] with T at most BLOCK_SAMPLES."""
    gain = FULL_SCALE * (PEAK / waveform.peak if waveform.peak > PEAK else 1.0)
    for piece in waveform.pieces:
        for block in torch.split(piece, BLOCK_SAMPLES):
            if not torch.isfinite(block).all():
                raise RequestError("not_finite", "the voice made samples that are no numbers")
            yield (block * gain).round_().clamp_(-FULL_SCALE, FULL_SCALE - 1).to(torch.int16)
