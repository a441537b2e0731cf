"""Many files, and long ones."""

import json
import resource
import struct
from contextlib import contextmanager

import numpy as np
import pytest
from case_process import finished
from case_run import Ran, check, events, settled, words
from case_sounds import speech

MANY = 700
OPEN_FILES = 256
LONG_S = 3700
LONG_HZ = 8000
RSS_BYTES = 1_400_000_000


@contextmanager
def few_open_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.case("SC-01")
def test_many_small_files_and_few_handles(omni, solo, inbox, out):
    """More than handles: the report's number is larger, and no other to a handle."""
    size = 400
    head = b"RIFF" + struct.pack("<I", 36 + 2 * size) + b"WAVEfmt "
    head += struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16_000, 2, 16)
    raw = head + b"data" + struct.pack("<I", 2 * size) + bytes(2 * size)
    (inbox / "many").mkdir()
    for n in range(MANY):
        (inbox / "many" / f"{n:05d}.wav").write_bytes(raw)
    with few_open_files():
        args = ("transcribe", inbox, "-o", out, "-f", "json")
        case = check(omni, None, *args, count=MANY + 8, code=0)
    for name, line in solo.lines.items():
        assert case[name]["segments"] == line["segments"]
    assert {case[f"many/{n:05d}.wav"]["status"] for n in range(MANY)} == {"empty"}


@pytest.mark.case("SC-03")
@pytest.mark.case("AS-09")
def test_an_hour_is_streamed_and_both_ends_are_heard(process, solo, inbox, tmp_path):
    """A tone with words at both ends; long recordings wait on disk, and nothing of it is left."""
    first, last = (s[::2] for s in (speech("train-question", 0.9), speech("yes-please")))
    t = np.arange(LONG_HZ * 60) / LONG_HZ
    minute = (0.02 * np.sin(2 * np.pi * 200 * t) * 32767).astype("<i2").tobytes()
    path, count = inbox / "long.wav", LONG_S * LONG_HZ
    with path.open("wb") as file:
        file.write(b"RIFF" + struct.pack("<I", 36 + 2 * count) + b"WAVEfmt ")
        file.write(struct.pack("<IHHIIHH", 16, 1, 1, LONG_HZ, 2 * LONG_HZ, 2, 16))
        file.write(b"data" + struct.pack("<I", 2 * count))
        file.write((first * 32767).astype("<i2").tobytes())
        left = count - len(first) - len(last)
        while left:
            part = minute[: 2 * left]
            file.write(part)
            left -= len(part) // 2
        file.write((last * 32767).astype("<i2").tobytes())
    out = tmp_path / "out"
    args = ("transcribe", inbox, "-o", out, "-q", "-f", "all")
    code, told, err = finished(process(*args, OMP_WAIT_POLICY="PASSIVE"), 300)
    case = settled(out, Ran(code, told, err), solo, count=9, code=0)
    line = case["long.wav"]
    assert line["duration"] == LONG_S
    assert "does the train" in words(line["segments"][0]["text"])
    assert "yes please" in words(line["segments"][-1]["text"])
    assert LONG_S - 3 < line["segments"][-1]["start"] < line["segments"][-1]["end"] <= LONG_S
    assert "01:01:3" in (out / "long.srt").read_text()
    peaks = [e["peak_rss_bytes"] for e in events(out, "batch")]
    assert max(peaks) < RSS_BYTES
    summary = next((out / ".omni" / "runs").glob("*/summary.json"))
    assert LONG_S < json.loads(summary.read_text())["audio_s"] < LONG_S + 20
