"""`--schedule overlap`: the same results as one stage after the other, whatever happens."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "manifests" / "demo"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two short recordings."""
    folder = tmp_path_factory.mktemp("overlap") / "in"
    folder.mkdir()
    shutil.copy(DEMO / "yes-please.flac", folder / "a.flac")
    shutil.copy(DEMO / "dentist-moved.flac", folder / "b.flac")
    return folder


@pytest.fixture(scope="module")
def command(model_cache, small):
    """`omni respond` on them in a process of its own; its exit code."""

    def run(out, *more, **environment):
        env = {"PATH": os.environ["PATH"], "OMNI_CACHE": str(model_cache)} | environment
        args = [sys.executable, "-m", "omnicli", "respond", small, "-o", out, *more]
        return subprocess.run(args, env=env, capture_output=True, check=False, timeout=300)

    return run


@pytest.fixture(scope="module")
def expected(command, small):
    """What one stage after the other makes of them."""
    out = small.parent / "stages"
    ran = command(out, "--schedule", "stages")
    assert ran.returncode == 0, ran.stderr
    return results(out)


def results(out):
    """The lines without what differs from run to run, and the sound."""
    lines = [json.loads(text) for text in (out / "results.jsonl").read_text().splitlines()]
    for line in lines:
        assert line.pop("timings")
        assert line.pop("run_id")
    return lines, {path.name: path.read_bytes() for path in sorted(out.rglob("*.wav"))}


def events(out, kind):
    lines = (out / ".omni" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_results_are_those_of_stages(omni, expected, small, tmp_path):
    out, trace = tmp_path / "out", tmp_path / "trace.json"
    ran = omni("respond", small, "-o", out, "--schedule", "overlap", "--trace-file", trace)
    assert ran.code == 0, ran.err
    assert results(out) == expected
    assert len(expected[1]) == 2
    assert {"listen", "encode", "talk", "vocode"} <= {e["stage"] for e in events(out, "worker")}
    waits = [row for row in json.loads(trace.read_text()) if row["name"] == "queue talk"]
    assert waits[-1]["args"] == {"items": 0}


def test_a_run_that_was_killed_goes_on(command, expected, omni, small, tmp_path):
    out = tmp_path / "out"
    faults = {"OMNI_TEST_FAULTS": "talk:b.flac:exit"}
    assert command(out, "--schedule", "overlap", **faults).returncode == -signal.SIGKILL
    assert len(events(out, "end")) == 0
    ran = omni("respond", small, "-o", out, "--schedule", "overlap")
    assert ran.code == 0, ran.err
    assert results(out) == expected


def test_a_fault_harms_its_item_only(expected, monkeypatch, omni, small, tmp_path):
    out = tmp_path / "out"
    monkeypatch.setenv("OMNI_TEST_FAULTS", "vocode:a.flac:raise")
    assert omni("respond", small, "-o", out, "--schedule", "overlap").code == 3
    (a, b), sound = results(out)
    assert (a["status"], a["error"]["stage"]) == ("failed", "vocode")
    assert b == expected[0][1]
    assert sound == {"b.wav": expected[1]["b.wav"]}


def test_schedules_have_names(omni, small, tmp_path):
    ran = omni("respond", small, "-o", tmp_path / "out", "--schedule", "overlaps")
    assert (ran.code, "did you mean overlap?" in ran.err) == (2, True)
