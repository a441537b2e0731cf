"""A model at a place of the user's own: what it is, and whether all of it is there."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omnicli.errors import UserError
from omnicli.models import weights
from omnicli.models.canonical import WEIGHTS, Json, json_file
from omnicli.models.catalogue import Format, Kind

INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
MODEL_TYPES = {"asr": ("whisper",), "llm": ("llama", "qwen2", "qwen3")}
SINGLE_FILE: dict[Kind, tuple[str, Format]] = {
    "llm": (".gguf", "gguf"),
    "voice": (".onnx", "piper-onnx"),
}
VAD_TENSORS = frozenset({"stft_conv.weight", "lstm_cell.weight_ih", "final_conv.weight"})
LAYOUTS: dict[Kind, str] = {
    "asr": "a Whisper folder as on Hugging Face (config.json, generation_config.json,"
    " tokenizer.json, model.safetensors) or of CTranslate2 (model.bin, config.json,"
    " tokenizer.json)",
    "llm": "a Llama, Qwen2 or Qwen3 folder as on Hugging Face (config.json, tokenizer.json,"
    " model.safetensors) or a .gguf file",
    "voice": "a Piper voice: NAME.onnx with NAME.onnx.json beside it",
    "vad": "a folder with model.safetensors of the silero-vad package",
    "omni": "a folder of an omni model as on Hugging Face (config.json, tokenizer.json,"
    " model-*.safetensors with their index)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model that was recognised."""

    path: Path  # what the converter reads, or the folder that is used as it is
    format: Format | None  # None: it is in canonical form already
    weights: tuple[Path, ...]
    others: tuple[Path, ...] = ()  # further files that a conversion depends on

    @property
    def name(self) -> str:
        """The folder's name, or the file's without its ending."""
        return self.path.stem if self.path.suffix in (".gguf", ".onnx") else self.path.name


def recognise(kind: Kind, path: Path) -> Source:
    """The model of this kind at a path."""
    suffix, format_ = SINGLE_FILE.get(kind, ("", None))
    if format_ and path.is_dir() and not _safetensors(path):
        path = _only(path, suffix) or path
    if format_ and path.is_file() and path.suffix.lower() == suffix:
        return _single_file(path, format_)
    if path.name == "model.bin":
        path = path.parent
    if not path.is_dir():
        raise _nothing_readable(kind, path)
    if kind == "asr" and (path / "model.bin").is_file() and not _safetensors(path):
        return _ctranslate2(path)
    return _folder(kind, path)


def _single_file(path: Path, format_: Format) -> Source:
    settings = path.with_name(path.name + ".json")
    others = (settings,) if format_ == "piper-onnx" and settings.is_file() else ()
    return Source(path=path, format=format_, weights=(path,), others=others)


def _ctranslate2(folder: Path) -> Source:
    others = tuple(p for p in (folder / "config.json", folder / "tokenizer.json") if p.is_file())
    weights_ = (folder / "model.bin",)
    return Source(path=folder, format="whisper-ct2", weights=weights_, others=others)


def _folder(kind: Kind, folder: Path) -> Source:
    """A folder that is used in place."""
    shards = _shards(kind, folder)
    if kind == "vad":
        _check_tensors(folder, shards, VAD_TENSORS)
    elif kind == "voice":
        _check_keys(folder / "config.json", ("audio", "inference", "phoneme_id_map"), LAYOUTS[kind])
    else:
        _check_hugging_face(kind, folder)
    return Source(path=folder, format=None, weights=shards)


def _only(folder: Path, suffix: str) -> Path | None:
    found = sorted(folder.glob(f"*{suffix}"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:5])
        raise UserError(f"{folder} holds several models: {names}", hint="give the path of one file")
    return found[0] if found else None


def _safetensors(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _nothing_readable(kind: Kind, path: Path) -> UserError:
    """Pickles run code when opened, so they are never opened here."""
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in inside:
        if any(file.match(pattern) for pattern in PICKLES):
            return UserError(
                f"{file} is a pickle, which is not read since it can run code",
                hint="load the model with transformers and save it: save_pretrained(folder)",
            )
    return UserError(
        f"{path} holds no {kind} model that can be read", hint=f"needed: {LAYOUTS[kind]}"
    )


# -------------------------------------------------------------------------- Hugging Face folders


def _shards(kind: Kind, folder: Path) -> tuple[Path, ...]:
    """The weight files of a folder, all of them whole."""
    if (folder / WEIGHTS).is_file():
        weights.names(folder / WEIGHTS)
        return (folder / WEIGHTS,)
    if not (folder / INDEX).is_file():
        raise _nothing_readable(kind, folder)
    match json_file(folder / INDEX):
        case {"weight_map": dict(places)} if all(isinstance(p, str) for p in places.values()):
            shards = tuple(folder / Path(name).name for name in sorted(set(places.values())))
        case _:
            raise UserError(f"{folder / INDEX} is damaged", hint="fetch the file again")
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise UserError(f"{folder} lacks {', '.join(absent)}", hint="fetch all parts of the model")
    _check_tensors(folder, shards, frozenset(places))
    return shards


def _check_tensors(folder: Path, shards: Sequence[Path], wanted: frozenset[str]) -> None:
    lacking = wanted.difference(*(weights.names(shard) for shard in shards))
    if lacking:
        raise UserError(f"{folder} lacks the tensor {min(lacking)}", hint="fetch the model again")


def _check_hugging_face(kind: Kind, folder: Path) -> None:
    config = _check_keys(folder / "config.json", ("model_type",), LAYOUTS[kind])
    if kind == "omni":  # its family knows what it needs besides
        _check_whole(folder, config)
        return
    if config["model_type"] not in MODEL_TYPES[kind]:
        known = ", ".join(MODEL_TYPES[kind])
        raise UserError(
            f"{folder} holds a model of the type {config['model_type']!r}", hint=f"known: {known}"
        )
    _check_whole(folder, config)
    needed = ["tokenizer.json", *(["generation_config.json"] if kind == "asr" else [])]
    absent = [name for name in needed if not (folder / name).is_file()]
    if absent:
        hint = "copy it from the model this one was made from, or save it anew with transformers"
        raise UserError(f"{folder} lacks {', '.join(absent)}", hint=hint)


def _check_whole(folder: Path, config: Json) -> None:
    if config.get("quantization_config") or config.get("quantization"):
        raise UserError(f"{folder} holds a quantised model", hint="take the full one, or a .gguf")


def _check_keys(path: Path, keys: tuple[str, ...], hint: str) -> Json:
    if not path.is_file():
        raise UserError(f"{path} is missing", hint=hint)
    found = json_file(path)
    absent = [key for key in keys if key not in found]
    if absent:
        raise UserError(f"{path} lacks {', '.join(absent)}", hint=hint)
    return found
