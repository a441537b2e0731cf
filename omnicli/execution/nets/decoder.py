"""A stack of causal decoder layers: the part that Llama, Qwen2, Qwen3 and Qwen-Omni share.

Embeddings in, states out, batched, right-padded, with the key-value cache as an argument. What a
layer holds follows from its config: biased or normed queries and keys, a dense network or a mixture
of experts. Parameters keep the names of the Hugging Face checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnicli.execution.kv_cache import KVCache
from omnicli.operators.attention import attend, causal_mask
from omnicli.operators.moe import Dispatch, route
from omnicli.operators.norm import rms_norm
from omnicli.operators.rope import Llama3Scaling, frequencies, rotate, scale_llama3, turns


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward network."""

    count: int
    chosen: int  # per token
    inner: int
    normed: bool  # whether the chosen ones' weights sum to 1
    shared_inner: int = 0  # width of an expert that every token passes; 0: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What decides the shape of the layers."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    eps: float
    theta: float
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # whether queries and keys are normed head by head
    scaling: Llama3Scaling | float | None = None  # a float divides all frequencies
    experts: ExpertsConfig | None = None

    @property
    def kv_values(self) -> int:
        """Numbers that the cache keeps for one position of one row."""
        return 2 * self.layers * self.kv_heads * self.head_width

    @property
    def active_values(self) -> int:
        """Numbers that a layer holds at a time for one position, roughly; for estimates."""
        inner = self.inner
        if self.experts is not None:
            inner = self.experts.chosen * (self.experts.inner + self.width)
            inner += self.experts.shared_inner
        return 12 * self.width + 3 * inner


def _keep(module: nn.Module, name: str, pieces: Sequence[Tensor]) -> None:
    """The pieces as one tensor of the module's, None if there are none."""
    whole = torch.cat(list(pieces)).detach() if pieces else None
    module.register_buffer(name, whole, persistent=False)


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

    qkv: Tensor  # [(H + 2 Hk) d, D]
    qkv_bias: Tensor | None
    qk_weight: Tensor  # [H + Hk, d]

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_width = layer, config.head_width
        self.heads, self.kv_heads = config.heads, config.kv_heads
        queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
        self.q_proj = nn.Linear(config.width, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.width, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_width, config.eps)
            self.k_norm = RMSNorm(config.head_width, config.eps)
        self.qk_norm = config.qk_norm

    def stack(self) -> None:
        """One product for queries, keys and values; the single ones are let go."""
        each = (self.q_proj, self.k_proj, self.v_proj)
        _keep(self, "qkv", [p.weight for p in each])
        _keep(self, "qkv_bias", [p.bias for p in each if p.bias is not None])
        del self.q_proj, self.k_proj, self.v_proj
        if self.qk_norm:
            norms = ((self.q_norm, self.heads), (self.k_norm, self.kv_heads))
            _keep(self, "qk_weight", [n.weight.expand(heads, -1) for n, heads in norms])
            self.eps = self.q_norm.eps
            del self.q_norm, self.k_norm

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        heads = F.linear(x, self.qkv, self.qkv_bias).view(*x.shape[:2], -1, self.head_width)
        qk, v = torch.split(heads, [self.heads + self.kv_heads, self.kv_heads], dim=2)
        if self.qk_norm:
            qk = rms_norm(qk, self.qk_weight, self.eps)
        qk = rotate(qk.transpose(1, 2), context.cos, context.sin)
        q, k = torch.split(qk, [self.heads, self.kv_heads], dim=1)  # [B, H, T, d]
        v = v.transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache.write(self.layer, k, v, context.positions)
        mixed = attend(q, k, v, context.mask)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Gated feed-forward network (SwiGLU)."""

    gate_up: Tensor  # [2 I, D]
    gate_up_bias: Tensor | None

    def __init__(self, width: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def stack(self) -> None:
        """One product for both gates; the single ones are let go."""
        each = (self.gate_proj, self.up_proj)
        _keep(self, "gate_up", [p.weight for p in each])
        _keep(self, "gate_up_bias", [p.bias for p in each if p.bias is not None])
        del self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        gate, up = F.linear(x, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class Experts(nn.Module):
    """A mixture of experts, and one that every token passes if the config has it."""

    gate_up: Tensor  # [E, 2 I, D]
    down: Tensor  # [E, D, I]

    def __init__(self, width: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(width, config.count, bias=False)
        self.experts = nn.ModuleList(MLP(width, config.inner) for _ in range(config.count))
        if config.shared_inner:
            self.shared_expert = MLP(width, config.shared_inner)
            self.shared_expert_gate = nn.Linear(width, 1, bias=False)

    def stack(self) -> None:
        """All experts' matrices in two tensors; the single ones are let go."""
        each = [expert for expert in self.experts if isinstance(expert, MLP)]
        gates = [torch.cat([e.gate_proj.weight, e.up_proj.weight])[None] for e in each]
        _keep(self, "gate_up", gates)
        _keep(self, "down", [e.down_proj.weight[None] for e in each])
        del self.experts

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        flat = x.flatten(0, 1)
        weights, ids = route(self.gate(flat), self.config.chosen, normed=self.config.normed)
        sent = Dispatch(ids, self.config.count)
        gate, up = sent.product(sent.scatter(flat), self.gate_up).chunk(2, dim=-1)
        out = sent.gather(sent.product(F.silu(gate) * up, self.down), weights)
        if self.config.shared_inner:
            out = out + self.shared_expert_gate(flat).sigmoid() * self.shared_expert(flat)
        return out.view_as(x)


class Layer(nn.Module):
    """Attention and feed-forward, each normed before and added after."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.width, config.eps)
        self.mlp: nn.Module = (
            MLP(config.width, config.inner, bias=config.mlp_bias)
            if config.experts is None
            else Experts(config.width, config.experts)
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), context)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embeddings to states."""

    frequency: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.width, config.eps)
        self.register_buffer("frequency", _frequency(config), persistent=False)

    def ready(self, device: torch.device | str) -> None:
        """To be called when the weights are there: put side by side what is used side by side.

        Checkpoints hold queries, keys and values, both gates and all experts one by one.
        """
        self.frequency = self.frequency.to(device)
        for kind in (Experts, Attention, MLP):  # experts first: they are MLPs one by one
            for module in [m for m in self.modules() if isinstance(m, kind)]:
                module.stack()

    def decode(self, x: Tensor, cache: KVCache, *, depth: int = 0) -> tuple[Tensor, Tensor]:
        """States after `depth` layers and, normed, after the last: x [B, T, D] -> 2 x [B, T, D].

        The embeddings follow what the cache's rows hold; the caller advances it by each row's real
        ones. Rows are padded on the right, with anything.
        """
        positions = cache.extend(x.shape[1])
        mask = causal_mask(positions, cache.readable)
        return self.run(x, positions, mask, cache, depth=depth)

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: KVCache | None,
        *,
        depth: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """As `decode`, with positions [B, T] and mask [B, 1, T, Tk] bool given."""
        context = Context(positions, *turns(positions, self.frequency), mask, cache)
        middle = x
        for done, layer in enumerate(self.layers, start=1):
            x = layer(x, context)
            middle = x if done == depth else middle
        return middle, self.norm(x)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """An empty cache for this network, in its dtype and on its device."""
        shape = (rows, self.config.kv_heads, capacity, self.config.head_width)
        weight = self.norm.weight
        return KVCache(self.config.layers, shape, dtype=weight.dtype, device=weight.device)


def _frequency(config: DecoderConfig) -> Tensor:
    frequency = frequencies(config.head_width, config.theta)
    if isinstance(config.scaling, Llama3Scaling):
        return scale_llama3(frequency, config.scaling)
    return frequency / (config.scaling or 1.0)
