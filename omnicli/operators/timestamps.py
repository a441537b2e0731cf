"""Whisper's rules for timestamp tokens, for all rows at once.

After openai/whisper `decoding.py` (`ApplyTimestampRules`), without its loop over rows:
timestamps come in pairs, never go back, begin every text, and win when together they are likelier
than any one word.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimestampIds:
    """Where a vocabulary keeps what the rules speak of."""

    end: int  # the end token; every id below it is text
    first: int  # the timestamp 0.00; every id from here on is a timestamp
    max_initial: int  # how many steps after `first` a text may begin


def begin_with_timestamp(logits: Tensor, ids: TimestampIds) -> None:
    """The first token is a timestamp near the start: logits [B, V], changed in place."""
    logits[:, : ids.first] = _NEVER
    logits[:, ids.first + ids.max_initial + 1 :] = _NEVER


def timestamp_rules(
    logits: Tensor, last: Tensor, before: Tensor, latest: Tensor, ids: TimestampIds
) -> None:
    """All later tokens: logits [B, V] float32, changed in place.

    `last` and `before` [B] are the last token and the one before it (a timestamp's id if there was
    none); `latest` [B] is the last timestamp.
    """
    closed = (last >= ids.first) & (before >= ids.first)  # a pair is complete: words come next
    opened = (last >= ids.first) & (before < ids.first)  # half a pair: its twin, or the end
    times, words = logits[:, ids.first :], logits[:, : ids.end]
    steps = torch.arange(ids.first, logits.shape[1], device=logits.device)
    earliest = latest + (~opened).long()
    times.masked_fill_(closed[:, None] | (steps[None] < earliest[:, None]), _NEVER)
    words.masked_fill_(opened[:, None], _NEVER)
    prefer_timestamps(logits, ids)


def prefer_timestamps(logits: Tensor, ids: TimestampIds) -> None:
    """If all timestamps together beat the best other token, one of them it is: in place."""
    times, others = logits[:, ids.first :], logits[:, : ids.first]
    win = times.logsumexp(dim=1) > others.amax(dim=1)
    others.masked_fill_(win[:, None], _NEVER)
