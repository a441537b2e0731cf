"""Recordings to words: the stages encode, identify, transcribe and transcript.

A clip is first heard in a *short* window: its own length plus a margin. If the text loops, runs on,
scores low or leaves speech out, the same clip is heard again in the *full* window of 30 s, then at
rising temperatures, as openai/whisper does; what is still left out behind the last timestamp is
heard by itself. The rounds are stages of their own (`encode.full`, `transcribe.full`,
`transcribe.t2` …) that only split off the clips in trouble.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from omnicli.config import ModelFolder, PolicySpec, Task
from omnicli.data import (
    AudioClip,
    Encoded,
    Heard,
    Inputs,
    Language,
    Request,
    Segment,
    Thought,
    Transcript,
)
from omnicli.errors import RequestError, UserError
from omnicli.execution.families.cascade.hearing import (
    ENCODER_FRAMES_PER_S,
    WINDOW_S,
    Encode,
    Hearing,
    Identify,
    Transcribe,
    clip_frames,
    encode_frames,
    listen_edge,
    token_limit,
)
from omnicli.execution.families.cascade.judging import doubts, judged, scores, sound, warnings
from omnicli.execution.nets.whisper import WhisperConfig, load_decoder, load_encoder
from omnicli.execution.seeds import row_seed
from omnicli.execution.shared import Shared
from omnicli.execution.stage import StageSpec
from omnicli.execution.whisper_tokens import read_tokens

TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)  # openai/whisper transcribe.py
VOTERS = 3  # clips, the longest, that decide a recording's language


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One way to hear a clip; it is tried on clips with one of these problems."""

    name: str
    window: str
    temperature: float = 0.0
    cures: frozenset[str] = frozenset()


_UNSOUND = frozenset({"runaway", "repetition", "low_score"})
ROUNDS = (
    Round(name="transcribe", window="short"),
    Round(name="transcribe.full", window="full", cures=_UNSOUND | {"doubled", "uncovered"}),
    *(
        Round(name=f"transcribe.t{round(10 * t)}", window="full", temperature=t, cures=_UNSOUND)
        for t in TEMPERATURES
    ),
    Round(name="transcribe.rest", window="rest", cures=frozenset({"uncovered"})),
)
ENCODERS = {"short": "encode", "full": "encode.full", "rest": "encode.rest"}

Row = tuple[int, str]  # a clip's place, and the task


def best_of(inputs: Inputs, rounds: Sequence[Round]) -> dict[Row, Thought]:
    """What counts as said in every row after these rounds."""
    best: dict[Row, Thought] = {}
    for way in rounds:
        for thought in inputs.parts(way.name, Thought):
            row = (thought.clip, thought.task)
            best[row] = better(best[row], thought) if row in best else thought
    return best


def better(old: Thought, new: Thought) -> Thought:
    """The sounder of two texts of one clip; what the rest held is added to the old."""
    if new.window == "rest":
        return _appended(old, new)
    if not new.problem or (old.problem in _UNSOUND and new.problem == "uncovered"):
        return new
    if old.problem == "uncovered":
        return old
    return max(old, new, key=lambda t: t.avg_logprob)


def _appended(old: Thought, rest: Thought) -> Thought:
    if rest.problem in _UNSOUND or not rest.text:
        return old
    return replace(
        old,
        text=f"{old.text} {rest.text}".strip(),
        segments=old.segments + rest.segments,
        problem=rest.problem,
    )


def rest_of(clip: AudioClip, thought: Thought) -> AudioClip:
    """What lies behind the last thing that was written down."""
    end_s = thought.segments[-1].end_s if thought.segments else clip.start_s
    skipped = round((end_s - clip.start_s) * clip.rate_hz)
    return replace(clip, samples=clip.samples[skipped:], start_s=end_s)


class Recogniser:
    """Builds the stages of one Whisper checkpoint."""

    def __init__(
        self,
        model: ModelFolder,
        task: Task,
        *,
        device: str,
        dtype: torch.dtype,
        voice_language: str = "",
        listening: str = "",
    ) -> None:
        """`voice_language`: what answers are spoken in, if anybody answers.

        `listening`: what else decides a transcript: the settings of the stage before.
        """
        self.model, self.task, self.dtype, self.listening = model, task, dtype, listening
        folder = model.folder
        self.voice_language = voice_language
        self.tokens = read_tokens(folder)
        self.config = WhisperConfig.read(folder)
        self.encoder = Shared(lambda: load_encoder(folder, dtype=dtype, device=device))
        self.decoder = Shared(lambda: load_decoder(folder, dtype=dtype, device=device))
        if task.language is not None and not self.tokens.knows(task.language):
            hint = f"known: {', '.join(sorted(self.tokens.languages)) or 'en'}"
            raise UserError(f"the model does not know the language {task.language!r}", hint=hint)

    def specs(self) -> list[StageSpec]:
        """All stages, the fallback rounds among them."""
        stages = [self._encode("short", 1), self._identify(), self._transcribe(0)]
        stages += [self._encode("full", 1)]
        stages += [self._transcribe(i) for i in range(1, len(ROUNDS) - 1)]
        stages += [self._encode("rest", len(ROUNDS) - 1), self._transcribe(len(ROUNDS) - 1)]
        return [*stages, self._transcript()]

    # -- encode

    def _encode(self, window: str, index: int) -> StageSpec:
        """`index` is the round that will read it."""

        @contextmanager
        def opened() -> Iterator[Encode]:
            with self.encoder.use() as net:
                yield Encode(net, full=window == "full")

        def clips(request: Request, inputs: Inputs) -> Sequence[tuple[int, AudioClip]]:
            if window == "short":
                return list(enumerate(_heard(inputs).clips))
            return self._again(inputs, index)

        width, ffn, size = self.config.d_model, self.config.encoder_ffn_dim, self.dtype.itemsize
        earlier = tuple(way.name for way in ROUNDS[:index]) if window != "short" else ()
        return StageSpec(
            name=ENCODERS[window],
            reads=("listen", *earlier),
            split=clips,
            open=opened,
            length=lambda item: clip_frames(item[1]),
            edge=lambda frames: encode_frames(frames, full=window == "full"),
            row_bytes=lambda frames: frames * (12 * width + 2 * ffn) * size,
            audio_s=lambda item: item[1].duration_s,
            forecast=forecast_frames if window == "short" else None,
            max_rows=16,
            fill_rows=1,  # edges are multiples of four frames: every product has rows enough
        )

    def _again(self, inputs: Inputs, index: int) -> list[tuple[int, AudioClip]]:
        """The clips that round `index` will hear, once each."""
        clips = _heard(inputs).clips
        troubled = self._troubled(inputs, index)
        if ROUNDS[index].window == "full":
            return [(place, clips[place]) for place in sorted({t.clip for t in troubled})]
        return [(t.clip, rest_of(clips[t.clip], t)) for t in troubled]

    def _troubled(self, inputs: Inputs, index: int) -> list[Thought]:
        """What earlier rounds left for round `index`, in a fixed order."""
        best = best_of(inputs, ROUNDS[:index])
        return [best[row] for row in sorted(best) if best[row].problem in ROUNDS[index].cures]

    # -- identify

    def _identify(self) -> StageSpec:
        @contextmanager
        def opened() -> Iterator[Identify]:
            with self.decoder.use() as net:
                yield Identify(net, self.tokens)

        def longest(request: Request, inputs: Inputs) -> Sequence[Encoded]:
            if not self.tokens.languages or request.language or self.task.language:
                return ()
            return sorted(inputs.parts("encode", Encoded), key=lambda e: -e.valid_frames)[:VOTERS]

        def decide(request: Request, inputs: Inputs, found: Sequence[Language]) -> Language | None:
            votes: dict[str, float] = {}
            for language in found:
                votes[language.code] = votes.get(language.code, 0.0) + language.probability
            if not votes:
                return None
            best = max(votes, key=lambda code: votes[code])
            return Language(code=best, probability=votes[best] / len(found))

        return StageSpec(
            name="identify",
            reads=("encode",),
            split=longest,
            join=decide,
            open=opened,
            length=lambda item: len(item.embeds),
            edge=listen_edge,
            row_bytes=self._decode_bytes,
        )

    def _language(self, request: Request, inputs: Inputs) -> Language:
        given = request.language or self.task.language
        if given is None:
            return inputs.one("identify", Language) or Language(code="en", probability=1.0)
        if not self.tokens.knows(given):
            raise RequestError("unknown_language", f"the model does not know {given!r}")
        return Language(code=self.tokens.code(given), probability=1.0)

    # -- transcribe

    def _transcribe(self, index: int) -> StageSpec:
        way = ROUNDS[index]

        @contextmanager
        def opened() -> Iterator[Transcribe]:
            with self.decoder.use() as net:
                yield Transcribe(net, self.tokens)

        def hearings(request: Request, inputs: Inputs) -> Sequence[Hearing]:
            return self._hearings(request, inputs, index)

        sampled = PolicySpec(name="sample", options={"temperature": way.temperature})
        earlier = tuple(before.name for before in ROUNDS[:index])
        return StageSpec(
            name=way.name,
            reads=("listen", "identify", ENCODERS[way.window], *earlier),
            split=hearings,
            open=opened,
            length=lambda item: len(item.encoded.embeds),
            edge=listen_edge,
            row_bytes=self._decode_bytes,
            audio_s=lambda item: item.clip.duration_s,
            forecast=_forecast_heard if index == 0 else None,
            seed=lambda item: item.seed,
            policy=sampled if way.temperature else PolicySpec(),
        )

    def _hearings(self, request: Request, inputs: Inputs, index: int) -> list[Hearing]:
        way, clips = ROUNDS[index], _heard(inputs).clips
        encoded = inputs.parts(ENCODERS[way.window], Encoded)
        if index == 0:
            tasks = self._tasks(request, inputs) if clips else []
            rows = [(e, clips[e.clip], task) for task in tasks for e in encoded]
        elif way.window == "full":
            by_clip = {e.clip: e for e in encoded}
            troubled = self._troubled(inputs, index)
            rows = [(by_clip[t.clip], clips[t.clip], t.task) for t in troubled]
        else:
            troubled = self._troubled(inputs, index)
            pairs = zip(encoded, troubled, strict=True)
            rows = [(e, rest_of(clips[t.clip], t), t.task) for e, t in pairs]
        language = self._language(request, inputs).code
        seed = request.seed if request.seed is not None else self.task.seed
        return [
            Hearing(
                encoded=e,
                clip=clip,
                language=language,
                task=task,
                window=way.window,
                temperature=way.temperature,
                seed=row_seed(seed, request.request_id, way.name, part),
            )
            for part, (e, clip, task) in enumerate(rows)
        ]

    def _tasks(self, request: Request, inputs: Inputs) -> list[str]:
        """What is written down of every clip: the words, and where needed their translation."""
        language = self._language(request, inputs).code
        if not self.tokens.languages or language == "en":
            return ["transcribe"]
        if self.task.command == "transcribe":
            return [self.task.task]
        say = request.say or ("prompt" if request.prompt else self.task.say)
        return ["transcribe", "translate"] if self._translates(say) else ["transcribe"]

    def _translates(self, say: str) -> bool:
        """Whether an answer about a foreign recording is made from its English translation."""
        if self.task.command != "respond":
            return False
        return say == "translation" or (self.voice_language == "en" and say != "transcript")

    def _decode_bytes(self, frames: int) -> int:
        """Caches and logits of one row."""
        c = self.config
        tokens = frames + token_limit(WINDOW_S, c.max_target_positions)
        return 2 * c.decoder_layers * c.d_model * tokens * self.dtype.itemsize + 16 * c.vocab_size

    # -- transcript

    def _transcript(self) -> StageSpec:
        return StageSpec(
            name="transcript",
            reads=("listen", "identify", *(way.name for way in ROUNDS)),
            join=self._join,
            record=Transcript,
            settings=self._settings(),
        )

    def _settings(self) -> str:
        """Whatever decides a transcript besides the recording and its line."""
        task = self.task
        translates = self._translates(task.say)
        parts = (self.model, task.task, task.language, task.channels, task.seed, translates)
        return " ".join(map(str, (*parts, self.listening)))

    def _join(self, request: Request, inputs: Inputs, parts: Sequence[object]) -> Transcript:
        heard = _heard(inputs)
        best = best_of(inputs, ROUNDS)
        task = self.task.task if self.task.command == "transcribe" else "transcribe"
        own = [best[row] for row in sorted(best) if row[1] == "transcribe"]
        foreign = [best[row] for row in sorted(best) if row[1] == "translate"]
        chosen = judged(own or foreign, heard)
        foreign = [sound(thought, heard) for thought in foreign]
        said = any(thought.text for thought in chosen)
        language = self._language(request, inputs) if heard.clips else None
        detected = inputs.one("identify", Language)
        return Transcript(
            text=_text(chosen),
            language=language.code if language and said else "",
            language_probability=round(detected.probability, 4) if detected and said else None,
            segments=_by_time([s for thought in chosen for s in thought.segments]),
            translation=_text(foreign) if own and foreign else None,
            task=task if foreign and not own else "transcribe",
            decoded_s=heard.decoded_s,
            speech_s=heard.speech_s,
            source_rate_hz=heard.source_rate_hz,
            source_channels=heard.source_channels,
            scores=scores(chosen, heard),
            finish_reason="length" if any(t.finish_reason != "stop" for t in chosen) else "stop",
            warnings=heard.warnings + warnings(chosen, heard) + doubts(foreign if own else ()),
        )


def forecast_frames(seconds: float) -> list[int]:
    """Encoder frames of the clips that a recording of so many seconds is cut into, at most."""
    whole, rest = divmod(seconds, WINDOW_S)
    clips = [WINDOW_S] * int(whole) + ([rest] if rest else [])
    return [math.ceil(clip * ENCODER_FRAMES_PER_S) for clip in clips]


def _forecast_heard(seconds: float) -> list[int]:
    return [encode_frames(frames, full=False) for frames in forecast_frames(seconds)]


def _heard(inputs: Inputs) -> Heard:
    heard = inputs.one("listen", Heard)
    assert heard is not None, "listen comes first"
    return heard


def _text(thoughts: Sequence[Thought]) -> str:
    """One text of all segments, by time; channels one after the other where they overlap."""
    segments = _by_time([s for thought in thoughts for s in thought.segments])
    return " ".join(s.text for s in segments)


def _by_time(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    return tuple(sorted(segments, key=lambda s: (s.start_s, s.end_s, s.channel)))
