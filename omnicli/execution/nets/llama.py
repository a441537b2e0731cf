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
from omnicli.execution.weights import hollow, load_into
from omnicli.operators.attention import attend, causal_mask
from omnicli.operators.norm import rms_norm
from omnicli.operators.rope import Llama3Scaling, frequencies, rotate, scale_llama3, turns

KINDS = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """What decides the shape of the network."""

    kind: str
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    vocab: int
    eps: float
    theta: float
    positions: int
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    scaling: Llama3Scaling | float | None = None  # a float divides all frequencies

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed head by head."""
        return self.kind == "qwen3"

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
        scaling=_scaling(folder, rope),
    )


def _refuse(folder: Path, raw: dict[str, Any]) -> None:
    if raw.get("use_sliding_window"):
        raise UserError(f"{folder} attends in a sliding window, which is not supported")
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


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Context:
    """What all layers of one call share."""

    positions: Tensor  # [B, T] int64
    cos: Tensor  # [B, 1, T, d/2]
    sin: Tensor
    mask: Tensor  # [B, 1, T, Tk] bool
    cache: KVCache | None


class Attention(nn.Module):
    """Self-attention in which several query heads share a key head."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_width = layer, config.head_width
        queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
        self.q_proj = nn.Linear(config.width, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.width, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_width, config.eps)
            self.k_norm = RMSNorm(config.head_width, config.eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        q, k, v = (self._heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(y.transpose(1, 2), context.cos, context.sin) for y in (q, k))
        v = v.transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache.write(self.layer, k, v, context.positions)
        mixed = attend(q, k, v, context.mask)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        return x.view(b, t, -1, self.head_width)  # [B, T, H, d]


class MLP(nn.Module):
    """Gated feed-forward network (SwiGLU)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.width, config.inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.inner, config.width, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each normed before and added after."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.width, config.eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), context)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """Token ids to hidden states, and hidden states to logits."""

    frequency: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.width, config.eps)
        if not config.tied:
            self.lm_head = nn.Linear(config.width, config.vocab, bias=False)
        self.register_buffer("frequency", _frequency(config), persistent=False)

    def forward(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Normed states after the last layer: ids [B, T] int64 -> [B, T, D].

        The ids follow what the cache's rows hold; the caller advances it by each row's real ids.
        Rows are padded on the right, with any id.
        """
        positions = cache.extend(ids.shape[1])
        mask = causal_mask(positions, cache.readable)
        _, last = self._run(ids, positions, mask, cache)
        return last

    def read(
        self, ids: Tensor, positions: Tensor, mask: Tensor, *, depth: int
    ) -> tuple[Tensor, Tensor]:
        """States after `depth` layers, and normed ones after the last: 2 x [B, T, D].

        ids and positions [B, T] int64, mask [B, 1, T, T] bool: who may look at whom.
        """
        return self._run(ids, positions, mask, None, depth=depth)

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: KVCache | None,
        *,
        depth: int = 0,
    ) -> tuple[Tensor, Tensor]:
        context = Context(positions, *turns(positions, self.frequency), mask, cache)
        x = middle = self.embed_tokens(ids)
        for done, layer in enumerate(self.layers, start=1):
            x = layer(x, context)
            middle = x if done == depth else middle
        return middle, self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> [..., V] float32."""
        head = self.embed_tokens if self.config.tied else self.lm_head
        return F.linear(hidden, head.weight).float()

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for this network, in its dtype and on its device."""
        shape = (rows, self.config.kv_heads, capacity, self.config.head_width)
        weight = self.embed_tokens.weight
        return KVCache(self.config.layers, shape, dtype=weight.dtype, device=weight.device)


def load_llama(folder: Path, *, dtype: torch.dtype, device: torch.device | str) -> Llama:
    """The network of a Hugging Face folder with its weights."""
    config = read_config(folder)
    with hollow():
        net = Llama(config)
    ignore = ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if config.tied else ()))
    load_into(net, folder, dtype=dtype, device=device, ignore=ignore, rename=_rename)
    net.frequency = net.frequency.to(device)
    return net


def _rename(name: str) -> str:
    return name.removeprefix("model.")


def _frequency(config: LlamaConfig) -> Tensor:
    frequency = frequencies(config.head_width, config.theta)
    if isinstance(config.scaling, Llama3Scaling):
        return scale_llama3(frequency, config.scaling)
    return frequency / (config.scaling or 1.0)
