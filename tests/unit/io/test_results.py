"""A line of results.jsonl: strict JSON, as the schema and the page in docs say."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnicli.data import Answer, Failure, Outcome, Request, Segment, Transcript, Waveform
from omnicli.io import results

DOCS = Path(__file__).parents[3] / "docs"
SCHEMA = json.loads((DOCS / "results.schema.json").read_text(encoding="utf-8"))
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")

REQUEST = Request(
    request_id="calls/1.wav",
    index=4,
    audio_filepath="calls/1.wav",
    duration_s=8.0,
    reference="Call me back.",
    language="en",
    raw={
        "audio_filepath": "calls/1.wav",
        "duration": 8.0,
        "text": "Call me back.",
        "call_id": 77,
        "agent": {"name": "Ada", "lines": [1, 2.5]},
    },
)
TRANSCRIPT = Transcript(
    text="Call me back.",
    language="en",
    language_probability=0.98765432,
    segments=(
        Segment(
            start_s=0.12345,
            end_s=1.5,
            text="Call me back.",
            channel="left",
            avg_logprob=-0.123456,
            no_speech_prob=0.01,
        ),
    ),
    decoded_s=8.00049,
    speech_s=1.4,
    source_rate_hz=8000,
    source_channels=2,
    scores={"avg_logprob": -0.123456, "window": "short"},
    warnings=("duration_claim: 9 s claimed, 8 s decoded",),
)
ANSWER = Answer(
    kind="summary",
    text="Someone wants a call.",
    language="en",
    summary_method="extractive",
    warnings=("duration_claim: 9 s claimed, 8 s decoded", "reply_cut"),
)
WAVEFORM = Waveform(pieces=(torch.zeros(11025),), rate_hz=22050, peak=0.0, samples=11025)
DONE = Outcome(
    request=REQUEST,
    status="ok",
    stem=Path("calls/1"),
    transcript=TRANSCRIPT,
    answer=ANSWER,
    waveform=WAVEFORM,
    timings={"think": 0.12345},
    models={"asr": "whisper-base@d01c3014"},
    device="cpu",
)
SILENT = Outcome(
    request=replace(REQUEST, reference=None, raw={}),
    status="empty",
    stem=Path("s"),
    transcript=replace(TRANSCRIPT, text="", language="", segments=(), language_probability=None),
)
FAILED = Outcome(
    request=Request(request_id="x"),
    status="failed",
    stem=Path("x"),
    failure=Failure(code="missing_file", stage="listen", message="there is no x"),
)
SAID = Outcome(
    request=Request(request_id="hi", speech_text="Hello", raw={"id": "hi", "text": "Hello"}),
    status="ok",
    stem=Path("hi"),
    answer=Answer(kind="say", text="Hello", language="en"),
    waveform=WAVEFORM,
)


def strictly(text):
    """What a reader says that knows no NaN."""

    def refuse(name):
        raise AssertionError(f"{name} in JSON")

    return json.loads(text.encode("utf-8"), parse_constant=refuse)


def checked(outcome, run_id="r1"):
    """A line that was read back and agrees with the schema."""
    line = strictly(results.to_json(results.line(outcome, run_id)))
    jsonschema.Draft202012Validator(SCHEMA).validate(line)
    return line


def test_a_full_line():
    line = checked(DONE)
    assert line == {
        "id": "calls/1.wav",
        "index": 4,
        "audio_filepath": "calls/1.wav",
        "offset": None,
        "duration": 8.0,
        "stem": "calls/1",
        "text": "Call me back.",
        "status": "ok",
        "error": None,
        "warnings": ["duration_claim: 9 s claimed, 8 s decoded", "reply_cut"],
        "pred_text": "Call me back.",
        "language": "en",
        "segments": [
            {
                "start": 0.123,
                "end": 1.5,
                "text": "Call me back.",
                "channel": "left",
                "avg_logprob": -0.1235,
                "no_speech_prob": 0.01,
            }
        ],
        "audio_in": {"rate_hz": 8000, "channels": 2, "speech_s": 1.4},
        "response_text": "Someone wants a call.",
        "response_language": "en",
        "response_kind": "summary",
        "summary_method": "extractive",
        "audio_out": "calls/1.wav",
        "audio_out_duration": 0.5,
        "finish_reason": "stop",
        "scores": {
            "avg_logprob": -0.1235,
            "window": "short",
            "task": "transcribe",
            "language_probability": 0.9877,
        },
        "timings": {"think": 0.123},
        "model": {"asr": "whisper-base@d01c3014"},
        "device": "cpu",
        "run_id": "r1",
        "schema": 1,
        "call_id": 77,
        "agent": {"name": "Ada", "lines": [1, 2.5]},
    }
    assert not math.isnan(line["duration"])


def test_silence_has_no_invented_words():
    line = checked(SILENT)
    assert (line["status"], line["pred_text"], line["language"]) == ("empty", "", None)
    assert line["response_text"] is line["audio_out"] is line["audio_out_duration"] is None
    assert "text" not in line


def test_a_failure_has_code_stage_and_message():
    line = checked(FAILED)
    assert line["error"] == {"code": "missing_file", "stage": "listen", "message": "there is no x"}
    assert line["pred_text"] is line["finish_reason"] is line["duration"] is None


def test_text_to_say_is_the_lines_text():
    line = checked(SAID)
    assert (line["text"], line["response_text"], line["response_kind"]) == ("Hello", "Hello", "say")
    assert "manifest" not in line


def test_a_claimed_duration_stands_in_for_one_that_was_not_decoded():
    line = checked(replace(FAILED, request=replace(REQUEST, duration_s=9.5)))
    assert line["duration"] == 9.5


def test_ours_wins_over_the_manifest_and_theirs_is_kept():
    raw = {"status": "new", "run_id": 3, "duration": 9.0, "manifest": "m", "text": None, "x": []}
    request = replace(REQUEST, reference=None, raw=raw)
    line = checked(replace(DONE, request=request))
    assert (line["status"], line["run_id"], line["duration"], line["x"]) == ("ok", "r1", 8.0, [])
    assert line["manifest"] == {k: v for k, v in raw.items() if k != "x"}


def test_a_text_cut_short_anywhere_is_seen():
    cut = replace(TRANSCRIPT, finish_reason="length")
    assert checked(replace(DONE, transcript=cut))["finish_reason"] == "length"
    cut = replace(ANSWER, finish_reason="length")
    assert checked(replace(DONE, answer=cut))["finish_reason"] == "length"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_null(bad):
    segment = replace(TRANSCRIPT.segments[0], avg_logprob=bad, no_speech_prob=bad)
    transcript = replace(
        TRANSCRIPT, segments=(segment,), scores={"a": bad}, language_probability=bad, speech_s=bad
    )
    request = replace(REQUEST, raw={"snr": [bad, {"db": bad}]})
    line = checked(replace(DONE, transcript=transcript, request=request, timings={"think": bad}))
    assert line["segments"][0]["avg_logprob"] is None
    assert line["scores"]["a"] is line["timings"]["think"] is line["audio_in"]["speech_s"] is None
    assert line["snr"] == [None, {"db": None}]


def test_a_name_that_is_not_utf8_comes_back_as_it_was():
    request = replace(REQUEST, request_id="caf\udce9\\\udce9", raw={"note \udc80": "\ud800"})
    line = checked(replace(DONE, request=request))
    assert line["id"] == request.request_id
    assert line["note \udc80"] == "\ud800"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from(sorted(SCHEMA["properties"])) | st.text()


@given(
    st.dictionaries(field_names, json_values, max_size=8), st.sampled_from([DONE, SILENT, FAILED])
)
def test_whatever_the_manifest_holds_the_line_is_ours_and_nothing_is_lost(raw, outcome):
    request = replace(outcome.request, reference=None, raw=raw)
    line = checked(replace(outcome, request=request))
    bare = checked(replace(outcome, request=replace(request, raw={})))
    assert {name: line[name] for name in bare} == bare
    for name, value in raw.items():
        kept = line["manifest"][name] if name in line.get("manifest", {}) else line[name]
        assert kept == null_for_nonfinite(value)


def null_for_nonfinite(value):
    """Python's own reader, told to take null for NaN."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def test_schema_and_page_name_every_field():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    ours = set(results.line(SILENT))
    assert set(SCHEMA["required"]) == ours
    assert set(SCHEMA["properties"]) == ours | set(results.SOMETIMES)
    documented = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert ours | set(results.SOMETIMES) <= set(documented)


def test_the_schema_refuses_what_we_do_not_write():
    good = results.line(DONE, "r1")
    for wrong in (
        {"status": "done"},
        {"status": "failed"},
        {"error": {"code": "x", "stage": "y", "message": "z"}},
        {"audio_out": None},
        {"segments": [{"start": 0}]},
        {"schema": 2},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(good | wrong, SCHEMA)
