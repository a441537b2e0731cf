"""The vectorised rules against the reference's loop over rows, written out from its description."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from omnicli.operators.timestamps import TimestampIds, begin_with_timestamp, timestamp_rules

IDS = TimestampIds(end=20, first=30, max_initial=5)
VOCAB = 50
NEVER = float("-inf")

tokens = st.lists(st.integers(0, VOCAB - 1).filter(lambda t: t < 20 or t >= 30), max_size=6)


def by_row(logits, said):
    """openai/whisper `ApplyTimestampRules` for one row."""
    logits = logits.clone()
    if not said:
        logits[: IDS.first] = NEVER
        logits[IDS.first + IDS.max_initial + 1 :] = NEVER
        return logits
    last = said[-1] >= IDS.first
    before = len(said) < 2 or said[-2] >= IDS.first
    if last and before:
        logits[IDS.first :] = NEVER
    elif last:
        logits[: IDS.end] = NEVER
    times = [t for t in said if t >= IDS.first]
    if times:
        earliest = times[-1] if last and not before else times[-1] + 1
        logits[IDS.first : earliest] = NEVER
    logprobs = logits.log_softmax(-1)
    if logprobs[IDS.first :].logsumexp(-1) > logprobs[: IDS.first].max():
        logits[: IDS.first] = NEVER
    return logits


@given(st.lists(tokens.filter(bool), min_size=1, max_size=6), st.integers(0, 1 << 30))
def test_rules_are_those_of_the_reference(rows, seed):
    rows = [[IDS.first, *said] for said in rows]  # every text begins with a timestamp
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
    expected = torch.stack([by_row(x, said) for x, said in zip(logits, rows, strict=True)])

    last = torch.tensor([said[-1] for said in rows])
    before = torch.tensor([said[-2] for said in rows])
    latest = torch.tensor([[t for t in said if t >= IDS.first][-1] for said in rows])
    timestamp_rules(logits, last, before, latest, IDS)

    assert torch.equal(logits, expected)


def test_a_text_begins_with_an_early_timestamp():
    logits = torch.randn(2, VOCAB)
    expected = torch.stack([by_row(x, []) for x in logits])
    begin_with_timestamp(logits, IDS)
    assert torch.equal(logits, expected)
