"""`omni transcribe` on real recordings."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest


def same(line):
    """What must not depend on how a run went."""
    return {k: v for k, v in line.items() if k not in ("timings", "run_id")}


def events(out):
    return [json.loads(x) for x in (out / ".omni" / "events.jsonl").read_text().splitlines()]


def batches(out):
    return [e for e in events(out) if e["event"] == "batch"]


def test_a_folder_gives_a_tree_of_files(omni, inbox, read, tmp_path):
    out = tmp_path / "out"
    ran = omni("transcribe", inbox, "-o", out, "-f", "all", "--json")
    assert ran.code == 0, ran.err
    lines = read(out)
    assert list(lines) == ["delivery.flac", "sub/appointment.flac", "yes.flac"]
    assert all(line["status"] == "ok" for line in lines.values())
    assert "please" in lines["yes.flac"]["pred_text"].lower()
    for ending in ("txt", "json", "srt", "vtt", "tsv"):
        assert (out / "sub" / f"appointment.{ending}").stat().st_size > 0
    summary = json.loads(ran.out)
    assert summary["counts"] == {"ok": 3}
    assert "\r" not in ran.err
    assert "\x1b" not in ran.err
    segments = lines["delivery.flac"]["segments"]
    duration = lines["delivery.flac"]["duration"]
    assert all(0 <= s["start"] < s["end"] <= duration for s in segments)


def test_quiet_says_nothing(omni, inbox, tmp_path):
    ran = omni("transcribe", inbox / "yes.flac", "-o", tmp_path / "out", "--quiet")
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_bad_files_harm_only_themselves(omni, inbox, read, tmp_path):
    alone = tmp_path / "alone"
    assert omni("transcribe", inbox, "-o", alone).code == 0

    (inbox / "notes.wav").write_text("Dear diary,\n" * 50)
    (inbox / "zero.wav").touch()
    good = (inbox / "yes.flac").read_bytes()
    (inbox / "cut.flac").write_bytes(good[:20])
    out = tmp_path / "out"
    ran = omni("transcribe", inbox, "-o", out)

    assert ran.code == 3
    lines = read(out)
    assert len(lines) == 6
    codes = {name: line["error"]["code"] for name, line in lines.items() if line["error"]}
    assert codes["notes.wav"] == "not_audio"
    assert codes["zero.wav"] == "empty_file"
    assert "cut.flac" in codes
    for name, line in read(alone).items():
        assert same(lines[name]) | {"index": 0} == same(line) | {"index": 0}
    assert "3 failed" in ran.err


def test_a_second_run_does_nothing_twice_and_failures_stand(omni, inbox, read, tmp_path):
    out = tmp_path / "out"
    (inbox / "notes.wav").write_text("no audio at all")
    assert omni("transcribe", inbox, "-o", out).code == 3
    first = (out / "results.jsonl").read_bytes()
    done = len(batches(out))

    assert omni("transcribe", inbox, "-o", out).code == 3
    assert (out / "results.jsonl").read_bytes() == first
    assert len(batches(out)) == done

    ran = omni("transcribe", inbox, "-o", out, "--retry-failed")
    assert ran.code == 3
    assert "1 worked on" in ran.err

    shutil.copy(inbox / "yes.flac", inbox / "notes.wav")
    assert omni("transcribe", inbox, "-o", out).code == 0
    assert "please" in read(out)["notes.wav"]["pred_text"].lower()


def test_a_line_whose_file_is_missing_is_a_failed_item(omni, inbox, read, tmp_path):
    rows = [
        {"audio_filepath": "yes.flac", "text": "Yes, please.", "caller": {"name": "Ann"}},
        {"audio_filepath": "gone.wav", "id": "gone"},
        {"audio_filepath": "delivery.flac", "offset": 0.5, "duration": 2},
        {"audio_filepath": "delivery.flac", "offset": 2.5, "duration": 2},
    ]
    manifest = inbox / "m.jsonl"
    manifest.write_text("\n".join(json.dumps(r) for r in rows))
    out = tmp_path / "out"
    ran = omni("transcribe", manifest, "-o", out)
    assert ran.code == 3
    lines = read(out)
    assert [line["index"] for line in lines.values()] == [0, 1, 2, 3]
    assert lines["gone"]["error"]["code"] == "missing_file"
    assert lines["yes.flac"]["caller"] == {"name": "Ann"}
    assert lines["yes.flac"]["text"] == "Yes, please."
    parts = [line for name, line in lines.items() if "#" in name]
    assert [p["duration"] for p in parts] == [2.0, 2.0]
    assert parts[0]["pred_text"] != parts[1]["pred_text"]


def test_silence_is_empty_and_nothing_is_invented(omni, read, tmp_path):
    import soundfile

    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "in" / "zeros.wav", [0.0] * 80_000, 16_000)
    soundfile.write(tmp_path / "in" / "one.wav", [0.0], 16_000)
    out = tmp_path / "out"
    assert omni("transcribe", tmp_path / "in", "-o", out).code == 0
    for line in read(out).values():
        assert (line["status"], line["pred_text"], line["segments"]) == ("empty", "", [])


def test_an_interrupted_run_goes_on_to_the_same_result(omni, inbox, read, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert omni("transcribe", inbox, "-o", whole).code == 0

    from omnicli import job
    from omnicli.errors import StoppedError

    real, checks = job.run_job, []

    def stopped(config, host):
        def after_four():
            checks.append(1)
            if len(checks) > 4:
                raise StoppedError(signal.SIGTERM)

        return real(config, replace(host, check=after_four))

    monkeypatch.setattr(job, "run_job", stopped)
    ran = omni("transcribe", inbox, "-o", out)
    assert ran.code == 143
    monkeypatch.setattr(job, "run_job", real)
    assert omni("transcribe", inbox, "-o", out).code == 0
    assert {n: same(x) for n, x in read(out).items()} == {
        n: same(x) for n, x in read(whole).items()
    }
    for path in whole.rglob("*.txt"):
        assert path.read_bytes() == (out / path.relative_to(whole)).read_bytes()


@pytest.mark.parametrize("after", [1, 3])
def test_a_killed_run_goes_on_to_the_same_result(omni, inbox, read, tmp_path, after, model_cache):
    """kill -9 as soon as so many batches are done."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert omni("transcribe", inbox, "-o", whole).code == 0
    environment = os.environ | {"OMNI_CACHE": str(model_cache)}
    command = [sys.executable, "-m", "omnicli", "transcribe", str(inbox), "-o", str(out)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        log = out / ".omni" / "events.jsonl"
        while process.poll() is None and (not log.exists() or len(batches_so_far(log)) < after):
            time.sleep(0.01)
        process.kill()
    assert omni("transcribe", inbox, "-o", out).code == 0
    assert {n: same(x) for n, x in read(out).items()} == {
        n: same(x) for n, x in read(whole).items()
    }
    assert not [p for p in out.rglob("*") if p.name.endswith(".part")]


def batches_so_far(log):
    return [line for line in log.read_text().splitlines() if '"batch"' in line]
