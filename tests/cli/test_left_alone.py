"""Runs that nobody watches: what stops them, what they leave, what the next one makes of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import soundfile

DEMO = Path(__file__).parents[2] / "manifests" / "demo"


@pytest.fixture
def small(tmp_path):
    """Two short recordings."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a", "b"):
        shutil.copy(DEMO / "yes-please.flac", folder / f"{name}.flac")
    return folder


@pytest.fixture
def bad(tmp_path):
    """Four files that are no recordings."""
    folder = tmp_path / "bad"
    folder.mkdir()
    for n in range(4):
        (folder / f"{n}.wav").write_text("no sound")
    return folder


@pytest.fixture
def process(model_cache, tmp_path):
    """A command in a process of its own, in an empty environment but for what is given."""
    started = []

    def start(*args, **environment):
        env = {"PATH": os.environ["PATH"], "OMNI_CACHE": str(model_cache)} | environment
        command = [sys.executable, "-m", "omnicli", *map(str, args)]
        ran = subprocess.Popen(
            command,
            env=env,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(ran)
        return ran

    yield start
    for one in started:
        one.kill()
        one.communicate()


def finished(ran):
    out, err = ran.communicate(timeout=300)
    return ran.returncode, out, err


def events(out):
    path = out / ".omni" / "events.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def until(condition, seconds=120):
    end = time.time() + seconds
    while not condition() and time.time() < end:
        time.sleep(0.02)
    assert condition()


# -- crashes and hangs


def test_what_kills_the_process_fails_after_three_and_the_others_are_done(
    omni, process, read, small, tmp_path
):
    out = tmp_path / "out"
    faults = {"OMNI_TEST_FAULTS": "encode:b.flac:exit"}
    for _ in range(3):
        code, _, _ = finished(process("transcribe", small, "-o", out, **faults))
        assert code == -signal.SIGKILL
    ran = omni("transcribe", small, "-o", out)
    assert ran.code == 3
    lines = read(out)
    assert lines["a.flac"]["status"] == "ok"
    assert lines["b.flac"]["error"]["code"] == "crash"
    assert lines["b.flac"]["error"]["stage"] == "encode"
    assert omni("transcribe", small, "-o", out, "--retry-failed").code == 0
    assert read(out)["b.flac"]["pred_text"] == lines["a.flac"]["pred_text"]


def test_what_hangs_is_told_and_tried_last_and_alone(process, read, small, tmp_path):
    out = tmp_path / "out"
    faults = {"OMNI_TEST_FAULTS": "encode:a.flac:hang"}
    code, stdout, err = finished(
        process("transcribe", small, "-o", out, "--patience", "1", **faults)
    )
    assert (code, stdout) == (1, "")
    assert "encode made no progress" in err
    assert "a.flac" in err
    assert [e["ids"] for e in events(out) if e["event"] == "stalled"] == ["a.flac,b.flac"]
    code, _, _ = finished(process("transcribe", small, "-o", out))
    assert code == 0
    encoded = [e["items"] for e in events(out) if e["event"] == "batch" and e["stage"] == "encode"]
    assert encoded[-2:] == [1, 1]
    assert {line["status"] for line in read(out).values()} == {"ok"}


def test_two_signals_end_it_at_once_and_nobody_is_blamed(process, small, tmp_path):
    out = tmp_path / "out"
    ran = process("transcribe", small, "-o", out, OMNI_TEST_FAULTS="encode:a.flac:hang")
    until(lambda: any(e["event"] == "stage" and e["stage"] == "encode" for e in events(out)))
    time.sleep(0.3)
    ran.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert ran.poll() is None, "the batch in hand is finished first"
    ran.send_signal(signal.SIGINT)
    assert finished(ran)[0] == 130
    assert finished(process("transcribe", small, "-o", out))[0] == 0
    assert [e["items"] for e in events(out) if e["event"] == "batch"][-2:] == [2, 2]


# -- when a run ends before its input


@pytest.mark.parametrize("option", ["--fail-fast", "--max-failures=2", "--max-failures=50%"])
def test_too_many_failures_end_the_run(omni, bad, read, small, tmp_path, option):
    shutil.copytree(small, bad / "later")
    out = tmp_path / "out"
    ran = omni("transcribe", bad, "-o", out, option)
    assert ran.code == 1
    assert "4 recordings failed: that is the limit" in ran.err
    assert set(read(out)) == {f"{n}.wav" for n in range(4)}
    assert omni("transcribe", bad, "-o", out).code == 3
    assert read(out)["later/a.flac"]["status"] == "ok"


def test_when_the_time_is_up_the_rest_waits(omni, read, small, tmp_path):
    out = tmp_path / "out"
    ran = omni("transcribe", small, "-o", out, "--max-runtime", "0s", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["counts"] == {"deferred": 2}
    assert {line["status"] for line in read(out).values()} == {"deferred"}
    assert omni("transcribe", small, "-o", out).code == 0
    assert {line["status"] for line in read(out).values()} == {"ok"}


def test_files_that_may_still_be_arriving_wait(omni, read, small, tmp_path):
    out = tmp_path / "out"
    os.utime(small / "a.flac", (1, 1))
    assert omni("transcribe", small, "-o", out, "--min-age", "1h").code == 0
    lines = read(out)
    assert (lines["a.flac"]["status"], lines["b.flac"]["status"]) == ("ok", "deferred")
    assert omni("transcribe", small, "-o", out).code == 0
    assert read(out)["b.flac"]["status"] == "ok"


# -- exit codes by choice


def test_exit_codes_by_choice(omni, bad, tmp_path):
    from omnicli.io.store import RunStore

    out, empty = tmp_path / "out", tmp_path / "empty"
    empty.mkdir()
    assert omni("transcribe", bad, "-o", out).code == 3
    assert omni("transcribe", bad, "-o", out, "--exit-zero-on-partial").code == 0
    assert omni("transcribe", empty, "-o", tmp_path / "none").code == 0
    ran = omni("transcribe", empty, "-o", tmp_path / "none", "--fail-if-empty")
    assert (ran.code, "0 items" in ran.err) == (2, True)
    with RunStore(out, "transcribe"):
        assert omni("transcribe", bad, "-o", out).code == 75
        ran = omni("transcribe", bad, "-o", out, "--lock-busy-exit", "0")
        assert (ran.code, ran.err) == (0, "")


def test_a_damaged_recording_fails_if_it_must(omni, read, small, tmp_path):
    samples, rate_hz = soundfile.read(DEMO / "yes-please.flac")
    soundfile.write(small / "c.wav", samples, rate_hz)
    whole = (small / "c.wav").read_bytes()
    (small / "c.wav").write_bytes(whole[: len(whole) // 2])
    assert omni("transcribe", small, "-o", tmp_path / "out").code == 0
    assert read(tmp_path / "out")["c.wav"]["warnings"][0].startswith("truncated_input")
    assert omni("transcribe", small, "-o", tmp_path / "strict", "--strict").code == 3
    assert read(tmp_path / "strict")["c.wav"]["error"]["code"] == "truncated_input"
    assert read(tmp_path / "strict")["a.flac"]["status"] == "ok"


# -- another input


def test_a_folder_of_another_input_is_refused(omni, bad, small, tmp_path):
    out = tmp_path / "out"
    assert omni("transcribe", bad, "-o", out).code == 3
    before = (out / "results.jsonl").read_bytes()
    ran = omni("transcribe", small, "-o", out)
    assert (ran.code, str(bad) in ran.err, "--overwrite" in ran.err) == (2, True, True)
    assert (out / "results.jsonl").read_bytes() == before
    again = omni("transcribe", out / "errors.jsonl", "-o", out)
    assert again.code == 3, again.err


# -- what is told


def test_in_an_empty_environment_silently(process, small, tmp_path):
    """As cron starts it: no HOME, no LANG, no terminal."""
    ran = process("transcribe", small, "-o", tmp_path / "out", "--quiet")
    assert finished(ran) == (0, "", "")
    assert (tmp_path / "out" / "a.txt").read_text(encoding="utf-8").strip()


def test_json_is_all_that_stdout_gets_and_logs_hold_no_words(omni, read, small, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    metrics, trace = tmp_path / "omni.prom", tmp_path / "trace.json"
    ran = omni(
        *("transcribe", small, "-o", out, "--json"),
        *("--log-file", log, "--log-format", "json", "--log-level", "debug"),
        *("--metrics-file", metrics, "--trace-file", trace),
    )
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["counts"] == {"ok": 2}
    assert "\x1b" not in ran.err
    assert "\r" not in ran.err
    words = [w for w in read(out)["a.flac"]["pred_text"].split() if len(w) > 4]
    kept = (out / ".omni" / "events.jsonl").read_text() + log.read_text() + trace.read_text()
    assert not [word for word in words if word in kept]
    assert 'omni_run_items{job="omni",status="ok"} 2.0' in metrics.read_text()
    assert {"encode", "listen"} <= {
        row["args"]["name"] for row in json.loads(trace.read_text()) if row["ph"] == "M"
    }
    summary = json.loads(next((out / ".omni" / "runs").glob("*/summary.json")).read_text())
    assert summary["exit_code"] == 0
    shown = omni("status", out)
    assert (shown.code, "2 ok" in shown.out) == (0, True)
    assert omni("clean", out, "--keep-runs", "0").code == 0
    assert not list((out / ".omni" / "runs").iterdir())
    again = omni("transcribe", small, "-o", out)
    assert "nothing to do" in again.err


def test_failures_are_named_at_the_end(omni, bad, tmp_path):
    ran = omni("transcribe", bad, "-o", tmp_path / "out", "--quiet")
    assert ran.code == 3
    assert "failed: 0.wav: not_audio" in ran.err
    assert "4 failed" in ran.err.splitlines()[-1]
    assert "errors.jsonl" in ran.err.splitlines()[-1]
    assert omni("status", tmp_path / "out").code == 3


def test_what_libraries_print_reaches_nobody(tmp_path):
    code = (
        "import os, sys\nfrom omnicli.cli.streams import guarded\n"
        "with guarded() as talk:\n"
        "    os.write(1, b'banner'); os.write(2, b'note'); print('p'); sys.stderr.write('w')\n"
        "    talk.write('ours ')\n"
        "print('data'); sys.stderr.write('end')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("data\n", "ours end")
    failing = code.replace("talk.write('ours ')", "raise SystemExit(3)")
    ran = subprocess.run(
        [sys.executable, "-c", failing], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.startswith("bannernote"), "shown where something went wrong"


def test_a_writer_that_fails_on_one_result_fails_that_item(
    omni, read, small, tmp_path, monkeypatch
):
    from omnicli import plugins

    real = plugins.load("writer", "txt")

    def write(outcome, folder):
        if outcome.request.request_id == "a.flac":
            raise ValueError("what a bug says")
        return real(outcome, folder)

    monkeypatch.setattr("omnicli.io.writers.txt.write", write)
    ran = omni("transcribe", small, "-o", tmp_path / "out", "-f", "txt")
    assert ran.code == 3
    assert "what a bug says" not in ran.err, "its words might be those of a recording"
    lines = read(tmp_path / "out")
    assert (lines["a.flac"]["error"]["code"], lines["a.flac"]["error"]["stage"]) == (
        "internal",
        "output",
    )
    assert lines["b.flac"]["status"] == "ok"


def test_too_little_space_is_told_before_the_work(omni, bad, tmp_path, monkeypatch):
    monkeypatch.setattr("omnicli.machine.free_bytes", lambda path: 1000)
    ran = omni("transcribe", bad, "-o", tmp_path / "out")
    assert ran.code == 3
    assert "warning: about 0 MB are needed" in ran.err


def test_a_place_for_what_waits(omni, bad, tmp_path):
    scratch = tmp_path / "disk" / "scratch"
    assert omni("transcribe", bad, "-o", tmp_path / "out", "--scratch", scratch).code == 3
    assert list(scratch.iterdir()) == []
    (tmp_path / "file").write_text("")
    ran = omni("transcribe", bad, "-o", tmp_path / "out", "--scratch", tmp_path / "file")
    assert (ran.code, "as scratch" in ran.err) == (2, True)
