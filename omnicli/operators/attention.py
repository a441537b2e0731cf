"""Attention and its masks: plain functions of tensors."""

import torch
from torch import Tensor
from torch.nn import functional as F

FEW = 4  # with fewer queries fused float32 kernels change bits with the rows of the batch
TILE_BYTES = 3 << 20  # scores that are computed at a time: about what two cores' caches hold


def causal_mask(q_positions: Tensor, k_size: int) -> Tensor:
    """True where a query may look: q_positions [B, Tq] int64 -> [B, 1, Tq, k_size] bool.

    Enough for right-padded rows too: a real query stands before all padding, and a decoded
    token overwrites the padding at its own position.
    """
    k_positions = torch.arange(k_size, device=q_positions.device)
    return (k_positions[None, None, :] <= q_positions[:, :, None])[:, None]


def length_mask(lengths: Tensor, k_size: int) -> Tensor:
    """True where a key is real: lengths [B] int64 -> [B, 1, 1, k_size] bool."""
    k_positions = torch.arange(k_size, device=lengths.device)
    return (k_positions[None, :] < lengths[:, None])[:, None, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention; groups of query heads may share a key head.

    q [B, H, Tq, d]; k and v [B, Hk, Tk, d] with H a multiple of Hk; mask [B, 1, Tq or 1, Tk] bool,
    None if every key counts -> [B, H, Tq, d]. Query head h looks at key head h // (H / Hk).
    """
    if q.shape[2] < FEW:
        queries = range(q.shape[2])
        return torch.cat([_attend_one(q, k, v, mask, at) for at in queries], dim=2)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # once per prompt: the copies are cheaper than a slower kernel
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query looks at every key: q, k, v [B, H, T, d] -> [B, H, T, d].

    On a CPU in bfloat16 the fused kernel computes in float32; tiles of scores that fit the cache
    are up to twice as fast. Their number follows from T alone, so company changes nothing.
    """
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v)
    b, h, t, d = q.shape
    q = (q * d**-0.5).reshape(b * h, t, d)
    k, v = k.reshape(b * h, t, d).transpose(1, 2), v.reshape(b * h, t, d)
    heads = max(1, TILE_BYTES // (t * t * q.element_size()))
    out = torch.empty_like(q)
    for tile in (slice(i, i + heads) for i in range(0, b * h, heads)):
        torch.bmm((q[tile] @ k[tile]).softmax(dim=-1), v[tile], out=out[tile])
    return out.view(b, h, t, d)


def _attend_one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, at: int) -> Tensor:
    """Query `at` of every row, written out.

    The query heads of a group stand in the query axis, so nothing is repeated.
    """
    b, h, _, d = q.shape
    grouped = q[:, :, at].reshape(b, k.shape[1], -1, d) * d**-0.5  # [B, Hk, H/Hk, d]
    # keys times queries: on a CPU in bfloat16 five times as fast as queries times keys
    scores = (k @ grouped.transpose(-1, -2)).transpose(-1, -2).float().contiguous()
    if mask is not None:
        seen = mask[:, :, min(at, mask.shape[2] - 1)].unsqueeze(2)
        scores = scores.masked_fill(~seen, float("-inf"))
    weights = scores.softmax(dim=-1).to(v.dtype)
    out: Tensor = (weights @ v).reshape(b, h, 1, d)
    return out
