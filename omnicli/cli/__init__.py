"""The command line: read options, call one function, turn errors into exit codes.

Exit codes: 0 all requests are done, 1 the run could not go on, 2 the command or its input is wrong,
3 some requests failed, 75 another run holds the folder, 130 and 143 interrupted.
Data goes to stdout, everything else to stderr. Nothing here imports torch before it must.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from omnicli import __version__
from omnicli.cli import commands, tools
from omnicli.cli.options import flat
from omnicli.cli.settings import read_settings
from omnicli.cli.streams import mend_streams
from omnicli.errors import OmniError, UserError
from omnicli.io.stems import AUDIO_SUFFIXES

COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: flat(command)
    for command in (commands.transcribe, commands.respond, commands.say)
}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Piles of recordings in; transcripts, summaries and spoken answers out.",
)
for _command in COMMANDS.values():
    app.command()(_command)
app.command("status")(tools.status)
app.command("doctor")(tools.doctor)
app.command("clean")(tools.clean)
app.add_typer(tools.manifest_app, name="manifest")
app.add_typer(tools.models_app, name="models")
tools.config_app.command("show")(tools.config_show(COMMANDS))
app.add_typer(tools.config_app, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"omni {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", is_eager=True, callback=_version, help="Print the version"),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The command `omni`."""
    if sys.getfilesystemencoding() != "utf-8":  # names and texts are, whatever the locale says
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    args = [_hyphened(arg) for arg in sys.argv[1:]]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `omni models list | head` ends quietly
    mend_streams()
    try:
        _refuse_names_as_options(args)
        defaults = read_settings(COMMANDS, os.environ, args).default_map() if _runs(args) else {}
        app(args, default_map=defaults)
    except OmniError as error:
        typer.echo(f"error: {error}", err=True)
        if error.hint:
            typer.echo(f"\nhint: {error.hint}", err=True)
        sys.exit(error.exit_code)


def _runs(args: Sequence[str]) -> bool:
    return bool(args) and args[0] in COMMANDS


def _hyphened(arg: str) -> str:
    """`--word_timestamps=True` as people paste it: underscores in an option's name are hyphens."""
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else arg


def _refuse_names_as_options(args: Sequence[str]) -> None:
    """A recording whose name begins with a hyphen would be taken for options."""
    for arg in args[: list(args).index("--")] if "--" in args else args:
        if arg.startswith("-") and os.path.splitext(arg)[1].lower() in AUDIO_SUFFIXES:  # noqa: PTH122
            raise UserError(
                f"{arg} looks like an option",
                hint=f"a file of that name is written ./{arg}, or after --",
            )
