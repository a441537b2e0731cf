"""Qwen2.5-Omni: a thinker, a talker of one codebook, flow matching to mel, BigVGAN to sound.

How it computes is what transformers 5.24 does in `models/qwen2_5_omni`, but for this:

- speaker, seed and sampling belong to a row;
- rows of any length share a vocoder's batch, each with its own noise;
- the talker's prompt always ends with codec_pad and codec_bos, not only beside padded rows.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from omnicli.config import PolicySpec
from omnicli.data import Codes, Failure, Inputs, Request, Waveform
from omnicli.errors import UserError
from omnicli.execution import omni
from omnicli.execution.kv_cache import REACH_STEP, KVCache
from omnicli.execution.nets import flow_dit
from omnicli.execution.nets.bigvgan import BigVGAN, BigVGANConfig
from omnicli.execution.nets.decoder import Decoder
from omnicli.execution.nets.flow_dit import DiTConfig, FlowDiT
from omnicli.execution.nets.llama import LlamaConfig, config_of
from omnicli.execution.seeds import row_seed
from omnicli.execution.stage import (
    Family,
    LoopStage,
    MapStage,
    RowEnd,
    Settings,
    StageSpec,
    StepOut,
)
from omnicli.execution.talker import (
    VOCODE,
    TalkItem,
    TalkPlan,
    cap_edge,
    check_voice,
    codes_of,
    items,
    one_after_the_other,
    spoken,
    talk_edge,
    talk_specs,
)
from omnicli.execution.weights import hollow, load_into, read_rows, weight_bytes
from omnicli.operators.ragged import pad_to

CODES_PER_S = 50.0
MOST_CODES = 4096  # transformers' default
CLIP_S = 300.0  # the window of the published feature extractor
# Without this prompt the published models do not speak (README of Qwen/Qwen2.5-Omni-7B).
SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of "
    "perceiving auditory and visual inputs, as well as generating text and speech."
)
MEL_PER_CODE = 2
VOCODE_STEP = 24  # the transformer's block
_SAMPLED = PolicySpec(
    name="sample",
    options={"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05},
)


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice of `spk_dict.pt`."""

    bos_token: int
    cond: Tensor  # [1, E]
    ref_mel: Tensor  # [1, T, M]


def read_speakers(folder: Path) -> dict[str, Speaker]:
    """The voices by name, read without running any code that the file might hold."""
    path = folder / "spk_dict.pt"
    try:
        read = torch.load(path, map_location="cpu", weights_only=True)
        return {
            name: Speaker(int(one["bos_token"]), one["cond"].float(), one["ref_mel"].float())
            for name, one in read.items()
        }
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing", hint="fetch all files of the model") from error
    except (pickle.UnpicklingError, RuntimeError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds no speakers: {error}") from error


# -- talk


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerConfig:
    """What decides the talker's shape, and its control tokens."""

    decoder: LlamaConfig
    embedding_width: int  # of the thinker's states and of the codec's embeddings
    codec_bos: int
    codec_pad: int
    codec_mask: int
    codec_eos: int
    text_eos: int
    text_pad: int

    @classmethod
    def read(cls, folder: Path) -> "TalkerConfig":
        """From `config.json`."""
        raw = omni.raw_config(folder)["talker_config"]
        return cls(
            decoder=config_of(folder, raw, "qwen2"),
            embedding_width=raw["embedding_size"],
            codec_bos=raw["tts_codec_start_token_id"],
            codec_pad=raw["tts_codec_pad_token_id"],
            codec_mask=raw["tts_codec_mask_token_id"],
            codec_eos=raw["tts_codec_end_token_id"],
            text_eos=raw["tts_text_end_token_id"],
            text_pad=raw["tts_text_pad_token_id"],
        )


class TalkerDecoder(Decoder):
    """The layers, and the embeddings of codes, which are as wide as the thinker."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__(config.decoder)
        self.embed_tokens = nn.Embedding(config.decoder.vocab, config.embedding_width)


class Talker(nn.Module):
    """The networks of the talker, under the names of the checkpoint."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        width = config.decoder.width
        self.thinker_to_talker_proj = nn.Linear(config.embedding_width, width)
        self.model = TalkerDecoder(config)
        self.codec_head = nn.Linear(width, config.decoder.vocab, bias=False)


def load_talker(folder: Path, config: TalkerConfig, *, dtype: torch.dtype, device: str) -> Talker:
    """The talker of a checkpoint."""
    with hollow():
        net = Talker(config)
    load_into(net, folder, dtype=dtype, device=device, prefix="talker.")
    net.model.ready(device)
    return net


@dataclass(slots=True)
class TalkState:
    """The cache, the thinker's reply that is still to come, and where each row is in it."""

    cache: KVCache
    reply: Tensor  # [B, R, D]: what is added to the next codes; the last one for ever
    ends: Tensor  # [B] int64: the last place in `reply`
    at: Tensor  # [B] int64

    def keep(self, rows: Tensor) -> None:
        """See `LoopState`."""
        self.cache.keep(rows)
        self.reply, self.ends, self.at = self.reply[rows], self.ends[rows], self.at[rows]

    def put(self, rows: Tensor, other: "TalkState") -> None:
        """See `RefillState`."""
        self.cache.put(rows, other.cache)
        more = other.reply.shape[1] - self.reply.shape[1]
        self.reply = nn.functional.pad(self.reply, (0, 0, 0, max(0, more)))
        self.reply[rows, : other.reply.shape[1]] = other.reply[: len(rows)]
        self.ends[rows], self.at[rows] = other.ends[: len(rows)], other.at[: len(rows)]

    def next_reply(self) -> Tensor:
        """What comes next of each row's reply -> [B, D]."""
        rows = torch.arange(len(self.at), device=self.at.device)
        found = self.reply[rows, torch.minimum(self.at, self.ends)]
        self.at = self.at + 1
        return found


class Talk(LoopStage[TalkItem, TalkState]):
    """The thinker's states to codes."""

    refills = True

    def __init__(
        self,
        net: Talker,
        config: TalkerConfig,
        marks: Tensor,
        voices: dict[str, Tensor],
    ) -> None:
        """The thinker's embeddings of text_eos, text_pad [2, D] and of each voice's token [D]."""
        self.net, self.config = net, config
        self.end_ids = frozenset({config.codec_pad, config.codec_eos})
        # Its own prompt, for the penalty: transformers counts it too.
        self.seen_ids = frozenset({config.codec_mask, config.codec_pad, config.codec_bos})
        weight = net.codec_head.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.bias = torch.zeros(config.decoder.vocab, device=self.device)
        self.bias[config.codec_bos] = -torch.inf
        self.text_eos, self.text_pad = marks.to(self.device, self.dtype)
        self.voices = {name: v.to(self.device, self.dtype) for name, v in voices.items()}

    def limit(self, item: TalkItem) -> int:
        """See `LoopStage`."""
        return item.limit

    def start(self, items: Sequence[TalkItem]) -> tuple[TalkState, StepOut]:
        """See `LoopStage`."""
        prompts, replies = zip(*(self.prompt(item) for item in items), strict=True)
        edge = talk_edge(max(item.positions for item in items)) + 2
        x, lengths = pad_to(prompts, edge)
        reply, sizes = pad_to(replies, max(map(len, replies)))
        capacity = edge + cap_edge(max(item.limit for item in items))
        cache = self.net.model.new_cache(len(items), -(-capacity // REACH_STEP) * REACH_STEP)
        _, states = self.net.model.decode(self.net.thinker_to_talker_proj(x), cache)
        cache.advance(lengths)
        last = states[torch.arange(len(items), device=self.device), lengths - 1]
        return TalkState(cache, reply, sizes - 1, torch.zeros_like(sizes)), self._out(last)

    def prompt(self, item: TalkItem) -> tuple[Tensor, Tensor]:
        """The talker's prompt [L + 2, D], and the reply that follows it code by code [R, D]."""
        said = item.said
        assert said.states is not None
        states = said.states.to(self.device, self.dtype)
        heard, written = states[: said.prompt_tokens], states[said.prompt_tokens :]
        codec = torch.tensor([self.config.codec_pad, self.config.codec_bos], device=self.device)
        opening = torch.stack([self.voices[item.voice], written[0]])
        opening = opening + self.net.model.embed_tokens(codec)
        reply = torch.cat([written[1:], self.text_eos[None], self.text_pad[None]])
        return torch.cat([heard, opening]), reply

    def step(self, frames: Tensor, state: TalkState) -> StepOut:
        """See `LoopStage`."""
        x = self.net.model.embed_tokens(frames[:, 0]) + state.next_reply()
        _, states = self.net.model.decode(self.net.thinker_to_talker_proj(x)[:, None], state.cache)
        state.cache.advance(1)
        return self._out(states[:, 0])

    def _out(self, last: Tensor) -> StepOut:
        return StepOut(self.net.codec_head(last).float() + self.bias)

    def finish(self, item: TalkItem, end: RowEnd, state: TalkState, row: int) -> Codes:
        """See `LoopStage`."""
        return codes_of(end, CODES_PER_S)


# -- vocode


@dataclass(frozen=True, slots=True, kw_only=True)
class VocodeItem:
    """Codes, whose voice says them, and the seed of their noise."""

    codes: Codes
    voice: str
    seed: int


class Vocode(MapStage[VocodeItem]):
    """Codes to mel by flow matching, mel to sound, in float32."""

    def __init__(self, dit: FlowDiT, gan: BigVGAN, speakers: dict[str, Speaker]) -> None:
        self.dit, self.gan, self.speakers = dit, gan, speakers
        self.device = dit.proj_out.weight.device

    def run(self, items: Sequence[VocodeItem]) -> list[Waveform | Failure]:
        """See `MapStage`."""
        bad = [self._bad(item.codes.codes) for item in items]
        good = [item for item, failure in zip(items, bad, strict=True) if failure is None]
        sounds = iter(self._sounds(good) if good else [])
        return [failure or next(sounds) for failure in bad]

    def _sounds(self, items: Sequence[VocodeItem]) -> list[Waveform]:
        edge = vocode_edge(max(len(item.codes.codes) for item in items))
        codes, lengths = pad_to([item.codes.codes[:, 0] for item in items], edge)
        noise = torch.stack([self._noise(item.seed, edge) for item in items])
        speakers = [self.speakers[item.voice] for item in items]
        mel = self.dit.sample(
            codes.to(self.device),
            torch.cat([one.cond for one in speakers]).to(self.device),
            torch.cat([one.ref_mel for one in speakers]).to(self.device),
            noise.to(self.device),
            lengths.to(self.device),
        )
        frames = MEL_PER_CODE * lengths
        waves = self.gan(mel, frames.to(self.device)).cpu()
        hop = waves.shape[1] // mel.shape[2]
        return [_waveform(w[: n * hop]) for w, n in zip(waves, frames.tolist(), strict=True)]

    def _noise(self, seed: int, edge: int) -> Tensor:
        """A row's own noise [2 edge, M]: what lies on its codes does not depend on the edge."""
        generator = torch.Generator().manual_seed(seed)
        shape = (VOCODE_STEP * MEL_PER_CODE, self.dit.config.mel_dim)
        steps = range(edge // VOCODE_STEP)
        return torch.cat([torch.randn(shape, generator=generator) for _ in steps])

    def _bad(self, codes: Tensor) -> Failure | None:
        if int(codes.min()) >= 0 and int(codes.max()) < self.dit.config.num_embeds:
            return None
        return Failure(code="bad_codes", stage=VOCODE, message="a code is outside the codebook")


def vocode_edge(codes: int) -> int:
    """What a row is padded to: at most a quarter more, in blocks of the transformer."""
    step = max(VOCODE_STEP, VOCODE_STEP << max(0, (codes // VOCODE_STEP).bit_length() - 3))
    return -(-codes // step) * step


def _waveform(samples: Tensor) -> Waveform:
    samples = samples.clone()
    peak = float(samples.abs().max()) if len(samples) else 0.0
    return Waveform(pieces=(samples,), rate_hz=omni.SPEECH_HZ, peak=peak, samples=len(samples))


# -- the family


def _tokens(frames: int) -> int:
    """Audio tokens of so many mel frames: a convolution and a pooling of stride 2."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _mix(embeds: Tensor, middle: Tensor, last: Tensor, heard: Tensor) -> Tensor:
    """The talker reads the sum of embeddings and last states; audio has no embedding."""
    return last + embeds.masked_fill(heard[..., None], 0.0)


def _audio_encoder(folder: Path) -> nn.Module:
    transformers = omni.library()
    whole = transformers.Qwen2_5OmniConfig.from_pretrained(folder, local_files_only=True)
    module = transformers.models.qwen2_5_omni.modeling_qwen2_5_omni
    net: nn.Module = module.Qwen2_5OmniAudioEncoder._from_config(
        whole.thinker_config.audio_config, attn_implementation="sdpa"
    )
    return net


def load(settings: Settings) -> Family:
    """The stages that the task needs; weights are read when a stage is opened."""
    stages = omni.hearing_specs(
        settings,
        omni.OmniPlan(
            kind="qwen2",
            audio_tokens=("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
            tokens_per_s=25.0,
            clip_s=CLIP_S,
            least_frames=4,
            system=SYSTEM,
            mix=_mix,
            audio_encoder=_audio_encoder,
            tokens=_tokens,
        ),
    )
    if settings.task.command == "respond":
        stages += _speaking(settings)
    return omni.family("qwen2_5_omni", settings, stages)


def _speaking(settings: Settings) -> list[StageSpec]:
    model = settings.folders["model"]
    config, speakers = TalkerConfig.read(model.folder), read_speakers(model.folder)
    device, dtype = settings.place("talk")

    @contextmanager
    def opened() -> Iterator[Talk]:
        ids = [config.text_eos, config.text_pad, *(s.bos_token for s in speakers.values())]
        rows = read_rows(model.folder, omni.EMBEDDINGS, ids)
        net = load_talker(model.folder, config, dtype=dtype, device=device)
        yield Talk(net, config, rows[:2], dict(zip(speakers, rows[2:], strict=True)))

    decoder = config.decoder
    longest = DiTConfig.from_json(_dit(model.folder)).max_position_embeddings
    plan = TalkPlan(
        model=model,
        open=opened,
        voices=tuple(speakers),
        voice=next(iter(speakers)),
        frames_per_s=CODES_PER_S,
        most_frames=min(MOST_CODES, longest // MEL_PER_CODE),
        policy=_SAMPLED,
        kv_values=decoder.kv_values,
        active_values=decoder.active_values,
        width=config.embedding_width,
        vocab=decoder.vocab,
        dtype=dtype,
        device=device,
        weights_bytes=weight_bytes(model.folder, "talker.", dtype),
    )
    check_voice(plan, settings.voice)
    return [
        *talk_specs(plan, settings.task, settings.voice),
        _vocode_spec(settings, plan, speakers),
    ]


def _dit(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = omni.raw_config(folder)["token2wav_config"]["dit_config"]
    return raw


def _load_vocoder(folder: Path, device: str) -> tuple[FlowDiT, BigVGAN]:
    raw = omni.raw_config(folder)["token2wav_config"]
    with hollow():
        dit = FlowDiT(DiTConfig.from_json(raw["dit_config"]))
        gan = BigVGAN(BigVGANConfig.from_json(raw["bigvgan_config"]))
    prefix, whole = "token2wav.", torch.float32  # transformers keeps both in float32
    load_into(
        dit,
        folder,
        dtype=whole,
        device=device,
        prefix=f"{prefix}code2wav_dit_model.",
        ignore=flow_dit.UNUSED,
    )
    load_into(gan, folder, dtype=whole, device=device, prefix=f"{prefix}code2wav_bigvgan_model.")
    gan.ready()
    return dit, gan


def _vocode_spec(settings: Settings, plan: TalkPlan, speakers: dict[str, Speaker]) -> StageSpec:
    model, task = settings.folders["model"], settings.task
    device, _ = settings.place(VOCODE)
    raw = _dit(model.folder)

    @contextmanager
    def opened() -> Iterator[Vocode]:
        yield Vocode(*_load_vocoder(model.folder, device), speakers)

    def split(request: Request, inputs: Inputs) -> Sequence[VocodeItem]:
        said = spoken(inputs)
        if not said:
            return ()
        seed = task.seed if request.seed is None else request.seed
        talked = items(plan, request, inputs, task.seed, settings.voice)
        return [
            VocodeItem(
                codes=codes,
                voice=item.voice,
                seed=row_seed(seed, request.request_id, VOCODE, part),
            )
            for part, (codes, item) in enumerate(zip(said, talked, strict=True))
        ]

    wide = MEL_PER_CODE * (2 * 12 * int(raw.get("hidden_size", 1024)) + 240 * 48)
    return StageSpec(
        name=VOCODE,
        reads=("talk", "talk.again", "answer", "think", "think.again"),
        split=split,
        join=one_after_the_other,
        open=opened,
        length=lambda item: len(item.codes.codes),
        edge=vocode_edge,
        row_bytes=lambda codes: 4 * codes * wide,
        audio_s=lambda item: len(item.codes.codes) / CODES_PER_S,
        apart=lambda item: speakers[item.voice].ref_mel.shape[1],
        max_rows=16,
        device=device,
        weights_bytes=weight_bytes(model.folder, "token2wav.", torch.float32),
        settings=f"{model} seed={task.seed}",
    )
