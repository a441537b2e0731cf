"""One take of a recording: select, choose channels, resample, collect; blocks stream through."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from omnicli.errors import RunError
from omnicli.operators.resample import StreamingResampler

SPILL_S = 20 * 60.0  # longer recordings lie in a scratch file, 77 MB at 16 kHz
LATE_S = 0.1  # a promised length may be this much too long: padding of the last packets
FULL_SCALE = 0.9999  # 32767 / 32768 and above
LOUDEST = 2.0**32  # even integers that were written as floats stay below
INVERTED = 0.05  # of the louder channel's energy; a mix of unrelated channels keeps a quarter
ALIKE = 1e-4  # energy of the difference: 40 dB below the channels
FAINT = 1e-8  # mean square of what is no more than dither: -80 dB
Block = tuple[Tensor, int]  # [C, n] float32 and its rate in Hz


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """What is wanted of a recording."""

    rate_hz: int
    channels: str
    offset_s: float
    duration_s: float | None
    scratch: Path | None
    gain: float = 1.0

    def span(self, rate_hz: int) -> tuple[int, int]:
        """First sample and the one after the last, at the source's rate."""
        begin = round(self.offset_s * rate_hz)
        if self.duration_s is None:
            return begin, sys.maxsize
        return begin, begin + round(self.duration_s * rate_hz)


@dataclass(slots=True, kw_only=True)
class Source:
    """A recording that one of the two libraries has opened."""

    rate_hz: int
    channels: int
    promised_s: float | None
    begin: int  # place in the recording of the first sample of `blocks`
    blocks: Iterator[Block]


@dataclass(slots=True, kw_only=True)
class Stats:
    """What the samples of a take are like, before they are changed."""

    samples: int = 0  # of all channels
    frames: dict[int, int] = field(default_factory=dict)  # by rate in Hz; mostly there is but one
    nonfinite: int = 0
    clipped: int = 0
    peak: float = 0.0
    stereo_frames: int = 0
    left: float = 0.0  # energies, where there are two channels
    right: float = 0.0
    sum: float = 0.0
    difference: float = 0.0

    @property
    def seconds(self) -> float:
        """Length."""
        return sum(frames / rate_hz for rate_hz, frames in self.frames.items())

    @property
    def louder(self) -> float:
        """Energy of the louder channel."""
        return max(self.left, self.right)

    @property
    def inverted(self) -> bool:
        """Whether the mix of two channels is next to nothing, though each holds something."""
        heard = self.louder > FAINT * self.stereo_frames
        return heard and self.sum / 4 < INVERTED * self.louder

    @property
    def alike(self) -> bool:
        """Whether two channels hold the same, perhaps upside down."""
        return self.stereo_frames > 0 and min(self.difference, self.sum) <= ALIKE * self.louder


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A take that is in the can."""

    tracks: tuple[Tensor, ...]
    stats: Stats
    source: Source
    end_s: float  # where in the recording it ended
    notes: tuple[str, ...] = ()

    @property
    def short(self) -> bool:
        """Whether less came than the header promises, all of which was asked for."""
        return self.source.promised_s is not None and self.source.promised_s - self.end_s > LATE_S


def collected(source: Source, take: Take) -> Made:
    """Everything that was asked for, as tracks."""
    collector = _Collector(take)
    with closing(collector):
        for block, rate_hz in _selected(source, take):
            collector.add(block, rate_hz)
        tracks = collector.finish()
    stats = collector.stats
    end_s = take.offset_s + stats.seconds
    return Made(tracks=tracks, stats=stats, source=source, end_s=end_s)


def _selected(source: Source, take: Take) -> Iterator[Block]:
    """The blocks of a source, cut to the part that is wanted."""
    place, rate_hz = source.begin, source.rate_hz
    for block, now_hz in source.blocks:
        if now_hz != rate_hz:  # recordings of several rates, glued together
            place, rate_hz = round(place * now_hz / rate_hz), now_hz
        begin, end = take.span(rate_hz)
        part = block[:, max(0, begin - place) : max(0, end - place)]
        if part.shape[1]:
            yield part, rate_hz
        place += block.shape[1]
        if place >= end:
            return


class _Collector:
    """Blocks in, tracks out."""

    def __init__(self, take: Take) -> None:
        self.take = take
        self.stats = Stats()
        self._tracks: list[_Track] = []
        self._resampler: StreamingResampler | None = None
        self._rate_hz = 0

    def add(self, block: Tensor, rate_hz: int) -> None:
        """Take the next block [C, n] in."""
        block = self._sane(block)
        self._compare(block)
        self.stats.samples += block.numel()
        self.stats.frames[rate_hz] = self.stats.frames.get(rate_hz, 0) + block.shape[1]
        if not self._tracks:
            count = 2 if self.take.channels == "split" and len(block) > 1 else 1
            most = round(SPILL_S * self.take.rate_hz)
            self._tracks = [_Track(most, self.take.scratch) for _ in range(count)]
        if rate_hz != self._rate_hz or self._resampler is None:
            self._flush()
            self._rate_hz = rate_hz
            self._resampler = StreamingResampler(rate_hz, self.take.rate_hz)
        picked = _picked(block, self.take.channels, len(self._tracks))
        self._write(self._resampler.push(picked * self.take.gain))

    def finish(self) -> tuple[Tensor, ...]:
        """The tracks, each [T]."""
        self._flush()
        return tuple(track.finish() for track in self._tracks)

    def close(self) -> None:
        """Let go of scratch files."""
        for track in self._tracks:
            track.close()

    def _flush(self) -> None:
        rest = self._resampler.flush() if self._resampler else None
        if rest is not None:
            self._write(rest)

    def _write(self, made: Tensor) -> None:
        for track, row in zip(self._tracks, made, strict=True):
            track.write(row.clamp(-1, 1))

    def _sane(self, block: Tensor) -> Tensor:
        level = block.abs()
        peak = float(level.max())
        if not peak <= LOUDEST:  # NaN compares as false
            good = level <= LOUDEST
            self.stats.nonfinite += int((~good).sum())
            block = block.where(good, torch.zeros(()))
            level = block.abs()
            peak = float(level.max())
        if peak >= FULL_SCALE:
            self.stats.clipped += int((level >= FULL_SCALE).sum())
        self.stats.peak = max(self.stats.peak, peak)
        return block

    def _compare(self, block: Tensor) -> None:
        if len(block) != 2 or self.take.channels not in ("mix", "split"):
            return
        left, right = block
        self.stats.stereo_frames += block.shape[1]
        self.stats.left += _energy(left)
        self.stats.right += _energy(right)
        self.stats.sum += _energy(left + right)
        self.stats.difference += _energy(left - right)


def _energy(samples: Tensor) -> float:
    return float(samples.square().sum())


def _picked(block: Tensor, channels: str, tracks: int) -> Tensor:
    """Channels [C, n] -> tracks [1 or 2, n]."""
    if len(block) == 1:
        return block.expand(tracks, -1)
    if tracks == 2:
        return block[:2]
    if channels in ("left", "right"):
        return block[:1] if channels == "left" else block[1:2]
    return block.mean(dim=0, keepdim=True)


class _Track:
    """Samples one after the other: in memory while they are few, else in a nameless file."""

    def __init__(self, most_samples: int, scratch: Path | None) -> None:
        self._most = most_samples
        self._scratch = scratch
        self._parts: list[Tensor] = []
        self._samples = 0
        self._file: IO[bytes] | None = None

    def write(self, part: Tensor) -> None:
        """Append [n]."""
        self._parts.append(part)
        self._samples += len(part)
        if self._samples > self._most:
            self._spill()

    def finish(self) -> Tensor:
        """All samples [T]; those in a file are mapped from it."""
        if self._file is None:
            return torch.cat(self._parts) if self._parts else torch.zeros(0)
        self._spill()
        name = f"/dev/fd/{self._file.fileno()}"
        return torch.from_file(name, shared=True, size=self._samples, dtype=torch.float32)

    def close(self) -> None:
        """The file lives as long as what is mapped from it."""
        if self._file is not None:
            self._file.close()

    def _spill(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115 - see `close`
            for part in self._parts:
                self._file.write(part.contiguous().numpy().tobytes())
            self._file.flush()
        except OSError as error:
            place = self._scratch or tempfile.gettempdir()
            raise RunError(f"cannot write to {place}: {error.strerror}") from error
        self._parts.clear()
