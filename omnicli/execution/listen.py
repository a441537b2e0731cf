"""The stage `listen`: decode a recording, find who speaks when, cut what is said into clips.

From here on lengths are real: nothing that a manifest or a header claims is believed any more.
Decoding is handed in as a function, since execution knows nothing of files.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from omnicli.data import AudioClip, Failure, Heard, Inputs, Recording, Request
from omnicli.errors import RequestError
from omnicli.execution.nets.silero import (
    Level,
    SileroVad,
    load_vad,
    speech_probabilities,
    window_peaks,
)
from omnicli.execution.stage import MapStage, Settings, StageSpec
from omnicli.operators.speech_regions import (
    RATE_HZ,
    ClipRule,
    Span,
    SpeechRule,
    cut_clips,
    speech_spans,
)

NAME = "listen"
MAX_ROWS = 32
SAMPLE_BYTES = 4
DAMAGE = frozenset(
    {"truncated_input", "trailing_data", "decode_errors", "nonfinite_samples", "short_selection"}
)  # warnings of a recording that fail it with `--strict`
CLAIM_SHARE = 0.05  # a claimed duration is off if it differs by more than this share
CLAIM_S = 0.1  # and by more than this

Selection = tuple[Path | None, float | None, float | None]
Decode = Callable[[Request], Recording]  # at 16 kHz; raises RequestError


@dataclass(frozen=True, slots=True)
class _Found:
    """What was found in one track."""

    speech: list[Span]
    clips: list[Span]


class Listen(MapStage[Request]):
    """Recordings to clips of speech: a few threads decode, then all tracks are heard together."""

    def __init__(
        self,
        net: SileroVad,
        decode: Decode,
        *,
        workers: int = 2,
        clips: ClipRule | None = None,
        strict: bool = False,
    ) -> None:
        self._net = net
        self._decode = decode
        self._workers = workers
        self._strict = strict
        self._speech_rule = SpeechRule()
        self._clip_rule = clips or ClipRule()

    @torch.inference_mode()
    def run(self, items: Sequence[Request]) -> list[Heard | Failure]:
        """What is said in each recording; the same part of the same file is heard once."""
        distinct = {selection(item): item for item in items}
        with ThreadPoolExecutor(self._workers) as pool:
            outcomes = dict(zip(distinct, pool.map(self._try, distinct.values()), strict=True))
        heard = self._hear({key: d for key, d in outcomes.items() if isinstance(d, Recording)})
        failed = {key: f for key, f in outcomes.items() if isinstance(f, Failure)}
        results: dict[Selection, Heard | Failure] = {**heard, **failed}
        return [_checked(item, results[selection(item)]) for item in items]

    def _try(self, request: Request) -> Recording | Failure:
        try:
            recording = self._decode(request)
        except RequestError as error:
            return Failure(code=error.code, stage=NAME, message=str(error))
        return (_damage(recording) if self._strict else None) or recording

    def _hear(self, recordings: Mapping[Selection, Recording]) -> dict[Selection, Heard]:
        tracks = [track for recording in recordings.values() for track in recording.tracks]
        assert all(recording.rate_hz == RATE_HZ for recording in recordings.values())
        found = self._search(tracks)
        return {
            key: _heard(recording, [next(found) for _ in recording.tracks])
            for key, recording in recordings.items()
        }

    def _search(self, tracks: Sequence[Tensor]) -> Iterator[_Found]:
        levels = [Level.of(track) for track in tracks]
        rows = speech_probabilities(self._net, tracks, levels)
        for track, level, row in zip(tracks, levels, rows, strict=True):
            speech = speech_spans(row.tolist(), len(track), self._speech_rule)
            loudness = window_peaks(track, level.offset).tolist()
            yield _Found(speech, cut_clips(speech, loudness, len(track), self._clip_rule))


def _damage(recording: Recording) -> Failure | None:
    """The first warning that tells of sound that is lost or spoilt, as a failure."""
    for warning in recording.warnings:
        code, _, detail = warning.partition(": ")
        if code in DAMAGE:
            return Failure(code=code, stage=NAME, message=detail or code.replace("_", " "))
    return None


def selection(request: Request) -> Selection:
    """What is to be decoded: a duration without an offset is a claim and selects nothing."""
    selects = request.offset_s is not None
    return request.audio, request.offset_s, request.duration_s if selects else None


def _heard(recording: Recording, found: Sequence[_Found]) -> Heard:
    clips = [
        AudioClip(
            samples=samples[clip.start : clip.end],
            rate_hz=RATE_HZ,
            start_s=clip.start / RATE_HZ,
            channel=channel,
        )
        for samples, channel, track in zip(recording.tracks, recording.channels, found, strict=True)
        for clip in track.clips
    ]
    speech_samples = sum(span.samples for track in found for span in track.speech)
    return Heard(
        clips=tuple(sorted(clips, key=lambda clip: (clip.start_s, clip.channel))),
        decoded_s=recording.duration_s,
        speech_s=speech_samples / RATE_HZ,
        source_rate_hz=recording.source_rate_hz,
        source_channels=recording.source_channels,
        warnings=recording.warnings,
    )


def _checked(request: Request, result: Heard | Failure) -> Heard | Failure:
    if isinstance(result, Failure):
        return result
    return replace(result, warnings=result.warnings + claim_warning(request, result.decoded_s))


def claim_warning(request: Request, decoded_s: float) -> tuple[str, ...]:
    """A warning if the manifest claims another duration than was decoded."""
    if request.offset_s is not None or request.duration_s is None:
        return ()
    off_s = abs(request.duration_s - decoded_s)
    if off_s <= max(CLAIM_S, CLAIM_SHARE * decoded_s):
        return ()
    return (f"duration_claim: {request.duration_s:g}!={decoded_s:.3f}",)


def listen_spec(settings: Settings, clips: ClipRule | None = None) -> StageSpec:
    """The stage before it is opened. Claimed lengths decide memory and progress only."""
    rule = clips or ClipRule()

    @contextmanager
    def opened() -> Iterator[Listen]:
        net = load_vad(settings.folders["vad"].folder, device=settings.device)
        strict = settings.task.strict
        yield Listen(net, settings.decode, workers=settings.workers, clips=rule, strict=strict)

    task = settings.task
    strict = " strict" if task.strict else ""

    def claimed_s(request: Request) -> float:
        return settings.claimed_s(request) or 0.0

    return StageSpec(
        name=NAME,
        split=_recording,
        open=opened,
        length=lambda request: minutes(claimed_s(request)),
        row_bytes=lambda length: length * 60 * RATE_HZ * SAMPLE_BYTES,
        audio_s=claimed_s,
        forecast=lambda duration_s: (minutes(duration_s),),
        max_rows=MAX_ROWS,
        fill_rows=1,  # rows are tracks, filled where they are heard
        settings=f"{settings.folders['vad']} {task.channels} {SpeechRule()} {rule}{strict}",
    )


def minutes(duration_s: float) -> int:
    """Minutes begun, up to a power of two: recordings of like size run together, in order."""
    return 1 << (max(1, math.ceil(duration_s / 60)) - 1).bit_length()


def _recording(request: Request, inputs: Inputs) -> Sequence[Request]:
    return (request,) if request.audio is not None else ()
