"""Normalisation against torch's own."""

import torch
from torch.nn import functional as F

from omnicli.operators.norm import rms_norm


def test_rms_norm():
    x, weight = torch.randn(2, 3, 16) * 5, torch.randn(16)
    expected = F.rms_norm(x.double(), (16,), weight.double(), 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_rounded_once():
    x, weight = torch.randn(4, 16).bfloat16(), torch.randn(16).bfloat16()
    expected = rms_norm(x.float(), weight.float(), 1e-6).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), expected)


def test_tiny_values_stay_finite():
    assert torch.isfinite(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6)).all()
