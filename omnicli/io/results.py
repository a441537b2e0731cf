"""One line of results.jsonl: what became of one request. docs/results.md explains every field."""

import json
import math
from collections.abc import Mapping

from omnicli.data import Json, Outcome, Segment, Transcript

SCHEMA = 1  # grows when a field changes its meaning; docs/results.schema.json describes it
TIME_DIGITS = 3  # milliseconds
SCORE_DIGITS = 4
SOMETIMES = ("text", "manifest")  # ours too, but not in every line

Line = dict[str, Json]


def line(outcome: Outcome, run_id: str | None = None) -> Line:
    """Our fields, then the manifest's own; a field of theirs that has our name is in `manifest`."""
    ours = _ours(outcome, run_id)
    names = {*ours, *SOMETIMES}
    theirs = {name: _strict(value) for name, value in outcome.request.raw.items()}
    clashes = {n: v for n, v in theirs.items() if n in names and (n not in ours or v != ours[n])}
    if clashes:
        ours["manifest"] = clashes
    return ours | {n: v for n, v in theirs.items() if n not in names}


def to_json(result: Line) -> str:
    """One line of strict JSON that encodes as UTF-8.

    A name that is not UTF-8 on disk reaches us with half surrogates. `backslashreplace` happens to
    spell them as JSON does (`\\udcXX`), so that reading gives the same name again.
    """
    text = json.dumps(result, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def audio_out(outcome: Outcome) -> str | None:
    """Where the spoken answer lies, below the output folder."""
    spoken = outcome.waveform is not None and outcome.waveform.samples > 0
    return f"{outcome.stem.as_posix()}.wav" if spoken else None


def _ours(outcome: Outcome, run_id: str | None) -> Line:
    return {
        **_input(outcome),
        **_verdict(outcome),
        **_heard(outcome.transcript),
        **_said(outcome),
        "finish_reason": _finish_reason(outcome),
        "scores": _scores(outcome.transcript),
        "timings": {stage: _number(s, TIME_DIGITS) for stage, s in outcome.timings.items()},
        "model": dict(outcome.models),
        "device": outcome.device,
        "run_id": run_id,
        "schema": SCHEMA,
    }


def _input(outcome: Outcome) -> Line:
    """Which request this is; `duration` is what was decoded, else what the manifest claims."""
    request, transcript = outcome.request, outcome.transcript
    decoded_s = transcript.decoded_s if transcript else 0.0
    text = request.raw.get("text") if request.reference is None else request.reference
    return {
        "id": request.request_id,
        "index": request.index,
        "audio_filepath": request.audio_filepath,
        "offset": _number(request.offset_s, TIME_DIGITS),
        "duration": _number(decoded_s or request.duration_s, TIME_DIGITS),
        "stem": outcome.stem.as_posix(),
        **({"text": text} if isinstance(text, str) else {}),
    }


def _verdict(outcome: Outcome) -> Line:
    failure = outcome.failure
    error: Json = None
    if failure:
        error = {"code": failure.code, "stage": failure.stage, "message": failure.message}
    return {"status": outcome.status, "error": error, "warnings": list(outcome.warnings)}


def _heard(transcript: Transcript | None) -> Line:
    if transcript is None:
        return {"pred_text": None, "language": None, "segments": [], "audio_in": None}
    audio_in: Line = {
        "rate_hz": transcript.source_rate_hz or None,
        "channels": transcript.source_channels or None,
        "speech_s": _number(transcript.speech_s, TIME_DIGITS),
    }
    return {
        "pred_text": transcript.text,
        "language": transcript.language or None,
        "segments": [_segment(s) for s in transcript.segments],
        "audio_in": audio_in,
    }


def _segment(segment: Segment) -> Line:
    return {
        "start": _number(segment.start_s, TIME_DIGITS),
        "end": _number(segment.end_s, TIME_DIGITS),
        "text": segment.text,
        **({"channel": segment.channel} if segment.channel else {}),
        "avg_logprob": _number(segment.avg_logprob, SCORE_DIGITS),
        "no_speech_prob": _number(segment.no_speech_prob, SCORE_DIGITS),
    }


def _said(outcome: Outcome) -> Line:
    answer, waveform = outcome.answer, outcome.waveform
    out = audio_out(outcome)
    length_s = waveform.samples / waveform.rate_hz if waveform and out else None
    return {
        "response_text": answer.text if answer else None,
        "response_language": answer.language or None if answer else None,
        "response_kind": answer.kind if answer else None,
        "summary_method": answer.summary_method if answer else None,
        "audio_out": out,
        "audio_out_duration": _number(length_s, TIME_DIGITS),
    }


def _finish_reason(outcome: Outcome) -> str | None:
    """`length` if any text was cut short, else `stop`."""
    reasons = [p.finish_reason for p in (outcome.answer, outcome.transcript) if p]
    return "length" if "length" in reasons else next(iter(reasons), None)


def _scores(transcript: Transcript | None) -> Line:
    if transcript is None:
        return {}
    scores: dict[str, float | str | None] = dict(transcript.scores)
    scores["task"] = transcript.task
    scores["language_probability"] = transcript.language_probability
    return {n: v if isinstance(v, str) else _number(v, SCORE_DIGITS) for n, v in scores.items()}


def _number(value: float | None, digits: int) -> float | None:
    """JSON knows no NaN and no infinity."""
    return None if value is None or not math.isfinite(value) else round(value, digits)


def _strict(value: Json) -> Json:
    """A manifest's value as it came, but for NaN and infinity, which Python's reader lets in."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_strict(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _strict(v) for k, v in value.items()}
    return value
