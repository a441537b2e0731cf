"""Qwen3-Omni: a thinker with experts, a nested dual-autoregressive talker, a causal vocoder.

How it computes is what transformers 5.24 does in `models/qwen3_omni_moe`, but for this:

- the mark for the text's end stands right behind the last token for every row, in company too;
- clips under a second are heard with silence behind them, so that company changes nothing;
- the vocoder looks one frame ahead at the seams of its chunks, so that no samples are lost there;
- speaker, seed and sampling belong to a row.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnicli.config import PolicySpec
from omnicli.data import Codes, Failure, Inputs, Request, Waveform
from omnicli.execution import omni
from omnicli.execution.kv_cache import REACH_STEP, KVCache
from omnicli.execution.nets.decoder import Decoder
from omnicli.execution.nets.llama import LlamaConfig, config_of
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
    one_after_the_other,
    spoken,
    talk_edge,
    talk_specs,
)
from omnicli.execution.weights import hollow, load_into, read_rows, unfilled, weight_bytes
from omnicli.operators.ragged import pad_to

FRAMES_PER_S = 12.5
MOST_FRAMES = 4096  # transformers' default
SUPPRESSED = 1024  # the last ids of the talker's vocabulary are control tokens
CLIP_S = 600.0  # heard in one pass
LEAST_MEL_FRAMES = 100  # the encoder's chunk: see the module's text
CHUNK_FRAMES, MOST_CONTEXT_FRAMES = 300, 100  # of the vocoder
EVEN = 4
_SAMPLED = PolicySpec(
    name="sample", options={"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05}
)
_SAMPLED_INNER = PolicySpec(name="sample", options={"top_k": 50, "top_p": 0.8})


# -- talk


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerConfig:
    """What decides the talker's shape, and the ids that it is prompted with."""

    backbone: LlamaConfig
    predictor: LlamaConfig
    books: int
    thinker_width: int
    codec_ids: tuple[int, ...]  # nothink, think_bos, think_eos; then the speaker, pad, bos
    end_id: int
    speakers: dict[str, int]
    user_id: int
    im_start_id: int

    @classmethod
    def read(cls, folder: Path) -> "TalkerConfig":
        """From `config.json`."""
        whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        raw = whole["talker_config"]
        names = ("nothink", "think_bos", "think_eos", "pad", "bos")
        return cls(
            backbone=config_of(folder, raw["text_config"], "qwen3"),
            predictor=config_of(folder, raw["code_predictor_config"], "qwen3"),
            books=raw["num_code_groups"],
            thinker_width=raw["thinker_hidden_size"],
            codec_ids=tuple(raw[f"codec_{name}_id"] for name in names),
            end_id=raw["codec_eos_token_id"],
            speakers=raw["speaker_id"],
            user_id=whole["user_token_id"],
            im_start_id=whole["im_start_token_id"],
        )


class Projection(nn.Module):
    """From the thinker's width to the talker's."""

    def __init__(self, thinker: int, inner: int, width: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(thinker, inner)
        self.linear_fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D']."""
        out: Tensor = self.linear_fc2(F.silu(self.linear_fc1(x)))
        return out


class Backbone(Decoder):
    """Frames to frames."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.codec_embedding = nn.Embedding(config.vocab, config.width)


class InnerDecoder(Decoder):
    """The codes of one frame, one after the other."""

    def __init__(self, config: LlamaConfig, books: int) -> None:
        super().__init__(config)
        self.codec_embedding = nn.ModuleList(
            nn.Embedding(config.vocab, config.width) for _ in range(books - 1)
        )


class Predictor(nn.Module):
    """All codes of a frame but the first."""

    def __init__(self, config: LlamaConfig, books: int) -> None:
        super().__init__()
        self.model = InnerDecoder(config, books)
        self.lm_head = nn.ModuleList(
            nn.Linear(config.width, config.vocab, bias=False) for _ in range(books - 1)
        )


class Talker(nn.Module):
    """The networks of the talker, under the names of the checkpoint."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        width = config.backbone.width
        self.model = Backbone(config.backbone)
        self.codec_head = nn.Linear(width, config.backbone.vocab, bias=False)
        self.text_projection = Projection(config.thinker_width, config.backbone.inner, width)
        self.hidden_projection = Projection(config.thinker_width, config.backbone.inner, width)
        self.code_predictor = Predictor(config.predictor, config.books)


def load_talker(folder: Path, config: TalkerConfig, *, dtype: torch.dtype, device: str) -> Talker:
    """The talker of a checkpoint."""
    with hollow():
        net = Talker(config)
    load_into(net, folder, dtype=dtype, device=device, prefix="talker.")
    net.model.ready(device)
    net.code_predictor.model.ready(device)
    return net


@dataclass(slots=True)
class TalkState:
    """Caches, the text that is still to come, and where each row is in it."""

    cache: KVCache
    text: Tensor  # [B, R, D]: what is added to the next frames; the last one for ever
    ends: Tensor  # [B] int64: the last place in `text`
    at: Tensor  # [B] int64
    inner: KVCache | None = None  # of the frame in hand

    def keep(self, rows: Tensor) -> None:
        """See `LoopState`."""
        self.cache.keep(rows)
        self.text, self.ends, self.at = self.text[rows], self.ends[rows], self.at[rows]
        self.inner = None

    def put(self, rows: Tensor, other: "TalkState") -> None:
        """See `RefillState`."""
        self.cache.put(rows, other.cache)
        more = other.text.shape[1] - self.text.shape[1]
        self.text = F.pad(self.text, (0, 0, 0, max(0, more)))
        self.text[rows, : other.text.shape[1]] = other.text[: len(rows)]
        self.ends[rows], self.at[rows] = other.ends[: len(rows)], other.at[: len(rows)]
        self.inner = None

    def next_text(self) -> Tensor:
        """What comes next of each row's text -> [B, D]."""
        rows = torch.arange(len(self.at), device=self.at.device)
        found = self.text[rows, torch.minimum(self.at, self.ends)]
        self.at = self.at + 1
        return found


class Talk(LoopStage[TalkItem, TalkState]):
    """Codec frames: a first code by the backbone, the others by the predictor."""

    refills = True

    def __init__(self, net: Talker, config: TalkerConfig, marks: Tensor) -> None:
        """`marks` [3, D]: the thinker's embeddings of tts_bos, tts_eos and tts_pad."""
        self.net, self.config = net, config
        self.books = config.books
        self.end_ids = frozenset({config.end_id})
        weight = net.codec_head.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.bias = torch.zeros(config.backbone.vocab, device=self.device)
        self.bias[-SUPPRESSED:] = -torch.inf
        self.bias[config.end_id] = 0.0
        with torch.inference_mode():
            filled = torch.cat([marks, marks[-1:]]).to(self.device, self.dtype)
            self.bos, self.eos, self.pad, _ = net.text_projection(filled)

    def limit(self, item: TalkItem) -> int:
        """See `LoopStage`."""
        return item.limit

    def start(self, items: Sequence[TalkItem]) -> tuple[TalkState, StepOut]:
        """See `LoopStage`."""
        prompts, texts = zip(*(self.prompt(item) for item in items), strict=True)
        edge = talk_edge(max(item.positions for item in items)) + len(self.config.codec_ids) + 4
        x, lengths = pad_to(prompts, edge)
        text, sizes = pad_to(texts, max(map(len, texts)))
        capacity = edge + cap_edge(max(item.limit for item in items))
        cache = self.net.model.new_cache(len(items), -(-capacity // REACH_STEP) * REACH_STEP)
        _, states = self.net.model.decode(x, cache)
        cache.advance(lengths)
        last = states[torch.arange(len(items), device=self.device), lengths - 1]
        return TalkState(cache, text, sizes - 1, torch.zeros_like(sizes)), self._out(last)

    def prompt(self, item: TalkItem) -> tuple[Tensor, Tensor]:
        """The talker's prompt [L, D], and the text that follows it frame by frame [R, D]."""
        said = item.said
        assert said.states is not None and said.heard is not None and said.ids is not None
        states = said.states.to(self.device, self.dtype)
        whole = self.net.text_projection(states)
        users, opening = self._turns(said.ids[: said.prompt_tokens])
        audio = said.heard.nonzero()[:, 0].to(self.device)
        whole[audio] = self.net.hidden_projection(states[audio])
        written = whole[said.prompt_tokens :]
        text_side = torch.cat([whole[opening], self.pad.expand(4, -1), self.bos[None], written[:1]])
        before, after = self.config.codec_ids[:3], self.config.codec_ids[3:]
        codec = torch.tensor(
            [*before, self.config.speakers[item.voice], *after], device=self.device
        )
        text_side[3:] += self.net.model.codec_embedding(codec)
        prompt = torch.cat([*(whole[span] for span in users), text_side])
        return prompt, torch.cat([written[1:], self.eos[None], self.pad[None]])

    def _turns(self, ids: Tensor) -> tuple[list[slice], slice]:
        """Where users speak, and the three tokens that open the answer."""
        begins = (ids == self.config.im_start_id).nonzero()[:, 0].tolist()
        spans = [slice(a, b) for a, b in zip(begins, [*begins[1:], len(ids)], strict=True)]
        users = [s for s in spans if int(ids[s.start + 1]) == self.config.user_id]
        return users, slice(begins[-1], begins[-1] + 3)

    def step(self, frames: Tensor, state: TalkState) -> StepOut:
        """See `LoopStage`."""
        x = self.net.model.codec_embedding(frames[:, 0]) + state.next_text()
        for book, table in enumerate(self.net.code_predictor.model.codec_embedding, start=1):
            x = x + table(frames[:, book])
        _, states = self.net.model.decode(x[:, None], state.cache)
        state.cache.advance(1)
        return self._out(states[:, 0])

    def _out(self, last: Tensor) -> StepOut:
        return StepOut(self.net.codec_head(last).float() + self.bias, last)

    def next_book(self, frames: Tensor, last: StepOut, state: TalkState) -> Tensor:
        """See `LoopStage`: the predictor's cache lives for one frame."""
        inner, known = self.net.code_predictor.model, frames.shape[1]
        if known == 1:
            assert last.hidden is not None
            first = self.net.model.codec_embedding(frames[:, 0])
            x = torch.stack([last.hidden, first], dim=1)
            if state.inner is None:
                state.inner = inner.new_cache(len(frames), self.books + 1)
            state.inner.clear()
        else:
            x = inner.codec_embedding[known - 2](frames[:, -1:])
        assert state.inner is not None
        _, states = inner.decode(x, state.inner)
        state.inner.advance(x.shape[1])
        logits: Tensor = self.net.code_predictor.lm_head[known - 1](states[:, -1])
        return logits.float()

    def finish(self, item: TalkItem, end: RowEnd, state: TalkState, row: int) -> Codes:
        """See `LoopStage`."""
        return codes_of(end, FRAMES_PER_S)


# -- vocode


class Vocode(MapStage[Codes]):
    """Codec frames to sound, chunk by chunk: (row, chunk) jobs of like width run together."""

    def __init__(self, net: Any) -> None:
        """`net`: transformers' `Qwen3OmniMoeCode2Wav`."""
        self.net = net
        config = net.config
        self.books, self.size = config.num_quantizers, config.codebook_size
        self.hop = int(net.total_upsample)
        seen = config.sliding_window * config.num_hidden_layers
        self.context = min(seen, MOST_CONTEXT_FRAMES)
        self.device = net.code_embedding.weight.device

    def run(self, items: Sequence[Codes]) -> list[Waveform | Failure]:
        """See `MapStage`."""
        bad = [self._bad(item.codes) for item in items]
        edge = vocode_edge(max(len(item.codes) for item in items))
        rows, _ = pad_to([item.codes * (not b) for item, b in zip(items, bad, strict=True)], edge)
        whole = self.decode(rows.to(self.device))
        lost = edge * self.hop - whole.shape[1]
        return [
            b or _waveform(row[: max(0, len(item.codes) * self.hop - lost)])
            for item, b, row in zip(items, bad, whole, strict=True)
        ]

    def decode(self, codes: Tensor) -> Tensor:
        """codes [B, T, K] -> samples [B, T * hop - lost]: as if decoded in one piece.

        Every chunk sees the frames that its attention reaches, and one frame ahead, since the last
        samples of a frame come from the transposed convolutions' overlap with the next.
        """
        frames, pieces = codes.shape[1], []
        for begin in range(0, frames, CHUNK_FRAMES):
            end = min(begin + CHUNK_FRAMES, frames)
            context = min(begin, self.context)
            ahead = min(end + 1, frames)
            made = self.net(codes[:, begin - context : ahead].transpose(1, 2))[:, 0]
            made = made[:, context * self.hop :]
            pieces.append(made if ahead == end else made[:, : (end - begin) * self.hop])
        return torch.cat(pieces, dim=1)

    def _bad(self, codes: Tensor) -> Failure | None:
        if codes.shape[1] == self.books and int(codes.min()) >= 0 and int(codes.max()) < self.size:
            return None
        return Failure(code="bad_codes", stage=VOCODE, message="a code is outside its codebook")


def vocode_edge(frames: int) -> int:
    """What a row is padded to."""
    step = max(16, 1 << max(0, frames.bit_length() - 4))
    return -(-frames // step) * step


def _waveform(samples: Tensor) -> Waveform:
    samples = samples.float().cpu().clone()
    peak = float(samples.abs().max()) if len(samples) else 0.0
    return Waveform(pieces=(samples,), rate_hz=omni.SPEECH_HZ, peak=peak, samples=len(samples))


# -- the family


def _tokens(frames: int) -> int:
    """Audio tokens of so many mel frames: three convolutions of stride 2 per chunk of 100."""
    rest = frames % LEAST_MEL_FRAMES
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + frames // LEAST_MEL_FRAMES * 13


def _mix(embeds: Tensor, middle: Tensor, last: Tensor, heard: Tensor) -> Tensor:
    """The talker reads embeddings of text, and states of a middle layer where audio is."""
    return torch.where(heard[..., None], middle, embeds)


def _audio_encoder(folder: Path) -> nn.Module:
    made = _library_config(folder).thinker_config.audio_config
    module = omni.library().models.qwen3_omni_moe.modeling_qwen3_omni_moe
    net: nn.Module = module.Qwen3OmniMoeAudioEncoder._from_config(made, attn_implementation="sdpa")
    return net


def _library_config(folder: Path) -> Any:
    return omni.library().Qwen3OmniMoeConfig.from_pretrained(folder, local_files_only=True)


def load(settings: Settings) -> Family:
    """The stages that the task needs; weights are read when a stage is opened."""
    model = settings.folders["model"]
    raw = omni.raw_config(model.folder)
    stages = omni.hearing_specs(
        settings,
        omni.OmniPlan(
            kind="qwen3",
            audio_tokens=("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
            tokens_per_s=13.0,
            clip_s=CLIP_S,
            least_frames=LEAST_MEL_FRAMES,
            depth=raw["talker_config"]["accept_hidden_layer"],
            mix=_mix,
            audio_encoder=_audio_encoder,
            tokens=_tokens,
        ),
    )
    if settings.task.command == "respond":
        stages += _speaking(settings, raw)
    return omni.family("qwen3_omni", settings, stages)


def _speaking(settings: Settings, raw: dict[str, Any]) -> list[StageSpec]:
    model = settings.folders["model"]
    config = TalkerConfig.read(model.folder)
    device, dtype = settings.place("talk")
    marks = [raw[f"tts_{name}_token_id"] for name in ("bos", "eos", "pad")]

    @contextmanager
    def opened() -> Iterator[Talk]:
        net = load_talker(model.folder, config, dtype=dtype, device=device)
        yield Talk(net, config, read_rows(model.folder, omni.EMBEDDINGS, marks))

    backbone = config.backbone
    plan = TalkPlan(
        model=model,
        open=opened,
        voices=tuple(config.speakers),
        voice=next(iter(config.speakers)),
        frames_per_s=FRAMES_PER_S,
        most_frames=MOST_FRAMES,
        policy=_SAMPLED,
        inner_policy=_SAMPLED_INNER,
        kv_values=backbone.kv_values,
        active_values=backbone.active_values,
        width=backbone.width,
        vocab=backbone.vocab,
        dtype=dtype,
        device=device,
        weights_bytes=weight_bytes(model.folder, "talker.", dtype),
    )
    check_voice(plan, settings.voice)
    return [*talk_specs(plan, settings.task, settings.voice), _vocode_spec(settings)]


def _vocode_spec(settings: Settings) -> StageSpec:
    model = settings.folders["model"]
    device, dtype = settings.place(VOCODE)

    @contextmanager
    def opened() -> Iterator[Vocode]:
        made = _library_config(model.folder).code2wav_config
        module = omni.library().models.qwen3_omni_moe.modeling_qwen3_omni_moe
        with unfilled():
            net = module.Qwen3OmniMoeCode2Wav._from_config(made)
        load_into(net, model.folder, dtype=dtype, device=device, prefix="code2wav.")
        yield Vocode(net.to(device))

    def split(request: Request, inputs: Inputs) -> Sequence[Codes]:
        return spoken(inputs)

    hop = 1920 * 96  # values at the widest layer, per frame
    return StageSpec(
        name=VOCODE,
        reads=("talk", "talk.again"),
        split=split,
        join=one_after_the_other,
        open=opened,
        length=lambda codes: len(codes.codes),
        edge=vocode_edge,
        row_bytes=lambda frames: min(frames, 2 * CHUNK_FRAMES) * hop * dtype.itemsize,
        audio_s=lambda codes: len(codes.codes) / FRAMES_PER_S,
        device=device,
        weights_bytes=weight_bytes(model.folder, "code2wav.", dtype),
        settings=f"{model} {dtype}",
    )
