"""Mixtures of experts: every token by hand, and in any company."""

import pytest
import torch

from omnicli.operators.moe import ROWS, Dispatch, route

EXPERTS, WIDTH, OUT = 5, 16, 12


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("grouped", [True, False])
def test_each_token_gets_its_own_experts(tokens, grouped, monkeypatch):
    if not grouped:
        monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, WIDTH, generator=generator)
    weight = torch.randn(EXPERTS, OUT, WIDTH, generator=generator)
    weights, ids = route(torch.randn(tokens, EXPERTS, generator=generator), 2, normed=True)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(tokens))
    sent = Dispatch(ids, EXPERTS)
    assert all(end % ROWS == 0 for end in sent.ends.tolist())
    made = sent.gather(sent.product(sent.scatter(x), weight), weights)
    for n in range(tokens):
        by_hand = sum(
            w * (weight[e] @ x[n]) for w, e in zip(weights[n], ids[n].tolist(), strict=True)
        )
        torch.testing.assert_close(made[n], by_hand, atol=1e-5, rtol=1e-5)


def test_company_changes_no_bit():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, WIDTH, generator=generator)
    weight = torch.randn(EXPERTS, OUT, WIDTH, generator=generator)
    weights, ids = route(torch.randn(40, EXPERTS, generator=generator), 2, normed=False)

    def made(rows):
        sent = Dispatch(ids[rows], EXPERTS)
        return sent.gather(sent.product(sent.scatter(x[rows]), weight), weights[rows])

    whole = made(torch.arange(40))
    for size in (4, 8, 20):
        rows = torch.randperm(40, generator=generator)[:size]
        assert torch.equal(made(rows), whole[rows])


def test_routing_is_that_of_the_reference():
    logits = torch.randn(9, EXPERTS, generator=torch.Generator().manual_seed(1))
    weights, ids = route(logits, 3, normed=False)
    probabilities = logits.softmax(dim=1)
    for n in range(9):
        assert ids[n].tolist() == probabilities[n].argsort(descending=True)[:3].tolist()
        assert torch.equal(weights[n], probabilities[n, ids[n]])
