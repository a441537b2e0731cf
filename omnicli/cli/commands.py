"""The commands that process an input: transcribe, respond, say."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from omnicli import plugins
from omnicli.cli.options import (
    DeviceOptions,
    HearingOptions,
    InputOptions,
    RunOptions,
    TellOptions,
    limits_of,
    models_of,
    resume_of,
    stop_of,
)
from omnicli.cli.places import test_faults
from omnicli.cli.running import run
from omnicli.config import SAY, Command, ModelChoice, RunConfig, Task
from omnicli.errors import UserError

SPEECH_WRITERS = {"transcribe": (), "respond": ("answer", "wav"), "say": ("wav",)}

Format = Annotated[
    str,
    typer.Option("--output-format", "-f", help="Comma list of txt, json, srt, vtt, tsv; all"),
]
SpeakingRate = Annotated[float, typer.Option(help="2 is twice as fast")]
Voice = Annotated[
    str | None,
    typer.Option(
        help="Piper voice (.onnx file or a name); an omni model's speaker", rich_help_panel="Models"
    ),
]


def transcribe(
    which: InputOptions,
    hearing: HearingOptions,
    device: DeviceOptions,
    doing: RunOptions,
    telling: TellOptions,
    output_format: Format = "txt,json",
    task: Annotated[str, typer.Option(help="transcribe, or translate to English")] = "transcribe",
) -> None:
    """Write down what is said.

    Example: omni transcribe calls/ -o transcripts -f txt,srt
    """
    made = Task(
        command="transcribe",
        language=which.language,
        task=_task(task),
        channels=which.channels,
        seed=doing.seed,
        strict=which.strict,
    )
    models = models_of(device, model=hearing.model, asr_model=hearing.asr_model)
    config = _config(made, _writers("transcribe", output_format), models, which, doing, telling)
    run(config, telling, dry_run=doing.dry_run)


def respond(
    which: InputOptions,
    hearing: HearingOptions,
    device: DeviceOptions,
    doing: RunOptions,
    telling: TellOptions,
    output_format: Format = "txt,json",
    say: Annotated[
        str | None,
        typer.Option(help="summary (the default), reply, translation, transcript or prompt"),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Ask this about every recording")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="The same, from a file")] = None,
    summary_method: Annotated[
        str, typer.Option(help="auto, extractive (the recording's own sentences) or generated")
    ] = "auto",
    speak: Annotated[bool, typer.Option("--speak/--no-speak", help="Spoken answers too")] = True,
    speaking_rate: SpeakingRate = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest generated answer")] = 160,
    llm_model: Annotated[
        str | None,
        typer.Option(help="Llama or Qwen folder, GGUF file or a name", rich_help_panel="Models"),
    ] = None,
    voice: Voice = None,
) -> None:
    """Transcribe, then answer each recording in writing and aloud.

    Example: omni respond voicemail/ -o answers --say summary
    """
    prompt = _prompt(prompt, prompt_file)
    made = Task(
        command="respond",
        language=which.language,
        channels=which.channels,
        say=_say(say, prompt),
        prompt=prompt,
        summary_method=summary_method,
        max_new_tokens=max_new_tokens,
        speak=speak,
        speaking_rate=speaking_rate,
        seed=doing.seed,
        strict=which.strict,
    )
    models = models_of(
        device,
        model=hearing.model,
        asr_model=hearing.asr_model,
        llm_model=llm_model,
        voice=voice,
    )
    config = _config(made, _writers("respond", output_format), models, which, doing, telling)
    run(config, telling, dry_run=doing.dry_run)


def say(
    source: Annotated[str, typer.Argument(help="Text lines or JSONL, - for standard input")],
    device: DeviceOptions,
    doing: RunOptions,
    telling: TellOptions,
    voice: Voice = None,
    speaking_rate: SpeakingRate = 1.0,
) -> None:
    """Speak every line of a text.

    Example: omni say lines.txt -o spoken
    """
    made = Task(command="say", speaking_rate=speaking_rate, seed=doing.seed)
    models, which = models_of(device, voice=voice), InputOptions(inputs=[source])
    config = _config(made, SPEECH_WRITERS["say"], models, which, doing, telling)
    run(config, telling, dry_run=doing.dry_run)


def _config(
    made: Task,
    writers: tuple[str, ...],
    models: ModelChoice,
    which: InputOptions,
    doing: RunOptions,
    telling: TellOptions,
) -> RunConfig:
    return RunConfig(
        inputs=_inputs(which),
        files_from=tuple(which.files_from or ()),
        audio_root=which.audio_root,
        recursive=which.recursive,
        output_dir=doing.output_dir,
        writers=writers,
        task=made,
        models=models,
        limits=limits_of(doing, workers=which.workers),
        resume=resume_of(doing, min_age_s=which.min_age),
        stop=stop_of(doing, datetime.now().astimezone()),
        scratch=doing.scratch,
        schedule=_plugin("handover", doing.schedule),
        loop=_plugin("loop", doing.loop),
        fail_if_empty=telling.fail_if_empty,
        log_content=telling.log_content,
        faults=test_faults(),
    )


def _plugin(kind: Literal["handover", "loop"], name: str) -> str:
    if name not in plugins.names(kind):
        plugins.load(kind, name)  # says which there are
    return name


def _inputs(which: InputOptions) -> tuple[str, ...]:
    if not which.inputs and not which.files_from:
        raise UserError("no input", hint="name files, folders or a manifest, or use --files-from")
    return tuple(which.inputs or ())


def _task(name: str) -> Literal["transcribe", "translate"]:
    if name == "transcribe":
        return "transcribe"
    if name == "translate":
        return "translate"
    raise UserError(f"no task named {name!r}", hint="transcribe or translate")


def _say(kind: str | None, prompt: str | None) -> str:
    if prompt and kind not in (None, "prompt"):
        raise UserError(f"both --say {kind} and a prompt are given", hint="choose one")
    if kind is not None and kind not in SAY:
        raise UserError(f"no say named {kind!r}", hint=f"--say is one of: {', '.join(SAY)}")
    return "prompt" if prompt else kind or "summary"


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
