"""Manifests as people have them."""

import gzip
import json
import os
import shutil
import unicodedata

import numpy as np
import pytest
from case_run import check, manifest, put_base, settled
from case_sounds import DEMO, speech, wav

from omnicli.job import run as job_run

CLAIMS = {"off": 9999, "text": "1.257", "nan": float("nan"), "minus": -1, "none": None, "tiny": 0.1}
CAFE = unicodedata.normalize("NFD", "café.flac")
NOTE = {"agent": {"n": 7, "tags": ["a", None]}, "call_id": "K-1", "score": 0.5}


@pytest.fixture(scope="module")
def place(tmp_path_factory, base):
    """A folder with a manifest in it that has everything; recordings lie below."""
    root = tmp_path_factory.mktemp("manifests")
    sounds = root / "sounds"
    sounds.mkdir()
    shutil.copy(DEMO / "yes-please.flac", sounds / "short.flac")
    shutil.copy(DEMO / "yes-please.flac", sounds / "claimed.flac")
    shutil.copy(DEMO / "yes-please.flac", sounds / CAFE)
    wav(sounds / "long.wav", np.concatenate([speech("train-question"), speech("yes-please")]))
    rows = [
        {"id": "first", "audio_filepath": "sounds/short.flac", **NOTE, "duration": 1.257},
        {"id": "second", "audio_filepath": "sounds/long.wav", "duration": 1, "text": "Excuse me"},
        {"id": "third", "audio_filepath": "sounds/short.flac", "language": "en"},
        {"id": "composed", "audio_filepath": f"sounds/{unicodedata.normalize('NFC', CAFE)}"},
        {"custom_id": "by-custom-id", "file_name": "sounds/short.flac"},
        {"audio_filepath": "sounds/long.wav", "offset": 4.85, "duration": 1.25},
        *(
            {"id": f"claim-{n}", "audio_filepath": "sounds/claimed.flac"}
            | ({} if claim is None else {"duration": claim})
            for n, claim in CLAIMS.items()
        ),
    ]
    path = manifest(root / "calls.jsonl", base, rows, first=False)
    text = path.read_text(encoding="utf-8").replace("\n", "\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    return root


@pytest.fixture(scope="module")
def taken(omni, solo, place):
    """It in one run, from elsewhere."""
    args = ("transcribe", place / "calls.jsonl", "-o", place / "out")
    decoded = []
    with pytest.MonkeyPatch.context() as patch:
        real = job_run.decode
        patch.setattr(job_run, "decode", lambda path, **w: decoded.append(path) or real(path, **w))
        case = check(omni, solo, *args, count=20, code=0, cwd="/")
    assert decoded
    return case, decoded


@pytest.mark.case("MA-01")
def test_a_byte_order_mark_and_crlf_lose_no_line(taken):
    case, _ = taken
    assert case["first"]["status"] == "ok"
    assert case["first"]["index"] == 0
    assert case["base/yes-please.flac"]["index"] == 19


@pytest.mark.case("MA-01")
def test_packed_and_without_a_last_end_of_line(omni, place, tmp_path):
    line = json.dumps({"id": "x", "audio_filepath": str(place / "sounds" / "missing.flac")})
    (tmp_path / "m.jsonl.gz").write_bytes(gzip.compress(f"\r\n{line}".encode()))
    out = tmp_path / "out"
    ran = omni("transcribe", tmp_path / "m.jsonl.gz", "-o", out, "--quiet")
    assert settled(out, ran, None, count=1, code=3).failed("x") == "missing_file"


@pytest.mark.case("MA-03")
def test_an_id_that_is_there_twice_is_refused_with_both_places(omni, place, tmp_path):
    rows = [{"id": "a", "audio_filepath": str(place / "sounds" / n)} for n in ("short.flac", CAFE)]
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    ran = omni("transcribe", path, "-o", tmp_path / "out")
    assert ran.code == 2
    assert "m.jsonl:1" in ran.err
    assert "m.jsonl:2" in ran.err
    assert not (tmp_path / "out" / "results.jsonl").exists()


@pytest.mark.case("MA-03")
def test_one_file_under_two_ids_is_decoded_once(taken, place):
    case, decoded = taken
    texts = {case.text(f"{n}") for n in ("first", "third", "by-custom-id")}
    assert texts == {"yes please"}
    assert decoded.count(place / "sounds" / "short.flac") == 1


@pytest.mark.case("MA-05")
def test_paths_start_from_the_manifest_wherever_the_command_runs(taken):
    case, _ = taken
    assert {line["status"] for line in case.lines.values()} == {"ok", "empty"}


@pytest.mark.case("MA-05")
def test_audio_root_moves_them_and_errors_show_where(omni, place, tmp_path):
    path = tmp_path / "m.jsonl"
    rows = [{"id": n, "audio_filepath": f"sounds/{n}.flac"} for n in ("short", "gone")]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    out = tmp_path / "out"
    args = ("transcribe", path, "-o", out, "--audio-root", place)
    ran = omni(*args, "--quiet", cwd="/")
    case = settled(out, ran, None, count=2, code=3)
    assert case["short"]["status"] == "ok"
    assert case.failed("gone") == "missing_file"
    assert str(place / "sounds" / "gone.flac") in case["gone"]["error"]["message"]


@pytest.mark.case("MA-07")
@pytest.mark.parametrize("claim", list(CLAIMS))
def test_a_wrong_claim_is_at_most_a_warning(taken, claim):
    case, _ = taken
    line = case[f"claim-{claim}"]
    assert (line["status"], line["duration"]) == ("ok", 1.257)
    assert case.text(f"claim-{claim}") == "yes please"
    warned = {"duration_claim"} if claim in ("off", "tiny") else set()
    assert case.warned(f"claim-{claim}") == warned


@pytest.mark.case("MA-07")
def test_batches_are_measured_by_what_was_decoded(taken):
    case, _ = taken
    assert case.warned("second") == {"duration_claim"}
    assert case["second"]["duration"] == pytest.approx(6.1, abs=0.05)
    assert case.text("second").endswith("yes please")


@pytest.mark.case("MA-09")
def test_fields_are_carried_through_in_the_order_of_the_input(taken, place):
    case, _ = taken
    assert {name: case["first"][name] for name in NOTE} == NOTE
    assert case["first"]["audio_filepath"] == "sounds/short.flac"
    assert case["second"]["text"] == "Excuse me"
    assert case["second"]["manifest"] == {"duration": 1}
    assert [line["index"] for line in case.lines.values()] == list(range(20))
    assert list(case.lines)[:3] == ["first", "second", "third"]
    assert case["by-custom-id"]["stem"] == "by-custom-id"
    part = next(line for name, line in case.lines.items() if name.startswith("sounds/long.wav#"))
    assert (part["offset"], part["duration"]) == (4.85, pytest.approx(1.25, abs=0.01))


@pytest.mark.case("MA-11")
def test_accents_composed_otherwise_are_found(taken, place):
    if not (place / "sounds" / CAFE).exists():
        pytest.fail("the file system keeps no composition of accents")
    case, _ = taken
    assert case.text("composed") == "yes please"


@pytest.mark.case("MA-11")
def test_two_files_that_differ_in_composition_only_are_no_guess(omni, tmp_path):
    """Two that are there are two; neither is meant by a third spelling."""
    names = ("e\u0301\u0327x.flac", "e\u0327\u0301x.flac")  # canonically equal
    for name in names:
        shutil.copy(DEMO / "yes-please.flac", tmp_path / name)
    if len({p.name for p in tmp_path.iterdir()}) != 2:
        pytest.skip("this file system takes them for one")
    rows = [
        {"id": "third", "audio_filepath": unicodedata.normalize("NFC", names[0])},
        {"id": "exact", "audio_filepath": names[0]},
    ]
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    out = tmp_path / "out"
    ran = omni("transcribe", path, "-o", out, "--quiet")
    case = settled(out, ran, None, count=2, code=3)
    assert case.failed("third") == "missing_file"
    assert case["exact"]["status"] == "ok"


@pytest.mark.case("MA-13")
@pytest.mark.parametrize("source", ["empty.jsonl", "blank.jsonl", "folder", "other-files"])
def test_an_empty_source_is_no_error_unless_it_must_be(omni, tmp_path, source):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n \n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "other-files").mkdir()
    (tmp_path / "other-files" / "notes.txt").write_text("none")
    ran = omni("transcribe", tmp_path / source, "-o", tmp_path / "out")
    assert ran.code == 0
    assert "0 items" in ran.err
    ran = omni("transcribe", tmp_path / source, "-o", tmp_path / "out", "--quiet")
    settled(tmp_path / "out", ran, None, count=0, code=0)
    args = ("transcribe", tmp_path / source, "-o", tmp_path / "out", "--fail-if-empty")
    ran = omni(*args, "--quiet")
    assert ran.code == 2
    assert "0 items" in ran.err


@pytest.mark.case("MA-13")
@pytest.mark.parametrize("source", ["nowhere", "nowhere.jsonl", "*.wav", "nowhere/**/*.flac"])
def test_what_is_not_there_is_an_error(omni, tmp_path, source):
    ran = omni("transcribe", source, "-o", tmp_path / "out", cwd=tmp_path)
    assert ran.code == 2
    assert source in ran.err
    assert not os.listdir(tmp_path)  # noqa: PTH208 - names are enough


@pytest.mark.case("MA-09")
def test_from_stdin_in_its_order(omni, base, tmp_path):
    put_base(base, tmp_path)
    paths = [f"base/{name}.flac" for name in ("yes-please", "tail", "empty")]
    out = tmp_path / "out"
    ran = omni("transcribe", "-", "-o", out, "-q", cwd=tmp_path, stdin="\n".join(paths))
    assert list(settled(out, ran, None, count=3, code=0).lines) == paths
