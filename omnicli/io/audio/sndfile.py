"""Recordings through libsndfile: what is close to PCM."""

import os
from collections.abc import Iterator
from io import FileIO
from typing import Any

import soundfile
import torch

from omnicli.io.audio.files import Form, Layout, checked_rate, is_chained, is_length
from omnicli.io.audio.takes import LATE_S, Block, Made, Source, Take, collected

BLOCK_FRAMES = 1 << 16
BLOCK_SAMPLES = 1 << 20  # of all channels together


def by_sndfile(file: FileIO, form: Form, layout: Layout, take: Take) -> Made | None:
    """None where FFmpeg should try: an unknown length, a chain of recordings, damage."""
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    try:
        with soundfile.SoundFile(file.fileno(), closefd=False) as sound:
            frames = _whole_frames(sound, layout)
            begin, end = take.span(checked_rate(sound.samplerate))
            if not is_length(frames) or (end > frames and is_chained(file, form)):
                return None
            begin = _sought(sound, min(begin, frames))
            source = Source(
                rate_hz=sound.samplerate,
                channels=sound.channels,
                promised_s=frames / sound.samplerate,
                begin=begin,
                blocks=_sound_blocks(sound, frames - begin),
            )
            return collected(source, take)
    except soundfile.SoundFileError:
        return None


def _whole_frames(sound: Any, layout: Layout) -> int:
    """Frames without the padding of the last block, where the header knows."""
    frames, known = int(sound.frames), layout.frames
    if known and 0 < frames - known < LATE_S * sound.samplerate:
        return known
    return frames


def _sought(sound: Any, begin: int) -> int:
    """Go to a frame, or stay at the first one where a codec cannot be sought in."""
    if not begin or not sound.seekable():
        return 0
    try:
        return int(sound.seek(begin))
    except soundfile.LibsndfileError:
        return 0


def _sound_blocks(sound: Any, frames: int) -> Iterator[Block]:
    most = max(1, min(BLOCK_FRAMES, BLOCK_SAMPLES // sound.channels))
    while frames > 0:
        block = sound.read(min(most, frames), dtype="float32", always_2d=True)
        if not len(block):
            return
        frames -= len(block)
        yield torch.from_numpy(block).t(), sound.samplerate
