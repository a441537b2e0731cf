"""What a run tells when the telling itself goes wrong: the run goes on, and nothing is made up."""

import errno
import json
import stat
import zlib
from pathlib import Path

import pytest

from omnicli.errors import UserError
from omnicli.observe import Observer
from omnicli.report.log import logging_to
from omnicli.report.metrics import LAST_SUCCESS, last_success_s
from omnicli.report.ping import Ping
from omnicli.report.summary import RunSummary, Totals
from omnicli.report.trace import tracing_to

FULL = Path("/dev/full")
full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


def a_run(*listeners):
    """Three items in batches of one, that take no time."""
    with Observer(None, listeners) as observer:
        observer.emit("run", run_id="r1", command="respond", items=3, device="cpu")
        observer.emit("stage", stage="talk", items=3, audio_s=3.0)
        for _ in range(3):
            with observer.span("batch", stage="talk", items=1, valid=1, padded=1, audio_s=1.0):
                pass
        observer.emit("end", run_id="r1", exit_code=0, wall_s=1.0)


# -- log


@full
def test_a_full_disk_under_the_log_does_not_end_the_run():
    told = []
    with logging_to(FULL, form="text", level="debug", tell=told.append) as listen:
        a_run(listen)
    assert told == ["the log /dev/full is not complete: No space left on device"]


def test_the_log_goes_on_when_its_folder_is_back(tmp_path):
    told = []
    path = tmp_path / "logs" / "omni.log"
    with logging_to(path, form="text", level="debug", tell=told.append) as listen:
        a_run(listen)
        path.parent.rename(tmp_path / "old")
        a_run(listen)
        assert len(told) == 1
        path.parent.mkdir()
        a_run(listen)
    assert len(told) == 1
    before = (tmp_path / "old" / "omni.log").read_text().splitlines()
    assert len(path.read_text().splitlines()) == len(before) == 6


def test_a_log_made_anew_after_rotation_is_no_more_open_than_the_first(tmp_path):
    path = tmp_path / "omni.log"
    with logging_to(path, form="text", level="info") as listen:
        a_run(listen)
        path.rename(tmp_path / "omni.log.1")
        a_run(listen)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert len(modes) == 1
    assert not modes.pop() & 0o137


def test_every_record_names_its_run(tmp_path):
    path = tmp_path / "omni.log"
    with logging_to(path, form="json", level="debug") as listen:
        a_run(listen)
    assert {json.loads(row)["run_id"] for row in path.read_text().splitlines()} == {"r1"}


# -- timeline


@full
def test_a_full_disk_under_the_timeline_does_not_end_the_run():
    told = []
    with tracing_to(FULL, told.append) as listen:
        a_run(listen)
    assert told == ["the trace /dev/full is not complete: No space left on device"]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_timeline_of_a_run_that_fails_is_whole(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(OSError, match="elsewhere"), tracing_to(path) as listen:
        a_run(listen)
        raise OSError(errno.EIO, "elsewhere")
    assert json.loads(_unpacked(path))


def test_a_packed_timeline_of_a_killed_run_can_be_read(tmp_path):
    path = tmp_path / "t.json.gz"
    context = tracing_to(path)
    a_run(context.__enter__())
    rows = json.loads(_unpacked(path) + b"]")
    context.__exit__(None, None, None)
    assert len([row for row in rows if row["ph"] == "X"]) == 3


def test_slices_of_less_than_a_millisecond_do_not_overlap(tmp_path):
    path = tmp_path / "t.json"
    with tracing_to(path) as listen:
        for begin, wall_s in (("00.000", 0.0015), ("00.001", 0.0004), ("00.002", 0.01)):
            listen(_batch(f"2026-01-02T03:04:{begin}+00:00", wall_s))
    slices = [row for row in json.loads(path.read_text()) if row["ph"] == "X"]
    begin_us = slices[0]["ts"]
    assert [(row["ts"] - begin_us, row["dur"]) for row in slices] == [
        *((0, 1500), (1500, 400), (2000, 10_000))
    ]


def test_slices_that_hold_others_stay_where_they_are(tmp_path):
    path = tmp_path / "t.json"
    with tracing_to(path) as listen:
        listen(_batch("2026-01-02T03:04:01.000+00:00", 1.0))
        listen(_batch("2026-01-02T03:04:00.000+00:00", 3.0))
    inner, outer = (row["ts"] for row in json.loads(path.read_text()) if row["ph"] == "X")
    assert inner - outer == 1_000_000


def test_the_queue_empties(tmp_path):
    path = tmp_path / "t.json"
    ts = "2026-01-02T03:04:00.000+00:00"
    with tracing_to(path) as listen:
        for _ in range(2):
            listen({"event": "stage", "ts": ts, "stage": "talk", "items": 3, "audio_s": 3.0})
            listen(_batch(ts, 0.1, items=3, error="MemoryError"))  # is tried again in halves
            listen(_batch(ts, 0.1, items=2))
            listen(_batch(ts, 0.1, error="ValueError"))  # alone: has failed
    rows = json.loads(path.read_text())
    waiting = [row["args"]["items"] for row in rows if row["name"] == "queue talk"]
    assert waiting == [3, 1, 0] * 2


def _batch(ts, wall_s, items=1, **more):
    facts = {"event": "batch", "ts": ts, "stage": "talk", "items": items, "valid": 1, "padded": 1}
    return {**facts, "audio_s": 1.0, "wall_s": wall_s, **more}


def _unpacked(path):
    raw = path.read_bytes()
    return zlib.decompressobj(31).decompress(raw) if path.suffix == ".gz" else raw


# -- metrics


def test_damage_elsewhere_does_not_hide_the_last_success():
    good = f'{LAST_SUCCESS}{{job="a b"}} 1.7e+09\n'
    assert last_success_s(f'omni_x{{job="a 1\n{LAST_SUCCESS}{{job=\n{good}{{{{', "a b") == 1.7e9
    assert last_success_s(good, "a") is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "0", "-1", "", "x"])
def test_a_last_success_that_is_no_time_is_none(value):
    assert last_success_s(f'{LAST_SUCCESS}{{job="a"}} {value}\n', "a") is None


# -- pings


@pytest.mark.parametrize(
    "wrong",
    [
        *("http://[secret", "http://secret\u2100/", "https:///secret"),
        *("http://h:secret/", "http://h:99999/secret", "ftp://secret/"),
    ],
)
def test_an_address_that_is_none_is_refused_and_not_told(wrong):
    with pytest.raises(UserError) as refused:
        Ping(wrong)
    assert "secret" not in str(refused.value)
    assert refused.value.__context__ is None


# -- summary


def test_the_summary_counts_failures_by_code_and_stage():
    totals = Totals()
    item = {"event": "item", "ts": "", "id": "a", "status": "failed", "audio_s": 0.0}
    for code, stage in (("oom", "talk"), ("undecodable", "decode"), ("oom", "talk")):
        totals({**item, "code": code, "stage": stage})
    when = {"started": "", "ended": "", "wall_s": 0.0, "exit_code": 3}
    heard = {"counts": {}, "worked_on": 3, "audio_s": 0.0, "spoken_s": 0.0, "failures": ()}
    made = RunSummary(run_id="r", command="c", output_dir=Path("o"), totals=totals, **when, **heard)
    assert json.loads(made.to_json())["failures_by_code"] == [
        {"code": "oom", "stage": "talk", "items": 2},
        {"code": "undecodable", "stage": "decode", "items": 1},
    ]
