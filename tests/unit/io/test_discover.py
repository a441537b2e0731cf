"""Finding recordings: which files count, in which order, under which ids."""

import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from omnicli.errors import UserError
from omnicli.io import discover
from omnicli.io.audio import decode
from omnicli.io.discover import build_manifest, read_inputs
from omnicli.io.manifest import BadLine, Cursor, read_manifest


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def read(*inputs, stdin="", **options):
    stream = stdin if hasattr(stdin, "read") else io.StringIO(stdin)
    return list(read_inputs([str(name) for name in inputs], stdin=stream, **options))


def ids(*inputs, **options):
    return [request.request_id for request in read(*inputs, **options)]


@pytest.fixture
def calls(tmp_path):
    touch(tmp_path, "in/b.wav", "in/a/x.mp3", "in/a/y.FLAC", "in/c/x.wav")
    return tmp_path / "in"


# -- folders


def test_a_folder_gives_its_recordings_by_name(calls):
    made = read(calls)

    assert [request.request_id for request in made] == ["a/x.mp3", "a/y.FLAC", "b.wav", "c/x.wav"]
    assert [request.index for request in made] == [0, 1, 2, 3]
    assert made[0].audio == calls / "a/x.mp3"
    assert made[0].audio_filepath == f"{calls}/a/x.mp3"
    assert ids(calls, recursive=False) == ["b.wav"]


def test_paths_are_absolute_but_shown_as_written(calls, monkeypatch):
    monkeypatch.chdir(calls.parent)

    made = read("./in")

    assert made[0].audio == calls / "a/x.mp3" and made[0].audio_filepath == "./in/a/x.mp3"
    assert made[0].request_id == "a/x.mp3"


def test_what_is_no_recording_is_passed_over(calls):
    touch(calls, "._b.wav", ".DS_Store", "Thumbs.db", "d.wav.part", "e.tmp", "f.txt", "m.jsonl")
    touch(calls, ".wav", ".hidden/z.wav", "noext")
    (calls / "dir.wav").mkdir()

    assert ids(calls) == ["a/x.mp3", "a/y.FLAC", "b.wav", "c/x.wav"]


def test_an_empty_folder_is_no_mistake(tmp_path):
    assert read(tmp_path) == []


def test_odd_names_are_names(tmp_path):
    touch(tmp_path, "-x.wav", "a b.wav", "é.wav", "call.2024-01-02.wav", "[1].wav")

    assert set(ids(tmp_path)) == {"-x.wav", "a b.wav", "é.wav", "call.2024-01-02.wav", "[1].wav"}
    assert ids(tmp_path / "[1].wav") == ["[1].wav"]


def test_a_folder_that_cannot_be_read_is_one_failing_item(calls, monkeypatch):
    scandir = os.scandir

    def refuse(path):
        if str(path).rstrip("/").endswith("in/a"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything

    made = read(calls)

    assert [request.request_id for request in made] == ["a", "b.wav", "c/x.wav"]
    assert made[0].audio == calls / "a"


def test_an_unreadable_folder_given_alone_keeps_its_name(calls, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)

    (made,) = read(calls)

    assert made.audio == calls and made.request_id == str(calls)


def test_a_deep_tree_is_no_trouble(tmp_path, monkeypatch):
    depth = sys.getrecursionlimit() + 100
    monkeypatch.chdir(tmp_path)
    try:
        for _ in range(depth):
            os.mkdir("d")  # noqa: PTH102 - no path of this length can be made at once
            os.chdir("d")
        touch(Path(), "x.wav")
        (made,) = read(tmp_path)
    finally:  # what clears temporary folders would recurse
        Path("x.wav").unlink()
        for _ in range(depth):
            os.chdir("..")
            Path("d").rmdir()

    assert made.request_id.startswith("d/d/d/")


# -- links


def test_links_in_a_circle_end(calls):
    (calls / "a/up").symlink_to(calls)
    (calls / "c/over").symlink_to(calls / "a")
    (calls / "self").symlink_to(calls / "self")

    assert ids(calls) == ["a/x.mp3", "a/y.FLAC", "b.wav", "c/x.wav"]


def test_a_linked_folder_elsewhere_is_read_once(calls, tmp_path):
    touch(tmp_path, "far/deep/z.wav")
    (tmp_path / "far/deep/back").symlink_to(tmp_path / "far")
    (calls / "d").symlink_to(tmp_path / "far")
    (calls / "e").symlink_to(tmp_path / "far/deep")

    assert ids(calls) == ["a/x.mp3", "a/y.FLAC", "b.wav", "c/x.wav", "d/deep/z.wav"]


def test_a_broken_link_is_an_item_that_will_fail(calls):
    (calls / "z.wav").symlink_to(calls / "gone.wav")

    assert ids(calls)[-1] == "z.wav"


# -- our own output


def test_output_folders_are_not_descended_into(calls):
    touch(calls, "out/b.wav", "old/.omni/run.sqlite", "old/sub/b.wav")

    assert ids(calls, exclude=[calls / "out"]) == ["a/x.mp3", "a/y.FLAC", "b.wav", "c/x.wav"]
    assert ids(f"{calls}/**/b.wav", exclude=[calls / "out"]) == ["b.wav"]


def test_an_output_folder_as_input_is_a_mistake(calls):
    touch(calls, "c/.omni/run.sqlite")

    for folder, exclude in ((calls / "c", []), (calls / "a", [calls / "a"])):
        with pytest.raises(UserError, match="output folder"):
            read(folder, exclude=exclude)


def test_an_output_folder_around_the_input_is_fine(calls):
    touch(calls.parent, ".omni/run.sqlite")

    assert len(ids(calls, exclude=[calls.parent])) == 4
    assert ids(f"{calls}/*.wav", exclude=[calls.parent]) == ["b.wav"]


# -- several inputs, patterns


def test_ids_start_from_what_the_inputs_have_in_common(calls):
    assert ids(calls / "a/x.mp3") == ["x.mp3"]
    assert ids(calls / "a/x.mp3", calls / "c/x.wav") == ["a/x.mp3", "c/x.wav"]
    assert ids(calls / "c", calls / "a") == ["c/x.wav", "a/x.mp3", "a/y.FLAC"]
    assert ids(calls / "b.wav", calls / "a") == ["b.wav", "a/x.mp3", "a/y.FLAC"]


def test_the_same_input_twice_counts_once(calls, monkeypatch):
    monkeypatch.chdir(calls)

    assert ids("b.wav", "a", calls / "b.wav", "./a/") == ["b.wav", "a/x.mp3", "a/y.FLAC"]


def test_a_pattern_is_resolved_and_its_ids_do_not_depend_on_what_it_matches(calls):
    assert ids(f"{calls}/*/x.*") == ["a/x.mp3", "c/x.wav"]
    assert ids(f"{calls}/*/x.wav") == ["c/x.wav"]
    assert ids(f"{calls}/?") == ["a/x.mp3", "a/y.FLAC", "c/x.wav"]


def test_a_file_that_is_no_recording_is_taken_when_named(calls):
    touch(calls, "notes.txt", "doc.json")

    assert ids(calls / "notes.txt", calls / "doc.json") == ["notes.txt", "doc.json"]


@pytest.mark.parametrize("name", ["none.wav", "none", "*.ogg", "none.jsonl"])
def test_what_is_not_there_is_said_at_once(calls, name):
    with pytest.raises(UserError, match=name.replace("*", r"\*")):
        read_inputs([str(calls / name)], stdin=io.StringIO())


def test_no_input_at_all_is_a_mistake():
    with pytest.raises(UserError):
        read_inputs([], stdin=io.StringIO())


# -- manifests, lists, stdin


def test_manifests_and_files_are_numbered_together(calls):
    (calls / "m.jsonl").write_text('{"audio": "b.wav", "id": "1"}\nbad\n{"audio": "c/x.wav"}\n')
    (calls / "nemo.json").write_text('{"audio_filepath": "a/x.mp3", "duration": 1}\n')

    made = read(calls / "m.jsonl", calls / "b.wav", calls / "nemo.json")

    assert isinstance(made[1], BadLine) and made[1].where == f"{calls}/m.jsonl:2"
    good = [entry for entry in made if not isinstance(entry, BadLine)]
    assert [request.index for request in good] == [0, 1, 2, 3]
    assert [request.request_id for request in good] == ["1", "c/x.wav", "b.wav", "a/x.mp3"]


def test_stdin_holds_objects_or_paths(calls, monkeypatch):
    monkeypatch.chdir(calls)
    text = '{"audio": "b.wav", "id": "1"}\n\n./a/x.mp3\r\n/far/y.wav\n  {"audio": 1}\n'

    *made, bad = read("-", stdin=io.TextIOWrapper(io.BytesIO(text.encode())))

    assert [request.request_id for request in made] == ["1", "a/x.mp3", "/far/y.wav"]
    assert [request.audio for request in made] == [
        calls / "b.wav",
        calls / "a/x.mp3",
        Path("/far/y.wav"),
    ]
    assert bad.where == "-:5"
    assert (
        read("-", stdin='{"audio": "q.wav"}', audio_root=calls / "a")[0].audio == calls / "a/q.wav"
    )


def test_a_list_holds_one_path_per_line(calls, tmp_path):
    name = os.fsdecode(b"caf\xe9.wav")
    listed = tmp_path / "list.txt"
    listed.write_bytes(b"b.wav\n\n{odd}.wav\n" + os.fsencode(name) + b"\n")

    made = read(files_from=[str(listed)], audio_root=calls)
    again = read(files_from=["-"], stdin=io.BytesIO(listed.read_bytes()), audio_root=calls)

    assert [request.request_id for request in made] == ["b.wav", "{odd}.wav", r"caf\xe9.wav"]
    assert [request.audio for request in made] == [calls / n for n in ("b.wav", "{odd}.wav", name)]
    assert [request.audio for request in again] == [request.audio for request in made]


def test_stdin_serves_one_purpose():
    with pytest.raises(UserError, match="stdin"):
        read("-", files_from=["-"])


def test_a_list_that_is_not_there_is_a_mistake(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError):
            read(files_from=[str(path)])


# -- scale


def test_ten_thousand_files_are_not_looked_at_one_by_one(tmp_path, monkeypatch):
    for number in range(20):
        touch(tmp_path, *(f"{number:02d}/{name:03d}.wav" for name in range(100)))
    looked_at = []
    for name in ("stat", "lstat"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os,
            name,
            lambda path, *a, _real=real, **k: (looked_at.append(path), _real(path, *a, **k))[1],
        )

    assert len(read(tmp_path)) == 2000
    assert not [path for path in looked_at if str(path).endswith(".wav")]


# -- building a manifest


def test_a_manifest_that_was_built_reads_back(tmp_path):
    folder = tmp_path / "in"
    bad_name = os.fsdecode(b"caf\xe9.wav")
    touch(folder, "b.wav", "out/.omni/x", "out/z.wav")
    for name, samples in (("a/é.wav", 16_000), (bad_name, 8_000)):
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("wb") as file:
            soundfile.write(file, np.zeros(samples), 16_000, format="WAV")
    path = folder / "m.jsonl"
    with path.open("w", encoding="utf-8") as out:
        report = build_manifest(folder, out)

    made = list(read_manifest(path, Cursor()))

    assert [(r.audio, r.duration_s) for r in made] == [
        (folder / "a/é.wav", 1.0),
        (folder / "b.wav", None),
        (folder / bad_name, 0.5),
    ]
    assert (report.recordings, report.total_s, report.unknown_length) == (3, 1.5, 1)
    assert decode(made[0].audio).duration_s == 1.0
    assert '"a/é.wav"' in path.read_text(encoding="utf-8")


def test_a_manifest_elsewhere_names_absolute_paths(calls, tmp_path):
    out = io.StringIO()

    build_manifest(calls / "a", out, relative_to=calls)
    build_manifest(calls / "a", out, relative_to=tmp_path / "elsewhere")

    names = [json.loads(line)["audio_filepath"] for line in out.getvalue().splitlines()]
    assert names == ["a/x.mp3", "a/y.FLAC", f"{calls}/a/x.mp3", f"{calls}/a/y.FLAC"]


def test_a_manifest_of_what_is_no_folder_is_a_mistake(tmp_path):
    with pytest.raises(UserError):
        build_manifest(tmp_path / "none", io.StringIO())


def test_suffixes_are_those_that_stems_cut_off():
    assert all(discover.is_recording(f"x{suffix.upper()}") for suffix in discover.AUDIO_SUFFIXES)
    assert not discover.is_recording("x.txt") and not discover.is_recording(".wav")
