import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omnicli.operators.sampling import inverse_cdf, keep_top_k, keep_top_p, penalise


def test_frequencies_are_the_probabilities():
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, float("-inf")])
    draws = 40_000
    chosen = inverse_cdf(logits.expand(draws, -1), torch.rand(draws))
    found = torch.bincount(chosen, minlength=5) / draws
    torch.testing.assert_close(found, logits.softmax(0), atol=0.01, rtol=0)


@given(st.integers(0, 1 << 30), st.floats(0, 1, exclude_max=True, width=32))
def test_a_token_of_probability_zero_is_never_chosen(seed, uniform):
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(seed)) * 5
    logits[0, ::2] = float("-inf")
    assert int(inverse_cdf(logits, torch.tensor([uniform]))) % 2 == 1


def test_the_filters_are_those_of_transformers():
    torch.manual_seed(3)
    logits, said = 3 * torch.randn(6, 40), torch.randint(0, 40, (6, 9))
    seen = torch.zeros(6, 40, dtype=torch.bool).scatter(1, said, True)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(said, logits.clone())
    assert torch.equal(penalise(logits, seen, 1.3), expected)
    for k in (1, 7, 40, 99):
        assert torch.equal(keep_top_k(logits, k), TopKLogitsWarper(k)(said, logits.clone()))
    for p in (0.05, 0.5, 0.8, 0.999):
        assert torch.equal(keep_top_p(logits, p), TopPLogitsWarper(p)(said, logits.clone()))
