"""Normalisation: functions of tensors that accumulate in float32."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last axis: x [..., D], weight [..., D] -> [..., D].

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. All of it in float32, one
    rounding at the end.
    """
    if x.dtype == torch.float32:  # the same bits, in fewer calls
        return F.rms_norm(x, x.shape[-1:], eps=eps) * weight
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
