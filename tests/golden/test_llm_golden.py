"""Language models against transformers, in float32.

Logits within 1e-3 (2e-4 on tiny networks), greedy tokens equal.
"""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from omnicli import models
from omnicli.execution.nets.llama import load_llama

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}
TINY = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama 3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
}


def rows_of(ids):
    """The same ids, right-padded to the longest: [B, T] and lengths [B]."""
    size = max(map(len, ids))
    padded = torch.tensor([row + [0] * (size - len(row)) for row in ids])
    return padded, torch.tensor([len(row) for row in ids])


@torch.inference_mode()
def last_logits(net, ids):
    padded, lengths = rows_of(ids)
    cache = net.new_cache(len(ids), padded.shape[1] + 8)
    hidden = net(padded, cache)
    cache.advance(lengths)
    return cache, net.logits(hidden[torch.arange(len(ids)), lengths - 1])


@pytest.mark.parametrize("name", TINY)
@torch.inference_mode()
def test_tiny_networks(name, tmp_path):
    torch.manual_seed(0)
    reference = TINY[name]().eval()
    for parameter in reference.parameters():
        parameter.normal_(0, 0.2)  # biases and norms too
    reference.save_pretrained(tmp_path)
    net = load_llama(tmp_path, dtype=torch.float32, device="cpu")

    ids = [torch.randint(0, 97, (n,)).tolist() for n in (70, 33, 5)]
    cache, logits = last_logits(net, ids)
    for step in range(6):
        for row, said in enumerate(ids):
            expected = reference(torch.tensor([said])).logits[0, -1]
            torch.testing.assert_close(logits[row], expected, atol=2e-4, rtol=1e-4)
        chosen = logits.argmax(1)
        ids = [[*said, int(token)] for said, token in zip(ids, chosen, strict=True)]
        assert step < 6
        hidden = net(chosen[:, None], cache)
        cache.advance(1)
        logits = net.logits(hidden[:, 0])


@torch.inference_mode()
def test_the_embedded_model(model_cache):
    folder = models.find("llm", None, model_cache).folder
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    net = load_llama(folder, dtype=torch.float32, device="cpu")
    ids = [[1, 9690, 198, 2683, 359, 253, 5356], [28, 314, 260]]
    cache, logits = last_logits(net, ids)
    for row, said in enumerate(ids):
        expected = reference(torch.tensor([said])).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, atol=1e-3, rtol=0)

    prompt = torch.tensor([ids[0]])
    greedy = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    expected = reference.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy)
    said = []
    cache = net.new_cache(1, 64)
    step = prompt
    for _ in range(24):
        hidden = net(step, cache)
        cache.advance(step.shape[1])
        step = net.logits(hidden[:, -1]).argmax(1)[:, None]
        said.append(int(step))
    assert said == expected[0, len(ids[0]) :].tolist()
