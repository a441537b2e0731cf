"""A Whisper model of CTranslate2 under its Hugging Face names.

CTranslate2 stacks q, k and v (k has a bias of zeros there, none here); everything else maps one to
one. Its config.json holds the suppressed tokens and alignment heads; the rest of the generation
settings follows from the tokenizer's own special tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from omnicli.errors import UserError
from omnicli.models import ct2
from omnicli.models.canonical import Canonical, Json, json_file
from omnicli.models.ct2 import Checkpoint
from omnicli.models.weights import Array, Weight

MULTILINGUAL_VOCABULARY = 51_865  # tokens at least; English-only models have 51,864
MAX_INITIAL_TIMESTAMP_INDEX = 50  # steps of 20 ms: a first timestamp of at most 1 s
CONV_KERNEL = 3
EMBEDDINGS, PROJECTION = "decoder/embeddings/weight", "decoder/projection/weight"
_RECONVERT = "convert the model again with a current CTranslate2"
_SIDES = ("encoder", "decoder")
START, END, PREVIOUS = "<|startoftranscript|>", "<|endoftext|>", "<|startofprev|>"
TRANSLATE, TRANSCRIBE, NO_TIMESTAMPS = "<|translate|>", "<|transcribe|>", "<|notimestamps|>"
_TOKENS = (START, END, PREVIOUS, TRANSLATE, TRANSCRIBE, NO_TIMESTAMPS)


def convert(folder: Path) -> Canonical:
    """The canonical form of a folder with `model.bin`, `config.json` and `tokenizer.json`."""
    checkpoint = ct2.read(folder / "model.bin")
    if checkpoint.specification != "WhisperSpec":
        raise UserError(
            f"{folder} holds a {checkpoint.specification or 'nameless model'}, no Whisper",
            hint="only Whisper models of CTranslate2 can be read",
        )
    tokenizer = _tokenizer(folder)
    plan = _plan(checkpoint)
    special = _special_tokens(json_file(tokenizer), tokenizer)
    settings = json_file(folder / "config.json")
    return Canonical(
        files={
            "config.json": _config(plan, special, settings),
            "generation_config.json": _generation_config(plan, special, settings),
            "tokenizer.json": tokenizer,
        },
        weights=tuple(plan.weights()),
    )


def _tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{folder} has no tokenizer.json",
            hint="copy tokenizer.json from the Whisper model it was made from into the folder",
        )
    return path


# ------------------------------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The sizes of a model, and the weights that follow from them."""

    checkpoint: Checkpoint
    dtype: str
    width: int  # D
    mels: int
    vocabulary: int  # V
    frames: int  # positions of the encoder
    tokens: int  # positions of the decoder
    hidden: dict[str, int]  # width of the feed-forward layers, by side
    layers: dict[str, int]
    heads: dict[str, int]

    def weights(self) -> Iterator[Weight]:
        """Every tensor of the model."""
        d, conv = self.width, CONV_KERNEL
        yield from self._linear(("model.encoder.conv1",), "encoder/conv1", (d, self.mels, conv))
        yield from self._linear(("model.encoder.conv2",), "encoder/conv2", (d, d, conv))
        for side, positions in (("encoder", self.frames), ("decoder", self.tokens)):
            name = f"model.{side}.embed_positions.weight"
            yield self._weight(name, f"{side}/position_encodings/encodings", (positions, d))
            yield from self._norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
            for index in range(self.layers[side]):
                yield from self._layer(
                    side, f"model.{side}.layers.{index}", f"{side}/layer_{index}"
                )
        yield self._weight("model.decoder.embed_tokens.weight", EMBEDDINGS, (self.vocabulary, d))

    def _layer(self, side: str, to: str, of: str) -> Iterator[Weight]:
        d, ffn = self.width, self.hidden[side]
        square = (d, d)
        mine = f"{to}.self_attn"
        yield from self._norm(f"{mine}_layer_norm", f"{of}/self_attention/layer_norm")
        stacked = (f"{mine}.q_proj", f"{mine}.k_proj", f"{mine}.v_proj")
        yield from self._linear(stacked, f"{of}/self_attention/linear_0", square)
        yield from self._linear((f"{mine}.out_proj",), f"{of}/self_attention/linear_1", square)
        if side == "decoder":
            cross = f"{to}.encoder_attn"
            yield from self._norm(f"{cross}_layer_norm", f"{of}/attention/layer_norm")
            yield from self._linear((f"{cross}.q_proj",), f"{of}/attention/linear_0", square)
            yield from self._linear(
                (f"{cross}.k_proj", f"{cross}.v_proj"), f"{of}/attention/linear_1", square
            )
            yield from self._linear((f"{cross}.out_proj",), f"{of}/attention/linear_2", square)
        yield from self._norm(f"{to}.final_layer_norm", f"{of}/ffn/layer_norm")
        yield from self._linear((f"{to}.fc1",), f"{of}/ffn/linear_0", (ffn, d))
        yield from self._linear((f"{to}.fc2",), f"{of}/ffn/linear_1", (d, ffn))

    def _norm(self, to: str, of: str) -> Iterator[Weight]:
        yield self._weight(f"{to}.weight", f"{of}/gamma", (self.width,))
        yield self._weight(f"{to}.bias", f"{of}/beta", (self.width,))

    def _linear(
        self, stacked: tuple[str, ...], of: str, shape: tuple[int, ...]
    ) -> Iterator[Weight]:
        """Linear layers (or a convolution) whose rows lie one below the other in the file."""
        for index, to in enumerate(stacked):
            yield self._weight(f"{to}.weight", f"{of}/weight", shape, (index, len(stacked)))
            if to.endswith("k_proj"):
                self._check_zero(f"{of}/bias", slice(index * shape[0], (index + 1) * shape[0]))
            else:
                yield self._weight(f"{to}.bias", f"{of}/bias", shape[:1], (index, len(stacked)))

    def _weight(
        self, to: str, of: str, shape: tuple[int, ...], part: tuple[int, int] = (0, 1)
    ) -> Weight:
        """Part `index` of `total` equal parts, each of this shape."""
        index, total = part
        rows = shape[0]
        found = self.checkpoint[of].stored.shape
        if found != (total * rows, *shape[1:]):
            raise UserError(
                f"{self.checkpoint.path} is no Whisper: {of} is {list(found)}", hint=_RECONVERT
            )
        make = partial(self.checkpoint.weight, of, slice(index * rows, (index + 1) * rows))
        return Weight(name=to, shape=shape, dtype=self.dtype, make=make)

    def _check_zero(self, of: str, rows: slice) -> None:
        if self.checkpoint.weight(of, rows).any():
            raise UserError(
                f"{self.checkpoint.path} is no Whisper: its keys have a bias", hint=_RECONVERT
            )


def _plan(checkpoint: Checkpoint) -> _Plan:
    _check_tied(checkpoint)
    norm = checkpoint["decoder/layer_norm/gamma"]
    width = norm.stored.shape[0] if norm.stored.ndim else 0
    plan = _Plan(
        checkpoint=checkpoint,
        dtype="F16" if norm.type == "float16" else "F32",
        width=width,
        mels=_size(checkpoint, "encoder/conv1/weight", 1),
        vocabulary=_size(checkpoint, EMBEDDINGS, 0),
        frames=_size(checkpoint, "encoder/position_encodings/encodings", 0),
        tokens=_size(checkpoint, "decoder/position_encodings/encodings", 0),
        hidden={
            side: _size(checkpoint, f"{side}/layer_0/ffn/linear_0/weight", 0) for side in _SIDES
        },
        layers={side: _layers(checkpoint, side) for side in _SIDES},
        heads={side: checkpoint.number(f"{side}/num_heads") for side in _SIDES},
    )
    for side, heads in plan.heads.items():
        if heads < 1 or width % heads:
            raise UserError(
                f"{checkpoint.path} is damaged: {heads} heads in the {side}", hint=_RECONVERT
            )
    return plan


def _size(checkpoint: Checkpoint, name: str, axis: int) -> int:
    shape = checkpoint[name].stored.shape
    if axis >= len(shape):
        raise UserError(
            f"{checkpoint.path} is no Whisper: {name} is {list(shape)}", hint=_RECONVERT
        )
    return int(shape[axis])


def _layers(checkpoint: Checkpoint, side: str) -> int:
    return next(
        n for n in count() if f"{side}/layer_{n}/ffn/linear_0/weight" not in checkpoint.variables
    )


def _check_tied(checkpoint: Checkpoint) -> None:
    """The output projection is the token embedding; writers before aliases stored it twice."""
    projection = checkpoint.variables.get(PROJECTION)
    if projection is None or projection is checkpoint[EMBEDDINGS]:
        return
    if not _same(projection.stored, checkpoint[EMBEDDINGS].stored):
        raise UserError(
            f"{checkpoint.path} has an output projection of its own",
            hint="only Whisper models with tied ones can be read",
        )


def _same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other)


# ------------------------------------------------------------------------------------ settings


def _special_tokens(tokenizer: Json, path: Path) -> dict[str, int]:
    """Ids of the tokens written `<|…|>`."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found: Json = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for entry in added if isinstance(added, list) else []:
        match entry:
            case {"content": str(token), "id": int(id_)}:
                found[token] = id_
    special = {t: id_ for t, id_ in found.items() if t.startswith("<|") and isinstance(id_, int)}
    missing = [token for token in _TOKENS if token not in special]
    if missing:
        raise UserError(
            f"{path} is no Whisper tokenizer: it lacks {', '.join(missing)}",
            hint="copy tokenizer.json from the Whisper model this one was made from",
        )
    return special


def _shared(special: dict[str, int], settings: Json) -> Json:
    """Keys that stand in both configuration files."""
    return {
        "bos_token_id": special[END],
        "eos_token_id": special[END],
        "pad_token_id": special[END],
        "decoder_start_token_id": special[START],
        "suppress_tokens": settings.get("suppress_ids") or [],
        "begin_suppress_tokens": settings.get("suppress_ids_begin") or [],
    }


def _config(plan: _Plan, special: dict[str, int], settings: Json) -> Json:
    """WhisperConfig of transformers."""
    sides = {
        f"{side}_{key}": value[side]
        for side in _SIDES
        for key, value in (
            ("layers", plan.layers),
            ("attention_heads", plan.heads),
            ("ffn_dim", plan.hidden),
        )
    }
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": plan.width,
        "num_hidden_layers": plan.layers["encoder"],
        "num_mel_bins": plan.mels,
        "vocab_size": plan.vocabulary,
        "max_source_positions": plan.frames,
        "max_target_positions": plan.tokens,
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "torch_dtype": {"F16": "float16", "F32": "float32"}[plan.dtype],
        **sides,
        **_shared(special, settings),
    }


def _generation_config(plan: _Plan, special: dict[str, int], settings: Json) -> Json:
    """GenerationConfig of transformers, as it is published beside the original models."""
    multilingual = plan.vocabulary >= MULTILINGUAL_VOCABULARY
    languages = {t: id_ for t, id_ in special.items() if special[START] < id_ < special[TRANSLATE]}
    tasks = {"translate": special[TRANSLATE], "transcribe": special[TRANSCRIBE]}
    return {
        **_shared(special, settings),
        "no_timestamps_token_id": special[NO_TIMESTAMPS],
        "prev_sot_token_id": special[PREVIOUS],
        "is_multilingual": multilingual,
        "alignment_heads": settings.get("alignment_heads") or [],
        "max_initial_timestamp_index": MAX_INITIAL_TIMESTAMP_INDEX,
        "max_length": plan.tokens,
        "return_timestamps": False,
        **({"lang_to_id": languages, "task_to_id": tasks} if multilingual else {}),
    }
