"""The objects that flow through a run, in the order in which they are made.

    Request -> Heard (AudioClip …) -> Encoded -> Language -> Thought | Said -> Transcript
            -> Ranking | Draft -> Answer -> Speech | Codes -> Waveform -> Outcome

Between stages every product is ragged (no padding) and belongs to one item: a part of one request.
Inside a stage tensors are padded to [B, T, ...]. Products carry no ids: the scheduler knows whose
they are.
Names end in their unit: `_s` seconds, `_hz` per second, `_samples`, `_frames`, `_tokens`, `_bytes`.
Letters of shapes: B batch, T time, D width, H heads, K codebooks, V vocabulary, L layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch import Tensor

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One recording to work on (a manifest line, a file that was found), or one text to say.

    None in an override means: what the run says.
    """

    request_id: str
    index: int = 0  # place in the input, from 0
    where: str = ""  # "calls.jsonl:12", for messages
    audio: Path | None = None  # None: there is nothing to hear, `speech_text` is spoken
    audio_filepath: str = ""  # the path as the user wrote it
    offset_s: float | None = None
    duration_s: float | None = None  # beside an offset it selects; alone it is a claim to check
    reference: str | None = None  # the manifest's `text`
    language: str | None = None
    prompt: str | None = None
    say: str | None = None
    voice: str | None = None
    seed: int | None = None
    speak: bool | None = None
    speech_text: str = ""  # `omni say` only
    raw: Mapping[str, Json] = field(default_factory=dict)  # the line as it was read


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of transcript with its place in the recording."""

    start_s: float
    end_s: float
    text: str
    channel: str = ""  # "left" or "right" with `--channels split`
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording, or the selected part of it, as sound."""

    tracks: tuple[Tensor, ...]  # each [T] float32 in [-1, 1]; may be memory-mapped
    channels: tuple[str, ...]  # a name per track: "" for a mix, "left", "right"
    rate_hz: int
    duration_s: float
    source_rate_hz: int
    source_channels: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioClip:
    """A stretch of mono audio that one pass of a model hears."""

    samples: Tensor  # [T] float32 in [-1, 1]; may be memory-mapped
    rate_hz: int
    start_s: float = 0.0  # where it begins in the recording
    channel: str = ""

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return len(self.samples) / self.rate_hz


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A recording, decoded and cut: only what holds speech goes on."""

    clips: tuple[AudioClip, ...]  # by time; empty: nobody speaks
    decoded_s: float
    speech_s: float
    source_rate_hz: int
    source_channels: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """What the audio encoder understood of one clip."""

    embeds: Tensor  # [T, D]
    clip: int  # its place among the recording's clips
    valid_frames: int  # frames that lie on the clip; the others are its margin of silence


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """The language of a recording, decided before its parts fan out."""

    code: str
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """What a thinker wrote about one clip, and how sure it was."""

    text: str
    segments: tuple[Segment, ...]  # times in the recording
    clip: int  # its place among the recording's clips
    task: str  # "transcribe" or "translate"
    window: str  # "short" (the clip's own length), "full" (30 s) or "rest" (what was left out)
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    finish_reason: str  # "stop", "length" or "loop"
    problem: str = ""  # why this text is not to be trusted; empty: it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The words of a whole recording. Plain data: kept in the run log."""

    text: str
    language: str
    language_probability: float | None
    segments: tuple[Segment, ...]
    translation: str | None = None  # in the voice's language, where that was needed
    task: str = "transcribe"
    decoded_s: float = 0.0
    speech_s: float = 0.0
    source_rate_hz: int = 0
    source_channels: int = 0
    scores: Mapping[str, float | str] = field(default_factory=dict)
    finish_reason: str = "stop"
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How much each sentence of a text matters: [S], higher is more."""

    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Free text from a language model, before anyone has checked it."""

    text: str
    finish_reason: str  # "stop", "length" or "loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is said about a recording. Plain data: kept in the run log."""

    kind: str  # summary, reply, translation, transcript, prompt, say
    text: str
    language: str
    summary_method: str | None = None  # "extractive" or "generated"
    finish_reason: str = "stop"
    speak: bool = True
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the thinker of an omni model said in one pass, and what its talker reads of it."""

    text: str
    about: str  # the pass: "transcribe" or what is answered
    clip: int  # its place among the recording's clips; the first of those that it heard
    finish_reason: str  # "stop", "length" or "loop"
    logprob: float  # per token
    prompt_tokens: int = 0
    states: Tensor | None = None  # [prompt + said, D], None if nobody is going to speak it
    heard: Tensor | None = None  # [prompt] bool: positions that hold audio
    ids: Tensor | None = None  # [prompt + said] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """What an autoregressive talker said: codec frames, ready for the vocoder."""

    codes: Tensor  # [T, K] int64
    finish_reason: str  # "stop", "length" (the cap that its text allows) or "loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """One sentence from the talker, ready for the vocoder."""

    latents: Tensor  # [T, D], T frames
    pause_s: float = 0.0  # silence that follows it


@dataclass(frozen=True, slots=True, kw_only=True)
class Waveform:
    """Sound: one sentence of a spoken answer, or the whole of it."""

    pieces: tuple[Tensor, ...]  # each [T] float32, one after the other
    rate_hz: int
    peak: float  # largest absolute sample
    samples: int  # length of all pieces together


Product = (
    Heard
    | Encoded
    | Language
    | Thought
    | Said
    | Transcript
    | Ranking
    | Draft
    | Answer
    | Speech
    | Codes
    | Waveform
)
P = TypeVar("P", bound=Product)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request ended early. Codes are listed in docs/results.md."""

    code: str
    stage: str
    message: str


@dataclass(frozen=True, slots=True)
class ItemKey:
    """Which part of which request."""

    request_id: str
    part: int = 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the bucketer needs to know of an item."""

    key: ItemKey
    length: int  # in the stage's own units
    edge: int  # the length that it is padded to, chosen by its own length alone
    row_bytes: int  # memory that the row takes at that edge
    audio_s: float = 0.0  # for progress
    apart: int = 0  # tickets with other numbers never share a batch


@dataclass(frozen=True, slots=True)
class Batch:
    """Tickets of one edge that run together."""

    tickets: tuple[Ticket, ...]
    slots: int = 0  # so many rows at a time, the others wait for their place; 0: all

    @property
    def padded(self) -> int:
        """Length units that the device computes."""
        return sum(t.edge for t in self.tickets)

    @property
    def valid(self) -> int:
        """Length units that anybody asked for."""
        return sum(t.length for t in self.tickets)

    @property
    def row_bytes(self) -> int:
        """Memory that the rows take that are there at a time."""
        return sum(t.row_bytes for t in self.tickets[: self.slots or None])


class Inputs:
    """What earlier stages made of one request, by stage name."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Product, ...]] = {}

    def put(self, stage: str, products: tuple[Product, ...]) -> None:
        """Keep what a stage made; one product per part, in order."""
        self._made[stage] = products

    def drop(self, stage: str) -> None:
        """Forget what nobody reads any more."""
        self._made.pop(stage, None)

    def has(self, stage: str) -> bool:
        """Whether the stage ran for this request (perhaps over no parts at all)."""
        return stage in self._made

    def parts(self, stage: str, kind: type[P]) -> tuple[P, ...]:
        """All parts of a stage's product, empty if it did not run."""
        found = self._made.get(stage, ())
        assert all(isinstance(p, kind) for p in found), f"{stage} made {found[0]!r}, not {kind}"
        return found  # type: ignore[return-value]

    def one(self, stage: str, kind: type[P]) -> P | None:
        """The one product of a stage, None if it did not run or made none."""
        found = self.parts(stage, kind)
        return found[0] if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that became of one request: what the writers get."""

    request: Request
    status: str  # ok, empty, deferred, failed
    stem: Path  # where its files go, below the output folder, without a suffix
    transcript: Transcript | None = None
    answer: Answer | None = None
    waveform: Waveform | None = None
    failure: Failure | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of all stages, each once, in order."""
        told = [p.warnings for p in (self.transcript, self.answer) if p]
        return tuple(dict.fromkeys(w for warnings in told for w in warnings))
