"""What a run did: totals by stage from its events, and the summary that is kept and shown."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from omnicli.data import Json
from omnicli.observe import Event

REPORT_FORM = 1  # of summary.json


@dataclass(slots=True)
class StageTotals:
    """One stage over all waves of a run."""

    wall_s: float = 0.0  # loading included
    items: int = 0
    batches: int = 0
    failed_batches: int = 0
    oom_retries: int = 0
    audio_s: float = 0.0
    valid: int = 0
    padded: int = 0
    peak_rss_bytes: int = 0
    vram_bytes: int = 0

    @property
    def padding(self) -> float:
        """Share of what was computed that nobody asked for."""
        return 1 - self.valid / self.padded if self.padded else 0.0

    @property
    def speed(self) -> float | None:
        """Seconds of audio per second of work; None where there is no audio."""
        return self.audio_s / self.wall_s if self.audio_s and self.wall_s else None


@dataclass(slots=True)
class Totals:
    """Counts a run's events; a listener."""

    stages: dict[str, StageTotals] = field(default_factory=dict)
    failures: dict[tuple[str, str], int] = field(default_factory=dict)  # (code, stage) -> items
    statuses: dict[str, int] = field(default_factory=dict)  # of what was worked on
    flags: dict[str, int] = field(default_factory=dict)  # first words of warnings -> items
    audio_s: float = 0.0
    spoken_s: float = 0.0
    peak_rss_bytes: int = 0

    def __call__(self, event: Event) -> None:
        """Count one event."""
        kind = event["event"]
        if kind == "load":
            self._stage(event).wall_s += _number(event, "wall_s")
        elif kind == "batch":
            self._batch(self._stage(event), event)
        elif kind == "item":
            self._item(event)

    def _stage(self, event: Event) -> StageTotals:
        return self.stages.setdefault(str(event["stage"]), StageTotals())

    def _batch(self, stage: StageTotals, event: Event) -> None:
        stage.wall_s += _number(event, "wall_s")
        stage.batches += 1
        stage.peak_rss_bytes = max(stage.peak_rss_bytes, round(_number(event, "peak_rss_bytes")))
        stage.vram_bytes = max(stage.vram_bytes, round(_number(event, "vram_bytes")))
        self.peak_rss_bytes = max(self.peak_rss_bytes, stage.peak_rss_bytes)
        if "error" in event:
            stage.failed_batches += 1
            stage.oom_retries += bool(event.get("oom"))
            return
        stage.items += round(_number(event, "items"))
        stage.audio_s += _number(event, "audio_s")
        stage.valid += round(_number(event, "valid"))
        stage.padded += round(_number(event, "padded"))

    def _item(self, event: Event) -> None:
        status = str(event["status"])
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.audio_s += _number(event, "audio_s")
        self.spoken_s += _number(event, "spoken_s")
        for flag in filter(None, str(event.get("warnings") or "").split(",")):
            self.flags[flag] = self.flags.get(flag, 0) + 1
        if event.get("code"):
            key = (str(event["code"]), str(event.get("stage") or ""))
            self.failures[key] = self.failures.get(key, 0) + 1


def _number(event: Event, name: str) -> float:
    value = event.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run, ended: kept as `.omni/runs/<run_id>/summary.json`, shown, and made into metrics."""

    run_id: str
    command: str
    output_dir: Path
    started: str
    ended: str
    wall_s: float
    exit_code: int
    counts: Mapping[str, int]  # status -> requests of the whole input
    worked_on: int  # requests of this run
    audio_s: float
    spoken_s: float
    failures: tuple[tuple[str, str, str], ...]  # of the whole input, the first: id, code, message
    totals: Totals
    backlog_items: int = 0  # that are still to be worked on
    backlog_s: float = 0.0  # of audio in them, as far as lines claim it
    oldest_pending_s: float = 0.0
    device: str = "cpu"
    host: str = ""
    models: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Json] = field(default_factory=dict)  # no secrets among it

    def headline(self) -> str:
        """Two lines for a person."""
        shown = {"todo": "not attempted"}
        told = ", ".join(f"{n} {shown.get(s, s)}" for s, n in sorted(self.counts.items()))
        new = f"{self.worked_on} worked on now" if self.worked_on else "nothing to do"
        heard = f", {self.audio_s:.1f} s of audio" if self.audio_s else ""
        spoken = f", {self.spoken_s:.1f} s spoken" if self.spoken_s else ""
        computed = any(stage.audio_s for stage in self.totals.stages.values())
        speed = f", {self.audio_s / self.wall_s:.1f} x real time" if computed else ""
        return (
            f"{told or '0 items'} ({new}{heard}{spoken} in {self.wall_s:.1f} s{speed})\n"
            f"results: {self.output_dir / 'results.jsonl'}"
        )

    def to_json(self) -> str:
        """One line of JSON."""
        stages = {
            name: {k: round(v, 3) for k, v in asdict(stage).items()}
            | {"padding": round(stage.padding, 4), "speed": _rounded(stage.speed)}
            for name, stage in self.totals.stages.items()
        }
        row = {
            "schema": REPORT_FORM,
            "run_id": self.run_id,
            "command": self.command,
            "output_dir": str(self.output_dir),
            "started": self.started,
            "ended": self.ended,
            "wall_s": self.wall_s,
            "exit_code": self.exit_code,
            "counts": dict(self.counts),
            "worked_on": self.worked_on,
            "audio_s": self.audio_s,
            "spoken_s": self.spoken_s,
            "failures": [
                dict(zip(("id", "code", "message"), f, strict=True)) for f in self.failures
            ],
            "failures_by_code": [
                {"code": code, "stage": stage, "items": items}
                for (code, stage), items in sorted(self.totals.failures.items())
            ],
            "backlog_items": self.backlog_items,
            "backlog_s": self.backlog_s,
            "oldest_pending_s": self.oldest_pending_s,
            "peak_rss_bytes": self.totals.peak_rss_bytes,
            "stages": stages,
            "device": self.device,
            "host": self.host,
            "models": dict(self.models),
            "versions": dict(self.versions),
            "config": dict(self.config),
        }
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
