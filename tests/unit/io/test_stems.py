"""Stems: every id gets a place of its own, inside the folder, on every system."""

import os
import re
import unicodedata
from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omnicli import config, plugins
from omnicli.io import atomic, stems

ENDINGS = [f".{name}" for name in plugins.names("writer") if name != "answer"]
ENDINGS += [f"{ending}.txt" for ending in stems.ANSWER_ENDINGS]

awkward = st.sampled_from(
    [
        *("a", "A", "ä", "a\u0308", "call", "call.wav", "CALL.WAV", "call.mp3", "call.summary.wav"),
        *("", ".", "..", "...", " ", ".wav", "..wav", ".omni", ".OMNI-x", "results", "results.wav"),
        *("a.wav", "a.txt", "a.json", "results.jsonl", "con", "Con.x.wav", "x.", "x ", "-x.wav"),
        *("C:", "a\\b", "\0", "\udce9", "ß", "ss", "б" * 125 + ".wav", "long " * 60, "_", "__"),
    ]
)
names = awkward | st.text(max_size=300) | st.text("aA.b_ ", max_size=4)
ids = st.lists(names, min_size=1, max_size=4).map("/".join)


def claim_all(request_ids):
    """Stems in the order of the ids, each claimed after the others."""
    keys, claimed = set(), []
    for request_id in request_ids:
        claimed.append(stems.claim(request_id, keys.__contains__))
        keys.add(stems.key_of(claimed[-1]))
    return claimed


@given(st.lists(ids, unique=True, max_size=12))
@example(["x.wav", "x.wav/y.wav", "x.txt/y.wav", "x.summary.wav", "x.answer.mp3"])
@example(["call.wav", "call.mp3", "call.mp3.wav", "call", "Call.WAV"])
def test_no_two_files_of_a_run_meet(request_ids):
    """Seen as a disk sees them that knows neither case nor composition."""
    files = [stems.key_of(s + e) for s in claim_all(request_ids) for e in ENDINGS]
    folders = {str(p) for f in files for p in PurePosixPath(f).parents}
    assert len(set(files)) == len(files)
    assert folders.isdisjoint(files)
    assert folders.isdisjoint({"results.jsonl", ".omni"})
    assert "results.jsonl" not in files


@given(ids)
@example("/" * 300)
@example("a/" * 3000 + ".omni")
@example("é" * 254 + "/x.wav")
def test_a_stem_is_safe_on_every_system(request_id):
    stem = stems.claim(request_id, lambda _: False)
    path = PurePosixPath(stem)
    assert stem == str(path) == str(stems.stem_of(request_id))
    assert not path.is_absolute() and not PureWindowsPath(stem).drive
    assert not re.search(r'[\x00-\x1f\x7f-\x9f<>:"\\|?*]', stem)
    assert len(stem.encode()) <= stems.STEM_BYTES
    assert not stems.key_of(stem).startswith(".omni")
    for name in path.parts:
        assert name not in ("", ".", "..")
        assert len(name.encode()) <= 255
    for name in path.parts[:-1]:
        assert name == name.rstrip(". ")
    longest = max((f"{path.name}{e}" for e in ENDINGS), key=len)
    assert len(os.fsencode(atomic.part_of(Path(longest)).name)) <= 255


@given(st.lists(ids, unique=True, min_size=2, max_size=6))
def test_the_same_ids_in_the_same_order_get_the_same_stems(request_ids):
    assert claim_all(request_ids) == claim_all(request_ids)


@pytest.mark.parametrize(
    ("request_id", "stem"),
    [
        ("call.2024-01-02.wav", "call.2024-01-02"),
        ("a.b.c.WAV", "a.b.c"),
        (".wav", ".wav"),
        ("x.tar.gz", "x.tar.gz"),
        ("calls/2024.05/may 3.m4a", "calls/2024.05/may 3"),
        ("-x.wav", "-x"),
        ("noël.ogg", "noël"),
        ("recording .wav", "recording "),
        ("calls/long.wav#12.5", "calls/long.wav#12.5"),
        ("utt-0042", "utt-0042"),
        ("sub/results.wav", "sub/results"),
    ],
)
def test_an_ordinary_id_only_loses_its_suffix(request_id, stem):
    assert stems.claim(request_id, lambda _: False) == stem


@pytest.mark.parametrize(
    ("request_id", "pattern"),
    [
        ("../../etc/passwd", "etc/passwd-#"),
        ("/data/calls/x.wav", "data/calls/x-#"),
        ("C:\\data\\x.wav", "C__data_x-#"),
        ("a//b.wav", "a/b-#"),
        ("con.wav", "_con-#"),
        ("sub/aux/x.wav", "sub/_aux/x-#"),
        ("LPT1.old.wav", "_LPT1.old-#"),
        ("dots./x.wav", "dots._/x-#"),
        (".omni/x.wav", "_.omni/x-#"),
        (".Omni.wav", "_.Omni-#"),
        ("results.wav", "results-#"),
        ("call.summary.wav", "call.summary-#"),
        ("x.wav/y.wav", "x.wav_/y-#"),
        ("tab\there.wav", "tab_here-#"),
        ("caf\udce9.wav", "caf_-#"),
        ("", "_-#"),
        ("..", "_-#"),
        ("б" * 125 + ".wav", "б" * 106 + "-#"),
    ],
)
def test_a_changed_id_is_marked_with_a_hash(request_id, pattern):
    assert re.fullmatch(
        re.escape(pattern).replace(r"\#", "[0-9a-f]{8}"), stems.claim(request_id, lambda _: False)
    )


def test_collisions_keep_the_suffix_and_then_get_a_hash():
    claimed = claim_all(["call.wav", "call.mp3", "CALL.wav", "call.WAV", "Call.mp3"])
    assert claimed[:3] == ["call", "call.mp3", "CALL.wav"]
    assert all(re.fullmatch(r"[Cc]all-[0-9a-f]{8}", s) for s in claimed[3:])


def test_a_name_typed_composed_and_one_decomposed_are_one_on_a_mac():
    composed = "né.wav"
    decomposed = unicodedata.normalize("NFD", composed)
    assert claim_all([composed, decomposed]) == ["né", decomposed]


def test_ids_that_would_be_cut_to_the_same_name_stay_apart():
    first, second = ("w" * 240 + end for end in "ab")
    assert stems.stem_of(first) != stems.stem_of(second)


def test_every_answer_has_an_ending_that_no_stem_has():
    kinds = {"answer" if kind == "prompt" else kind for kind in (*config.SAY, "say")}
    assert {f".{kind}" for kind in kinds} <= set(stems.ANSWER_ENDINGS)


def test_the_room_is_that_of_the_longest_name(tmp_path):
    longest = max(len(ending) for ending in ENDINGS)
    part = atomic.part_of(tmp_path / "x").name
    most_digits = len("4194304") - len(str(os.getpid()))
    assert longest + len(part) - 1 + most_digits <= stems.ROOM_BYTES


def test_a_place_with_a_sound_file_is_occupied(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.wav").touch()
    assert stems.occupied(tmp_path, "in/a")
    assert not stems.occupied(tmp_path, "in/b")


@pytest.mark.parametrize(
    "request_id", ["б" * 125 + ".wav", "a/../../b", "\0\n", "x" * 5000, "nul/."]
)
def test_the_file_can_be_made_and_lies_inside(request_id, tmp_path):
    path = atomic.write_text(tmp_path / f"{stems.stem_of(request_id)}.translation.txt", "x")
    assert path.resolve().is_relative_to(tmp_path.resolve())
    assert path.read_text() == "x"
