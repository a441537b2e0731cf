"""Recordings from disk as mono sound at one rate, whatever container they come in.

A file is known by its content, never by its name. libsndfile reads what is close to PCM; FFmpeg
(PyAV carries its own) reads the rest, and what libsndfile gives up on or reads only the first piece
of. Lengths are those that were decoded, never those of a header. Blocks stream through channel
choice and resampling, so that memory does not grow with the recording.

A warning is a stable code, sometimes followed by a colon and a detail:

    truncated_input     the header promises more than there is
    trailing_data       bytes after the recording that no decoder looked at
    decode_errors       damaged packets were left out
    short_selection     the manifest's `duration` goes beyond the end
    nonfinite_samples   NaN or infinite samples, taken as silence
    out_of_range        samples far beyond full scale, scaled down
    clipped             a noticeable share of the samples is at full scale
    phase_inverted      the channels cancel each other: the left one was taken
    identical_channels  both channels hold the same: one was taken
    channels_dropped    `--channels split` takes the first two channels only
"""

import errno
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from io import FileIO
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import av
import av.error
import av.logging
import numpy as np
import soundfile
import torch
from torch import Tensor

from omnicli.data import Recording
from omnicli.errors import RequestError, RunError
from omnicli.operators.resample import StreamingResampler

RATE_HZ = 16_000  # what Whisper and the speech detector hear
BLOCK_FRAMES = 1 << 16
BLOCK_SAMPLES = 1 << 20  # of all channels together
LOWEST_HZ, HIGHEST_HZ = 1_000, 400_000  # beyond, a header is wrong
SPILL_S = 20 * 60.0  # longer recordings lie in a scratch file, 77 MB at 16 kHz
MOST_PLANES = 8  # from so many planar channels on PyAV 18 reads beyond its list of planes
PREROLL_S = 1.0  # lossy codecs need the packets before a place to decode it exactly
LATE_S = 0.1  # a promised length may be this much too long: padding of the last packets
TRAILING_BYTES = 1024  # tags and padding behind a recording are no news
FULL_SCALE = 0.9999  # 32767 / 32768 and above
CLIPPED_SHARE = 0.001
OVERSCALED = 2.0  # lossy decoders overshoot a little; beyond this the scale is another
LOUDEST = 2.0**32  # even integers that were written as floats stay below
INVERTED = 0.05  # of the louder channel's energy; a mix of unrelated channels keeps a quarter
ALIKE = 1e-4  # energy of the difference: 40 dB below the channels
FAINT = 1e-8  # mean square of what is no more than dither: -80 dB

Block = tuple[Tensor, int]  # [C, n] float32 and its rate in Hz

# FFmpeg's own words go nowhere: stderr belongs to the person at the terminal.
av.logging.set_level(None)


def decode(
    path: Path,
    *,
    rate_hz: int = RATE_HZ,
    channels: str = "mix",
    offset_s: float | None = None,
    duration_s: float | None = None,
    scratch: Path | None = None,
) -> Recording:
    """The recording, or the part from `offset_s` on that lasts `duration_s`, at `rate_hz`.

    `channels` is mix, left, right or split (two tracks). `scratch` is a folder for long recordings.
    Raises RequestError for what cannot be decoded.
    """
    take = _Take(
        rate_hz=rate_hz,
        channels=channels,
        offset_s=offset_s or 0.0,
        duration_s=duration_s,
        scratch=scratch,
    )
    try:
        with _opened(path) as file:
            return _decode(file, take)
    except RequestError as error:
        raise RequestError(error.code, f"{_shown(path)}: {error}") from error
    except av.error.FFmpegError as error:
        raise RequestError("decode_error", f"{_shown(path)}: {error}") from error
    except OSError as error:
        raise RequestError("unreadable", f"{_shown(path)}: {error.strerror or error}") from error


def probe(path: Path) -> float | None:
    """Seconds that the header promises; None if it does not say, or cannot be read."""
    try:
        with _opened(path) as file:
            return _promised_s(file, _form(file))
    except (RequestError, OSError, soundfile.SoundFileError, av.error.FFmpegError):
        return None


# -- opening


def _shown(path: Path) -> str:
    """A path for messages: bytes that are no UTF-8 are spelt out."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class _File(FileIO):
    """A file for PyAV, which would print the exception of an impossible seek to stderr."""

    def seek(self, place: int, whence: int = os.SEEK_SET, /) -> int:
        """The new place, -1 if there is no such place (damaged headers point anywhere)."""
        try:
            return super().seek(place, whence)
        except (OSError, OverflowError):
            return -1


def _opened(path: Path) -> FileIO:
    """A regular file, open for reading; never waits for whoever should write into a pipe."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _irregular(path)
        file = _File(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except PermissionError as error:
        raise RequestError("unreadable", "permission denied") from error
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # a NUL in the name
        raise RequestError("missing_file", "there is no such file") from error
    except OSError as error:
        code = "missing_file" if error.errno in (errno.ELOOP, errno.ENAMETOOLONG) else "unreadable"
        raise RequestError(code, error.strerror or str(error)) from error
    if os.fstat(file.fileno()).st_size == 0:
        file.close()
        raise RequestError("empty_file", "the file has 0 bytes")
    return file


def _irregular(path: Path) -> RequestError:
    if not path.is_dir():
        return RequestError("not_a_file", "a pipe, socket or device, not a file")
    if not os.access(path, os.R_OK | os.X_OK):
        return RequestError("unreadable", "permission denied")
    return RequestError("not_a_file", "a folder, not a file")


# -- what a file is, by its first bytes


@dataclass(frozen=True, slots=True)
class _Form:
    """A kind of file."""

    name: str
    sort: str  # "sndfile" or "ffmpeg" (who reads it), "guess" (FFmpeg may), "other" (no sound)


HEAD_BYTES = 4096
# fmt: off
_FORMS = tuple((re.compile(pattern, re.DOTALL), _Form(name, sort)) for pattern, name, sort in (
    (rb"(RIFF|RIFX|RF64|BW64)....WAVE", "WAV", "sndfile"),
    (rb"riff\x2e\x91\xcf\x11", "W64", "sndfile"),
    (rb"FORM....AIF[FC]", "AIFF", "sndfile"),
    (rb"fLaC", "FLAC", "sndfile"),
    (rb"OggS", "Ogg", "sndfile"),
    (rb"\.snd|dns\.", "AU", "sndfile"),
    (rb"caff", "CAF", "sndfile"),
    (rb"NIST_1A", "NIST SPHERE", "sndfile"),
    (rb"Creative Voice File", "VOC", "sndfile"),
    (rb"ID3", "MP3", "ffmpeg"),
    (rb"....(ftyp|moov|mdat|wide|free|skip|pnot)", "MP4", "ffmpeg"),
    (rb"\x1a\x45\xdf\xa3", "Matroska", "ffmpeg"),
    (rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "ASF", "ffmpeg"),
    (rb"#!AMR", "AMR", "ffmpeg"),
    (rb"RIFF....AVI ", "AVI", "ffmpeg"),
    (rb"wvpk", "WavPack", "ffmpeg"),
    (rb"MAC ", "Monkey's Audio", "ffmpeg"),
    (rb"TTA[12]", "TTA", "ffmpeg"),
    (rb"FLV\x01", "FLV", "ffmpeg"),
    (rb"\x00\x00\x01[\xba\xb3]", "MPEG", "ffmpeg"),
    (rb"\x89PNG", "a PNG image", "other"),
    (rb"\xff\xd8\xff", "a JPEG image", "other"),
    (rb"GIF8[79]a", "a GIF image", "other"),
    (rb"RIFF....WEBP", "a WebP image", "other"),
    (rb"%PDF-", "a PDF document", "other"),
    (rb"PK\x03\x04", "a ZIP archive", "other"),
    (rb"\x1f\x8b", "a gzip archive", "other"),
    (rb"BZh[1-9]", "a bzip2 archive", "other"),
    (rb"\xfd7zXZ|7z\xbc\xaf|Rar!", "an archive", "other"),
    (rb"\x7fELF", "a program", "other"),
    (rb"SQLite format 3", "a database", "other"),
    (rb"(\xef\xbb\xbf)?\s*(?i:<!doctype html|<html)", "an HTML page", "other"),
    (rb"\xff\xfe.\x00.\x00|\xfe\xff\x00.\x00.", "a text file", "other"),
    (rb"\x0b\x77", "AC-3", "guess"),
    (rb"\xff[\xf0\xf1\xf8\xf9]", "AAC", "guess"),  # ADTS: 12 bits of sync, layer 0
    (rb"\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff][\x00-\xef]", "MP3", "guess"),  # 11 bits of sync
))
# fmt: on
_UNKNOWN = _Form("unknown content", "guess")
MOST_ACCENTS = 0.3  # of the bytes of a text in an old 8-bit code
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def _form(file: FileIO) -> _Form:
    head = _read_at(file, 0, HEAD_BYTES)
    found = next((form for pattern, form in _FORMS if pattern.match(head)), None)
    if found is None:
        return _Form("a text file", "other") if _is_text(head) else _UNKNOWN
    if head.startswith(b"ID3") and _read_at(file, _tag_bytes(head), 4) == b"fLaC":
        return _Form("FLAC", "sndfile")
    return found


def _is_text(head: bytes) -> bool:
    if _CONTROL.search(head):
        return False
    broken = head.decode("utf-8", "replace").count("\ufffd") > 1  # one: a letter cut in two
    return not broken or sum(byte >= 0x80 for byte in head) <= MOST_ACCENTS * len(head)


def _read_at(file: FileIO, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size) or b""


def _tag_bytes(head: bytes) -> int:
    """Length of an ID3v2 tag (id3.org, ID3v2.4 structure, 3.1): four times seven bits."""
    if len(head) < 10 or not head.startswith(b"ID3"):
        return 0
    a, b, c, d = (byte & 0x7F for byte in head[6:10])
    return 10 + (a << 21 | b << 14 | c << 7 | d)


# -- what the chunks of a WAV or AIFF file promise

_HEADS = (b"RIFF", b"RIFX", b"RF64", b"FORM")
_CHUNK_NAME = re.compile(rb"[ -~]{4}")
MOST_CHUNKS = 10_000
ENDLESS = 0x7FFF_0000  # what is written when the length is not known yet, or a little below 2^31
MPEG_TAGS = (0x50, 0x55)
EXTENSIBLE = 0xFFFE


@dataclass(slots=True)
class _Layout:
    """What was found by walking over the chunks."""

    notes: list[str] = field(default_factory=list)
    codec_tag: int = 0
    block_bytes: int = 1
    frames: int | None = None  # of codecs that pad their last block
    end: int = 0  # of the last chunk
    long_bytes: int = 0  # RF64: the length that does not fit into 32 bits
    sound: bool = True  # whether there is a chunk of samples


def _layout(file: FileIO, form: _Form) -> _Layout:
    layout = _Layout()
    if form.name not in ("WAV", "AIFF"):
        return layout
    little = _read_at(file, 0, 4) not in (b"RIFX", b"FORM")
    size = os.fstat(file.fileno()).st_size
    layout.sound = False
    for name, length, start in islice(_chunks(file, size, little), MOST_CHUNKS):
        if name in (b"data", b"SSND"):
            layout.sound = True
            length = _measure(layout, length, size - start)
        else:
            _note_chunk(layout, name, _read_at(file, start, min(length, 40)), little)
        layout.end = start + length
    if layout.sound and size - layout.end > TRAILING_BYTES:
        layout.notes.append(f"trailing_data: {size - layout.end} bytes")
    return layout


def _chunks(file: FileIO, size: int, little: bool) -> Iterator[tuple[bytes, int, int]]:
    """Name, length and place of each chunk, as far as they follow each other."""
    place, pad = 12, 0
    while place + pad + 8 <= size:
        head = _read_at(file, place, 9)
        if not _CHUNK_NAME.match(head, pad):
            pad = 1 - pad  # some writers forget the byte that makes a length even
        name, number = head[pad : pad + 4], head[pad + 4 : pad + 8]
        if len(number) < 4 or not _CHUNK_NAME.match(name) or name in _HEADS:
            return
        length = int.from_bytes(number, "little" if little else "big")
        place += pad + 8
        yield name, length, place
        place, pad = place + length, length % 2


def _measure(layout: _Layout, length: int, present: int) -> int:
    """Length of the chunk of samples; a note if the file ends before it does."""
    promised = layout.long_bytes or length
    if not promised or (promised >= ENDLESS and not layout.long_bytes):
        return present
    if promised - present >= layout.block_bytes:
        layout.notes.append(f"truncated_input: {present} of {promised} bytes")
    return min(promised, present)


def _note_chunk(layout: _Layout, name: bytes, body: bytes, little: bool) -> None:
    order: Any = "little" if little else "big"
    if name == b"fmt " and len(body) >= 16:
        tag = int.from_bytes(body[:2], order)
        layout.codec_tag = int.from_bytes(body[24:26], order) if tag == EXTENSIBLE else tag
        layout.block_bytes = max(1, int.from_bytes(body[12:14], order))
    elif name == b"fact" and len(body) >= 4:
        layout.frames = int.from_bytes(body[:4], order)
    elif name == b"ds64" and len(body) >= 16:
        layout.long_bytes = int.from_bytes(body[8:16], order)


# -- a second recording behind the first

_SECOND_HEAD = {
    "FLAC": b"fLaC\x00\x00\x00\x22",  # the marker and the head of its 34 bytes of STREAMINFO
    "Ogg": b"OggS\x00\x02",  # a page that begins a stream
}
_OGG_LATER_PAGE = re.compile(rb"OggS\x00[\x00\x01\x04\x05]")
SCAN_BYTES = 1 << 20


def _is_chained(file: FileIO, form: _Form) -> bool:
    """Whether several recordings were glued together; libsndfile would read the first only."""
    if (pattern := _SECOND_HEAD.get(form.name)) is None:
        return False
    place = _tag_bytes(_read_at(file, 0, 10)) + 4
    if form.name == "Ogg":  # all streams of one recording begin on its first pages
        later = _OGG_LATER_PAGE.search(_read_at(file, 0, SCAN_BYTES))
        if later is None:
            return False
        place = later.end()
    file.seek(place)
    before = b""
    while read := file.read(SCAN_BYTES):
        if pattern in before + read:
            return True
        before = read[-len(pattern) :]
    return False


# -- one take: select, choose channels, resample, collect


@dataclass(frozen=True, slots=True, kw_only=True)
class _Take:
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
class _Source:
    """A recording that one of the two libraries has opened."""

    rate_hz: int
    channels: int
    promised_s: float | None
    begin: int  # place in the recording of the first sample of `blocks`
    blocks: Iterator[Block]


@dataclass(slots=True, kw_only=True)
class _Stats:
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
class _Made:
    """A take that is in the can."""

    tracks: tuple[Tensor, ...]
    stats: _Stats
    source: _Source
    end_s: float  # where in the recording it ended
    notes: tuple[str, ...] = ()

    @property
    def short(self) -> bool:
        """Whether less came than the header promises, all of which was asked for."""
        return self.source.promised_s is not None and self.source.promised_s - self.end_s > LATE_S


def _decode(file: FileIO, take: _Take) -> Recording:
    form = _form(file)
    if form.sort == "other":
        raise RequestError("not_audio", f"this is {form.name}")
    layout = _layout(file, form)
    made = _made(file, form, layout, take)
    second, notes = _second_take(made.stats, take)
    if second != take:
        made = replace(_made(file, form, layout, second), stats=made.stats)
    notes = [*layout.notes, *_told(made, take), *made.notes, *notes]
    codes = dict.fromkeys(note.partition(":")[0] for note in notes)
    return Recording(
        tracks=made.tracks,
        channels=("left", "right") if len(made.tracks) == 2 else ("",),
        rate_hz=take.rate_hz,
        duration_s=made.stats.seconds,
        source_rate_hz=made.source.rate_hz,
        source_channels=made.source.channels,
        warnings=tuple(next(n for n in notes if n.partition(":")[0] == code) for code in codes),
    )


def _made(file: FileIO, form: _Form, layout: _Layout, take: _Take) -> _Made:
    """By libsndfile, by FFmpeg, or by whichever of them gets more out of a damaged file."""
    first = None
    if form.sort == "sndfile" and layout.codec_tag not in MPEG_TAGS:
        first = _by_sndfile(file, form, layout, take)
        if first is not None and not _lacks(first, take):
            return first
    try:
        other = _by_ffmpeg(file, form, layout, take)
    except RequestError as error:
        if first is not None and first.stats.samples:
            return first
        if not layout.sound:
            raise RequestError("no_samples", f"{form.name} header without samples") from error
        raise
    return other if first is None or other.end_s > first.end_s else first


def _lacks(made: _Made, take: _Take) -> bool:
    return not made.stats.samples or (take.duration_s is None and made.short)


def _second_take(stats: _Stats, take: _Take) -> tuple[_Take, list[str]]:
    """What only the whole recording could tell: another choice of channel, another scale."""
    notes = []
    if take.channels == "mix" and stats.inverted:
        notes.append("phase_inverted")
    if take.channels == "split" and stats.alike:
        notes.append("identical_channels")
    second = replace(take, channels="left") if notes else take
    if stats.peak > OVERSCALED:
        notes.append(f"out_of_range: peak {stats.peak:g}")
        second = replace(second, gain=1 / stats.peak)
    return second, notes


def _told(made: _Made, take: _Take) -> list[str]:
    """Warnings about one take."""
    stats, source = made.stats, made.source
    notes = []
    if take.duration_s is None and made.short:
        notes.append(f"truncated_input: {made.end_s:.1f} of {source.promised_s:.1f} s")
    if take.duration_s is not None and take.duration_s - stats.seconds > LATE_S:
        notes.append(f"short_selection: {stats.seconds:.1f} of {take.duration_s:.1f} s")
    if stats.nonfinite:
        notes.append(f"nonfinite_samples: {stats.nonfinite}")
    if stats.peak <= OVERSCALED and stats.clipped > CLIPPED_SHARE * stats.samples:
        notes.append(f"clipped: {100 * stats.clipped / stats.samples:.1f} %")
    if take.channels == "split" and source.channels > 2:
        notes.append(f"channels_dropped: {source.channels - 2}")
    return notes


def _collect(source: _Source, take: _Take) -> _Made:
    collector = _Collector(take)
    with closing(collector):
        for block, rate_hz in _selected(source, take):
            collector.add(block, rate_hz)
        tracks = collector.finish()
    stats = collector.stats
    end_s = take.offset_s + stats.seconds
    return _Made(tracks=tracks, stats=stats, source=source, end_s=end_s)


def _selected(source: _Source, take: _Take) -> Iterator[Block]:
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

    def __init__(self, take: _Take) -> None:
        self.take = take
        self.stats = _Stats()
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
        return torch.from_file(name, shared=False, size=self._samples, dtype=torch.float32)

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


# -- libsndfile


def _by_sndfile(file: FileIO, form: _Form, layout: _Layout, take: _Take) -> _Made | None:
    """None where FFmpeg should try: an unknown length, a chain of recordings, damage."""
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    try:
        with soundfile.SoundFile(file.fileno(), closefd=False) as sound:
            frames = _whole_frames(sound, layout)
            begin, end = take.span(_checked(sound.samplerate))
            if not _is_length(frames) or (end > frames and _is_chained(file, form)):
                return None
            begin = _sought(sound, min(begin, frames))
            source = _Source(
                rate_hz=sound.samplerate,
                channels=sound.channels,
                promised_s=frames / sound.samplerate,
                begin=begin,
                blocks=_sound_blocks(sound, frames - begin),
            )
            return _collect(source, take)
    except soundfile.SoundFileError:
        return None


def _checked(rate_hz: int) -> int:
    if not LOWEST_HZ <= rate_hz <= HIGHEST_HZ:
        raise RequestError("unsupported_format", f"a sample rate of {rate_hz} Hz")
    return rate_hz


def _is_length(frames: int) -> bool:
    """Streams that were never closed have 2^63 - 1 frames."""
    return frames < 1 << 62


def _whole_frames(sound: Any, layout: _Layout) -> int:
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


# -- FFmpeg


def _by_ffmpeg(file: FileIO, form: _Form, layout: _Layout, take: _Take) -> _Made:
    mp3_frames = _mp3_frames(file) if form.name == "MP3" else None
    with _container(file, form) as container:
        stream = _audio_stream(container, form, layout)
        packets = _Packets(container, stream)
        frames = packets.frames()
        first = next(frames, None)
        if first is None:
            raise _nothing(form, packets.bad)
        begin, frames = _go_to(take, first, packets, frames)
        source = _Source(
            rate_hz=_checked(first.sample_rate),
            channels=len(_channels(first)),
            promised_s=_mp3_s(mp3_frames, first)
            if mp3_frames
            else _stream_s(form, container, stream),
            begin=begin,
            blocks=_frame_blocks(frames),
        )
        made = _collect(source, take)
    if form.sort == "guess" and packets.bad > packets.good:
        raise RequestError("not_audio", "its content is no known kind of audio")
    if not made.stats.samples:
        raise RequestError("no_samples", f"it ends before {take.offset_s:g} s")
    notes = (f"decode_errors: {packets.bad} packets",) if packets.bad else ()
    return replace(made, notes=notes)


@contextmanager
def _container(file: FileIO, form: _Form) -> Iterator[Any]:
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


def _audio_stream(container: Any, form: _Form, layout: _Layout) -> Any:
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


def _nothing(form: _Form, bad: int) -> RequestError:
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
    take: _Take, first: Any, packets: _Packets, frames: Iterator[Any]
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
        kind = (_checked(frame.sample_rate), len(samples))
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
    start = _tag_bytes(_read_at(file, 0, 10))
    found = _XING.search(_read_at(file, start, HEAD_BYTES))
    return int.from_bytes(found[1], "big") - TRIMMED_FRAMES if found else None


def _mp3_s(frames: int, first: Any) -> float:
    """Seconds of so many frames: of 1152 samples in MPEG-1, of 576 in MPEG-2 at its low rates."""
    rate_hz: int = first.sample_rate
    return frames * (1152 if rate_hz >= 32_000 else 576) / rate_hz


def _stream_s(form: _Form, container: Any, stream: Any) -> float | None:
    """Seconds that the container promises for the stream; None if it would be a guess."""
    if form.name not in _COUNTED:
        return None
    if stream.duration:
        return float(stream.duration * stream.time_base)
    if container.duration and len(container.streams) == 1:
        return float(container.duration / av.time_base)
    return None


# -- headers


def _promised_s(file: FileIO, form: _Form) -> float | None:
    if form.sort == "other":
        return None
    if form.sort == "sndfile" and _layout(file, form).codec_tag not in MPEG_TAGS:
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        with soundfile.SoundFile(file.fileno(), closefd=False) as sound:
            return sound.frames / sound.samplerate if _is_length(sound.frames) else None
    with _container(file, form) as container:
        length = container.duration
        return float(length / av.time_base) if length else None
