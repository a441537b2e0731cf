"""Whisper as stages: clips to frames (Encode), to a language (Identify), to words (Transcribe)."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from omnicli.data import AudioClip, Encoded, Language, Segment, Thought
from omnicli.execution.heap import forget_pages
from omnicli.execution.kv_cache import KVCache
from omnicli.execution.looping import loops
from omnicli.execution.nets.whisper import CrossCache, Decoder, Encoder
from omnicli.execution.stage import LoopStage, MapStage, RowEnd, StepOut
from omnicli.execution.whisper_tokens import TIME_PRECISION_S, WhisperTokens
from omnicli.operators.attention import length_mask
from omnicli.operators.mel import FRAMES_PER_S, HOP_SAMPLES, log_mel
from omnicli.operators.ragged import pad_to
from omnicli.operators.timestamps import begin_with_timestamp, timestamp_rules

WINDOW_S = 30.0
MARGIN_S = 1.5  # silence after a clip: with half a second, one clip in four looped
FRAME_SAMPLES = 2 * HOP_SAMPLES  # one encoder frame
ENCODER_FRAMES_PER_S = FRAMES_PER_S // 2  # 50
ENCODE_STEP_FRAMES = 32
FEW_FRAMES = 160
LISTEN_EDGES_FRAMES = (
    256,
    512,
    768,
    1024,
    1536,
)  # of the decoder's audio: few, so batches are large
MIN_TOKENS, TOKENS_PER_S = 24, 20  # more tokens than anyone speaks: beyond that, a text runs on
LOOP = (5, 20)  # a text that says the same so often, in so many tokens at the least, is stopped

# openai/whisper transcribe.py
MAX_COMPRESSION_RATIO = 2.4
MIN_AVG_LOGPROB = -1.0
MAX_NO_SPEECH_PROB = 0.6
DOUBLED_WORDS = 3  # that are said twice: people do it too, so only the short window is doubted
MAX_UNCOVERED_S = 2.0  # speech left over after the last timestamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Hearing:
    """A clip that one pass of the decoder writes down."""

    encoded: Encoded
    clip: AudioClip
    language: str
    task: str
    window: str
    temperature: float
    seed: int


class Encode(MapStage[tuple[int, AudioClip]]):
    """Clips (with their places) to encoder frames, each padded to its own edge."""

    def __init__(self, net: Encoder, *, full: bool) -> None:
        self.net = net
        self.full = full

    def run(self, items: Sequence[tuple[int, AudioClip]]) -> list[Encoded]:
        """See `MapStage`: Encoded [T, D]."""
        weight = self.net.conv1.weight
        edge = encode_frames(max(clip_frames(clip) for _, clip in items), full=self.full)
        samples, _ = pad_to([clip.samples for _, clip in items], edge * FRAME_SAMPLES)
        for _, clip in items:
            forget_pages(clip.samples)
        if edge < FEW_FRAMES:  # float32 convolutions round differently over one short row
            samples = torch.cat([samples, samples[:1]])
        mel = log_mel(samples.to(weight.device), self.net.conv1.in_channels)
        embeds = self.net(mel.to(weight.dtype))
        return [
            Encoded(embeds=row.clone(), clip=place, valid_frames=clip_frames(clip))
            for row, (place, clip) in zip(embeds, items, strict=False)
        ]


def clip_frames(clip: AudioClip) -> int:
    """Encoder frames that a clip's own samples touch."""
    return -(-len(clip.samples) // FRAME_SAMPLES)


def encode_frames(valid_frames: int, *, full: bool) -> int:
    """Frames that the encoder computes for a clip: its length, a margin, and the step's rest."""
    most = round(WINDOW_S * ENCODER_FRAMES_PER_S)
    if full:
        return most
    wanted = valid_frames + round(MARGIN_S * ENCODER_FRAMES_PER_S)
    return min(most, -(-wanted // ENCODE_STEP_FRAMES) * ENCODE_STEP_FRAMES)


class Identify(MapStage[Encoded]):
    """The language of a clip, from the decoder's first prediction."""

    def __init__(self, net: Decoder, tokens: WhisperTokens) -> None:
        self.net = net
        self.codes = list(tokens.languages)
        self.ids = torch.tensor(list(tokens.languages.values()))
        self.start = tokens.start

    def run(self, items: Sequence[Encoded]) -> list[Language]:
        """See `MapStage`."""
        cross = hear(self.net, items)
        first = torch.full((len(items), 1), self.start, device=cross.k[0].device)
        hidden = self.net(first, self.net.new_cache(len(items), 1), cross)
        logits = self.net.logits(hidden[:, 0]).cpu()[:, self.ids]
        best, at = logits.softmax(dim=1).max(dim=1)
        return [
            Language(code=self.codes[i], probability=p)
            for p, i in zip(best.tolist(), at.tolist(), strict=True)
        ]


def hear(net: Decoder, items: Sequence[Encoded]) -> CrossCache:
    """The decoder's view of B clips, padded to one edge and masked."""
    edge = listen_edge(max(len(item.embeds) for item in items))
    audio, lengths = pad_to([item.embeds for item in items], edge)
    for item in items:
        forget_pages(item.embeds)
    return net.listen(audio, length_mask(lengths, edge))


def listen_edge(frames: int) -> int:
    """Frames that the decoder attends to, padding included."""
    return next(edge for edge in LISTEN_EDGES_FRAMES if frames <= edge)


@dataclass(slots=True)
class TranscribeState:
    """Caches, and what the timestamp rules and the gate must remember of each row."""

    cache: KVCache
    cross: CrossCache
    last: Tensor  # [B] int64
    before: Tensor  # [B] int64
    latest: Tensor  # [B] int64, the last timestamp
    no_speech: list[float]
    last_step: Tensor  # [B] int64, the last timestamp that lies on the clip
    said: list[list[int]]  # words, no timestamps

    def keep(self, rows: Tensor) -> None:
        """See `LoopState`."""
        self.cache.keep(rows)
        self.cross.keep(rows)
        self.last, self.before = self.last[rows], self.before[rows]
        self.latest, self.last_step = self.latest[rows], self.last_step[rows]
        kept = rows.tolist()
        self.no_speech = [self.no_speech[row] for row in kept]
        self.said = [self.said[row] for row in kept]


class Transcribe(LoopStage[Hearing, TranscribeState]):
    """Encoder frames to text with timestamps."""

    scored = True

    def __init__(self, net: Decoder, tokens: WhisperTokens) -> None:
        self.net = net
        self.tokens = tokens
        self.times = tokens.times
        self.end_ids = frozenset({tokens.end})
        weight = net.embed_tokens.weight
        self.bias = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
        self.bias[[*tokens.suppressed, tokens.no_timestamps]] = float("-inf")

    def limit(self, item: Hearing) -> int:
        """See `LoopStage`: bounded by the seconds of the clip."""
        return token_limit(item.clip.duration_s, self.net.config.max_target_positions)

    def start(self, items: Sequence[Hearing]) -> tuple[TranscribeState, StepOut]:
        """See `LoopStage`."""
        prompts = [self.tokens.prompt(item.language, item.task) for item in items]
        cross = hear(self.net, [item.encoded for item in items])
        device = cross.k[0].device
        longest = token_limit(WINDOW_S, self.net.config.max_target_positions)
        cache = self.net.new_cache(len(items), len(prompts[0]) + longest)
        hidden = self.net(torch.tensor(prompts, device=device), cache, cross)
        raw = self.net.logits(hidden[:, 0])
        no_speech = raw.softmax(dim=1)[:, self.tokens.no_speech].tolist()
        first = self.times.first
        began = torch.full((len(items),), first, device=device)
        last_step = torch.tensor(
            [first + int(item.clip.duration_s / TIME_PRECISION_S) for item in items], device=device
        )
        said: list[list[int]] = [[] for _ in items]
        state = TranscribeState(cache, cross, began, began, began, no_speech, last_step, said)
        logits = self.net.logits(hidden[:, -1], self.bias)
        logits[:, list(self.tokens.suppressed_first)] = float("-inf")
        begin_with_timestamp(logits, self.times)
        return state, StepOut(logits)

    def step(self, frames: Tensor, state: TranscribeState) -> StepOut:
        """See `LoopStage`."""
        hidden = self.net(frames, state.cache, state.cross)
        state.before, state.last = state.last, frames[:, 0]
        is_time = state.last >= self.times.first
        state.latest = torch.where(is_time, state.last, state.latest)
        logits = self.net.logits(hidden[:, 0], self.bias)
        self._end_with_the_clip(logits, state)
        timestamp_rules(logits, state.last, state.before, state.latest, self.times)
        self._stop_loops(logits, state)
        return StepOut(logits)

    def _stop_loops(self, logits: Tensor, state: TranscribeState) -> None:
        """What goes in circles is over: it takes no row to its limit."""
        for row, token in enumerate(state.last.tolist()):
            if token < self.tokens.end:
                state.said[row].append(token)
            if loops(state.said[row], *LOOP):
                logits[row] = float("-inf")
                logits[row, self.tokens.end] = 0.0

    def _end_with_the_clip(self, logits: Tensor, state: TranscribeState) -> None:
        """No timestamp lies behind the clip's last sample."""
        times = logits[:, self.times.first :]
        steps = torch.arange(self.times.first, logits.shape[1], device=logits.device)
        behind = torch.maximum(state.last_step, state.latest)
        times.masked_fill_(steps[None] > behind[:, None], float("-inf"))

    def finish(self, item: Hearing, end: RowEnd, state: TranscribeState, row: int) -> Thought:
        """See `LoopStage`."""
        ids = end.frames[:, 0].tolist()
        avg_logprob = end.logprob / max(1, end.steps)
        no_speech = state.no_speech[row]
        silent = no_speech > MAX_NO_SPEECH_PROB and avg_logprob < MIN_AVG_LOGPROB
        text = "" if silent else self.tokens.text(ids).strip()
        segments = () if silent else self._segments(ids, item.clip, avg_logprob, no_speech)
        thought = Thought(
            text=text,
            segments=segments,
            clip=item.encoded.clip,
            task=item.task,
            window=item.window,
            temperature=item.temperature,
            avg_logprob=avg_logprob,
            compression_ratio=compression_ratio(text),
            no_speech_prob=no_speech,
            finish_reason="loop" if loops(state.said[row], *LOOP) else end.reason,
        )
        return thought if silent else replace(thought, problem=problem_of(thought, item.clip))

    def _segments(
        self, ids: list[int], clip: AudioClip, avg_logprob: float, no_speech: float
    ) -> tuple[Segment, ...]:
        """The texts between pairs of timestamps, with times in the recording."""
        made = []
        for start, end, words in timed(ids, self.times.first, clip.duration_s):
            if text := self.tokens.text(words).strip():
                segment = Segment(
                    start_s=round(clip.start_s + start, 3),
                    end_s=round(clip.start_s + end, 3),
                    text=text,
                    channel=clip.channel,
                    avg_logprob=avg_logprob,
                    no_speech_prob=no_speech,
                )
                made.append(segment)
        return tuple(made)


def token_limit(duration_s: float, positions: int) -> int:
    """The most tokens that a clip may take; half the positions, as the reference has it."""
    return min(positions // 2, MIN_TOKENS + round(TOKENS_PER_S * duration_s))


def timed(
    ids: Sequence[int], first: int, duration_s: float
) -> Iterator[tuple[float, float, list[int]]]:
    """Cut token ids at their timestamps: (start_s, end_s, words), inside the clip, none empty."""
    start, words = 0.0, []
    for token in ids:
        if token < first:
            words.append(token)
            continue
        at = min(duration_s, (token - first) * TIME_PRECISION_S)
        if words:
            yield _span(start, at, duration_s, words)
            words = []
        start = at
    if words:
        yield _span(start, duration_s, duration_s, words)


def _span(
    start: float, end: float, duration_s: float, words: list[int]
) -> tuple[float, float, list[int]]:
    """At least one step long, and never past the end."""
    end = min(duration_s, max(end, start + TIME_PRECISION_S))
    return min(start, max(0.0, end - TIME_PRECISION_S)), end, words


def compression_ratio(text: str) -> float:
    """How well a text compresses; texts that loop compress too well (openai/whisper utils.py)."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw)) if raw else 0.0


def doubled(text: str) -> bool:
    """Whether a text says the same twice: what a short window does before it loops."""
    words = [word.strip(".,;:!?-").casefold() for word in text.split()]
    half = len(words) // 2
    return half >= DOUBLED_WORDS and len(words) % 2 == 0 and words[:half] == words[half:]


def problem_of(thought: Thought, clip: AudioClip) -> str:
    """Why a text is not to be trusted; empty if it is."""
    if thought.finish_reason == "length":
        return "runaway"
    if thought.finish_reason == "loop" or thought.compression_ratio > MAX_COMPRESSION_RATIO:
        return "repetition"
    if thought.avg_logprob < MIN_AVG_LOGPROB:
        return "low_score"
    if thought.window == "short" and doubled(thought.text):
        return "doubled"
    covered_s = thought.segments[-1].end_s - clip.start_s if thought.segments else 0.0
    return "uncovered" if clip.duration_s - covered_s > MAX_UNCOVERED_S else ""
