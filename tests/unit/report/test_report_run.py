"""What a run tells: totals, metrics, timeline, log, pings."""

import gzip
import json
import os
import stat
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omnicli.errors import UserError
from omnicli.observe import Observer
from omnicli.report import metrics
from omnicli.report.log import logging_to
from omnicli.report.ping import Ping
from omnicli.report.summary import RunSummary, Totals
from omnicli.report.trace import tracing_to


def a_run(*listeners):
    """The events of a small run."""
    with Observer(None, listeners) as observer:
        observer.emit("run", run_id="r1", command="respond", items=3, device="cpu")
        observer.emit("stage", stage="talk", items=3, audio_s=10.0)
        batch = {"stage": "talk", "items": 2, "valid": 60, "padded": 80, "audio_s": 8.0}
        with observer.span("batch", **batch) as event:
            event["peak_rss_bytes"] = 1000
        with observer.span("batch", **batch) as event:
            event |= {"error": "MemoryError", "oom": True}
        observer.emit(
            "item", id="a b\n\x1b[31m", status="ok", warnings="clipped,runaway", audio_s=4.0
        )
        observer.emit("item", id="c", status="failed", code="oom", stage="talk", audio_s=0.0)
        observer.emit("item", id="d", status="empty", audio_s=6.0)
        observer.emit("end", run_id="r1", exit_code=3, wall_s=2.5)


def summary_of(totals, exit_code=3, ended="2026-01-02T03:04:05+00:00"):
    return RunSummary(
        run_id="r1",
        command="respond",
        output_dir=Path("/out"),
        started="2026-01-02T03:04:00+00:00",
        ended=ended,
        wall_s=5.0,
        exit_code=exit_code,
        counts={"ok": 1, "failed": 1, "empty": 1},
        worked_on=3,
        audio_s=totals.audio_s,
        spoken_s=1.5,
        failures=(("c", "oom", "too big"),),
        totals=totals,
        versions={"omni": "0.1", "torch": "2"},
    )


@pytest.fixture
def summary():
    totals = Totals()
    a_run(totals)
    return summary_of(totals)


def test_totals_count_what_was_done(summary):
    stage = summary.totals.stages["talk"]
    assert (stage.items, stage.batches, stage.failed_batches, stage.oom_retries) == (2, 2, 1, 1)
    assert stage.padding == 0.25
    assert summary.totals.failures == {("oom", "talk"): 1}
    row = json.loads(summary.to_json())
    assert row["counts"] == {"ok": 1, "failed": 1, "empty": 1}
    assert row["stages"]["talk"]["padding"] == 0.25
    assert row["failures"] == [{"id": "c", "code": "oom", "message": "too big"}]


# -- metrics


def samples(text):
    return {
        (s.name, *sorted((k, v) for k, v in s.labels.items() if k != "job")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_metrics_have_the_figures_of_the_run(tmp_path, summary):
    path = tmp_path / "omni.prom"
    metrics.write(path, summary, job="nightly")
    text = path.read_text()
    assert text.endswith("\n")
    assert 'job="nightly"' in text
    found = samples(text)
    assert found["omni_run_items", ("status", "failed")] == 1
    assert found["omni_run_failures", ("code", "oom"), ("stage", "talk")] == 1
    assert found["omni_run_flagged_items", ("flag", "clipped")] == 1
    assert found["omni_run_flagged_items", ("flag", "runaway")] == 1
    assert found["omni_run_padding_ratio", ("stage", "talk")] == 0.25
    assert found["omni_run_empty_ratio",] == pytest.approx(1 / 3)
    assert ("omni_last_success_timestamp_seconds",) not in found
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["omni.prom"]


def test_the_last_success_survives_a_failed_run(tmp_path, summary):
    path = tmp_path / "omni.prom"
    good = summary_of(summary.totals, exit_code=0)
    metrics.write(path, good, job="a")
    success = samples(path.read_text())["omni_last_success_timestamp_seconds",]
    for code in (1, 3, 143):
        later = summary_of(summary.totals, exit_code=code, ended="2026-01-03T00:00:00+00:00")
        metrics.write(path, later, job="a")
        found = samples(path.read_text())
        assert found["omni_last_success_timestamp_seconds",] == success
        assert found["omni_last_run_timestamp_seconds",] > success
        assert found["omni_last_run_exit_code",] == code


def test_a_damaged_file_before_is_no_obstacle(tmp_path, summary):
    path = tmp_path / "omni.prom"
    path.write_bytes(b"\xff{{{ omni_last_success_timestamp_seconds{job= 3\n")
    metrics.write(path, summary, job="a")
    assert samples(path.read_text())


def test_a_name_that_nobody_reads_is_refused(tmp_path):
    with pytest.raises(UserError, match="would not be read"):
        metrics.check_path(tmp_path / "omni.txt")
    with pytest.raises(UserError, match="folder"):
        metrics.check_path(tmp_path / "nowhere" / "omni.prom")


# -- timeline


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_timeline_has_a_track_per_stage(tmp_path, name):
    path = tmp_path / name
    with tracing_to(path) as listen:
        a_run(listen)
    raw = path.read_bytes()
    rows = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)
    tracks = [r["args"]["name"] for r in rows if r["ph"] == "M"]
    assert tracks == ["talk"]
    slices = [r for r in rows if r["ph"] == "X"]
    assert len(slices) == 2
    assert slices[0]["args"]["waste"] == 0.25
    assert {r["name"] for r in rows if r["ph"] == "C"} == {"memory", "queue talk"}
    assert "a b" not in json.dumps(rows)


def test_the_timeline_of_a_killed_run_can_be_read(tmp_path):
    path = tmp_path / "t.json"
    context = tracing_to(path)
    a_run(context.__enter__())
    assert json.loads(path.read_text() + "\n]")
    context.__exit__(None, None, None)


# -- log


def test_the_log_is_a_line_per_record(tmp_path):
    path = tmp_path / "logs" / "omni.log"
    for _ in range(2):
        with logging_to(path, form="text", level="debug") as listen:
            a_run(listen)
    lines = path.read_text().splitlines()
    assert len(lines) == 16
    assert all(line[10] == "T" and line[23] in "+-" for line in lines)
    assert "\x1b" not in path.read_text()
    assert [line.split()[1] for line in lines[:8]] == [
        *("info", "info", "debug", "warning", "debug", "warning", "debug", "warning")
    ]
    assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0


def test_the_log_as_json(tmp_path):
    path = tmp_path / "omni.log"
    with logging_to(path, form="json", level="warning") as listen:
        a_run(listen)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["event"] for row in rows] == ["batch", "item", "end"]
    assert rows[1]["code"] == "oom"
    assert rows[2]["dur_ms"] == 2500


def test_the_log_survives_rotation(tmp_path):
    path = tmp_path / "omni.log"
    with logging_to(path, form="text", level="info") as listen:
        a_run(listen)
        path.rename(tmp_path / "omni.log.1")
        a_run(listen)
    assert len(path.read_text().splitlines()) == len(
        (tmp_path / "omni.log.1").read_text().splitlines()
    )


@pytest.mark.parametrize(
    "wrong", [{"form": "xml", "level": "info"}, {"form": "text", "level": "loud"}]
)
def test_wrong_settings_of_the_log(tmp_path, wrong):
    with pytest.raises(UserError), logging_to(tmp_path / "l", **wrong):
        pass


def test_a_log_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot write"),
        logging_to(tmp_path / "file" / "log", form="text", level="info"),
    ):
        pass


# -- pings


@pytest.fixture
def watcher():
    heard = []

    class Handler(BaseHTTPRequestHandler):
        status = 200

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            heard.append((self.path, body))
            self.send_response(Handler.status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/secret", heard, Handler
        server.shutdown()


def test_pings_at_both_ends(watcher):
    url, heard, _ = watcher
    ping = Ping(url)
    assert ping.start() == ""
    assert ping.end(3, "x" * 20_000 + "the end") == ""
    (start, _), (end, body) = heard
    assert start == f"/secret/start?rid={ping.run}"
    assert end == f"/secret/3?rid={ping.run}"
    assert len(body) == 10_000
    assert body.endswith(b"the end")


def test_a_watcher_that_is_down_changes_nothing_and_the_address_stays_secret(watcher):
    url, heard, handler = watcher
    handler.status = 500
    ping = Ping(url, pause_s=0)
    told = ping.start()
    assert "500" in told
    assert len(heard) == 3
    gone = Ping("http://127.0.0.1:1/secret", pause_s=0)
    for text in (told, gone.end(0, ""), repr(gone)):
        assert text
        assert "secret" not in text


def test_no_other_address():
    for wrong in ("file:///etc/passwd", "secret", ""):
        with pytest.raises(UserError) as refused:
            Ping(wrong)
        assert "secret" not in str(refused.value)


def test_the_doctor_names_what_is_missing(tmp_path):
    from omnicli.report.doctor import checks

    found = {check.name: check for check in checks(tmp_path / "cache", tmp_path)}
    assert found["whisper-base"].ok is False
    assert "pull" in found["whisper-base"].hint
    assert found["free space"].ok is not None
    assert found["torch"].told
    assert os.listdir(tmp_path) == []  # noqa: PTH208
