"""The options that commands share, in groups, and what a run's configuration makes of them.

A group is a data class; `flat` turns a command that takes groups into one that Typer understands.
Its fields are also the keys of configuration files and, in capitals, of `OMNI_*` variables.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from omnicli.cli.places import hub_cache, model_cache, omp_threads
from omnicli.config import Limits, ModelChoice, Resume, Stop, places_of
from omnicli.errors import UserError

_IN, _MODEL, _AGAIN, _RUN, _SHOW, _EXIT = (
    "Input",
    "Models",
    "Earlier results",
    "Run",
    "Messages",
    "Exit codes",
)
_LIMITS = Limits()
_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of its groups as options of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, given in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(
                given.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            )
            continue
        inner = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=f.default,
                annotation=inner[f.name],
            )
            for f in fields(groups[name])
        ]

    def run(**values: Any) -> None:
        made = {
            name: kind(**{f.name: values.pop(f.name) for f in fields(kind)})  # type: ignore[operator]
            for name, kind in groups.items()
        }
        command(**made, **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def seconds(text: str) -> float:
    """`90`, `90s`, `5m`, `6h` or `1d` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?", str(text).strip())
    if not found:
        raise typer.BadParameter(f"{text!r} is no length of time: 90s, 5m, 6h or 1d")
    return float(found[1]) * _UNITS[found[2] or ""]


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Which recordings."""

    inputs: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders, globs, JSONL manifests, or - for standard input"),
    ] = None
    language: Annotated[
        str | None, typer.Option("--language", "-l", help="Spoken language, found out if not given")
    ] = None
    channels: Annotated[
        str, typer.Option(help="Of stereo: mix, left, right or split", rich_help_panel=_IN)
    ] = "mix"
    files_from: Annotated[
        list[str] | None,
        typer.Option(help="File with one path per line, - for standard input", rich_help_panel=_IN),
    ] = None
    audio_root: Annotated[
        Path | None,
        typer.Option(
            help="Folder that relative paths of manifests start from", rich_help_panel=_IN
        ),
    ] = None
    recursive: Annotated[
        bool,
        typer.Option("--recursive/--no-recursive", help="Sub-folders too", rich_help_panel=_IN),
    ] = True
    min_age: Annotated[
        float,
        typer.Option(
            parser=seconds,
            metavar="TIME",
            help="Leave younger files for the next run: they may still be arriving",
            rich_help_panel=_IN,
        ),
    ] = 0.0
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Damaged recordings fail, not warn", rich_help_panel=_IN),
    ] = False
    workers: Annotated[
        int, typer.Option(min=1, help="Threads that decode audio", rich_help_panel=_RUN)
    ] = _LIMITS.workers


@dataclass(frozen=True, kw_only=True)
class HearingOptions:
    """Which models hear."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="embedded, or the folder or hub id of an omni model",
            rich_help_panel=_MODEL,
        ),
    ] = "embedded"
    asr_model: Annotated[
        str | None,
        typer.Option(
            help="Whisper folder (Hugging Face or CTranslate2 layout) or a name",
            rich_help_panel=_MODEL,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where they run."""

    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N", rich_help_panel=_MODEL)
    ] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            "--compute-type",
            help="auto, float32, bfloat16 or float16",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    place: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE=DEVICE[/DTYPE],...",
            help="Stages of an omni model that run elsewhere: think=cuda:0,talk=cuda:1",
            rich_help_panel=_MODEL,
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads; all that are allowed", rich_help_panel=_MODEL),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where results go, what is done again, how much runs together, when to stop."""

    output_dir: Annotated[
        Path,
        typer.Option("--output-dir", "-o", help="Results go here; a second run goes on there"),
    ] = Path("omni-out")
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Try failed items again", rich_help_panel=_AGAIN),
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Do everything anew", rich_help_panel=_AGAIN)
    ] = False
    refresh: Annotated[
        bool,
        typer.Option("--refresh", help="Do anew what older versions made", rich_help_panel=_AGAIN),
    ] = False
    checksum: Annotated[
        bool,
        typer.Option(
            "--checksum", help="Files have changed if their content has", rich_help_panel=_AGAIN
        ),
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, compute nothing", rich_help_panel=_RUN)
    ] = False
    max_runtime: Annotated[
        float | None,
        typer.Option(
            parser=seconds,
            metavar="TIME",
            help="Stop after that long; the rest is left for the next run",
            rich_help_panel=_RUN,
        ),
    ] = None
    until: Annotated[
        str | None, typer.Option(help="The same, by the clock: 06:00", rich_help_panel=_RUN)
    ] = None
    max_failures: Annotated[
        str | None,
        typer.Option(
            metavar="N|P%", help="Stop when so many items have failed", rich_help_panel=_RUN
        ),
    ] = None
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop at the first", rich_help_panel=_RUN)
    ] = False
    patience: Annotated[
        float,
        typer.Option(
            parser=seconds,
            metavar="TIME",
            help="A batch without progress for so long, and ten times its estimate, is stuck",
            rich_help_panel=_RUN,
        ),
    ] = _LIMITS.patience_s
    batch_size: Annotated[
        int, typer.Option(min=1, help="Most rows of a batch", rich_help_panel=_RUN)
    ] = _LIMITS.max_rows
    batch_memory: Annotated[
        int, typer.Option(min=1, help="MiB that a batch may take", rich_help_panel=_RUN)
    ] = _LIMITS.batch_bytes >> 20
    max_memory: Annotated[
        int | None,
        typer.Option(min=1, help="MiB that the process may take", rich_help_panel=_RUN),
    ] = None
    schedule: Annotated[
        str,
        typer.Option(
            help="stages (one after the other) or overlap (all at a time)", rich_help_panel=_RUN
        ),
    ] = "stages"
    loop: Annotated[
        str,
        typer.Option(
            help="How rows of an omni model advance: lockstep or refill", rich_help_panel=_RUN
        ),
    ] = "lockstep"
    scratch: Annotated[
        Path | None,
        typer.Option(help="Folder for what waits between stages", rich_help_panel=_RUN),
    ] = None
    seed: Annotated[int, typer.Option(help="Of everything random", rich_help_panel=_RUN)] = 0


@dataclass(frozen=True, kw_only=True)
class TellOptions:
    """What is said, where, and the exit code."""

    json: Annotated[
        bool, typer.Option("--json", help="A summary object on stdout", rich_help_panel=_SHOW)
    ] = False
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Nothing unless it fails", rich_help_panel=_SHOW)
    ] = False
    progress: Annotated[str, typer.Option(help="auto, on or off", rich_help_panel=_SHOW)] = "auto"
    log_file: Annotated[
        Path | None, typer.Option(help="Append a log here", rich_help_panel=_SHOW)
    ] = None
    log_format: Annotated[str, typer.Option(help="text or json lines", rich_help_panel=_SHOW)] = (
        "text"
    )
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error", rich_help_panel=_SHOW)
    ] = "info"
    log_content: Annotated[
        bool,
        typer.Option(
            "--log-content", help="What was said may stand in the log", rich_help_panel=_SHOW
        ),
    ] = False
    metrics_file: Annotated[
        Path | None,
        typer.Option(
            help="Metrics for node_exporter's textfile collector (.prom)", rich_help_panel=_SHOW
        ),
    ] = None
    job_name: Annotated[
        str, typer.Option(help="The job's name in the metrics", rich_help_panel=_SHOW)
    ] = "omni"
    trace_file: Annotated[
        Path | None,
        typer.Option(help="Timeline for chrome://tracing or Perfetto", rich_help_panel=_SHOW),
    ] = None
    ping_url: Annotated[
        str | None,
        typer.Option(
            help="Told when the run starts and ends (healthchecks); better in OMNI_PING_URL",
            rich_help_panel=_SHOW,
        ),
    ] = None
    fail_if_empty: Annotated[
        bool,
        typer.Option("--fail-if-empty", help="No input at all is an error", rich_help_panel=_EXIT),
    ] = False
    lock_busy_exit: Annotated[
        int,
        typer.Option(
            min=0, max=255, help="When another run holds the folder", rich_help_panel=_EXIT
        ),
    ] = 75
    exit_zero_on_partial: Annotated[
        bool,
        typer.Option(
            "--exit-zero-on-partial", help="0 although items failed", rich_help_panel=_EXIT
        ),
    ] = False
    config: Annotated[
        Path | None,
        typer.Option(help="Settings, in place of ./omni.toml", rich_help_panel=_SHOW),
    ] = None
    profile: Annotated[
        str | None, typer.Option(help="A profile of the settings", rich_help_panel=_SHOW)
    ] = None


# -- what the run's configuration makes of them


def resume_of(run: RunOptions, *, min_age_s: float) -> Resume:
    """What is done again."""
    return Resume(
        retry_failed=run.retry_failed,
        overwrite=run.overwrite,
        refresh=run.refresh,
        checksum=run.checksum,
        min_age_s=min_age_s,
    )


def stop_of(run: RunOptions, now: datetime) -> Stop:
    """When to stop."""
    lasting = [s for s in (run.max_runtime, _seconds_until(run.until, now)) if s is not None]
    count, share = _max_failures(run.max_failures)
    return Stop(
        max_failures=1 if run.fail_fast else count,
        max_failed_share=None if run.fail_fast else share,
        max_runtime_s=min(lasting, default=None),
    )


def _seconds_until(text: str | None, now: datetime) -> float | None:
    """Seconds until the clock shows `HH:MM` next."""
    if text is None:
        return None
    try:
        at = datetime.strptime(text, "%H:%M").time()
    except ValueError as error:
        raise UserError(f"--until {text!r} is no time of day", hint="HH:MM") from error
    then = datetime.combine(now.date(), at, now.tzinfo)
    return ((then if then > now else then + timedelta(days=1)) - now).total_seconds()


def _max_failures(text: str | None) -> tuple[int | None, float | None]:
    if text is None:
        return None, None
    number = text.removesuffix("%").strip()
    if not number.isdecimal() or (text.endswith("%") and int(number) > 100) or int(number) < 1:
        raise UserError(f"--max-failures {text!r}", hint="a number of items, or a share: 5%")
    return (None, int(number) / 100) if text.endswith("%") else (int(number), None)


def limits_of(run: RunOptions, *, workers: int) -> Limits:
    """How much runs together."""
    return Limits(
        max_rows=run.batch_size,
        batch_bytes=run.batch_memory << 20,
        max_bytes=None if run.max_memory is None else run.max_memory << 20,
        patience_s=run.patience,
        workers=workers,
    )


def models_of(device: DeviceOptions, **chosen: Any) -> ModelChoice:
    """Which models, and where."""
    return ModelChoice(
        device=device.device,
        dtype=device.dtype,
        threads=device.threads or omp_threads(),
        cache=model_cache(),
        hub_cache=hub_cache(),
        places=places_of(device.place or ""),
        **chosen,
    )
