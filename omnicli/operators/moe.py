"""Mixtures of experts: which expert a token goes to, and all experts' products in one call."""

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 4  # an expert's rows are padded to a multiple: with fewer, kernels round differently


def route(logits: Tensor, chosen: int, *, normed: bool) -> tuple[Tensor, Tensor]:
    """The likeliest experts of each token: logits [N, E] -> weights [N, k] float32, ids [N, k].

    Softmax over all experts, then the best `chosen`; `normed` makes their weights sum to 1
    (Qwen2-MoE, Qwen3-MoE).
    """
    weights, ids = logits.float().softmax(dim=-1).topk(chosen, dim=-1)
    if normed:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids


class Dispatch:
    """Tokens sorted by expert, every expert's rows padded to a multiple of `ROWS`."""

    def __init__(self, ids: Tensor, experts: int) -> None:
        """ids [N, k] int64: each token's experts."""
        flat = ids.flatten()
        counts = torch.bincount(flat, minlength=experts)
        room = (counts + ROWS - 1) // ROWS * ROWS
        self.ends = room.cumsum(0)
        order = flat.argsort(stable=True)
        begins = self.ends - room
        sorted_ids = flat[order]
        rank = torch.arange(len(flat), device=ids.device) - (counts.cumsum(0) - counts)[sorted_ids]
        self.place = torch.empty_like(flat)  # of each (token, choice) among the padded rows
        self.place[order] = begins[sorted_ids] + rank
        self.rows = int(self.ends[-1])
        self.chosen = ids.shape[1]

    def scatter(self, x: Tensor) -> Tensor:
        """Tokens to their experts' rows: x [N, D] -> [rows, D], zeros in between."""
        spread = x.new_zeros(self.rows, x.shape[1])
        spread[self.place] = x.repeat_interleave(self.chosen, dim=0)
        return spread

    def gather(self, y: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts: y [rows, D], weights [N, k] -> [N, D].

        Summed in the token's own order of experts, so its company changes no bit.
        """
        parts = y[self.place].view(len(weights), self.chosen, -1)
        return (parts * weights[..., None].to(y.dtype)).sum(dim=1)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Every row times its expert's matrix: x [rows, D], weight [E, O, D] -> [rows, O]."""
        grouped = getattr(F, "grouped_mm", None)
        if grouped is not None:
            out: Tensor = grouped(x, weight.transpose(1, 2), offs=self.ends.to(torch.int32))
            return out
        out, begin = x.new_empty(len(x), weight.shape[1]), 0
        for expert, end in enumerate(self.ends.tolist()):
            if end > begin:
                torch.mm(x[begin:end], weight[expert].t(), out=out[begin:end])
            begin = end
        return out
