"""Manifests: what a line may say, what is wrong with one, and what does not grow with them."""

import gzip
import io
import json
import math
import os
import tracemalloc
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnicli.data import Request
from omnicli.errors import UserError
from omnicli.io.manifest import (
    ID_CHARACTERS,
    LINE_BYTES,
    BadLine,
    Cursor,
    check_manifest,
    claim_is_off,
    path_id,
    printable,
    read_manifest,
    read_texts,
)


def entries(folder, text, name="m.jsonl", **options):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_manifest(path, Cursor(), **options))


def one(folder, **row):
    found = entries(folder, json.dumps({"audio_filepath": "a.wav", **row}))
    assert len(found) == 1
    return found[0]


# -- what a line may say


def test_a_line_with_everything(tmp_path):
    row = {
        "id": "x/1",
        "audio_filepath": "calls/a.wav",
        "offset": 1.5,
        "duration": "3.0",
        "text": "so it was",
        "lang": "es",
        "prompt": "Who calls?",
        "say": "reply",
        "voice": "joe",
        "seed": 7,
        "speak": False,
        "call": {"agent": [1, None]},
    }

    assert one(tmp_path, **row) == Request(
        request_id="x/1",
        index=0,
        where=f"{tmp_path}/m.jsonl:1",
        audio=tmp_path / "calls/a.wav",
        audio_filepath="calls/a.wav",
        offset_s=1.5,
        duration_s=3.0,
        reference="so it was",
        language="es",
        prompt="Who calls?",
        say="reply",
        voice="joe",
        seed=7,
        speak=False,
        raw=row,
    )


def test_the_first_name_of_the_audio_and_of_the_id_counts(tmp_path):
    names = ["audio_filepath", "file_name", "path", "audio"]
    for first in range(4):
        row = {name: f"{name}.wav" for name in reversed(names[first:])}
        (made,) = entries(tmp_path, json.dumps(row))
        assert made.audio == tmp_path / f"{names[first]}.wav"
    ids = {"utt_id": "c", "custom_id": "b", "id": "a"}
    assert one(tmp_path, **ids).request_id == "a"
    assert one(tmp_path, **(ids | {"id": None})).request_id == "b"
    assert one(tmp_path, utt_id=17).request_id == "17"


def test_a_line_without_an_id_has_its_path_and_its_offset(tmp_path):
    lines = [
        {"audio_filepath": "a/x.wav"},
        {"audio_filepath": "./b//x.wav"},
        {"audio_filepath": "a/x.wav", "offset": 12.5},
        {"audio_filepath": "a/x.wav", "offset": 3},
        {"audio_filepath": "../y.wav"},
        {"audio_filepath": "/data/y.wav"},
        {"audio_filepath": f"{tmp_path}/c/y.wav"},
    ]

    made = entries(tmp_path, "\n".join(map(json.dumps, lines)))

    wanted = [
        "a/x.wav",
        "b/x.wav",
        "a/x.wav#12.5",
        "a/x.wav#3",
        "../y.wav",
        "/data/y.wav",
        "c/y.wav",
    ]
    assert [request.request_id for request in made] == wanted
    assert [request.index for request in made] == list(range(7))


def test_paths_start_from_the_manifest_or_from_the_root(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/m.jsonl").write_text('{"audio_filepath": "a/b.wav"}')
    monkeypatch.chdir(tmp_path)

    for root, wanted in ((None, tmp_path / "x/a/b.wav"), (Path("r"), tmp_path / "r/a/b.wav")):
        (made,) = read_manifest(Path("x/m.jsonl"), Cursor(), audio_root=root)
        assert made.audio == wanted and made.request_id == "a/b.wav"
        assert made.where == "x/m.jsonl:1"


def test_marks_of_other_systems_are_no_trouble(tmp_path):
    line = b'{"audio_filepath": "%d.wav"}'
    text = b"\xef\xbb\xbf" + line % 1 + b"\r\n\r\n  \r\n" + line % 2 + b"\r\n" + line % 3

    plain = entries(tmp_path, text)
    packed = entries(tmp_path, gzip.compress(text), "m.jsonl.gz")

    assert [made.request_id for made in plain] == ["1.wav", "2.wav", "3.wav"]
    assert [made.where.rpartition(":")[2] for made in plain] == ["1", "4", "5"]
    assert [replace(made, where="") for made in packed] == [replace(m, where="") for m in plain]


@pytest.mark.parametrize("claim", [math.nan, math.inf, -1, 0, "NaN", "-3", 1e12, 10**400, "", None])
def test_a_duration_alone_is_a_claim_and_nonsense_is_none(claim, tmp_path):
    made = one(tmp_path, duration=claim)

    assert made.duration_s is None
    json.dumps(dict(made.raw), allow_nan=False)


def test_no_constant_that_json_lacks_goes_on(tmp_path):
    (made,) = entries(
        tmp_path, '{"audio": "a.wav", "x": [NaN, {"y": -Infinity}, 1e999, 2], "z": Infinity}'
    )

    assert made.raw == {"audio": "a.wav", "x": [None, {"y": None}, None, 2], "z": None}


# -- what is wrong with a line


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"offset": -1}, "offset: "),
        ({"offset": math.nan}, "offset: "),
        ({"offset": "soon"}, "offset: a number is expected"),
        ({"offset": 1, "duration": math.nan}, "duration: "),
        ({"offset": 1, "duration": -1}, "duration: "),
        ({"duration": [1]}, "duration: a number is expected"),
        ({"duration": True}, "duration: a number is expected"),
        ({"text": 3}, "text: a text is expected, not 3"),
        ({"language": ["en"]}, "language: a text"),
        ({"prompt": {}}, "prompt: a text"),
        ({"say": "poem"}, "say: 'poem' is none of summary, reply"),
        ({"voice": 1}, "voice: a text"),
        ({"seed": 1.5}, "seed: a whole number"),
        ({"seed": True}, "seed: a whole number"),
        ({"seed": -1}, "seed: a whole number"),
        ({"speak": "yes"}, "speak: true or false"),
        ({"audio_filepath": ["a.wav"]}, "audio_filepath: a text"),
        ({"audio_filepath": "a\0.wav"}, "a path cannot hold a NUL"),
        ({"id": ""}, "id: it is empty"),
        ({"id": "a\nb"}, "id: it holds control characters"),
        ({"id": 1.5}, "id: a text"),
        ({"id": "x" * (ID_CHARACTERS + 1)}, "id: longer than"),
        ({"id": "\ud800"}, "not UTF-8"),
        ({"audio_filepath": "\ud800.wav"}, "not UTF-8"),
    ],
)
def test_a_bad_field_is_named(row, what, tmp_path):
    bad = one(tmp_path, **row)

    assert isinstance(bad, BadLine)
    assert bad.what.startswith(what)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"audio": "a.wav"', "not JSON: "),
        (b"[1]", "not a JSON object; an array must be split into lines"),
        (b"a.wav", "not JSON: "),
        (b'{"audio": "\xe9.wav"}', "not UTF-8"),
        ('{"audio": "a.wav"}'.encode("utf-16"), "not UTF-8"),
        (b'{"audio_file_path": "a.wav"}', "no audio_filepath; did you mean 'audio_filepath' by"),
        (b'{"langauge": "en"}', "no audio_filepath; did you mean 'language' by 'langauge'?"),
        (b'{"url": "a.wav"}', "no audio_filepath"),
        (b'{"audio": ""}', "no audio_filepath"),
        (b'{"audio": "a.wav", "x": ' + b"[" * 70 + b"]" * 70 + b"}", "nested deeper than 64"),
        (b'{"x": ' + b"[" * 200_000, "nested deeper than 64"),
        (b'{"x": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
    ],
)
def test_a_bad_line_does_not_hide_the_next(line, what, tmp_path):
    good = b'{"audio": "b.wav"}'

    first, bad, last = entries(tmp_path, good + b"\n" + line + b"\n" + good)

    assert (first.index, last.index) == (0, 1)
    assert isinstance(bad, BadLine) and bad.what.startswith(what)
    assert bad.where == f"{tmp_path}/m.jsonl:2"


def test_a_line_without_end_is_left_out(tmp_path):
    text = b'{"audio": "a.wav", "x": "' + b"x" * LINE_BYTES + b'"}\n{"audio": "b.wav"}\n'

    bad, good = entries(tmp_path, text)

    assert bad == BadLine(f"{tmp_path}/m.jsonl:1", "longer than 16 MiB")
    assert good.request_id == "b.wav" and good.where.endswith(":2")


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: d[:40] + b"\0" * 40])
def test_a_damaged_archive_is_a_bad_line(damage, tmp_path):
    random = np.random.default_rng(0)
    text = "".join(f'{{"audio": "{random.integers(1 << 60)}.wav"}}\n' for _ in range(2000))

    *_, last = entries(tmp_path, damage(gzip.compress(text.encode())), "m.jsonl.gz")

    assert isinstance(last, BadLine) and last.what.startswith("cannot be read on from here")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
known = st.sampled_from(
    ["audio_filepath", "id", "offset", "duration", "text", "language", "seed", "speak", "say"]
)
lines = (
    st.dictionaries(known | st.text(max_size=8), json_values, max_size=5).map(json.dumps)
    | st.text(max_size=40)
).map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=40)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(lines, max_size=5))
def test_whatever_stands_there_becomes_a_request_or_a_bad_line(tmp_path, lines):
    for index, made in enumerate(
        entry for entry in entries(tmp_path, b"\n".join(lines)) if isinstance(entry, Request)
    ):
        assert made.index == index
        assert 1 <= len(made.request_id) <= ID_CHARACTERS and made.request_id.encode()
        assert not any(unicodedata.category(letter) == "Cc" for letter in made.request_id)
        json.dumps(dict(made.raw), allow_nan=False)


# -- names


def test_a_name_composed_in_another_way_is_found(tmp_path):
    typed, on_disk = (unicodedata.normalize(form, "Jürgen/Übung é.wav") for form in ("NFC", "NFD"))
    assert typed != on_disk
    (tmp_path / on_disk).parent.mkdir()
    (tmp_path / on_disk).write_bytes(b"x")

    made = one(tmp_path, audio_filepath=typed)

    assert made.audio == tmp_path / on_disk
    assert made.request_id == made.audio_filepath == typed


def test_of_two_names_that_could_be_meant_none_is(tmp_path):
    for name in ("e\u0301\u0323.wav", "\u00e9\u0323.wav"):  # one letter, its accents in two orders
        (tmp_path / name).write_bytes(b"x")

    typed = unicodedata.normalize("NFC", "e\u0301\u0323.wav")

    assert one(tmp_path, audio_filepath=typed).audio == tmp_path / typed


def test_a_name_that_is_no_utf8_gives_a_readable_id(tmp_path):
    name = os.fsdecode(b"caf\xe9\n.wav")
    (tmp_path / name).write_bytes(b"x")

    made = one(tmp_path, audio_filepath=name)  # Python writes it as a half surrogate

    assert made.audio.exists()
    assert made.request_id == r"caf\xe9\x0a.wav"


@given(st.binary(min_size=1, max_size=60).filter(lambda name: 0 not in name))
def test_every_name_is_printable_text(name):
    text = printable(os.fsdecode(name))

    assert text.encode("utf-8")
    assert not any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in text)


def test_a_very_long_path_gives_an_id_of_its_own():
    ids = {path_id("d/" * 800 + str(number)) for number in range(3)}

    assert len(ids) == 3 and all(len(name) == ID_CHARACTERS for name in ids)


# -- scale


def test_memory_does_not_grow_with_the_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    row = json.dumps({"audio_filepath": "a/b.wav", "text": "the quick brown fox " * 5})
    path.write_text(f"{row}\n" * 20_000)
    list(read_manifest(path, Cursor()))
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_manifest(path, Cursor()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert count == 20_000
    assert peak < path.stat().st_size / 4


# -- texts to say


def test_texts_are_lines_or_objects():
    text = "Hello there.\r\n\n  \n" + json.dumps({"text": "Hola", "language": "es", "seed": "3"})
    text += '\n{"text": "", "output_file": "out/b.wav"}\n'

    first, second, third = read_texts("-", io.StringIO(text))

    assert (first.request_id, first.speech_text) == ("line-000001", "Hello there.")
    assert (second.request_id, second.language, second.seed) == ("line-000004", "es", 3)
    assert (third.request_id, third.speech_text, third.index) == ("out/b", "", 2)
    assert third.raw == {"text": "", "output_file": "out/b.wav"} and third.audio is None


def test_texts_that_cannot_be_said_are_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"txt": "a"}\n{"text": 1}\nplain\n{"text": "b", "id": 5}\n\xff\n')

    found = list(read_texts(str(path), io.StringIO()))

    assert [entry.what for entry in found if isinstance(entry, BadLine)] == [
        "no text; did you mean 'text' by 'txt'?",
        "text: a text is expected, not 1",
        "not JSON: Expecting value (column 1)",
        "not UTF-8",
    ]
    assert [entry.request_id for entry in found if isinstance(entry, Request)] == ["5"]


def test_a_source_of_texts_must_be_there(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(UserError):
            read_texts(str(path), io.StringIO())


# -- checking


def test_a_check_finds_what_a_run_would_stumble_over(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(32_000), 16_000)
    (tmp_path / "b.wav").write_bytes(b"no sound")
    rows = [
        {"audio": "a.wav", "duration": 2},
        {"audio": "a.wav", "id": "two", "duration": 2.05},
        {"audio": "a.wav", "id": "three", "duration": 2.2},
        {"audio": "a.wav", "offset": 0.5, "duration": 1},
        {"audio": "a.wav", "offset": 1.5, "duration": 1},
        {"audio": "b.wav"},
        {"audio": "c.wav"},
        {"audio": "a.wav", "id": "two"},
        {"audio": 1},
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))

    report = check_manifest(tmp_path / "m.jsonl")

    assert report.requests == 8 and not report.usable
    assert report.total_s == pytest.approx(2 + 2 + 2 + 1 + 0.5 + 2)
    counts = [report.bad_lines, report.missing, report.duplicates, report.unknown_length]
    assert [kind.count for kind in counts] == [1, 1, 1, 1]
    assert report.wrong_duration.count == 2
    assert report.duplicates.first[0].where == f"{tmp_path}/m.jsonl:8"
    assert report.duplicates.first[0].what == f"the id 'two' is taken by {tmp_path}/m.jsonl:2"


def test_a_claim_may_be_a_little_off():
    assert not claim_is_off(1.09, 1.0) and claim_is_off(1.11, 1.0)
    assert not claim_is_off(95.1, 100) and claim_is_off(94.9, 100)
    assert not claim_is_off(1, 100, selects=True) and claim_is_off(106, 100, selects=True)
