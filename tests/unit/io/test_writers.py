"""Output files, read back by programs that know nothing of ours."""

import csv
import html
import io
import json
import resource
import tracemalloc
import wave
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnicli import config, plugins
from omnicli.data import Answer, Failure, Outcome, Request, Segment, Transcript, Waveform
from omnicli.errors import RequestError
from omnicli.io import results
from omnicli.io.writers import wav

TEXT_WRITERS = ("txt", "srt", "vtt", "tsv")


def transcript_of(*segments, text=None):
    text = " ".join(s.text for s in segments) if text is None else text
    return Transcript(text=text, language="en", language_probability=0.9, segments=segments)


def outcome_of(transcript=None, status="ok", stem="calls/may 3", **others):
    request = others.pop("request", Request(request_id="calls/may 3.wav"))
    return Outcome(request=request, status=status, stem=Path(stem), transcript=transcript, **others)


def waveform_of(*pieces, rate_hz=22050):
    tensors = tuple(torch.as_tensor(p, dtype=torch.float32) for p in pieces)
    peak = max((float(t.abs().max()) for t in tensors if len(t)), default=0.0)
    return Waveform(pieces=tensors, rate_hz=rate_hz, peak=peak, samples=sum(map(len, tensors)))


def written(name, outcome, folder):
    return plugins.load("writer", name)(outcome, folder)


def subtitles(path):
    """(start ms, duration ms, text) as FFmpeg reads them."""
    if path.stat().st_size == 0:
        return []
    with av.open(str(path)) as container:
        packets = [p for p in container.demux(container.streams.subtitles[0]) if p.size]
        return [
            (p.pts, p.duration, event.dialogue.decode()) for p in packets for event in p.decode()
        ]


TWO = (
    Segment(start_s=0.0, end_s=2.5, text="The plumber comes on Tuesday at half past eight."),
    Segment(start_s=2.5, end_s=3601.25, text="Bring the key."),
)
CHANNELS = (
    Segment(start_s=0.0, end_s=2.0, text="Good morning,", channel="left"),
    Segment(start_s=2.0, end_s=3.0, text="how can I help?", channel="left"),
    Segment(start_s=3.5, end_s=5.0, text="My order is late.", channel="right"),
)


def test_the_tree_is_mirrored_and_nothing_else_is_left(tmp_path):
    outcome = outcome_of(
        transcript_of(*TWO),
        answer=Answer(kind="summary", text="A plumber comes.", language="en"),
        waveform=waveform_of(torch.zeros(100)),
    )
    made = {written(name, outcome, tmp_path) for name in plugins.names("writer")}
    assert made == {p for p in tmp_path.rglob("*") if p.is_file()}
    assert {p.relative_to(tmp_path).as_posix() for p in made} == {
        f"calls/may 3{e}" for e in (".json", ".srt", ".summary.txt", ".tsv", ".txt", ".vtt", ".wav")
    }


def test_dots_in_a_stem_are_kept(tmp_path):
    outcome = outcome_of(transcript_of(*TWO), stem="call.2024-01-02")
    assert written("txt", outcome, tmp_path) == tmp_path / "call.2024-01-02.txt"


def test_text_is_one_paragraph(tmp_path):
    path = written("txt", outcome_of(transcript_of(*TWO, text=" Über 3 €. Yes. ")), tmp_path)
    assert path.read_bytes() == "Über 3 €. Yes.\n".encode()


def test_text_of_two_channels_is_a_line_a_turn(tmp_path):
    path = written("txt", outcome_of(transcript_of(*CHANNELS)), tmp_path)
    assert path.read_text() == "left: Good morning, how can I help?\nright: My order is late.\n"


@pytest.mark.parametrize("kind", [*config.SAY, "say"])
def test_an_answer_is_named_for_its_kind(kind, tmp_path):
    answer = Answer(kind=kind, text=" See you at nine. ", language="en")
    path = written("answer", outcome_of(answer=answer), tmp_path)
    assert path.name == f"may 3.{'answer' if kind == 'prompt' else kind}.txt"
    assert path.read_text() == "See you at nine.\n"


def test_no_answer_no_file(tmp_path):
    silent = outcome_of(answer=Answer(kind="reply", text=" ", language="en"))
    assert written("answer", silent, tmp_path) is None
    assert written("answer", outcome_of(), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["srt", "vtt"])
def test_subtitles_read_back_by_ffmpeg(name, tmp_path):
    path = written(name, outcome_of(transcript_of(*TWO)), tmp_path)
    lines = "The plumber comes on\nTuesday at half past eight."
    assert subtitles(path) == [(0, 2500, lines), (2500, 3598750, "Bring the key.")]
    assert "01:00:01" in path.read_text()


MARKUP = Segment(start_s=0, end_s=3, text="if a < b & c --> {d}, <b>bold</b> \n\n next")


def test_markup_and_arrows_stay_text_in_srt(tmp_path):
    path = written("srt", outcome_of(transcript_of(MARKUP)), tmp_path)
    ((start, duration, shown),) = subtitles(path)
    assert (start, duration) == (0, 3000)
    assert shown.replace("\n", " ") == "if a ‹ b & c -> (d), ‹b>bold‹/b> next"


def test_markup_and_arrows_stay_text_in_vtt(tmp_path):
    path = written("vtt", outcome_of(transcript_of(MARKUP)), tmp_path)
    header, blank, timing, *lines = path.read_text().splitlines()
    assert (header, blank, timing) == ("WEBVTT", "", "00:00:00.000 --> 00:00:03.000")
    assert "<" not in "".join(lines) and "-->" not in "".join(lines)
    assert html.unescape(" ".join(lines)) == "if a < b & c --> {d}, <b>bold</b> next"
    assert len(subtitles(path)) == 1


@pytest.mark.parametrize("name", ["srt", "vtt"])
def test_channels_are_named(name, tmp_path):
    path = written(name, outcome_of(transcript_of(*CHANNELS)), tmp_path)
    text = path.read_text()
    assert ("left: Good" if name == "srt" else "<v left>Good") in text
    assert len(subtitles(path)) == 3


readable = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=200)
moments = st.integers(0, 100_000)


@pytest.mark.parametrize("name", ["srt", "vtt"])
@given(data=st.lists(st.tuples(moments, moments, readable), max_size=5))
def test_any_text_gives_a_file_that_ffmpeg_reads(name, tmp_path_factory, data):
    parts = [Segment(start_s=a / 1000, end_s=(a + n) / 1000, text=t) for a, n, t in data]
    path = written(name, outcome_of(transcript_of(*parts)), tmp_path_factory.mktemp("any"))
    cues = subtitles(path)
    assert len(cues) >= len([t for _, _, t in data if t.strip()])
    assert all(duration > 0 for _, duration, _ in cues)
    ends = [start + duration for start, duration, _ in cues]
    assert all(end <= start for end, (start, _, _) in zip(ends, cues[1:], strict=False))


def test_tsv_has_whole_milliseconds(tmp_path):
    odd = Segment(start_s=1.0004, end_s=1.0, text='tab\there, "quotes"\nand a line')
    path = written("tsv", outcome_of(transcript_of(*TWO, odd)), tmp_path)
    rows = list(
        csv.DictReader(io.StringIO(path.read_text()), dialect="excel-tab", quoting=csv.QUOTE_NONE)
    )
    assert [(int(r["start"]), int(r["end"])) for r in rows] == [
        (0, 2500),
        (2500, 3601250),
        (1000, 1001),
    ]
    assert rows[2]["text"] == 'tab here, "quotes" and a line'


def test_tsv_of_two_channels_has_a_column_for_them(tmp_path):
    path = written("tsv", outcome_of(transcript_of(*CHANNELS)), tmp_path)
    rows = list(csv.DictReader(io.StringIO(path.read_text()), dialect="excel-tab"))
    assert [r["channel"] for r in rows] == ["left", "left", "right"]


@pytest.mark.parametrize("name", TEXT_WRITERS)
def test_silence_gives_a_file_without_words(name, tmp_path):
    for transcript in (None, transcript_of()):
        path = written(name, outcome_of(transcript, status="empty"), tmp_path)
        header = {"vtt": "WEBVTT\n", "tsv": "start\tend\ttext\n"}
        assert path.read_text() == header.get(name, "")


@pytest.mark.parametrize("name", TEXT_WRITERS)
def test_a_failure_gives_the_transcript_if_there_is_one(name, tmp_path):
    failure = Failure(code="runaway", stage="talk", message="no end")
    assert written(name, outcome_of(None, status="failed", failure=failure), tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    kept = written(
        name, outcome_of(transcript_of(*TWO), status="failed", failure=failure), tmp_path
    )
    assert "plumber" in kept.read_text()


def test_json_is_the_results_line(tmp_path):
    request = Request(request_id="caf\udce9", raw={"call_id": 7, "bad": float("nan")})
    outcome = outcome_of(transcript_of(*TWO), request=request, timings={"think": 1.25})
    path = written("json", outcome, tmp_path)
    assert json.loads(path.read_text()) == results.line(outcome)
    assert path.read_text().count("\n") > 20


@pytest.mark.parametrize("rate_hz", [16000, 22050])
def test_wav_is_pcm16_mono_and_of_its_own_length(rate_hz, tmp_path):
    pieces = [torch.linspace(-0.9, 0.9, n) for n in (1, 70_000, 0, 333)]
    path = written("wav", outcome_of(waveform=waveform_of(*pieces, rate_hz=rate_hz)), tmp_path)
    info = soundfile.info(path)
    assert (info.format, info.subtype, info.channels) == ("WAV", "PCM_16", 1)
    assert (info.samplerate, info.frames) == (rate_hz, 70_334)
    assert path.stat().st_size == 44 + 2 * 70_334
    heard, _ = soundfile.read(path, dtype="float32")
    np.testing.assert_allclose(heard, torch.cat(pieces), atol=0.51 / 32768)


@pytest.mark.parametrize(
    ("peak", "expected"), [(0.5, 0.5), (0.985, 0.985), (0.99, 0.99), (1.0, 0.99), (7.5, 0.99)]
)
def test_only_what_is_too_loud_is_turned_down_and_as_a_whole(peak, expected, tmp_path):
    samples = torch.sin(torch.arange(5000) / 10)
    samples = samples / samples.abs().max() * peak
    path = written("wav", outcome_of(waveform=waveform_of(samples[:100], samples[100:])), tmp_path)
    heard, _ = soundfile.read(path, dtype="float32")
    np.testing.assert_allclose(heard, samples * (expected / peak), atol=0.51 / 32768)


def test_wav_does_not_depend_on_how_it_is_cut(tmp_path):
    samples = torch.randn(200_000) * 0.4
    whole = written("wav", outcome_of(stem="a", waveform=waveform_of(samples)), tmp_path)
    cut = written("wav", outcome_of(stem="b", waveform=waveform_of(*samples.split(777))), tmp_path)
    assert whole.read_bytes() == cut.read_bytes()


def test_wav_never_holds_the_whole(tmp_path):
    memory_mapped = torch.zeros(1).expand(4_000_000)  # 8 MB as PCM16, a few bytes in memory
    waveform = Waveform(pieces=(memory_mapped,), rate_hz=22050, peak=0.0, samples=4_000_000)
    tracemalloc.start()
    path = wav.write(outcome_of(waveform=waveform), tmp_path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size == 8_000_044
    assert peak_bytes < 1_000_000


def test_no_speech_no_wav(tmp_path):
    assert written("wav", outcome_of(), tmp_path) is None
    assert written("wav", outcome_of(waveform=waveform_of(torch.zeros(0))), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_wav_that_does_not_fit_leaves_nothing(tmp_path):
    outcome = outcome_of(stem="a", waveform=waveform_of(torch.zeros(100_000)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            written("wav", outcome, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_samples_that_are_no_numbers_are_not_written(bad, tmp_path):
    waveform = Waveform(pieces=(torch.tensor([0.1, bad]),), rate_hz=16000, peak=0.1, samples=2)
    with pytest.raises(RequestError) as caught:
        written("wav", outcome_of(stem="a", waveform=waveform), tmp_path)
    assert caught.value.code == "not_finite"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("link", [False, True])
def test_the_recording_itself_is_never_replaced(link, tmp_path):
    recording = tmp_path / "a.wav"
    with wave.open(str(recording), "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes(b"\1\2" * 50)
    before = recording.read_bytes()
    if link:
        (tmp_path / "linked.wav").symlink_to(recording)
    request = Request(request_id="a.wav", audio=recording)
    stem = "linked" if link else "a"
    outcome = outcome_of(request=request, stem=stem, waveform=waveform_of([0.5]))
    with pytest.raises(FileExistsError, match="the recording itself"):
        written("wav", outcome, tmp_path)
    assert recording.read_bytes() == before


def test_a_second_run_replaces_the_first_ones_files(tmp_path):
    for n in (300, 20):
        path = written("wav", outcome_of(waveform=waveform_of(torch.zeros(n))), tmp_path)
    assert soundfile.info(path).frames == 20
