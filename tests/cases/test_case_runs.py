"""A run's life: exit codes, kills, signals, a full disk, locks, what lies there already."""

import json
import os
import resource
import shutil
import signal
import threading
import time
from contextlib import contextmanager

import pytest
from case_process import finished, until
from case_run import Case, check, events, put_base, read_lines, results, same_base, settled
from case_sounds import DEMO

KILLS = 2
TEXTS = [f"The {n} bus leaves from the main square at noon and comes back later." for n in range(6)]


@pytest.fixture
def texts(tmp_path):
    """Lines to say."""
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def whole(out):
    """No file under a final name is half written."""
    for path in out.rglob("*.wav"):
        raw = path.read_bytes()
        assert int.from_bytes(raw[4:8], "little") == len(raw) - 8, path
    if (out / "results.jsonl").exists():
        read_lines(out / "results.jsonl")


# -- exit codes


@pytest.mark.case("RU-01")
@pytest.mark.parametrize("bad", [1, 5])
def test_a_failed_file_is_an_exit_code_and_a_name(omni, tmp_path, bad):
    folder = tmp_path / "in"
    folder.mkdir()
    for n in range(5):
        shutil.copy(DEMO / "yes-please.flac", folder / f"{n}.flac")
    for n in range(bad):
        (folder / f"{n}.flac").write_text("no sound")
    case = check(omni, None, "transcribe", folder, "-o", tmp_path / "out", count=5, code=3)
    assert f"{bad} failed" in case.ran.err
    for n in range(bad):
        assert f"failed: {n}.flac: not_audio" in case.ran.err
    assert sum(line["status"] == "ok" for line in case.lines.values()) == 5 - bad


@pytest.mark.case("RU-01")
def test_the_code_is_zero_only_by_choice(omni, solo, inbox, out):
    (inbox / "bad.wav").write_text("no sound")
    case = check(omni, solo, "transcribe", inbox, "-o", out, count=9, code=3)
    assert case.failed("bad.wav") == "not_audio"
    assert omni("transcribe", inbox, "-o", out, "-q", "--exit-zero-on-partial").code == 0
    assert omni("transcribe", inbox, "-o", out, "-q", "--retry-failed").code == 3
    shutil.copy(DEMO / "yes-please.flac", inbox / "bad.wav")
    ran = omni("transcribe", inbox, "-o", out, "-q")
    assert settled(out, ran, solo, count=9, code=0).text("bad.wav") == "yes please"
    assert not (out / "errors.jsonl").exists() or not read_lines(out / "errors.jsonl")


# -- kills and signals


@pytest.mark.case("RU-03")
@pytest.mark.case("RU-09")
def test_killed_at_any_time_and_run_again_is_as_run_once(omni, process, texts, tmp_path):
    """Locks of the dead are in nobody's way; the last run is clean."""
    clean, out = tmp_path / "clean", tmp_path / "out"
    assert omni("say", texts, "-o", clean, "-q").code == 0
    for n in range(KILLS):
        runs = len(events(out, "run"))
        started = process("say", texts, "-o", out, "--batch-size", "1", "-q")
        until(lambda runs=runs: len(events(out, "run")) > runs)
        time.sleep(0.2 + 0.9 * n)
        started.send_signal(signal.SIGKILL)
        finished(started)
        whole(out)
    assert (out / ".omni" / "lock").exists()
    ran = omni("say", texts, "-o", out, "-q")
    assert ran.code == 0, ran.err
    solo = Case(ran, clean, results(clean))
    same_base(settled(out, ran, solo, count=6, code=0), solo)


@pytest.mark.case("RU-09")
@pytest.mark.parametrize("content", ["", "99999999", '{"pid": 1, "host": "elsewhere"}', "\0\xff"])
def test_a_lock_file_that_nobody_holds_is_no_lock(omni, tmp_path, content):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.wav").write_text("no sound")
    args = ("transcribe", tmp_path / "in", "-o", tmp_path / "out", "-q")
    assert omni(*args).code == 3
    (tmp_path / "out" / ".omni" / "lock").write_text(content, encoding="latin-1")
    assert omni(*args).code == 3


@contextmanager
def soon(act, condition):
    """Act from another thread when the condition holds."""
    done = threading.Event()

    def wait():
        while not done.is_set() and not condition():
            time.sleep(0.005)
        if not done.is_set():
            act()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.case("RU-05")
def test_asked_once_it_ends_in_order_and_goes_on_next_time(omni, solo, alone, out):
    args = ("transcribe", alone, "-o", out, "-q", "--batch-size", "2")
    ran = interrupted(omni, args, signal.SIGINT, "encode")
    assert ran.code == 130
    assert len(read_lines(out / "results.jsonl")) <= 8
    assert not list(out.rglob("*.part"))
    ran = omni(*args)
    settled(out, ran, solo, count=8, code=0)


@pytest.mark.case("RU-05")
def test_what_is_spoken_when_it_is_asked_to_end_is_kept(omni, texts, out):
    args = ("say", texts, "-o", out, "-q", "--batch-size", "1")
    assert interrupted(omni, args, signal.SIGTERM, "vocode").code == 143
    kept = read_lines(out / "results.jsonl")
    assert 0 < len(kept) < 6
    assert {line["status"] for line in kept} == {"ok"}
    whole(out)
    settled(out, omni(*args), None, count=6, code=0)


def interrupted(omni, args, number, stage):
    """A signal after the first batch of a stage."""
    out = args[args.index("-o") + 1]
    with soon(lambda: os.kill(os.getpid(), number), lambda: has_done(out, stage)):
        return omni(*args)


def has_done(out, stage):
    """Whether a batch of a stage is done; the last line may be half written."""
    path = out / ".omni" / "events.jsonl"
    seen = path.read_text().splitlines() if path.exists() else []
    return any(f'"stage": "{stage}"' in line and '"event": "batch"' in line for line in seen)


@pytest.mark.case("RU-05")
def test_asked_twice_it_ends_at_once(process, base, tmp_path):
    put_base(base, tmp_path / "in")
    out = tmp_path / "out"
    faults = {"OMNI_TEST_FAULTS": "encode:*:hang"}
    started = process("transcribe", tmp_path / "in", "-o", out, "-q", **faults)
    until(lambda: any(e["stage"] == "encode" for e in events(out, "stage")))
    time.sleep(0.2)
    started.send_signal(signal.SIGINT)
    time.sleep(0.2)
    started.send_signal(signal.SIGINT)
    code, _, err = finished(started, within_s=5)
    assert (code, "Traceback" in err) == (130, False)


# -- disks


@contextmanager
def file_limit(size_bytes):
    """Files cannot grow beyond; writing more is an error, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.case("RU-07")
@pytest.mark.parametrize(("kib", "codes"), [(8, {1, 2}), (160, {1})])
def test_a_full_disk_ends_the_run_and_leaves_nothing_half_written(
    omni, texts, tmp_path, kib, codes
):
    """The smaller one is full before anything is done."""
    out = tmp_path / "out"
    with file_limit(kib << 10):
        ran = omni("say", texts, "-o", out, "-q")
    assert ran.code in codes
    assert str(out) in ran.err
    assert "Traceback" not in ran.err
    assert not list(out.rglob("*.wav"))
    assert not list(out.rglob("*.part"))
    ran = omni("say", texts, "-o", out, "-q")
    assert ran.code == 0, ran.err
    settled(out, ran, None, count=6, code=0)
    assert len(list(out.glob("*.wav"))) == 6
    whole(out)


@contextmanager
def watched(path):
    """How many lines a file has, many times a second; all of them are whole."""
    seen, problems, stop = [], [], threading.Event()

    def watch():
        while not stop.is_set():
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            *rows, rest = text.split("\n")
            problems.extend([rest] if rest else [])
            seen.append(len([json.loads(row) for row in rows]))
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
    assert not problems
    assert seen == sorted(seen)


@pytest.mark.case("RU-11")
@pytest.mark.parametrize("command", ["say", "transcribe"])
def test_lines_appear_whole_while_the_run_goes_on(omni, texts, alone, out, command):
    source, count = (texts, 6) if command == "say" else (alone, 8)
    with watched(out / "results.jsonl"):
        ran = omni(command, source, "-o", out, "-q", "--batch-size", "1")
    settled(out, ran, None, count=count, code=0)
    kinds = [row["event"] for row in read_lines(out / ".omni" / "events.jsonl")]
    last = len(kinds) - 1 - kinds[::-1].index("batch")
    assert kinds[:last].count("item") > 0, "nothing is done before the last batch is"


# -- what lies there already


@pytest.mark.case("RU-13")
def test_results_of_another_input_or_command_are_not_replaced(omni, solo, alone, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    (other / "x.wav").write_text("no sound")
    assert omni("transcribe", other, "-o", out, "-q").code == 3
    before = (out / "results.jsonl").read_bytes()
    refused = omni("transcribe", alone, "-o", out, "-q")
    assert refused.code == 2
    assert str(other) in refused.err
    assert "--overwrite" in refused.err
    refused = omni("respond", other, "-o", out, "-q")
    assert refused.code == 2
    assert "transcribe" in refused.err
    assert (out / "results.jsonl").read_bytes() == before
    args = ("transcribe", alone, "-o", out)
    case = check(omni, solo, *args, "--overwrite", again=args, count=8, code=0)
    assert "x.wav" not in case.lines


@pytest.mark.case("RU-13")
def test_results_of_other_settings_are_replaced_by_what_says_so(omni, solo, alone, out):
    args = ("transcribe", alone, "-o", out)
    assert omni(*args, "-q", "--batch-size", "4").code == 0
    assert "replace" not in omni(*args, "--batch-size", "8", "--dry-run").out, "the same results"
    asked = omni(*args, "--channels", "left", "--dry-run")
    assert "8 due (8 replace results of other settings)" in asked.out
    ran = omni(*args, "--channels", "left")
    assert ran.code == 0
    assert "8 results here were made with other settings and have been replaced" in ran.err
    assert "other settings" not in omni(*args, "--channels", "left").err
    same_base(settled(out, omni(*args, "-q"), None, count=8, code=0), solo)


@pytest.mark.case("RU-13")
def test_a_file_of_somebody_else_is_not_replaced_by_speech(omni, texts, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "line-000001.wav").write_bytes(b"somebody's own")
    assert omni("say", texts, "-o", out, "-q").code == 0
    assert (out / "line-000001.wav").read_bytes() == b"somebody's own"
    assert results(out)["line-000001"]["audio_out"] != "line-000001.wav"
