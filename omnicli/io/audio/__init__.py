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

from dataclasses import replace
from io import FileIO
from pathlib import Path

import av
import av.error
import av.logging
import soundfile

from omnicli.data import Recording
from omnicli.errors import RequestError
from omnicli.io.audio.ffmpeg import MPEG_TAGS, by_ffmpeg, header_s
from omnicli.io.audio.files import Form, Layout, form_of, layout_of, open_file
from omnicli.io.audio.sndfile import by_sndfile
from omnicli.io.audio.takes import LATE_S, Made, Stats, Take
from omnicli.io.names import printable

RATE_HZ = 16_000  # what Whisper and the speech detector hear
CLIPPED_SHARE = 0.001
OVERSCALED = 2.0  # lossy decoders overshoot a little; beyond this the scale is another


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
    take = Take(
        rate_hz=rate_hz,
        channels=channels,
        offset_s=offset_s or 0.0,
        duration_s=duration_s,
        scratch=scratch,
    )
    try:
        with open_file(path) as file:
            return _decode(file, take)
    except RequestError as error:
        raise RequestError(error.code, f"{printable(str(path))}: {error}") from error
    except av.error.FFmpegError as error:
        raise RequestError("decode_error", f"{printable(str(path))}: {error}") from error
    except OSError as error:
        raise RequestError(
            "unreadable", f"{printable(str(path))}: {error.strerror or error}"
        ) from error


def probe(path: Path) -> float | None:
    """Seconds that the header promises; None if it does not say, or cannot be read."""
    try:
        with open_file(path) as file:
            return header_s(file, form_of(file))
    except (RequestError, OSError, soundfile.SoundFileError, av.error.FFmpegError):
        return None


def _decode(file: FileIO, take: Take) -> Recording:
    form = form_of(file)
    if form.sort == "other":
        raise RequestError("not_audio", f"this is {form.name}")
    layout = layout_of(file, form)
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


def _made(file: FileIO, form: Form, layout: Layout, take: Take) -> Made:
    """By libsndfile, by FFmpeg, or by whichever of them gets more out of a damaged file."""
    first = None
    if form.sort == "sndfile" and layout.codec_tag not in MPEG_TAGS:
        first = by_sndfile(file, form, layout, take)
        if first is not None and not _lacks(first, take):
            return first
    try:
        other = by_ffmpeg(file, form, layout, take)
    except RequestError as error:
        if first is not None and first.stats.samples:
            return first
        if not layout.sound:
            raise RequestError("no_samples", f"{form.name} header without samples") from error
        raise
    return other if first is None or other.end_s > first.end_s else first


def _lacks(made: Made, take: Take) -> bool:
    return not made.stats.samples or (take.duration_s is None and made.short)


def _second_take(stats: Stats, take: Take) -> tuple[Take, list[str]]:
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


def _told(made: Made, take: Take) -> list[str]:
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
