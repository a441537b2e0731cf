"""A small random Whisper as a folder of CTranslate2, written without it."""

import json
import struct
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

TYPES = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4, "bfloat16": 5}
TOKENS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|es|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|notimestamps|>",
)
FIRST_SPECIAL = 20


def small_whisper(mels: int = 80, vocabulary: int = 40) -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=20,
        vocab_size=vocabulary,
        num_mel_bins=mels,
        max_source_positions=30,
        max_target_positions=12,
        pad_token_id=FIRST_SPECIAL,
        bos_token_id=FIRST_SPECIAL,
        eos_token_id=FIRST_SPECIAL,
        decoder_start_token_id=FIRST_SPECIAL + 1,
    )
    model = WhisperForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


class Stacker:
    """A model's tensors under CTranslate2's names, stacked as its converter stacks them."""

    def __init__(self, model):
        self.state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        self.found = {}

    def norm(self, to, of):
        self.found[f"{to}/gamma"] = self.state[f"{of}.weight"]
        self.found[f"{to}/beta"] = self.state[f"{of}.bias"]

    def linear(self, to, *modules):
        weights = [self.state[f"{of}.weight"] for of in modules]
        zeros = [np.zeros(len(weight), "f4") for weight in weights]
        biases = [self.state.get(f"{of}.bias", z) for of, z in zip(modules, zeros, strict=True)]
        self.found[f"{to}/weight"] = np.concatenate(weights)
        self.found[f"{to}/bias"] = np.concatenate(biases)

    def layer(self, to, of, cross):
        mine, theirs = f"{of}.self_attn", f"{of}.encoder_attn"
        self.norm(f"{to}/self_attention/layer_norm", f"{mine}_layer_norm")
        self.linear(f"{to}/self_attention/linear_0", *(f"{mine}.{x}_proj" for x in "qkv"))
        self.linear(f"{to}/self_attention/linear_1", f"{mine}.out_proj")
        if cross:
            self.norm(f"{to}/attention/layer_norm", f"{theirs}_layer_norm")
            self.linear(f"{to}/attention/linear_0", f"{theirs}.q_proj")
            self.linear(f"{to}/attention/linear_1", *(f"{theirs}.{x}_proj" for x in "kv"))
            self.linear(f"{to}/attention/linear_2", f"{theirs}.out_proj")
        self.norm(f"{to}/ffn/layer_norm", f"{of}.final_layer_norm")
        self.linear(f"{to}/ffn/linear_0", f"{of}.fc1")
        self.linear(f"{to}/ffn/linear_1", f"{of}.fc2")


def variables(model: WhisperForConditionalGeneration) -> dict[str, np.ndarray]:
    stacker = Stacker(model)
    for name in ("conv1", "conv2"):
        stacker.linear(f"encoder/{name}", f"model.encoder.{name}")
    for side, layers, heads in (("encoder", 1, 4), ("decoder", 2, 2)):
        position = stacker.state[f"model.{side}.embed_positions.weight"]
        stacker.found[f"{side}/position_encodings/encodings"] = position
        stacker.found[f"{side}/num_heads"] = np.int16(heads)
        stacker.norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for index in range(layers):
            to, of = f"{side}/layer_{index}", f"model.{side}.layers.{index}"
            stacker.layer(to, of, cross=side == "decoder")
    stacker.found["decoder/embeddings/weight"] = stacker.state["model.decoder.embed_tokens.weight"]
    return stacker.found


def quantised(found: dict[str, np.ndarray], how: str) -> dict[str, np.ndarray]:
    """As CTranslate2 quantises: 127 / largest of a row, or 2^10 / largest of all."""
    changed = {}
    for name, array in found.items():
        rows = array.reshape(len(array), -1) if array.ndim > 1 else None
        if rows is None or not name.endswith("/weight") or how not in ("int8", "int16"):
            changed[name] = array.astype("f2") if how == "float16" and array.ndim else array
            continue
        largest = np.abs(rows).max(axis=1) if how == "int8" else np.abs(rows).max()
        scale = ((127 if how == "int8" else 2**10) / largest).astype("f4")
        changed[name] = np.rint(rows * scale.reshape(-1, 1)).astype(how).reshape(array.shape)
        changed[f"{name}_scale"] = scale
    return changed


ALIASES = (("decoder/projection/weight", "decoder/embeddings/weight"),)


def packed(found, spec="WhisperSpec", bfloat16=False, aliases=ALIASES) -> bytes:
    def text(value):
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    out = struct.pack("<I", 6) + text(spec) + struct.pack("<II", 3, len(found))
    for name, array in sorted(found.items()):
        kind, raw = str(array.dtype), array.tobytes()
        if bfloat16 and kind == "float32":
            kind, raw = "bfloat16", (np.frombuffer(raw, "<u4") >> 16).astype("<u2").tobytes()
        shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        out += text(name) + shape + struct.pack("<BI", TYPES[kind], len(raw)) + raw
    names = b"".join(text(name) for pair in aliases for name in pair)
    return out + struct.pack("<I", len(aliases)) + names


def write_folder(folder: Path, model_bin: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(model_bin)
    settings_ = {"suppress_ids": [1, 2], "suppress_ids_begin": [3], "alignment_heads": [[1, 0]]}
    (folder / "config.json").write_text(json.dumps(settings_))
    added = [{"id": FIRST_SPECIAL + i, "content": token} for i, token in enumerate(TOKENS)]
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": added})
    )
    return folder
