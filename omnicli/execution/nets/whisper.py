"""Whisper's encoder and decoder; modules are named as in Hugging Face checkpoints.

The encoder runs on as many frames as it is given, up to its 1,500 positions: padding every clip to
30 s is a habit of the reference, not of the network.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnicli.errors import UserError
from omnicli.execution.kv_cache import KVCache
from omnicli.execution.weights import hollow, load_into
from omnicli.operators.attention import attend, attend_all, causal_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperConfig:
    """The sizes that a checkpoint's config.json gives."""

    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_layers: int
    decoder_attention_heads: int
    decoder_ffn_dim: int
    num_mel_bins: int
    vocab_size: int
    max_source_positions: int
    max_target_positions: int

    @classmethod
    def read(cls, folder: Path) -> "WhisperConfig":
        """From a model folder's config.json."""
        path = folder / "config.json"
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{name: int(row[name]) for name in cls.__slots__})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"cannot read {path} as a Whisper model's: {error!r}") from error


class Attention(nn.Module):
    """Multi-head attention; only the keys have no bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, H, T, d]."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        """[B, H, T, d] -> output [B, T, D]."""
        merged: Tensor = self.out_proj(x.transpose(1, 2).flatten(2))
        return merged


class EncoderLayer(nn.Module):
    """Self-attention over all frames, then the MLP."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        a, y = self.self_attn, self.self_attn_layer_norm(x)
        q, k, v = a.split(a.q_proj(y)), a.split(a.k_proj(y)), a.split(a.v_proj(y))
        x = x + a.merge(attend_all(q, k, v))
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return out


class Encoder(nn.Module):
    """Log-mel frames to what was understood, two frames at a time."""

    def __init__(self, c: WhisperConfig) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(c.num_mel_bins, c.d_model, 3, padding=1)
        self.conv2 = nn.Conv1d(c.d_model, c.d_model, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(c.max_source_positions, c.d_model)
        self.layers = nn.ModuleList(
            EncoderLayer(c.d_model, c.encoder_attention_heads, c.encoder_ffn_dim)
            for _ in range(c.encoder_layers)
        )
        self.layer_norm = nn.LayerNorm(c.d_model)

    def forward(self, mel: Tensor) -> Tensor:
        """mel [B, bands, 2 T] -> [B, T, D]; T at most 1,500."""
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2)
        x = x + self.embed_positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.layer_norm(x)
        return out


@dataclass(slots=True)
class CrossCache:
    """Keys and values of the audio, one pair per layer: each [B, H, T, d]."""

    k: list[Tensor]
    v: list[Tensor]
    mask: Tensor | None  # [B, 1, 1, T] bool, True on real frames; None if all are

    def keep(self, rows: Tensor) -> None:
        """Keep these rows [B'] int64, in this order."""
        self.k = [x.index_select(0, rows) for x in self.k]
        self.v = [x.index_select(0, rows) for x in self.v]
        self.mask = None if self.mask is None else self.mask.index_select(0, rows)


class DecoderLayer(nn.Module):
    """Self-attention with a cache, attention to the audio, then the MLP."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.encoder_attn = Attention(width, heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def attend_self(
        self, x: Tensor, index: int, cache: KVCache, positions: Tensor, mask: Tensor
    ) -> Tensor:
        """x [B, T, D] with everything said so far -> [B, T, D]."""
        a, y = self.self_attn, self.self_attn_layer_norm(x)
        k, v = cache.write(index, a.split(a.k_proj(y)), a.split(a.v_proj(y)), positions)
        return x + a.merge(attend(a.split(a.q_proj(y)), k, v, mask))

    def attend_audio(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, T, D] with the audio's k and v [B, H, S, d] -> [B, T, D]."""
        a = self.encoder_attn
        q = a.split(a.q_proj(self.encoder_attn_layer_norm(x)))
        return x + a.merge(attend(q, k, v, mask))

    def mlp(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return out


class Decoder(nn.Module):
    """Tokens and audio to the next token."""

    def __init__(self, c: WhisperConfig) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.embed_positions = nn.Embedding(c.max_target_positions, c.d_model)
        self.layers = nn.ModuleList(
            DecoderLayer(c.d_model, c.decoder_attention_heads, c.decoder_ffn_dim)
            for _ in range(c.decoder_layers)
        )
        self.layer_norm = nn.LayerNorm(c.d_model)

    def listen(self, audio: Tensor, mask: Tensor | None) -> CrossCache:
        """The audio's keys and values, once per clip: audio [B, T, D], mask [B, 1, 1, T]."""
        crosses = [cast(DecoderLayer, layer).encoder_attn for layer in self.layers]
        k = [a.split(a.k_proj(audio)).contiguous() for a in crosses]
        v = [a.split(a.v_proj(audio)).contiguous() for a in crosses]
        return CrossCache(k, v, mask)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for `rows` rows of `capacity` tokens."""
        c, weight = self.config, self.embed_tokens.weight
        shape = (rows, c.decoder_attention_heads, capacity, c.d_model // c.decoder_attention_heads)
        return KVCache(c.decoder_layers, shape, dtype=weight.dtype, device=weight.device)

    def forward(self, tokens: Tensor, cache: KVCache, cross: CrossCache) -> Tensor:
        """tokens [B, T] int64, the next of every row -> hidden [B, T, D]; the cache advances."""
        positions = cache.extend(tokens.shape[1])
        mask = causal_mask(positions, cache.readable)
        x = self.embed_tokens(tokens) + self.embed_positions(positions)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            x = layer.attend_self(x, i, cache, positions, mask)
            x = layer.attend_audio(x, cross.k[i], cross.v[i], cross.mask)
            x = layer.mlp(x)
        cache.advance(tokens.shape[1])
        out: Tensor = self.layer_norm(x)
        return out

    def logits(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [B, D] -> [B, V] float32; `bias` [V] is -inf where a token is never wanted."""
        return F.linear(hidden, self.embed_tokens.weight, bias).float()


def load_encoder(folder: Path, *, dtype: torch.dtype, device: str) -> Encoder:
    """The encoder of a checkpoint in Hugging Face's layout."""
    with hollow():
        net = Encoder(WhisperConfig.read(folder))
    _load(net, folder, "encoder", "decoder", dtype, device)
    return net


def load_decoder(folder: Path, *, dtype: torch.dtype, device: str) -> Decoder:
    """The decoder of a checkpoint in Hugging Face's layout."""
    with hollow():
        net = Decoder(WhisperConfig.read(folder))
    _load(net, folder, "decoder", "encoder", dtype, device)
    return net


def _load(
    net: nn.Module, folder: Path, ours: str, other: str, dtype: torch.dtype, device: str
) -> None:
    load_into(
        net,
        folder,
        dtype=dtype,
        device=device,
        ignore=(f"model.{other}.*", f"{other}.*", "proj_out.weight"),
        rename=lambda name: name.removeprefix("model.").removeprefix(f"{ours}."),
    )
