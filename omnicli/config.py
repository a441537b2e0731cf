"""The one configuration object: built by the command line, passed down, kept in the run folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from omnicli.errors import UserError

Command = Literal["transcribe", "respond", "say"]
SAY = ("summary", "reply", "translation", "transcript", "prompt")
SUMMARY_METHODS = ("auto", "extractive", "generated")
CHANNELS = ("mix", "left", "right", "split")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A token policy by name, with its options."""

    name: str = "greedy"
    options: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which model, and where it runs."""

    model: str = "embedded"
    asr_model: str | None = None
    llm_model: str | None = None
    voice: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None  # of one operation on the CPU; None: as many as there are CPUs
    cache: Path | None = None  # where embedded and converted models lie
    hub_cache: Path | None = None  # where Hugging Face's tools keep what they downloaded
    places: tuple["Place", ...] = ()  # stages that compute elsewhere than the others

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one stage computes, and in what."""

    stage: str
    device: str
    dtype: str | None = None  # None: as the others

    def __post_init__(self) -> None:
        if self.dtype is not None:
            _one_of("dtype", self.dtype, DTYPES)


def places_of(text: str) -> tuple[Place, ...]:
    """Read `think=cuda:0,talk=cuda:1/bfloat16`."""
    return tuple(_place(one.strip()) for one in text.split(",") if one.strip())


def _place(text: str) -> Place:
    stage, equals, where = text.partition("=")
    device, slash, dtype = where.partition("/")
    if not equals or not stage or not device:
        raise UserError(f"no place: {text!r}", hint="STAGE=DEVICE or STAGE=DEVICE/DTYPE")
    return Place(stage=stage, device=device, dtype=dtype if slash else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A checkpoint in its canonical layout."""

    name: str
    folder: Path
    digest: str  # of the weights; part of what results depend on

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be made of each recording; a manifest line may override some of it."""

    command: Command
    language: str | None = None
    task: Literal["transcribe", "translate"] = "transcribe"
    channels: str = "mix"
    say: str = "summary"
    prompt: str | None = None
    summary_method: str = "auto"
    max_new_tokens: int = 160
    speak: bool = True
    speaking_rate: float = 1.0  # 1 is the voice's own; 2 is twice as fast
    seed: int = 0
    strict: bool = False  # a damaged recording fails instead of giving a warning

    def __post_init__(self) -> None:
        _one_of("say", self.say, SAY)
        _one_of("summary method", self.summary_method, SUMMARY_METHODS)
        _one_of("channels", self.channels, CHANNELS)
        if not 0.25 <= self.speaking_rate <= 4:
            raise UserError(f"the speaking rate is {self.speaking_rate}", hint="from 0.25 to 4")
        if self.max_new_tokens < 1:
            raise UserError("at least one new token is needed")
        if self.say == "prompt" and not self.prompt:
            raise UserError("there is no prompt to answer", hint="--prompt or --prompt-file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much runs together."""

    max_rows: int = 64  # cap on the rows of a batch
    batch_bytes: int = 1 << 30  # activations and caches of one batch
    held_bytes: int = 256 << 20  # products that wait between stages; beyond, they wait on disk
    wave_s: float = 3600.0  # audio seconds that pass the stages together
    wave_items: int = 2000
    workers: int = 2  # threads that decode audio
    max_bytes: int | None = None  # that the process may hold; None: what the machine leaves
    patience_s: float = 600.0  # without progress for so long, at the least, a batch is stuck


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What earlier runs did and is done again, and what is left for a later one."""

    retry_failed: bool = False
    overwrite: bool = False  # everything
    refresh: bool = False  # what older versions of a stage made
    checksum: bool = False  # a file has changed if its content has, whatever its time
    min_age_s: float = 0.0  # younger files may still be arriving


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """When a run ends before its input does."""

    max_failures: int | None = None
    max_failed_share: float | None = None  # of the requests that were worked on
    max_runtime_s: float | None = None


FAULT_KINDS = ("raise", "oom", "nan", "hang", "noend", "exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that a test puts into a run: what one request does to one stage."""

    stage: str  # a pattern, as file names have them
    request_id: str  # likewise
    kind: str
    rows: int = 0  # `oom>8`: batches of more rows than that are too big


def faults_of(text: str) -> tuple[Fault, ...]:
    """Read `stage:id:kind;stage:id:kind`; an id may hold colons."""
    return tuple(_fault(one.strip()) for one in text.split(";") if one.strip())


def _fault(text: str) -> Fault:
    stage, _, rest = text.partition(":")
    request_id, _, told = rest.rpartition(":")
    kind, _, rows = told.partition(">")
    if kind not in FAULT_KINDS or not request_id or (rows and not rows.isdecimal()):
        raise UserError(f"no fault: {text!r}", hint=f"stage:id:{'|'.join(FAULT_KINDS)}")
    return Fault(stage=stage, request_id=request_id, kind=kind, rows=int(rows or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run computes, and where it goes."""

    inputs: tuple[str, ...]
    output_dir: Path
    task: Task
    models: ModelChoice
    limits: Limits = field(default_factory=Limits)
    writers: tuple[str, ...] = ("txt", "json")
    schedule: str = "stages"
    loop: str = "lockstep"
    resume: Resume = field(default_factory=Resume)
    stop: Stop = field(default_factory=Stop)
    fail_if_empty: bool = False
    log_content: bool = False  # what was said may stand in events and logs
    scratch: Path | None = None  # where products wait; None: in the output folder
    faults: tuple[Fault, ...] = ()
    files_from: tuple[str, ...] = ()
    audio_root: Path | None = None
    recursive: bool = True


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"no {what} named {value!r}", hint=f"one of: {', '.join(known)}")
