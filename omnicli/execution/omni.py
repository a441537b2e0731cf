"""What families of the Qwen-Omni kind are put together from: listen, encode, think, answer.

The thinker's and talker's loops are ours; configs, tokenizers' files and the networks that run once
per item (audio encoder, causal vocoder) are those of transformers, imported when they are used.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from omnicli.data import AudioClip, Encoded, Heard, Inputs, Request
from omnicli.errors import UserError
from omnicli.execution.chat import Chat
from omnicli.execution.hear import features, packed
from omnicli.execution.listen import listen_spec
from omnicli.execution.nets.llama import config_of, load_llama_part
from omnicli.execution.shared import Shared
from omnicli.execution.stage import Family, MapStage, Settings, StageSpec
from omnicli.execution.thinker import Mix, ThinkerPlan, Thinking, think_edge
from omnicli.execution.weights import load_into, read_shapes, unfilled, weight_bytes
from omnicli.operators.mel import FRAMES_PER_S, HOP_SAMPLES
from omnicli.operators.speech_regions import RATE_HZ, ClipRule

SPEECH_HZ = 24_000  # of both families' vocoders
GAP_S = 30.0  # a pause of this length is not heard
AUDIO_TOWER = "thinker.audio_tower."
EMBEDDINGS = "thinker.model.embed_tokens.weight"
PARTS = ("thinker.", "talker.", "token2wav.", "code2wav.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniPlan:
    """What a family tells of the part of it that hears and thinks."""

    kind: str  # of its text network, as `nets.llama` knows it
    audio_tokens: tuple[str, str, str]
    tokens_per_s: float
    clip_s: float  # no pass hears more at once
    least_frames: int  # of a clip: shorter ones are heard with silence behind them
    system: str = ""
    depth: int = 0
    mix: Mix
    audio_encoder: Callable[[Path], nn.Module]  # transformers' network, without weights
    tokens: Callable[[int], int]  # mel frames -> audio tokens


def library() -> Any:
    """transformers, quiet; UserError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "Qwen-Omni models need transformers", hint="pip install 'omnicli[qwen]'"
        ) from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers


def raw_config(folder: Path) -> dict[str, Any]:
    """`config.json`."""
    read: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return read


def chat_of(folder: Path) -> Chat:
    """The tokenizer and template; older checkpoints have their tokenizer in several files."""
    if (folder / "tokenizer.json").is_file() or not (folder / "vocab.json").is_file():
        return Chat(folder)
    made = library().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer: Tokenizer = made.backend_tokenizer
    return Chat(folder, tokenizer)


def check_parts(folder: Path) -> None:
    """UserError if a tensor belongs to no part of the model that anybody knows."""
    strange = sorted(name for name in read_shapes(folder) if not name.startswith(PARTS))
    if strange:
        raise UserError(
            f"{folder} has tensors of no known part: {', '.join(strange[:4])}",
            hint="is this the kind of model that its config says?",
        )


# -- encode


class Encode(MapStage[tuple[int, AudioClip]]):
    """Clips (with their places) to the thinker's audio embeddings, packed without padding."""

    def __init__(self, net: Any, bands: int, plan: OmniPlan, dtype: torch.dtype) -> None:
        self.net, self.bands, self.plan, self.dtype = net, bands, plan, dtype
        self.device = next(net.parameters()).device

    def run(self, items: Sequence[tuple[int, AudioClip]]) -> list[Encoded]:
        """See `MapStage`: Encoded [T, D]."""
        least = self.plan.least_frames
        rows = [features(clip, self.bands, least_frames=least) for _, clip in items]
        sound, lengths = packed(rows)
        sizes = [self.plan.tokens(row.shape[1]) for row in rows]
        embeds = self.embed(sound.to(self.device, self.dtype), lengths.to(self.device))
        assert len(embeds) == sum(sizes), f"{len(embeds)} embeddings of {sum(sizes)}"
        return [
            Encoded(embeds=one.cpu().clone(), clip=place, valid_frames=row.shape[1])
            for one, (place, _), row in zip(torch.split(embeds, sizes), items, rows, strict=True)
        ]

    def embed(self, sound: Tensor, lengths: Tensor) -> Tensor:
        """Features [bands, sum F] and lengths [B] -> [sum T, D]."""
        found: Tensor = self.net(sound, feature_lens=lengths).last_hidden_state
        return found


def encode_spec(settings: Settings, plan: OmniPlan) -> StageSpec:
    """The stage `encode`."""
    model = settings.folders["model"]
    device, dtype = settings.place("encode")
    raw = raw_config(model.folder)["thinker_config"]["audio_config"]
    wide = raw["d_model"] * 12 + raw.get("downsample_hidden_size", 0) * raw["num_mel_bins"]

    @contextmanager
    def opened() -> Iterator[Encode]:
        library()
        with unfilled():
            net = plan.audio_encoder(model.folder)
        load_into(net, model.folder, dtype=dtype, device=device, prefix=AUDIO_TOWER)
        yield Encode(net.to(device), raw["num_mel_bins"], plan, dtype)

    def split(request: Request, inputs: Inputs) -> Sequence[tuple[int, AudioClip]]:
        heard = inputs.one("listen", Heard)
        return list(enumerate(heard.clips)) if heard else ()

    return StageSpec(
        name="encode",
        reads=("listen",),
        split=split,
        open=opened,
        length=lambda item: -(-len(item[1].samples) // HOP_SAMPLES),
        edge=think_edge,
        row_bytes=lambda frames: frames * wide * dtype.itemsize,
        audio_s=lambda item: item[1].duration_s,
        forecast=lambda heard_s: [max(1, round(heard_s * FRAMES_PER_S))],
        fill_rows=4,
        device=device,
        weights_bytes=weight_bytes(model.folder, AUDIO_TOWER, dtype),
    )


# -- put together


def thinker_plan(settings: Settings, plan: OmniPlan) -> ThinkerPlan:
    """The thinker of a checkpoint, from its config and the headers of its weights."""
    model = settings.folders["model"]
    device, dtype = settings.place("think")
    raw = raw_config(model.folder)["thinker_config"]
    config = config_of(model.folder, raw["text_config"], plan.kind)
    return ThinkerPlan(
        model=model,
        chat=chat_of(model.folder),
        net=Shared(
            lambda: load_llama_part(model.folder, config, "thinker.", dtype=dtype, device=device)
        ),
        device=device,
        dtype=dtype,
        audio_tokens=plan.audio_tokens,
        tokens_per_s=plan.tokens_per_s,
        context=config.positions,
        system=plan.system,
        depth=plan.depth,
        mix=plan.mix,
        width=config.width,
        kv_values=config.kv_values,
        active_values=config.active_values,
        vocab=config.vocab,
        weights_bytes=weight_bytes(model.folder, "thinker.model.", dtype),
    )


def hearing_specs(settings: Settings, plan: OmniPlan) -> list[StageSpec]:
    """listen, encode, think, think.again, transcript and, if anybody asked, answer."""
    if settings.task.command == "say":
        raise UserError(
            "this model hears before it speaks; it cannot say a given text",
            hint="omni say with --model embedded",
        )
    rule = ClipRule(window_samples=round(plan.clip_s * RATE_HZ), gap_samples=round(GAP_S * RATE_HZ))
    answers = settings.task.command == "respond"
    thinking = Thinking(thinker_plan(settings, plan), settings.task, answers=answers)
    return [listen_spec(settings, rule), encode_spec(settings, plan), *thinking.specs()]


def family(name: str, settings: Settings, stages: Sequence[StageSpec]) -> Family:
    """The family, once all its tensors are known to belong to a part of it."""
    check_parts(settings.folders["model"].folder)
    parts = {spec.name.partition(".")[0]: spec.weights_bytes for spec in stages}
    return Family(
        name=name,
        stages=tuple(stages),
        models={role: str(model) for role, model in settings.folders.items()},
        device=settings.device,
        weights_bytes=sum(parts.values()),
    )
