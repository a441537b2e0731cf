"""Recognition: silence, noise, beginnings, languages, times."""

import re

import numpy as np
import pytest
from case_run import check, put_base, results, words
from case_sounds import chords, espeak, noise, silence, speech, tones, wav

MINUTE_S = 60
SPEED = 0.6  # seconds of work for a second of speech, at the very most
CUE = re.compile(r"(?:(\d+):)?(\d\d):(\d\d)[.,](\d{3})")


@pytest.fixture(scope="module")
def odd(tmp_path_factory, base):
    """Recordings that are hard to hear right."""
    root = put_base(base, tmp_path_factory.mktemp("speech") / "in")
    folder = root / "odd"
    spanish = speech("station-spanish")
    question, yes = speech("train-question", 0.9), speech("yes-please")
    made = {
        "silence": silence(5),
        "faint-noise": noise(5, -60),
        "speech-then-silence": np.concatenate([yes, silence(20)]),
        "chords": chords(MINUTE_S),
        "pink-noise": noise(MINUTE_S, -20, pink=True),
        "at-once": question[800:],
        "apart": np.concatenate(
            [speech("dentist-moved", 0, 0.5), silence(1.5), yes[:7600], silence(1.5), yes[10000:]]
        ),
        "minus-35-db": question / np.abs(question).max() * 10 ** (-35 / 20),
        "tone-then-spanish": np.concatenate([tones(40, 425), spanish]),
        "english-then-spanish": spanish,
        "two-seconds": np.concatenate([yes, silence(2.0 - len(yes) / 16_000)]),
        "ten-ms": tones(0.01, 300),
        "one-window": np.concatenate([silence(30.02 - len(yes) / 16_000), yes]),
    }
    for name, samples in made.items():
        wav(folder / f"{name}.wav", samples)
    espeak("Guten Morgen. Ich komme heute leider eine Stunde später.", folder / "german.wav", "de")
    return root


@pytest.fixture(scope="module")
def heard(omni, solo, odd):
    count = sum(path.is_file() for path in odd.rglob("*"))
    args = ("transcribe", odd, "-o", odd.parent / "out", "-f", "all")
    return check(omni, solo, *args, count=count, code=0)


@pytest.mark.case("AS-01")
@pytest.mark.parametrize("name", ["silence", "faint-noise"])
def test_nothing_is_made_up_where_nobody_speaks(heard, name):
    line = heard[f"odd/{name}.wav"]
    assert (line["status"], line["pred_text"], line["segments"]) == ("empty", "", [])
    assert line["audio_in"]["speech_s"] == 0


@pytest.mark.case("AS-01")
def test_nothing_is_made_up_after_the_last_word(heard):
    line = heard["odd/speech-then-silence.wav"]
    assert heard.text("odd/speech-then-silence.wav") == "yes please"
    assert line["scores"]["no_speech_prob"] is not None
    assert line["segments"][-1]["end"] < 2.5


@pytest.mark.case("AS-03")
@pytest.mark.parametrize("name", ["chords", "pink-noise"])
def test_music_and_noise_are_empty_or_doubted_and_soon_done(heard, name):
    line = heard[f"odd/{name}.wav"]
    doubts = {"suspect_text", "low_coverage", "low_confidence"}
    assert line["status"] == "empty" or heard.warned(f"odd/{name}.wav") & doubts, line["pred_text"]
    assert sum(line["timings"].values()) < 3 * SPEED * MINUTE_S


@pytest.mark.case("AS-05")
@pytest.mark.parametrize(
    ("name", "first"), [("at-once", "does the train"), ("minus-35-db", "does the train")]
)
def test_the_first_word_is_there(heard, name, first):
    assert heard.text(f"odd/{name}.wav").startswith(first)
    assert heard[f"odd/{name}.wav"]["audio_in"]["speech_s"] > 3


@pytest.mark.case("AS-05")
def test_single_words_far_apart_are_all_there(heard):
    assert re.search(r"^hello\b.*\byes\b.*\bplease$", heard.text("odd/apart.wav"))
    assert 0.8 < heard["odd/apart.wav"]["audio_in"]["speech_s"] < 3


@pytest.mark.case("AS-07")
@pytest.mark.parametrize(
    ("name", "language"),
    [("tone-then-spanish", "es"), ("english-then-spanish", "es"), ("german", "de")],
)
def test_each_recording_has_its_language(heard, name, language):
    assert heard[f"odd/{name}.wav"]["language"] == language
    assert heard["base/yes-please.flac"]["language"] == "en"


@pytest.mark.case("AS-07")
def test_speech_after_a_tone_is_heard(heard):
    assert "no tengo tiempo" in heard.text("odd/tone-then-spanish.wav")


@pytest.mark.case("AS-07")
def test_a_line_decides_its_language_against_the_run(omni, base, tmp_path):
    folder = base.as_posix()
    (tmp_path / "m.jsonl").write_text(
        f'{{"id": "line", "audio_filepath": "{folder}/hola.flac", "language": "es"}}\n'
        f'{{"id": "run", "audio_filepath": "{folder}/yes-please.flac"}}\n'
        f'{{"id": "none", "audio_filepath": "{folder}/yes-please.flac", "language": "xx"}}\n'
    )
    ran = omni("transcribe", tmp_path / "m.jsonl", "-o", tmp_path / "out", "-l", "en", "-q")
    assert ran.code == 3
    lines = results(tmp_path / "out")
    assert (lines["line"]["language"], lines["run"]["language"]) == ("es", "en")
    assert words(lines["line"]["pred_text"]).startswith("no tengo tiempo")
    assert lines["none"]["error"]["code"] == "unknown_language"


@pytest.mark.case("AS-09")
def test_times_lie_in_the_recording_and_never_go_back(heard):
    for line in heard.lines.values():
        before = 0.0
        for segment in line["segments"]:
            assert 0 <= segment["start"] < segment["end"] <= line["duration"] + 0.001, line["id"]
            assert segment["start"] >= before, line["id"]
            before = segment["start"]
    late = heard["odd/one-window.wav"]
    assert heard.text("odd/one-window.wav") == "yes please"
    assert late["segments"][0]["start"] > 28


def cues(path):
    """Begin and end of each cue in seconds."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if "-->" in line:
            yield [
                int(h or 0) * 3600 + int(m) * 60 + int(s) + int(ms) / 1000
                for h, m, s, ms in CUE.findall(line)
            ]


@pytest.mark.case("AS-09")
@pytest.mark.parametrize("suffix", ["srt", "vtt"])
def test_subtitles_neither_overlap_nor_outlast(heard, suffix):
    for line in heard.lines.values():
        end_s = 0.0
        for begin_s, next_end_s in cues(heard.out / f"{line['stem']}.{suffix}"):
            assert end_s <= begin_s < next_end_s <= line["duration"] + 0.001
            end_s = next_end_s


@pytest.mark.case("AS-11")
@pytest.mark.parametrize("name", ["silence", "ten-ms"])
def test_scores_of_nothing_are_null(heard, name):
    """`check` has read everything strictly."""
    line = heard[f"odd/{name}.wav"]
    assert line["status"] == "empty"
    assert line["scores"].get("avg_logprob") is None
