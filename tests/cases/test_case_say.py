"""Texts to speech: odd texts, batches, files."""

import json

import numpy as np
import pytest
import soundfile
from case_run import check, results, words

from omnicli.execution.families.cascade import speak

NOTHING = {
    "none": "",
    "blank": "   ",
    "dots": "...",
    "emoji": "👍👍",
    "dash": "—",
    "zero": "\u200b\xa0",
}
NUMBERS = {
    "ones": "test: 11111111111 test",
    "block": f"The code is {'1234567890' * 10} and that is the end.",
    "two": "82",
    "phone": "Call +49 30 901820 today.",
    "iban": "Use DE89 3704 0044 0532 0130 00 please.",
    "date": "It was on 2024-01-02 in Rome.",
    "pi": "About 3.14 meters.",
    "euro": "It costs €1,200 now.",
}
MARKUP = {
    "url": "See https://www.example.com/a/b?c=d#e for the details.",
    "mail": "Write to anna.meyer@example.org today.",
    "html": '<p>Good <b>morning</b>, <a href="http://x.y">Anna</a>.</p>',
    "word": f"This is {'a' * 80} end.",
    "base64": "Key: TWFuIGlzIGRpc3Rpbmd1aXNo end.",
}
LONG = (
    "The painter said that he can come on Friday if the weather is dry, that he needs the keys of "
    "the basement by then, and that somebody should open the garden door before noon"
)
ENDLESS = f"{LONG} because nobody else has a key and because it is late already"
# How often the words of a text must be heard again, and what is said for what is written.
RECALL = 0.8
BOUND_S, BOUND_S_PER_LETTER = 2.0, 0.6


def lines(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("say")


@pytest.fixture(scope="module")
def solo_say(omni, say_base, place):
    """The known lines alone."""
    path = lines(place / "base.jsonl", say_base)
    return check(omni, None, "say", path, "-o", place / "solo", count=8, code=0)


@pytest.fixture(scope="module")
def said(omni, solo_say, say_base, place):
    """Odd texts among the known ones."""
    odd = {**NOTHING, **NUMBERS, **MARKUP, "thirty": LONG}
    rows = [{"id": name, "text": text} for name, text in odd.items()]
    path = lines(place / "all.jsonl", [*rows[:9], *say_base, *rows[9:]])
    return check(omni, solo_say, "say", path, "-o", place / "out", count=8 + len(rows), code=0)


@pytest.fixture(scope="module")
def heard(omni, said, place):
    """What a listener understands; of the block of digits only its end."""
    rows = []
    for name, line in said.lines.items():
        if line["audio_out"] and name not in ("base64", "word", "thirty"):
            row = {"id": name, "audio_filepath": str(said.out / line["audio_out"])}
            cut = {"offset": line["audio_out_duration"] - 2.5} if name == "block" else {}
            rows.append(row | cut)
    path = lines(place / "back.jsonl", rows)
    ran = omni("transcribe", path, "-o", place / "back", "-l", "en", "-q")
    assert ran.code == 0
    return {name: words(line["pred_text"]) for name, line in results(place / "back").items()}


@pytest.mark.case("TA-01")
@pytest.mark.parametrize("name", list(NOTHING))
def test_nothing_to_say_is_empty_and_no_sound(said, name):
    line = said[name]
    assert (line["status"], line["audio_out"], line["error"]) == ("empty", None, None)
    assert not (said.out / f"{line['stem']}.wav").exists()


@pytest.mark.case("TA-03")
@pytest.mark.parametrize(
    ("name", "words_"),
    [
        ("ones", "test 111 test"),
        ("block", "that is the end"),
        ("two", "82"),
        ("phone", "call today"),
        ("iban", "please"),
        ("date", "january rome"),
        ("pi", "3 14 meters"),
        ("euro", "1 200 euros now"),
    ],
)
def test_numbers_are_said_and_so_is_what_follows(heard, name, words_):
    assert not set(words_.split()) - set(heard[name].split()), heard[name]


@pytest.mark.case("TA-07")
@pytest.mark.parametrize(
    ("name", "words_"),
    [("url", "example com details"), ("mail", "write example org today"), ("html", "good morning")],
)
def test_addresses_and_markup_are_said_as_people_do(heard, name, words_):
    assert not set(words_.split()) - set(heard[name].split()), heard[name]
    assert not {"href", "https", "slash", "less", "greater"} & set(heard[name].split())


@pytest.mark.case("TA-07")
@pytest.mark.case("TA-03")
@pytest.mark.parametrize("name", [*NUMBERS, *MARKUP])
def test_no_text_runs_away(said, name):
    line = said[name]
    assert line["status"] == "ok"
    bound_s = BOUND_S + BOUND_S_PER_LETTER * len(line["text"])
    assert 0.2 < line["audio_out_duration"] < bound_s


@pytest.mark.case("TA-05")
def test_speech_that_does_not_end_fails_alone(omni, solo_say, say_base, tmp_path, monkeypatch):
    real = speak.load_talker
    bent = []

    def load(*args):
        net = real(*args)
        durations = net.dp.forward

        def endless(hidden, mask, *rest):
            made = durations(hidden, mask, *rest)
            rows = mask.sum(dim=(1, 2)) > 180
            bent.extend(rows[rows].tolist())
            made[rows] = 9.0
            return made

        net.dp.forward = endless
        return net

    monkeypatch.setattr(speak, "load_talker", load)
    path = lines(tmp_path / "m.jsonl", [{"id": "endless", "text": ENDLESS}, *say_base])
    case = check(omni, solo_say, "say", path, "-o", tmp_path / "out", count=9, code=3)
    assert case.failed("endless") == "runaway"
    assert len(bent) >= 2, "it was tried with another seed"
    assert not (case.out / "endless.wav").exists()


@pytest.mark.case("VO-01")
def test_each_sound_is_as_long_as_its_own_frames(said):
    """Equal to the solo run: see `check`."""
    spoken = [line for line in said.lines.values() if line["audio_out"]]
    assert len({line["audio_out_duration"] for line in spoken}) > len(spoken) / 2
    for name in ("base-0", "base-1", "base-2", "thirty"):
        samples, _ = soundfile.read(said.out / said[name]["audio_out"])
        assert len(samples) % 256 == 0
        tail = samples[-220:]
        assert 20 * np.log10(np.sqrt((tail**2).mean()) + 1e-12) < -35, name
        assert np.abs(samples).max() > 0.05


@pytest.mark.case("VO-01")
def test_nothing_hums_after_the_last_word(said):
    quiet = []
    for name in ("base-1", "base-2", "base-3", "base-4", "base-7", "thirty"):
        samples, _ = soundfile.read(said.out / said[name]["audio_out"])
        tail = samples[-110:]
        quiet.append(20 * np.log10(np.sqrt((tail**2).mean()) + 1e-12) < -50)
    assert sum(quiet) >= len(quiet) - 1


@pytest.mark.case("VO-03")
def test_headers_tell_the_truth(said):
    for line in said.lines.values():
        if line["audio_out"]:
            info = soundfile.info(said.out / line["audio_out"])
            assert (info.samplerate, info.channels, info.subtype) == (22_050, 1, "PCM_16")
            assert info.frames / info.samplerate == pytest.approx(
                line["audio_out_duration"], abs=0.0006
            )


@pytest.mark.case("VO-05")
def test_each_sound_says_its_own_text(said, heard):
    found = total = 0
    for n in range(8):
        wanted = words(said[f"base-{n}"]["text"]).split()
        got = heard[f"base-{n}"].split()
        found += sum(word in got for word in wanted)
        total += len(wanted)
        assert sum(word in got for word in wanted) >= len(wanted) / 2, (wanted, got)
    assert found / total > RECALL


@pytest.mark.case("VO-07")
def test_a_sound_has_the_name_of_its_id_every_time(said, solo_say):
    for case in (said, solo_say):
        assert [case[f"base-{n}"]["audio_out"] for n in range(8)] == [
            f"base-{n}.wav" for n in range(8)
        ]
    sounds = {path.stem for path in said.out.glob("*.wav")}
    assert sounds == {name for name, line in said.lines.items() if line["status"] == "ok"}


@pytest.mark.case("VO-07")
def test_blank_lines_of_a_text_move_no_number(omni, tmp_path):
    (tmp_path / "lines.txt").write_text("Yes.\n\n...\nNo.\n")
    ran = omni("say", tmp_path / "lines.txt", "-o", tmp_path / "out", "-q")
    assert ran.code == 0
    found = {name: line["status"] for name, line in results(tmp_path / "out").items()}
    assert found == {"line-000001": "ok", "line-000003": "empty", "line-000004": "ok"}
