"""A language model of the GGUF format under its Hugging Face names, dequantised to float16."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from omnicli.errors import UserError
from omnicli.models import gguf_file, gguf_tokenizer
from omnicli.models.canonical import Canonical, Json
from omnicli.models.gguf_file import Tensor
from omnicli.models.weights import Array, Weight

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AGAIN = "fetch the file again"
ROPE_FACTORS = "rope_freqs.weight"
# What Llama 3.1 and its successors use; the file holds only the factors that follow from it.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Fields:
    """A file's metadata, read with a type and a default in mind."""

    path: Path
    architecture: str
    values: dict[str, Any]

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number under the architecture's own prefix."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int):
            raise UserError(
                f"{self.path} lacks {self.architecture}.{key}", hint="convert the model again"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A float32 as its shortest decimal: 1e-05, not 9.999999747378752e-06."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int | float):
            raise UserError(
                f"{self.path} lacks {self.architecture}.{key}", hint="convert the model again"
            )
        return float(str(np.float32(value)))

    def optional(self, key: str) -> Any:
        """A value, or None."""
        return self.values.get(f"{self.architecture}.{key}")


def convert(path: Path) -> Canonical:
    """The canonical form of a `.gguf` file."""
    values, tensors = gguf_file.read(path)
    fields = Fields(path, str(values.get("general.architecture")), values)
    _check(fields)
    config = _config(fields, tensors)
    files: dict[str, Path | Json] = {
        "config.json": config,
        **gguf_tokenizer.files(fields.values, path),
    }
    return Canonical(files=files, weights=tuple(_weights(fields, tensors, config)))


def _check(fields: Fields) -> None:
    if fields.architecture not in ARCHITECTURES:
        raise UserError(
            f"{fields.path} is a model of the kind {fields.architecture!r}",
            hint=f"one of: {', '.join(ARCHITECTURES)}",
        )
    if fields.values.get("split.count", 1) > 1:
        raise UserError(
            f"{fields.path} is one part of several", hint="join them with llama-gguf-split --merge"
        )
    if fields.whole("expert_count", 0):
        raise UserError(
            f"{fields.path} is a mixture of experts",
            hint="a dense Llama, Qwen2 or Qwen3 model is needed",
        )


# ------------------------------------------------------------------------------------- weights


def _weights(fields: Fields, tensors: dict[str, Tensor], config: Json) -> Iterator[Weight]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS:
            continue
        part = name.split(".")[-2] if "." in name else ""
        permuted = heads.get(part, 0) if fields.architecture == "llama" else 0
        if permuted and tensor.shape[0] % (2 * permuted):
            raise UserError(f"{fields.path} is damaged: {name} is {list(tensor.shape)}", hint=AGAIN)
        make = partial(_values, tensor, permuted)
        yield Weight(
            name=_hugging_face_name(name, fields.path), shape=tensor.shape, dtype="F16", make=make
        )


def _hugging_face_name(name: str, path: Path) -> str:
    if name in OUTER:
        return OUTER[name]
    match name.split("."):
        case ["blk", index, part, ("weight" | "bias") as what] if part in INNER:
            return f"model.layers.{index}.{INNER[part]}.{what}"
    raise UserError(
        f"{path} holds a tensor of an unknown use: {name}",
        hint="a Llama, Qwen2 or Qwen3 model is needed",
    )


def _values(tensor: Tensor, permuted_heads: int) -> Array:
    values = tensor.values()
    return _unpermuted(values, permuted_heads) if permuted_heads else values


def _unpermuted(values: Array, heads: int) -> Array:
    """Undo llama.cpp's order of q and k rows.

    It pairs the two halves of a head row by row, since its rotary embedding turns neighbours
    (`permute` in convert_hf_to_gguf.py); Hugging Face keeps the halves one after the other.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


# ------------------------------------------------------------------------------------ settings


def _config(fields: Fields, tensors: dict[str, Tensor]) -> Json:
    """LlamaConfig, Qwen2Config or Qwen3Config of transformers."""
    width, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    kv_heads = fields.whole("attention.head_count_kv", heads)
    if min(heads, kv_heads) < 1 or heads % kv_heads:
        raise UserError(f"{fields.path} is damaged: {heads} heads for {kv_heads}", hint=AGAIN)
    head_dim = fields.whole("attention.key_length", width // heads)
    embedding = _tensor(tensors, "token_embd.weight", fields)
    return {
        "architectures": [ARCHITECTURES[fields.architecture]],
        "model_type": fields.architecture,
        "hidden_size": width,
        "intermediate_size": fields.whole("feed_forward_length"),
        "num_hidden_layers": fields.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.real("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(fields, tensors, head_dim),
        "max_position_embeddings": fields.whole("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float16",
        **gguf_tokenizer.ids(fields.values),
    }


def _tensor(tensors: dict[str, Tensor], name: str, fields: Fields) -> Tensor:
    if name not in tensors:
        raise UserError(f"{fields.path} lacks the tensor {name}", hint=AGAIN)
    return tensors[name]


def _rope_scaling(fields: Fields, tensors: dict[str, Tensor], head_dim: int) -> Json | None:
    if ROPE_FACTORS in tensors:
        return _llama3_scaling(fields, tensors[ROPE_FACTORS].values().reshape(-1), head_dim)
    kind = fields.optional("rope.scaling.type")
    if kind in (None, "none"):
        return None
    scaling = {"rope_type": kind, "factor": fields.real("rope.scaling.factor")}
    original = fields.optional("rope.scaling.original_context_length")
    return scaling | ({"original_max_position_embeddings": original} if original else {})


def _llama3_scaling(fields: Fields, factors: Array, head_dim: int) -> Json:
    """Recognise Llama 3.1's rule by its factors: one per pair of channels, 1 for the fast ones."""
    scaling = {"rope_type": "llama3", "factor": float(str(factors.max())), **LLAMA3_ROPE}
    if not np.allclose(
        factors, llama3_factors(fields.real("rope.freq_base"), head_dim, scaling), rtol=1e-3
    ):
        raise UserError(
            f"{fields.path} scales its positions in an unknown way",
            hint="take the Hugging Face folder",
        )
    return scaling


def llama3_factors(theta: float, head_dim: int, scaling: Json) -> Array:
    """By how much each frequency is divided: `_compute_llama3_parameters` of transformers."""
    length = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)  # wavelengths in tokens
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip(
        (scaling["original_max_position_embeddings"] / length - low) / (high - low), 0, 1
    )
    slowdown: Array = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return slowdown
