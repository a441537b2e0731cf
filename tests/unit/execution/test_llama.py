"""The Llama kind of network: its configuration and its invariances, on a tiny random one.

Golden values are in tests/golden/test_llm_golden.py.
"""

import json

import pytest
import torch

from omnicli.errors import UserError
from omnicli.execution.nets.llama import Llama, LlamaConfig, read_config
from omnicli.operators.attention import causal_mask

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 61,
    "max_position_embeddings": 128,
}


def config(folder, **other):
    (folder / "config.json").write_text(json.dumps(CONFIG | other))
    return read_config(folder)


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def net(request, tmp_path):
    torch.manual_seed(0)
    made = Llama(config(tmp_path, model_type=request.param, tie_word_embeddings=True))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.ready("cpu")
    return made.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_by_step_is_all_at_once(net, dtype):
    net = net.to(dtype)
    ids = torch.randint(0, 61, (2, 20))
    at_once = net.logits(net(ids, net.new_cache(2, 20)))
    cache = net.new_cache(2, 20)
    found = []
    for size in (7, 1, 1, 4, 1, 6):  # prompts, steps and something between
        begin = sum(h.shape[1] for h in found)
        found.append(net(ids[:, begin : begin + size], cache))
        cache.advance(size)
    atol = 1e-4 if dtype == torch.float32 else 0.5  # of values up to about 30
    torch.testing.assert_close(net.logits(torch.cat(found, 1)), at_once, atol=atol, rtol=0)


def test_more_input_does_not_change_earlier_output(net):
    ids = torch.randint(0, 61, (1, 24))
    long, short = (net(ids[:, :n], net.new_cache(1, 24)) for n in (24, 12))
    torch.testing.assert_close(long[:, :12], short, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_company_changes_no_bit(net, dtype):
    net = net.to(dtype)
    ids = torch.randint(0, 61, (8, 32))
    lengths = torch.randint(1, 33, (8,))

    def grow(rows):
        cache = net.new_cache(len(rows), 64)
        hidden = net(ids[rows], cache)
        cache.advance(lengths[rows])
        chosen = net.logits(hidden[torch.arange(len(rows)), lengths[rows] - 1])
        seen = [chosen]
        for _ in range(4):
            seen.append(net.logits(net(seen[-1].argmax(1)[:, None], cache)[:, 0]))
            cache.advance(1)
        return torch.stack(seen, dim=1)

    together = grow(list(range(8)))
    for row in range(8):
        assert torch.equal(grow([row] * 4)[0], together[row])


def test_read_gives_what_forward_gives_and_the_layer_asked_for(net):
    ids = torch.randint(0, 61, (2, 9))
    positions = torch.arange(9).expand(2, -1)
    middle, last = net.read(ids, positions, causal_mask(positions, 9), depth=3)
    torch.testing.assert_close(last, net(ids, net.new_cache(2, 9)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(net.norm(middle), last)
    first, _ = net.read(ids, positions, causal_mask(positions, 9), depth=0)
    assert torch.equal(first, net.embed_tokens(ids))


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_the_matrices(tmp_path, tied):
    shape = config(tmp_path, tie_word_embeddings=tied, head_dim=16)
    matrices = [p.numel() for p in Llama(shape).parameters() if p.dim() == 2]
    assert shape.parameters == sum(matrices)


def test_old_and_new_ways_to_write_rotary_settings_are_read_alike(tmp_path):
    stretch = {"rope_type": "linear", "factor": 4.0}
    old = config(tmp_path, rope_theta=5e5, rope_scaling=stretch)
    new = config(tmp_path, rope_parameters={"rope_theta": 5e5, **stretch})
    assert old == new
    assert isinstance(old, LlamaConfig)
    assert (old.theta, old.scaling) == (5e5, 4.0)
    assert Llama(old).frequency[0] == 0.25


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' model"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_what_the_network_does_not_compute_is_refused(tmp_path, other, message):
    with pytest.raises(UserError, match=message):
        config(tmp_path, **other)
