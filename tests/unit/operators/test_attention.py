"""Attention against the plainest code that says the same."""

import math

import pytest
import torch

from omnicli.operators.attention import attend, attend_all, causal_mask, length_mask


def plain(q, k, v, mask):
    """Head by head, query by query, in float64."""
    b, h, t, d = q.shape
    share = h // k.shape[1]
    out = torch.zeros(b, h, t, d, dtype=torch.float64)
    for row in range(b):
        for head in range(h):
            keys, values = k[row, head // share].double(), v[row, head // share].double()
            for at in range(t):
                seen = mask[row, 0, min(at, mask.shape[2] - 1)]
                scores = keys[seen] @ q[row, head, at].double() / math.sqrt(d)
                out[row, head, at] = scores.softmax(0) @ values[seen]
    return out


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_attend(queries, heads):
    torch.manual_seed(queries)
    q = torch.randn(3, heads[0], queries, 8)
    k, v = torch.randn(2, 3, heads[1], 12, 8)
    start = torch.tensor([[0], [1], [3]])
    for mask in (
        causal_mask(start + torch.arange(queries), 12),
        length_mask(torch.tensor([1, 5, 12]), 12),
    ):
        torch.testing.assert_close(attend(q, k, v, mask), plain(q, k, v, mask).float())
    everything = torch.ones(3, 1, 1, 12, dtype=torch.bool)
    torch.testing.assert_close(attend(q, k, v, None), plain(q, k, v, everything).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 3, 96])
def test_attend_rounds_alike_in_any_company(dtype, queries):
    torch.manual_seed(0)
    q = torch.randn(9, 9, queries, 64).to(dtype)
    k, v = (torch.randn(9, 3, 128, 64).to(dtype)[:, :, :96] for _ in range(2))
    mask = length_mask(torch.arange(88, 97), 96)
    together = attend(q, k, v, mask)
    for row in range(9):
        same = [row] * 4
        assert torch.equal(attend(q[same], k[same], v[same], mask[same])[0], together[row])


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attend_all_is_attention_without_a_mask(dtype, atol):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 70, 16).to(dtype)
    everything = torch.ones(2, 1, 1, 70, dtype=torch.bool)
    found = attend_all(q, k, v).double()
    torch.testing.assert_close(found, plain(q, k, v, everything), atol=atol, rtol=atol)


def test_masks():
    assert causal_mask(torch.tensor([[2, 3]]), 5)[0, 0].tolist() == [
        [True, True, True, False, False],
        [True, True, True, True, False],
    ]
    assert length_mask(torch.tensor([0, 2]), 3)[:, 0, 0].tolist() == [
        [False, False, False],
        [True, True, False],
    ]
