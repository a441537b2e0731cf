"""`omni respond` and `omni say` on real recordings: words, and sound that says them."""

import json
import math

import soundfile


def rms_db(samples):
    return 10 * math.log10(max(1e-12, float((samples**2).mean())))


def test_the_demo(omni, read, demo, tmp_path):
    out = tmp_path / "out"
    ran = omni("respond", demo, "-o", out, "--json")
    assert ran.code == 0, ran.err
    lines = read(out)
    assert len(lines) == 10
    assert json.loads(ran.out)["counts"] == {"empty": 1, "ok": 9}

    empty = lines["empty-room"]
    assert (empty["status"], empty["response_text"], empty["audio_out"]) == ("empty", None, None)
    assert not list(out.glob("empty-room*.wav"))

    spanish = lines["station-spanish"]
    assert (spanish["language"], spanish["response_language"]) == ("es", "en")
    assert "estación" in spanish["pred_text"]

    assert lines["train-question"]["response_kind"] == "reply"
    assert lines["shopping-list"]["response_kind"] == "prompt"
    assert lines["dentist-moved"]["caller"] == "dental office"
    for name, line in lines.items():
        if line["response_kind"] == "summary":
            assert line["summary_method"] == "extractive"
            if line["language"] == "en":
                sentences = line["response_text"].split(". ")
                assert all(s.rstrip(".") in line["pred_text"] for s in sentences), name
        if line["audio_out"]:
            samples, rate_hz = soundfile.read(out / line["audio_out"], dtype="float32")
            info = soundfile.info(out / line["audio_out"])
            assert (info.subtype, info.channels, rate_hz) == ("PCM_16", 1, 22_050)
            assert abs(len(samples) / rate_hz - line["audio_out_duration"]) < 1e-3
            assert -40 < rms_db(samples) < -8

    again = omni("respond", demo, "-o", out)
    assert again.code == 0
    assert "nothing to do" in again.err


def test_spoken_answers_are_heard_as_they_were_written(omni, read, demo, tmp_path):
    """Transcribed again, at most one word in ten is another."""
    import jiwer
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    said, heard = tmp_path / "said", tmp_path / "heard"
    assert omni("respond", demo, "-o", said, "--say", "transcript", "-l", "en").code == 0
    assert omni("transcribe", *sorted(said.glob("*.wav")), "-o", heard, "-l", "en").code == 0
    normal = EnglishTextNormalizer({})
    lines, back = read(said), read(heard)
    names = [n for n, line in lines.items() if line["audio_out"] and n != "station-spanish"]
    written = [normal(lines[name]["response_text"]) for name in names]
    again = [normal(back[f"{name}.wav"]["pred_text"]) for name in names]
    assert len(names) == 8
    assert jiwer.wer(written, again) <= 0.1


def test_another_question_does_not_listen_again(omni, read, inbox, tmp_path):
    out = tmp_path / "out"
    assert omni("respond", inbox, "-o", out, "--no-speak").code == 0
    first = read(out)
    log = out / ".omni" / "events.jsonl"
    before = len(log.read_text().splitlines())
    assert omni("respond", inbox, "-o", out, "--no-speak", "--prompt", "Who is calling?").code == 0
    stages = {json.loads(x).get("stage") for x in log.read_text().splitlines()[before:]}
    assert stages & {"listen", "encode", "transcribe"} == set()
    assert "write" in stages
    for name, line in read(out).items():
        assert line["response_kind"] == "prompt"
        assert line["pred_text"] == first[name]["pred_text"]
        assert line["audio_out"] is None
        assert not list(out.rglob("*.summary.txt")), "an answer to another question"


def test_an_earlier_answer_does_not_outlive_its_recording(omni, inbox, tmp_path):
    out = tmp_path / "out"
    assert omni("respond", inbox / "yes.flac", "-o", out).code == 0
    assert {p.name for p in out.glob("yes*")} == {
        "yes.json",
        "yes.summary.txt",
        "yes.txt",
        "yes.wav",
    }
    (inbox / "yes.flac").write_text("no sound any more")
    assert omni("respond", inbox / "yes.flac", "-o", out).code == 3
    assert {p.name for p in out.glob("yes*")} == {"yes.json"}


def test_lines_of_text_are_spoken_one_by_one(omni, read, tmp_path):
    source = tmp_path / "lines.txt"
    source.write_text("Good morning.\n\n👍👍\nThe code is 4711, and the bill is $12.50.\n")
    out = tmp_path / "out"
    assert omni("say", source, "-o", out).code == 0
    lines = list(read(out).values())
    assert [line["status"] for line in lines] == ["ok", "empty", "ok"]
    lengths = [line["audio_out_duration"] for line in lines]
    assert lengths[1] is None
    assert 0.4 < lengths[0] < lengths[2]
    before = {p.name: p.read_bytes() for p in out.glob("*.wav")}
    assert omni("say", source, "-o", out, "--overwrite").code == 0
    assert {p.name: p.read_bytes() for p in out.glob("*.wav")} == before


def test_a_faster_voice_takes_less_time(omni, read, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"id": "a", "text": "This is a sentence of some length."}')
    seconds = []
    for rate in ("1", "2"):
        out = tmp_path / rate
        assert omni("say", tmp_path / "t.jsonl", "-o", out, "--speaking-rate", rate).code == 0
        seconds.append(read(out)["a"]["audio_out_duration"])
    assert 0.4 < seconds[1] / seconds[0] < 0.7  # no sound is shorter than a frame
