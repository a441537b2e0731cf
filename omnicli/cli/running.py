"""One run from the command line: who is told what, and with which exit code it ends."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from omnicli.cli.options import TellOptions
from omnicli.cli.streams import guarded, stopping
from omnicli.config import RunConfig
from omnicli.errors import BusyError, OmniError
from omnicli.observe import Event, Listener

if TYPE_CHECKING:
    from omnicli.report.summary import RunSummary

UNTOLD = "internal"  # errors that nobody foresaw: their words may be those of a recording


def run(config: RunConfig, telling: TellOptions, *, dry_run: bool) -> None:
    """Run it or plan it; ends with the exit code."""
    from omnicli.job import plan_job

    if dry_run:
        plan = plan_job(config)
        typer.echo(json.dumps(asdict(plan)) if telling.json else str(plan))
        return
    try:
        code = _run(config, telling)
    except BusyError as error:
        if telling.lock_busy_exit == error.exit_code:
            raise
        if telling.lock_busy_exit:
            typer.echo(f"error: {error}", err=True)
        code = telling.lock_busy_exit
    raise typer.Exit(0 if code == 3 and telling.exit_zero_on_partial else code)


def _run(config: RunConfig, telling: TellOptions) -> int:
    from omnicli.job import run_job
    from omnicli.job.run import Host

    with guarded() as talk, ExitStack() as open_:
        ends = tuple(_ends(telling, talk))
        listeners = tuple(_listeners(telling, talk, open_))
        check = open_.enter_context(stopping(config.output_dir / ".omni" / "left-at-once"))
        host = Host(
            listeners=listeners,
            check=check,
            give_up=partial(_give_up, talk),
            ended=ends,
        )
        with _pinging(telling.ping_url, talk) as words:
            summary = run_job(config, host)
            words += _told(summary, quiet=False)
            words.code = summary.exit_code
    if telling.json:
        typer.echo(summary.to_json())
    for line in _told(summary, quiet=telling.quiet):
        typer.echo(line, err=True)
    return summary.exit_code


@contextmanager
def _pinging(url: str | None, talk: TextIO) -> Iterator["_Words"]:
    """Pings at both ends of a block, whose exit code and last words it is told or finds out."""
    words = _Words()
    if url is None:
        yield words
        return
    from omnicli.report.ping import Ping

    ping = Ping(url)
    problem = ping.start()
    try:
        yield words
    except OmniError as error:
        words.code = error.exit_code
        words.append(str(error))
        raise
    finally:
        problem = ping.end(words.code, "\n".join(words)) or problem
        if problem:
            talk.write(f"warning: {problem}\n")


class _Words(list[str]):
    """A run's last words, and its exit code: 1 until it is known."""

    code = 1


def _told(summary: "RunSummary", *, quiet: bool) -> Iterator[str]:
    """The last lines: what was done, what failed, where it is."""
    failed = summary.counts.get("failed", 0)
    if not quiet:
        yield summary.headline()
    if not failed:
        return
    for request_id, code, message in summary.failures:
        yield f"failed: {request_id}: {code}" + (f": {message}" if code != UNTOLD else "")
    more = failed - len(summary.failures)
    rest = f", {more} more" if more > 0 else ""
    where = summary.output_dir
    yield f"{failed} failed{rest}; listed in {where / 'errors.jsonl'}, try them with --retry-failed"


def _ends(telling: TellOptions, talk: TextIO) -> Iterator[Callable[["RunSummary"], None]]:
    """What is done with the summary, however the run ended."""
    if telling.metrics_file:
        from omnicli.report import metrics

        metrics.check_path(telling.metrics_file)
        yield partial(_write_metrics, telling.metrics_file, telling.job_name, talk)


def _write_metrics(path: Path, job: str, talk: TextIO, summary: "RunSummary") -> None:
    from omnicli.report import metrics

    try:
        metrics.write(path, summary, job=job)
    except OSError as error:
        talk.write(f"warning: cannot write {path}: {error.strerror}\n")


def _listeners(telling: TellOptions, talk: TextIO, open_: ExitStack) -> Iterator[Listener]:
    from omnicli.report.progress import progress

    def tell(message: str) -> None:
        talk.write(f"warning: {message}\n")

    plain = os.environ.get("TERM", "dumb") == "dumb"
    mode = "off" if telling.quiet else telling.progress
    yield from open_.enter_context(progress(talk, mode=mode, plain=plain))
    if not telling.quiet:
        yield partial(_show_warning, talk)
    if telling.log_file:
        from omnicli.report.log import logging_to

        yield open_.enter_context(
            logging_to(
                telling.log_file, form=telling.log_format, level=telling.log_level, tell=tell
            )
        )
    if telling.trace_file:
        from omnicli.report.trace import tracing_to

        yield open_.enter_context(tracing_to(telling.trace_file, tell))


def _show_warning(talk: TextIO, event: Event) -> None:
    if event["event"] == "warning":
        talk.write(f"warning: {event['message']}\n")


def _give_up(talk: TextIO, message: str) -> None:
    """The process is stuck: nothing orderly can be done any more."""
    talk.write(f"error: {message}\n\nhint: the same command tries these last, one by one\n")
    talk.flush()
    os._exit(1)
