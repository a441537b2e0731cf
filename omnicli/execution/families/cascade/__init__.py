"""The cascade: Whisper hears, a small language model answers, a Piper voice speaks.

Its pieces are separate checkpoints, each of which can be exchanged: roles vad, asr, llm, voice.
"""

from collections.abc import Sequence

from omnicli.data import Answer, Inputs, Request
from omnicli.execution import phonemes
from omnicli.execution.families.cascade.recognise import Recogniser
from omnicli.execution.families.cascade.respond import Responder, speakable
from omnicli.execution.families.cascade.speak import talk_spec, vocode_spec, voice_info
from omnicli.execution.listen import listen_spec
from omnicli.execution.stage import Family, Settings, StageSpec


def load(settings: Settings) -> Family:
    """The stages that the task needs; weights are read when a stage is opened."""
    build = {"transcribe": _recognise, "respond": _respond, "say": _say}
    return Family(
        name="cascade",
        stages=tuple(build[settings.task.command](settings)),
        models={role: str(model) for role, model in settings.folders.items()},
        device=settings.device,
        weights_bytes=sum(
            path.stat().st_size
            for model in settings.folders.values()
            for path in model.folder.glob("*.safetensors")
        ),
    )


def _recognise(settings: Settings, voice_language: str = "") -> list[StageSpec]:
    listen = listen_spec(settings)
    recogniser = Recogniser(
        settings.folders["asr"],
        settings.task,
        device=settings.device,
        dtype=settings.dtype,
        voice_language=voice_language,
        listening=listen.settings,
    )
    return [listen, *recogniser.specs()]


def _respond(settings: Settings) -> list[StageSpec]:
    voice = voice_info(settings.folders["voice"].folder)
    responder = Responder(
        settings.folders["llm"],
        settings.task,
        voice_language=voice.language,
        device=settings.device,
        dtype=settings.dtype,
    )
    speaks = settings.task.speak or phonemes.installed()  # a line may ask for speech by itself
    return [
        *_recognise(settings, voice.language),
        *responder.specs(),
        *(_speak(settings) if speaks else ()),
    ]


def _say(settings: Settings) -> list[StageSpec]:
    voice_language = voice_info(settings.folders["voice"].folder).language

    def given(request: Request, inputs: Inputs, parts: Sequence[object]) -> Answer:
        language = (request.language or "").lower().replace("_", "-").split("-")[0]
        answer = Answer(kind="say", text=request.speech_text, language=language)
        return speakable(answer, voice_language) if language else answer

    spec = StageSpec(name="answer", join=given, record=Answer, settings=voice_language)
    return [spec, *_speak(settings)]


def _speak(settings: Settings) -> list[StageSpec]:
    voice = settings.folders["voice"]
    return [talk_spec(voice, settings), vocode_spec(voice, settings)]
