"""A run as metrics for node_exporter's textfile collector.

Gauges, since the process starts anew each night; no label is a file or an id. The time of the last
success is carried over from the file before when a run has not succeeded (exit code 0 is success).
"""

import math
import os
from datetime import datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from omnicli.errors import UserError
from omnicli.report.summary import RunSummary, StageTotals

LAST_SUCCESS = "omni_last_success_timestamp_seconds"
FLAGS = ("repetition", "low_coverage", "runaway", "clipped")


def check_path(path: Path) -> None:
    """Raises UserError for a name that the collector would not read."""
    if path.suffix != ".prom":
        raise UserError(f"the metrics file {path} would not be read", hint="a name with .prom")
    if not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder for the metrics file {path}")


def write(path: Path, summary: RunSummary, *, job: str) -> None:
    """Replace the file in one go. Raises OSError."""
    try:
        before = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        before = ""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # the collector reads *.prom only
    try:
        with part.open("wb") as file:
            file.write(render(summary, job=job, before=before))
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o644)  # node_exporter is another user
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def render(summary: RunSummary, *, job: str, before: str = "") -> bytes:
    """The text format; `before` is the file as it was."""
    made = _Gauges(job)
    ended_s = datetime.fromisoformat(summary.ended).timestamp()
    made.set("omni_last_run_timestamp_seconds", "When the last run ended", ended_s)
    success_s = ended_s if summary.exit_code == 0 else last_success_s(before, job)
    if success_s is not None:
        made.set(LAST_SUCCESS, "When the last run ended with exit code 0", success_s)
    made.set("omni_last_run_exit_code", "Of the last run", summary.exit_code)
    made.set("omni_last_run_duration_seconds", "Of the last run", summary.wall_s)
    for status in ("ok", "empty", "deferred", "failed", "todo"):
        count = summary.counts.get(status, 0)
        made.set("omni_run_items", "Items of the input by status", count, status=status)
    for (code, where), count in sorted(summary.totals.failures.items()):
        made.set("omni_run_failures", "Items that failed now", count, code=code, stage=where)
    for flag in FLAGS:
        count = summary.totals.flags.get(flag, 0)
        made.set("omni_run_flagged_items", "Items with a warning of a kind", count, flag=flag)
    heard = "Seconds of sound"
    made.set("omni_run_audio_seconds", heard, summary.audio_s, direction="in")
    made.set("omni_run_audio_seconds", heard, summary.spoken_s, direction="out")
    worked = sum(summary.totals.statuses.values())
    empty = summary.totals.statuses.get("empty", 0) / worked if worked else 0.0
    made.set("omni_run_empty_ratio", "Share of items without speech", empty)
    for name, stage in summary.totals.stages.items():
        _set_stage(made, name, stage)
    peak = summary.totals.peak_rss_bytes
    made.set("omni_run_peak_rss_bytes", "Most memory that the process held", peak)
    vram = max((s.vram_bytes for s in summary.totals.stages.values()), default=0)
    made.set("omni_run_peak_vram_bytes", "Most memory on the GPU", vram)
    made.set("omni_backlog_items", "Items that are still to be done", summary.backlog_items)
    made.set("omni_backlog_audio_seconds", "Claimed, of those", summary.backlog_s)
    made.set("omni_oldest_pending_seconds", "Age of the oldest of those", summary.oldest_pending_s)
    versions = {
        n: summary.versions.get(m, "") for n, m in (("version", "omni"), ("torch", "torch"))
    }
    made.set("omni_build_info", "Always 1", 1, **versions, device=summary.device)
    return generate_latest(made.registry)


def _set_stage(made: "_Gauges", name: str, stage: StageTotals) -> None:
    made.set("omni_run_stage_seconds", "Wall time, loading included", stage.wall_s, stage=name)
    if stage.speed is not None:
        told = "Seconds of sound per second of work"
        made.set("omni_run_stage_realtime_factor", told, stage.speed, stage=name)
    made.set("omni_run_padding_ratio", "Share that nobody asked for", stage.padding, stage=name)
    made.set("omni_run_batches", "Batches", stage.batches, stage=name)
    made.set("omni_run_oom_retries", "Batches that did not fit", stage.oom_retries, stage=name)


class _Gauges:
    """Gauges by name, made when they are first set; all carry the job's name."""

    def __init__(self, job: str) -> None:
        self.registry = CollectorRegistry()
        self._job = job
        self._made: dict[str, Gauge] = {}

    def set(self, metric: str, told: str, value: float, **labels: str) -> None:
        if metric not in self._made:
            names = ["job", *labels]
            self._made[metric] = Gauge(metric, told, names, registry=self.registry)
        self._made[metric].labels(job=self._job, **labels).set(value)


def last_success_s(text: str, job: str) -> float | None:
    """The time of the last success that a metrics file tells; None if it tells none.

    Line by line: damage elsewhere in the file does not hide it.
    """
    for line in text.split("\n"):
        if line.startswith(LAST_SUCCESS):
            try:
                (family,) = text_string_to_metric_families(line)
                (sample,) = family.samples
            except (ValueError, KeyError, IndexError):  # damaged
                continue
            if sample.labels.get("job") == job and 0 < sample.value < math.inf:
                return float(sample.value)
    return None
