"""The stages `talk` and `vocode`: an answer's sentences to latents, latents to sound.

`talk` takes sentences that are spelled already, so they are bucketed by their phonemes. How long
they last only their durations tell: inside, rows are grouped again by frames. `vocode` cuts rows
into windows of one shape, so a batch may hold rows of any length and its memory does not grow.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from omnicli.config import ModelFolder
from omnicli.data import Answer, Failure, Inputs, Product, Request, Speech, Waveform
from omnicli.errors import RequestError, UserError
from omnicli.execution.heap import keep_freed_memory
from omnicli.execution.nets.vits import (
    Span,
    Talker,
    VitsConfig,
    Voice,
    load_talker,
    load_voice,
    read_config,
    speaker_rows,
)
from omnicli.execution.phonemes import ESPEAK, Alphabet, phoneme_ids, require
from omnicli.execution.seeds import row_seed
from omnicli.execution.spoken import SENTENCE_PAUSE_S, cut, to_sentences
from omnicli.execution.stage import MapStage, Settings, StageSpec
from omnicli.execution.talker import joined
from omnicli.execution.weights import read_shapes
from omnicli.operators.ragged import pad_to, unpad

TALK, VOCODE = "talk", "vocode"
MAX_IDS = 400  # of one utterance; about ten seconds. Longer ones are cut
FRAMES_PER_ID = 2.2  # usual, pads counted; for estimates
MAX_ID_S = 1.0  # a phoneme longer than this is cut to it
MAX_MEAN_FRAMES = 10  # per id; more is a runaway
RUNAWAY = "runaway"
SLACK_FRAMES = 100
# An even number of rows whose length is a multiple of 16 gives each row the same bits, whoever
# else is there: oneDNN takes other kernels for one row, and torch's exp and gelu other ones for
# what is left of 32 numbers.
EVEN, STEP = 2, 16
FLOW_FRAMES = {"cpu": 2048, "cuda": 65_536}  # that pass the flow in one call
# On a CPU for its second-level cache: the widest layer of a window takes 0.5 MiB in bfloat16.
CHUNK_FRAMES = {"cpu": 32, "cuda": 256}

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceInfo:
    """What a voice's settings and headers say; no weights are read."""

    name: str
    folder: Path
    language: str  # two letters
    rate_hz: int
    alphabet: Alphabet
    config: VitsConfig
    noise_scale: float = 0.667
    length_scale: float = 1.0
    duration_noise: float = 0.8
    speakers: Mapping[str, int] = field(default_factory=dict)
    default_speaker: int = 0

    @property
    def frames_per_s(self) -> float:
        """Latent frames in a second of sound."""
        return self.rate_hz / self.config.hop_samples

    def speaker(self, name: str | None) -> int:
        """The number of a speaker: by name, by number, or the voice's first one."""
        if name is None or name == self.name:
            return self.default_speaker
        if name in self.speakers:
            return self.speakers[name]
        if name.isdecimal() and int(name) < self.config.speakers:
            return int(name)
        known = ", ".join(list(self.speakers)[:8]) or "it has but one"
        raise RequestError("unknown_voice", f"{self.name} has no speaker {name!r} ({known})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """One sentence to speak, spelled."""

    text: str
    ids: tuple[int, ...]
    seed: int
    speaker: int = 0
    speaking_rate: float = 1.0
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Voiced:
    """One sentence's latents and whose voice they are."""

    speech: Speech
    speaker: int = 0


# -- the voice and its sentences


def voice_info(folder: Path) -> VoiceInfo:
    """Read a voice's folder: config.json as Piper writes it, model.safetensors."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return _voice_info(folder, raw, read_config(read_shapes(folder)))
    except OSError as error:
        raise UserError(f"cannot read the voice's settings {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "it should be the .onnx.json that came with the voice"
        raise UserError(f"{path} is not a Piper voice's settings: {error!r}", hint=hint) from error


def _voice_info(folder: Path, raw: Mapping[str, Any], config: VitsConfig) -> VoiceInfo:
    espeak_voice = str(raw.get("espeak", {}).get("voice", ""))
    inference = raw.get("inference", {})
    hop_samples = raw.get("hop_length", config.hop_samples)
    if hop_samples != config.hop_samples:
        raise ValueError(f"hop_length is {hop_samples}, the weights make {config.hop_samples}")
    family = raw.get("language", {}).get("family") or espeak_voice.split("-")[0]
    return VoiceInfo(
        name=folder.name,
        folder=folder,
        language=str(family),
        rate_hz=int(raw["audio"]["sample_rate"]),
        alphabet=Alphabet(
            kind=raw.get("phoneme_type") or ESPEAK,
            espeak_voice=espeak_voice,
            ids={phoneme: tuple(ids) for phoneme, ids in raw["phoneme_id_map"].items()},
            clusters=frozenset(tuple(c) for c in raw.get("vowel_clusters") or ()),
        ),
        config=config,
        noise_scale=float(inference.get("noise_scale", 0.667)),
        length_scale=float(inference.get("length_scale", 1.0)),
        duration_noise=float(inference.get("noise_w", 0.8)),
        speakers={str(k): int(v) for k, v in raw.get("speaker_id_map", {}).items()},
        default_speaker=int(raw.get("default_speaker_id", 0)),
    )


def utterances(
    voice: VoiceInfo, request: Request, text: str, *, seed: int, speaking_rate: float
) -> list[Utterance]:
    """The sentences of a text in order, each short enough to be said in one go."""
    spelled = [
        (piece, ids, pause_s)
        for sentence in to_sentences(text, voice.language)
        for piece, ids, pause_s in _spelled(sentence.text, sentence.pause_s, voice.alphabet)
    ]
    speaker = voice.speaker(request.voice)
    base = seed if request.seed is None else request.seed
    return [
        Utterance(
            text=piece,
            ids=ids,
            seed=row_seed(base, request.request_id, TALK, part),
            speaker=speaker,
            speaking_rate=speaking_rate,
            pause_s=pause_s if part < len(spelled) - 1 else 0.0,
        )
        for part, (piece, ids, pause_s) in enumerate(spelled)
    ]


def _spelled(
    text: str, pause_s: float, alphabet: Alphabet
) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Spell a sentence; cut it in half where it is too long, until it is not."""
    found = phoneme_ids(text, alphabet)
    if any(len(ids) > MAX_IDS for ids in found) and len(text) > 2:
        halves = cut(text, len(text) // 2 + 1)
        for half in halves:
            yield from _spelled(half, pause_s if half is halves[-1] else 0.0, alphabet)
        return
    for i, ids in enumerate(found):
        yield text, ids[:MAX_IDS], pause_s if i == len(found) - 1 else SENTENCE_PAUSE_S


def edge_of(length: int, parts: int = 8) -> int:
    """What a length is padded to: up to the next power of two in that many steps."""
    step = max(STEP, (1 << (length - 1).bit_length()) // 2 // parts)
    return -(-length // step) * step


def coarse_edge(length: int) -> int:
    """What a batch is chosen by: the stage itself makes groups of one `edge_of` from its rows."""
    return edge_of(length, parts=2)


# -- talk


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A row before the flow: frames of the prior, with noise. [F, C]"""

    frames: Tensor


class Talk(MapStage[Utterance]):
    """Utterances to latents."""

    def __init__(self, net: Talker, voice: VoiceInfo, device: str) -> None:
        self._net = net
        self._voice = voice
        self._device = torch.device(device)

    @torch.inference_mode()
    def run(self, items: Sequence[Utterance]) -> list[Speech | Failure]:
        """See `MapStage`. An utterance that runs away is drawn once more, with another seed."""
        drawn = self._drawn(items)
        again = [i for i, d in enumerate(drawn) if isinstance(d, Failure) and d.code == RUNAWAY]
        for i, second in zip(again, self._drawn([_reseeded(items[i]) for i in again]), strict=True):
            drawn[i] = second
        made: dict[int, Speech | Failure] = {
            i: d for i, d in enumerate(drawn) if isinstance(d, Failure)
        }
        left = [i for i in range(len(items)) if i not in made]
        frames = [d.frames for i in left if isinstance(d := drawn[i], _Drawn)]
        for edge, rows in _by_edge(len(f) for f in frames):
            for some in _slices(rows, max(EVEN, FLOW_FRAMES[self._device.type] // edge)):
                owners = [items[left[r]] for r in some]
                latents = self._flow([frames[r] for r in some], owners, edge)
                for r, owner, made_of in zip(some, owners, latents, strict=True):
                    made[left[r]] = Speech(latents=made_of, pause_s=owner.pause_s)
        return [made[i] for i in range(len(items))]

    def _drawn(self, items: Sequence[Utterance]) -> list[_Drawn | Failure]:
        """Every row's prior, in order."""
        drawn: dict[int, _Drawn | Failure] = {}
        for edge, rows in _by_edge(len(u.ids) for u in items):
            drawn |= zip(rows, self._draw([items[r] for r in rows], edge), strict=True)
        return [drawn[i] for i in range(len(items))]

    def _draw(self, items: Sequence[Utterance], edge: int) -> list[_Drawn | Failure]:
        """Rows of one edge through text encoder and durations."""
        rows = _filled(items)
        noise = [_Noise(u.seed) for u in rows]
        ids, lengths = pad_to([torch.tensor(u.ids) for u in rows], edge)
        first, _ = pad_to([n.draw(len(u.ids), 2) for n, u in zip(noise, rows, strict=True)], edge)
        mask = _mask(lengths, edge).to(self._device)
        hidden, means, log_spreads = self._net.enc_p(ids.to(self._device), mask)
        log_frames = self._net.dp(
            hidden,
            mask,
            first.to(self._device) * self._voice.duration_noise,
            speaker_rows(self._net.emb_g, [u.speaker for u in rows]),
        )
        return [
            self._stretched(u, n, means[i], log_spreads[i], log_frames[i])
            for i, (u, n) in enumerate(zip(items, noise, strict=False))
        ]

    def _stretched(
        self,
        item: Utterance,
        noise: "_Noise",
        means: Tensor,
        log_spreads: Tensor,
        log_frames: Tensor,
    ) -> _Drawn | Failure:
        """One row's prior, every phoneme repeated for as long as it lasts: [N, C] -> [F, C]."""
        scale = self._voice.length_scale / item.speaking_rate
        n = len(item.ids)
        lasts = torch.ceil(torch.exp(log_frames[:n]) * scale)
        longest = math.ceil(MAX_ID_S * self._voice.frames_per_s * max(1.0, scale))
        total = float(lasts.clamp_(max=longest).sum())
        if math.isnan(total):  # it passes the clamp
            return Failure(code="not_finite", stage=TALK, message="its durations are no numbers")
        if total > SLACK_FRAMES + MAX_MEAN_FRAMES * n * max(1.0, scale):
            return Failure(code=RUNAWAY, stage=TALK, message=f"{total:.0f} frames for {n} phonemes")
        if total < 1:
            lasts[-1] = 1
        which = torch.repeat_interleave(lasts.long())
        added = noise.draw(len(which), means.shape[-1]).to(self._device)
        spread = log_spreads[which].exp() * self._voice.noise_scale
        return _Drawn(means[which] + added * spread)

    def _flow(
        self, frames: Sequence[Tensor], owners: Sequence[Utterance], edge: int
    ) -> list[Tensor]:
        """Rows [F, C] of one edge through the flow, to latents [F, C] on the CPU."""
        z, lengths = pad_to(_filled(frames), edge)
        speakers = speaker_rows(self._net.emb_g, [u.speaker for u in _filled(owners)])
        latents = self._net.flow(z, _mask(lengths.cpu(), edge).to(self._device), speakers)
        return unpad(latents[: len(frames)].cpu(), [len(f) for f in frames])


def _reseeded(item: Utterance) -> Utterance:
    """The same words with other noise, which depends on nothing but its own."""
    return replace(item, seed=row_seed(item.seed, "", f"{TALK}.again", 0))


class _Noise:
    """A row's own random numbers, drawn on the CPU: the same on every device."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, length: int, width: int) -> Tensor:
        """Normal noise [length, width]."""
        return torch.randn(length, width, generator=self._generator)


def _mask(lengths: Tensor, edge: int) -> Tensor:
    """[B] -> [B, edge, 1] float32, 1 for real positions."""
    return (torch.arange(edge) < lengths[:, None]).float()[..., None]


def _filled(rows: Sequence[T]) -> list[T]:
    return [*rows, *[rows[-1]] * (-len(rows) % EVEN)]


def _by_edge(lengths: Iterable[int]) -> list[tuple[int, list[int]]]:
    """Places of rows that are padded to the same edge."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, length in enumerate(lengths):
        groups[edge_of(length)].append(i)
    return sorted(groups.items())


def _slices(rows: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    for begin in range(0, len(rows), most):
        yield rows[begin : begin + most]


# -- vocode


@dataclass(frozen=True, slots=True)
class _Job:
    """One window of one row."""

    row: int
    chunk: int
    window: Tensor  # [context + chunk + context, C]
    begin: int  # the stretch of the window that lies on the row
    end: int


class Vocode(MapStage[Voiced]):
    """Latents to sound, window by window."""

    def __init__(self, net: Voice, voice: VoiceInfo, device: str) -> None:
        self._net = net
        self._rate_hz = voice.rate_hz
        self._hop = voice.config.hop_samples
        self._device = torch.device(device)
        self._dtype = net.dec.conv_pre.weight.dtype
        self._context = net.dec.context_frames
        self._chunk = CHUNK_FRAMES[self._device.type]
        # Calls have few shapes, and each thread the same share of a call: then a window's bits do
        # not depend on the others.
        self._quantum = max(4, 2 * torch.get_num_threads()) if self._device.type == "cpu" else 32
        self._most = 2 * self._quantum

    @torch.inference_mode()
    def run(self, items: Sequence[Voiced]) -> list[Waveform | Failure]:
        """See `MapStage`."""
        sounds = [torch.zeros(len(v.speech.latents) * self._hop) for v in items]
        jobs = [job for row, item in enumerate(items) for job in self._jobs(row, item)]
        for some in _slices(jobs, self._most):
            samples = self._call(some, [items[j.row].speaker for j in some])
            for job, made in zip(some, samples, strict=False):
                place = sounds[job.row][job.chunk * self._chunk * self._hop :]
                place[: len(made)] = made[: len(place)]
        return [self._waveform(sound) for sound in sounds]

    def _jobs(self, row: int, item: Voiced) -> Iterator[_Job]:
        latents = item.speech.latents
        frames, width = len(latents), self._chunk + 2 * self._context
        chunks = -(-frames // self._chunk)
        padded = F.pad(
            latents, (0, 0, self._context, chunks * self._chunk - frames + self._context)
        )
        for chunk in range(chunks):
            first = chunk * self._chunk  # of the window, in the padded row
            begin, end = max(0, self._context - first), self._context - first + frames
            yield _Job(row, chunk, padded[first : first + width], begin, min(width, end))

    def _call(self, jobs: Sequence[_Job], speakers: Sequence[int]) -> Tensor:
        """Jobs -> their samples [J, chunk * hop] float32 on the CPU, and perhaps more rows."""
        fill = -len(jobs) % self._quantum
        windows = F.pad(torch.stack([j.window for j in jobs]), (0, 0, 0, 0, 0, fill))
        width = windows.shape[1]
        spans = [
            Span(i, j.begin, j.end) for i, j in enumerate(jobs) if j.begin > 0 or j.end < width
        ]
        samples: Tensor = self._net.dec(
            windows.to(self._device, self._dtype),
            speaker_rows(self._net.emb_g, [*speakers, *[0] * fill]),
            self._context,
            spans,
        )
        return samples.cpu()

    def _waveform(self, samples: Tensor) -> Waveform | Failure:
        peak = float(samples.abs().max()) if len(samples) else 0.0
        if not math.isfinite(peak):
            return Failure(code="not_finite", stage=VOCODE, message="the vocoder made no sound")
        return Waveform(pieces=(samples,), rate_hz=self._rate_hz, peak=peak, samples=len(samples))


# -- the stages


def talk_spec(model: ModelFolder, settings: Settings) -> StageSpec:
    """The stage that reads answers and makes `Speech`, a part per sentence."""
    voice = voice_info(model.folder)
    task, device = settings.task, settings.device
    require(voice.alphabet)

    def split(request: Request, inputs: Inputs) -> Sequence[Utterance]:
        answer = inputs.one("answer", Answer)
        if answer is None or not answer.speak:
            return ()
        return utterances(
            voice, request, answer.text, seed=task.seed, speaking_rate=task.speaking_rate
        )

    @contextmanager
    def opened() -> Iterator[Talk]:
        yield Talk(load_talker(voice.folder, voice.config, device), voice, device)

    id_s = FRAMES_PER_ID * voice.length_scale / task.speaking_rate / voice.frames_per_s
    return StageSpec(
        name=TALK,
        reads=("answer",),
        split=split,
        open=opened,
        length=_id_count,
        edge=coarse_edge,
        row_bytes=_talk_bytes(voice.config),
        audio_s=lambda item: len(item.ids) * id_s,
        fill_rows=1,
        settings=f"{model} rate={task.speaking_rate} seed={task.seed}",
    )


def vocode_spec(model: ModelFolder, settings: Settings) -> StageSpec:
    """The stage that reads `Speech` and makes one `Waveform` per request."""
    voice = voice_info(model.folder)
    device, hop = settings.device, voice.config.hop_samples
    # Nothing computes half precision on a CPU well; asked for there, it means "small".
    halves = settings.dtype == torch.float16 and device == "cpu"
    dtype = torch.float32 if halves else settings.dtype
    chunk = CHUNK_FRAMES[torch.device(device).type]

    def split(request: Request, inputs: Inputs) -> Sequence[Voiced]:
        spoken = inputs.parts(TALK, Speech)
        speaker = voice.speaker(request.voice) if spoken else 0
        return [Voiced(speech=s, speaker=speaker) for s in spoken]

    def join(request: Request, inputs: Inputs, parts: Sequence[Waveform]) -> Product | None:
        pauses_s = [s.pause_s for s in inputs.parts(TALK, Speech)]
        return joined(voice.rate_hz, parts, pauses_s) if parts else None

    @contextmanager
    def opened() -> Iterator[Vocode]:
        keep_freed_memory()
        yield Vocode(load_voice(voice.folder, voice.config, dtype, device), voice, device)

    return StageSpec(
        name=VOCODE,
        reads=(TALK,),
        split=split,
        join=join,
        open=opened,
        length=_frame_count,
        edge=lambda frames: -(-frames // chunk) * chunk,
        row_bytes=lambda frames: frames * (hop + 2 * voice.config.latent) * 4,
        audio_s=lambda item: len(item.speech.latents) / voice.frames_per_s,
        fill_rows=1,
        settings=f"{model} {dtype}",
    )


def _id_count(item: Utterance) -> int:
    return len(item.ids)


def _frame_count(item: Voiced) -> int:
    return len(item.speech.latents)


def _talk_bytes(c: VitsConfig) -> Callable[[int], int]:
    """Float32 activations of a row of N ids: attention weights, wide layers, frames of the flow."""
    per_frame = 2 * c.latent + 8 * c.coupling_width
    per_id = c.filter + 8 * c.width + math.ceil(FRAMES_PER_ID * per_frame)
    return lambda n: 4 * n * (4 * c.heads * n + per_id)
