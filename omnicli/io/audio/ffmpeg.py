"""Recordings through FFmpeg (PyAV): the rest, and what libsndfile gives up on."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import FileIO
from itertools import chain
from typing import Any

import av
import av.error
import av.logging
import numpy as np
import soundfile
import torch

from omnicli.errors import RequestError
from omnicli.io.audio.files import (
    HEAD_BYTES,
    Form,
    Layout,
    checked_rate,
    is_length,
    layout_of,
    read_at,
    tag_bytes,
)
from omnicli.io.audio.sndfile import BLOCK_FRAMES
from omnicli.io.audio.takes import Block, Made, Source, Take, collected

MOST_PLANES = 8  # from so many planar channels on PyAV 18 reads beyond its list of planes
PREROLL_S = 1.0  # lossy codecs need the packets before a place to decode it exactly
MPEG_TAGS = (0x50, 0x55)

# FFmpeg's own words go nowhere: stderr belongs to the person at the terminal.
av.logging.set_level(None)


def by_ffmpeg(file: FileIO, form: Form, layout: Layout, take: Take) -> Made:
    """A take by FFmpeg."""
    mp3_frames = _mp3_frames(file) if form.name == "MP3" else None
    with _container(file, form) as container:
        stream = _audio_stream(container, form, layout)
        packets = _Packets(container, stream)
        frames = packets.frames()
        first = next(frames, None)
        if first is None:
            raise _nothing(form, packets.bad)
        begin, frames = _go_to(take, first, packets, frames)
        source = Source(
            rate_hz=checked_rate(first.sample_rate),
            channels=len(_channels(first)),
            promised_s=_mp3_s(mp3_frames, first)
            if mp3_frames
            else _stream_s(form, container, stream),
            begin=begin,
            blocks=_frame_blocks(frames),
        )
        made = collected(source, take)
    if form.sort == "guess" and packets.bad > packets.good:
        raise RequestError("not_audio", "its content is no known kind of audio")
    if not made.stats.samples:
        raise RequestError("no_samples", f"it ends before {take.offset_s:g} s")
    notes = (f"decode_errors: {packets.bad} packets",) if packets.bad else ()
    return replace(made, notes=notes)


@contextmanager
def _container(file: FileIO, form: Form) -> Iterator[Any]:
    """FFmpeg reads from this one file: a playlist must not lead it to other files or hosts."""
    file.seek(0)
    try:
        container: Any = av.open(
            file, metadata_errors="replace", options={"protocol_whitelist": "none"}
        )
    except av.error.FFmpegError as error:
        if form.sort == "guess":
            raise RequestError("not_audio", "its content is no known kind of audio") from error
        raise RequestError(
            "decode_error", f"{form.name} that cannot be opened: damaged or cut short"
        ) from error
    with container:
        yield container


def _audio_stream(container: Any, form: Form, layout: Layout) -> Any:
    if not container.streams.audio:
        if container.format.name.endswith("_pipe"):
            raise RequestError("not_audio", "this is an image")
        name = container.format.name if form.sort == "guess" else form.name
        raise RequestError("no_audio_stream", f"{name} without an audio track")
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        tag = f" (tag 0x{layout.codec_tag:04x})" if layout.codec_tag else ""
        raise RequestError("unsupported_format", f"{form.name} in an unknown codec{tag}")
    return stream


def _nothing(form: Form, bad: int) -> RequestError:
    if bad:
        return RequestError("decode_error", f"{form.name} of which nothing could be decoded")
    return RequestError("no_samples", f"{form.name} without a single sample")


class _Packets:
    """The packets of one stream; damaged ones are counted and left out."""

    def __init__(self, container: Any, stream: Any) -> None:
        self.container, self.stream = container, stream
        self.good = self.bad = 0

    def frames(self) -> Iterator[Any]:
        """Decoded frames from wherever the container stands."""
        packets = self.container.demux(self.stream)
        while True:
            try:
                packet = next(packets, None)
                frames: Sequence[Any] = packet.decode() if packet is not None else ()
            except av.error.FFmpegError:
                self.bad += 1
                continue
            self.good += 1
            yield from frames
            if packet is None:
                return


def _go_to(
    take: Take, first: Any, packets: _Packets, frames: Iterator[Any]
) -> tuple[int, Iterator[Any]]:
    """Frames from a little before the offset on, and the place of the first of their samples.

    Times are taken relative to the first frame: containers count the codec's delay differently.
    """
    stay = 0, chain([first], frames)
    before_s = take.offset_s - PREROLL_S
    if before_s <= 0 or first.pts is None:
        return stay
    goal = first.pts + int(before_s / first.time_base)
    try:
        packets.container.seek(goal, stream=packets.stream)
    except (av.error.FFmpegError, OverflowError):
        return stay
    frames = packets.frames()
    landed = next(frames, None)
    if landed is None or landed.pts is None:
        return 0, iter(())
    begin = round((landed.pts - first.pts) * first.time_base * landed.sample_rate)
    return begin, chain([landed], frames)


def _frame_blocks(frames: Iterator[Any]) -> Iterator[Block]:
    """Decoded frames, a thousand samples or so each, put together to blocks."""
    held: list[np.ndarray] = []
    held_frames = 0
    now: tuple[int, int] | None = None  # rate and channels may change where recordings are glued
    for frame in frames:
        samples = _channels(frame)
        kind = (checked_rate(frame.sample_rate), len(samples))
        if now is not None and (kind != now or held_frames >= BLOCK_FRAMES):
            yield torch.from_numpy(np.concatenate(held, axis=1)), now[0]
            held, held_frames = [], 0
        now = kind
        held.append(samples)
        held_frames += samples.shape[1]
    if now is not None:
        yield torch.from_numpy(np.concatenate(held, axis=1)), now[0]


def _channels(frame: Any) -> np.ndarray:
    """A frame's samples [C, n] float32, whatever FFmpeg's sample format is."""
    channels = frame.layout.nb_channels
    if frame.format.is_planar and channels >= MOST_PLANES:
        parts = [part.to_ndarray() for part in av.AudioResampler(format="flt").resample(frame)]
        return np.concatenate(parts, axis=1).reshape(-1, channels).T
    samples: np.ndarray = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, channels).T
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128) / 128
    if samples.dtype.kind == "i":
        return (samples / -float(np.iinfo(samples.dtype).min)).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # seen to later, as `nonfinite_samples`
        return samples.astype(np.float32, copy=False)


# Containers that write a length down; of the others FFmpeg guesses it from the bitrate.
_COUNTED = ("MP4", "Matroska", "FLAC", "Ogg", "ASF", "WAV", "AIFF", "CAF")
_XING = re.compile(rb"(?:Xing|Info)\x00{3}[\x01\x03\x05\x07\x09\x0b\x0d\x0f](.{4})", re.DOTALL)
TRIMMED_FRAMES = 4  # at most, of the encoder's delay and padding


def _mp3_frames(file: FileIO) -> int | None:
    """Frames by the Xing or Info header in the first one, less what decoders trim."""
    start = tag_bytes(read_at(file, 0, 10))
    found = _XING.search(read_at(file, start, HEAD_BYTES))
    return int.from_bytes(found[1], "big") - TRIMMED_FRAMES if found else None


def _mp3_s(frames: int, first: Any) -> float:
    """Seconds of so many frames: of 1152 samples in MPEG-1, of 576 in MPEG-2 at its low rates."""
    rate_hz: int = first.sample_rate
    return frames * (1152 if rate_hz >= 32_000 else 576) / rate_hz


def _stream_s(form: Form, container: Any, stream: Any) -> float | None:
    """Seconds that the container promises for the stream; None if it would be a guess."""
    if form.name not in _COUNTED:
        return None
    if stream.duration:
        return float(stream.duration * stream.time_base)
    if container.duration and len(container.streams) == 1:
        return float(container.duration / av.time_base)
    return None


def header_s(file: FileIO, form: Form) -> float | None:
    """Seconds that the header promises."""
    if form.sort == "other":
        return None
    if form.sort == "sndfile" and layout_of(file, form).codec_tag not in MPEG_TAGS:
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        with soundfile.SoundFile(file.fileno(), closefd=False) as sound:
            return sound.frames / sound.samplerate if is_length(sound.frames) else None
    with _container(file, form) as container:
        length = container.duration
        return float(length / av.time_base) if length else None
