"""Anything at all as a line, a header, a name: clean errors and nothing else."""

import io
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from case_sounds import padded, speech, wav
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from omnicli.data import Recording
from omnicli.errors import RequestError, UserError
from omnicli.io import stems
from omnicli.io.audio import decode, probe
from omnicli.io.discover import read_inputs
from omnicli.io.manifest import FIELDS, BadLine, Cursor, manifest_line, read_stream, text_line
from omnicli.io.store import RunStore

QUICK = settings(
    deadline=None,
    derandomize=True,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DECODE_S = 5.0  # of a file that holds one second
MOST_SAMPLES = 10 * 60 * 16_000

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
ROWS = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), VALUES, max_size=6)
NAMED = ROWS.map(lambda row: {"audio_filepath": "x.wav"} | row)
GOOD = b'{"id": "a", "audio_filepath": "a.wav", "offset": 1.5, "duration": "3", "x": [1, {"y": 2}]}'


def entries(raw, parse=manifest_line):
    cursor = Cursor(name="m.jsonl", base="/base")
    return list(read_stream(io.BytesIO(raw), cursor, parse))


def taken(found, where):
    """Take it into a run log: all problems, and what was taken in all the same."""
    requests = [entry for entry in found if not isinstance(entry, BadLine)]
    with RunStore(where, "transcribe") as store:
        problems = list(store.ingest(requests))
        store.commit()
        return requests, problems, sum(store.counts().values())


# -- manifests


@pytest.mark.case("MA-07")
@QUICK
@given(st.lists(ROWS | NAMED, max_size=6))
@example([{"audio_filepath": "a", "id": "\ud800"}])
@example([{"audio_filepath": "\ud800"}, {"audio_filepath": "a\0b"}])
@example([{"audio_filepath": "a", "duration": 10**400, "seed": 1e300, "id": 10**400}])
def test_any_row_is_a_request_or_a_bad_line(rows):
    raw = "\n".join(json.dumps(row) for row in rows).encode()
    found = entries(raw)
    assert len(found) == len(rows)
    for entry in found:
        if isinstance(entry, BadLine):
            assert entry.what
            assert entry.where.startswith("m.jsonl:")
        else:
            assert entry.request_id.strip()
            json.dumps(entry.raw, allow_nan=False)
            entry.request_id.encode("utf-8")


@pytest.mark.case("MA-03")
@settings(QUICK, max_examples=40)
@given(st.lists(NAMED, min_size=1, max_size=6), st.booleans())
def test_ids_are_unique_or_reported(rows, twice):
    raw = "\n".join(json.dumps(row) for row in (rows * 2 if twice else rows)).encode()
    with tempfile.TemporaryDirectory() as place:
        requests, problems, kept = taken(entries(raw), Path(place))
    distinct = len({request.request_id for request in requests})
    assert kept == distinct
    assert len(problems) == len(requests) - distinct


@pytest.mark.case("MA-01")
@QUICK
@given(st.binary(max_size=60), st.integers(0, len(GOOD)), st.integers(0, len(GOOD)))
@example(b"[" * 5000, 0, 0)
@example(b"\x1f\x8b", 0, 0)
@example(b'{"a":' * 5000, 0, len(GOOD))
def test_spoilt_bytes_are_bad_lines(junk, begin, end):
    raw = GOOD[:begin] + junk + GOOD[end:]
    for parse in (manifest_line, text_line):
        for entry in entries(GOOD + b"\n" + raw + b"\n" + GOOD, parse):
            assert not isinstance(entry, BadLine) or entry.what


# -- headers


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A second of speech as a small WAV: its bytes, and a place for spoilt ones."""
    path = wav(tmp_path_factory.mktemp("fuzz") / "x.wav", padded(speech("yes-please"), 1.0))
    return path.read_bytes(), path


def decoded(path):
    """What it gives, in bounded time and size."""
    start_s = time.monotonic()
    length_s = probe(path)
    assert length_s is None or length_s >= 0
    try:
        recording = decode(path, scratch=path.parent)
    except RequestError as error:
        assert error.code
        assert str(error)
        return None
    finally:
        assert time.monotonic() - start_s < DECODE_S
    assert isinstance(recording, Recording)
    assert sum(len(track) for track in recording.tracks) < MOST_SAMPLES
    assert all(bool(track.isfinite().all()) for track in recording.tracks)
    return recording


@pytest.mark.case("IN-19")
@settings(QUICK, max_examples=250)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.binary(min_size=1, max_size=4)), max_size=4),
    st.none() | st.integers(0, 3000),
)
@example([(4, b"\xff\xff\xff\xff"), (40, b"\xff\xff\xff\xff")], None)
@example([(22, b"\xff\xff")], None)
@example([(24, b"\x00\x00\x00\x00")], None)
@example([(24, b"\xff\xff\xff\x7f")], None)
@example([(32, b"\x00\x00")], None)
@example([(16, b"\xff\xff\xff\xff")], None)
@example([(40, b"\x00\x00\x00\x80")], 44)
def test_any_header_gives_a_recording_or_an_error(small, changes, size):
    raw, path = small
    spoilt = bytearray(raw)
    for place, new in changes:
        spoilt[place : place + len(new)] = new
    path.write_bytes(bytes(spoilt[:size]))
    decoded(path)


@pytest.mark.case("IN-13")
@settings(QUICK, max_examples=100)
@given(
    st.sampled_from([b"RIFF", b"fLaC", b"OggS\0\2", b"ID3\4\0\0", b"\xff\xfb\x90", b"....ftyp"]),
    st.binary(max_size=200),
)
def test_any_beginning_gives_a_recording_or_an_error(small, head, rest):
    _, path = small
    path.write_bytes(head + rest)
    decoded(path)


# -- names

NAMES = st.lists(
    st.binary(min_size=1, max_size=60).filter(lambda n: not {0, 47} & set(n) and n.strip(b".")),
    min_size=1,
    max_size=8,
    unique=True,
)


@pytest.mark.case("FS-01")
@settings(QUICK, max_examples=80)
@given(NAMES, st.booleans())
@example(
    [b"a\xff", b"a\xfe", b"A", b"con", b"..x", b"a\nb", "e\u0301".encode(), "é".encode()], False
)
@example([b"results", b".omni2", b"x.summary", b"-rf", b"*", b"a\\b", b"C:"], True)
def test_any_name_has_a_stem_of_its_own_inside(names, nested):
    with tempfile.TemporaryDirectory() as place:
        root = os.fsencode(place) + b"/in"
        os.mkdir(root)  # noqa: PTH102 - bytes
        wanted = 0
        for name in names:
            folder = root + b"/" + name if nested else root
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - bytes
            with open(folder + b"/" + name + b".wav", "wb"):  # noqa: PTH123 - bytes
                wanted += not name.startswith(b".")
        found = list(read_inputs([f"{place}/in"], stdin=io.BytesIO()))
        assert len(found) == wanted
        assert all(entry.audio.is_file() for entry in found)
        keys = claimed(entry.request_id for entry in found)
        out = Path(place, "out").resolve()
        for stem in keys.values():
            assert (out / f"{stem}.wav").resolve().is_relative_to(out)
            (out / stem).parent.mkdir(parents=True, exist_ok=True)
            (out / f"{stem}.translation.txt").touch()
        assert len([p for p in out.rglob("*") if p.is_file()]) == wanted
        shutil.rmtree(root)


def claimed(ids):
    """Stems by their keys, all of them different."""
    keys = {}
    for name in ids:
        stem = stems.claim(name, keys.__contains__)
        assert stems.key_of(stem) not in keys
        keys[stems.key_of(stem)] = stem
    return keys


@pytest.mark.case("FS-07")
@settings(QUICK, max_examples=300)
@given(st.lists(st.text(min_size=1, max_size=400), min_size=1, max_size=6, unique=True))
@example(["../../etc/passwd", "/etc/passwd", "a/../../b", ".", "..", "//", "\ud800", "я" * 400])
def test_any_id_has_a_stem_of_its_own_inside(ids):
    for stem in claimed(ids).values():
        parts = Path(stem).parts
        assert parts
        assert not Path(stem).is_absolute()
        assert ".." not in parts
        assert all(len(part.encode()) <= 255 for part in parts)
        assert not parts[0].casefold().startswith(".omni")


@pytest.mark.case("MA-13")
@settings(QUICK, max_examples=60)
@given(st.text(max_size=20).filter(lambda text: "\0" not in text))
def test_any_input_that_is_not_there_is_a_user_error(text):
    with tempfile.TemporaryDirectory() as place, pytest.raises(UserError):
        list(read_inputs([f"{place}/none/{text}"], stdin=io.BytesIO()))
