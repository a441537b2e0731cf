"""Rotary positions: a rotation, relative, and Llama 3.1's stretching."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from omnicli.operators.rope import Llama3Scaling, frequencies, rotate, scale_llama3, turns


def test_a_pair_is_turned_like_a_complex_number():
    x = torch.randn(2, 3, 5, 8)
    positions = torch.randint(0, 100, (2, 5))
    frequency = frequencies(8, 10_000.0)
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    angle = positions[:, None, :, None] * frequency.double()
    expected = pairs * torch.polar(torch.ones_like(angle), angle)
    found = rotate(x, *turns(positions, frequency)).double()
    torch.testing.assert_close(found[..., :4], expected.real, atol=1e-4, rtol=0)
    torch.testing.assert_close(found[..., 4:], expected.imag, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shift", [1, 17, 300])
def test_only_the_distance_between_query_and_key_counts(shift):
    q, k = torch.randn(2, 1, 1, 6, 32)
    frequency = frequencies(32, 10_000.0)

    def scores(first):
        cos, sin = turns(torch.arange(first, first + 6)[None], frequency)
        return rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2)

    torch.testing.assert_close(scores(0), scores(shift), atol=1e-3, rtol=0)


def test_bfloat16_is_turned_in_float32():
    x = torch.randn(1, 1, 4, 8).bfloat16()
    parts = turns(torch.arange(4)[None], frequencies(8, 10_000.0))
    assert torch.equal(rotate(x, *parts), rotate(x.float(), *parts).bfloat16())


def test_llama3_stretching_is_that_of_transformers():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192
    )
    torch.testing.assert_close(scale_llama3(frequencies(128, 500_000.0), scaling), expected)
