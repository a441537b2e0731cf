"""The Llama kind of language model: Llama, Qwen2 (biased q, k, v) and Qwen3 (normed q, k).

One network, batched, right-padded, with the key-value cache as an argument. Parameters keep the
names of the Hugging Face checkpoints, without their leading `model.`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnicli.errors import UserError
from omnicli.execution.kv_cache import KVCache
from omnicli.execution.nets.decoder import Decoder, DecoderConfig, ExpertsConfig
from omnicli.execution.weights import hollow, load_into
from omnicli.operators.rope import Llama3Scaling

KINDS = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """What decides the shape of the network."""

    kind: str
    vocab: int
    positions: int
    tied: bool

    @property
    def parameters(self) -> int:
        """Weights in all matrices; norms and biases would not change what is done with it."""
        attention = 2 * self.width * self.head_width * (self.heads + self.kv_heads)
        tables = self.vocab * self.width * (1 if self.tied else 2)
        return tables + self.layers * (attention + 3 * self.width * self.inner)


def read_config(folder: Path) -> LlamaConfig:
    """The network's shape from `config.json`; refuses what this network does not compute."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = raw.get("model_type", "")
    if kind not in KINDS:
        raise UserError(f"{folder} holds a {kind!r} model", hint=f"known: {', '.join(KINDS)}")
    return config_of(folder, raw, kind)


def config_of(folder: Path, raw: dict[str, Any], kind: str) -> LlamaConfig:
    """The shape of a network of this kind from its part of a config; `folder` is for messages."""
    _refuse(folder, raw)
    heads = raw["num_attention_heads"]
    rope = _rope(raw)
    bias = bool(raw.get("attention_bias", False))
    return LlamaConfig(
        kind=kind,
        width=raw["hidden_size"],
        inner=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_width=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab=raw["vocab_size"],
        eps=raw["rms_norm_eps"],
        theta=float(rope.get("rope_theta", 10_000.0)),
        positions=raw["max_position_embeddings"],
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or kind == "qwen2",
        out_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        scaling=_scaling(folder, rope),
        experts=_experts(raw),
    )


def _experts(raw: dict[str, Any]) -> ExpertsConfig | None:
    count = raw.get("num_experts") or raw.get("num_local_experts")
    if not count:
        return None
    return ExpertsConfig(
        count=count,
        chosen=raw["num_experts_per_tok"],
        inner=raw["moe_intermediate_size"],
        normed=bool(raw.get("norm_topk_prob", False)),
        shared_inner=raw.get("shared_expert_intermediate_size") or 0,
    )


def _refuse(folder: Path, raw: dict[str, Any]) -> None:
    if raw.get("use_sliding_window"):
        raise UserError(f"{folder} attends in a sliding window, which is not supported")
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise UserError(f"{folder} mixes dense layers with experts, which is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{folder} activates with {raw['hidden_act']!r}", hint="known: silu")


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings under one roof: newer files have them there, older ones in two places."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return {"rope_theta": raw.get("rope_theta") or 10_000.0} | scaling


def _scaling(folder: Path, rope: dict[str, Any]) -> Llama3Scaling | float | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return float(rope["factor"])
    if kind != "llama3":
        hint = "known: default, linear, llama3"
        raise UserError(f"{folder} stretches positions by {kind!r}", hint=hint)
    return Llama3Scaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_positions=rope["original_max_position_embeddings"],
    )


class Llama(Decoder):
    """Token ids to hidden states, and hidden states to logits."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab, config.width)
        if not config.tied:
            self.lm_head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Normed states after the last layer: ids [B, T] int64 -> [B, T, D]; see `decode`."""
        return self.decode(self.embed_tokens(ids), cache)[1]

    def read(
        self, ids: Tensor, positions: Tensor, mask: Tensor, *, depth: int
    ) -> tuple[Tensor, Tensor]:
        """States after `depth` layers, and normed ones after the last: 2 x [B, T, D].

        ids and positions [B, T] int64, mask [B, 1, T, T] bool: who may look at whom.
        """
        return self.run(self.embed_tokens(ids), positions, mask, None, depth=depth)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> [..., V] float32."""
        head = self.embed_tokens if self.config.tied else self.lm_head
        return F.linear(hidden, head.weight).float()


def load_llama(folder: Path, *, dtype: torch.dtype, device: torch.device | str) -> Llama:
    """The network of a Hugging Face folder with its weights."""
    config = read_config(folder)
    with hollow():
        net = Llama(config)
    ignore = ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if config.tied else ()))
    load_into(net, folder, dtype=dtype, device=device, ignore=ignore, rename=_rename)
    net.ready(device)
    return net


def load_llama_part(
    folder: Path,
    config: LlamaConfig,
    prefix: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Llama:
    """A network that is a part of a larger model: `PREFIXmodel.layers...`, `PREFIXlm_head...`."""
    with hollow():
        net = Llama(config)
    ignore = ("audio_tower.*", "visual.*", *(("lm_head.weight",) if config.tied else ()))
    load_into(net, folder, dtype=dtype, device=device, prefix=prefix, ignore=ignore, rename=_rename)
    net.ready(device)
    return net


def _rename(name: str) -> str:
    return name.removeprefix("model.")
