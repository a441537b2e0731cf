"""Transcribe and texts that go in circles, with a network that says what its clip tells it to."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from omnicli.data import AudioClip, Encoded
from omnicli.execution.families.cascade.hearing import Hearing, Transcribe, token_limit
from omnicli.operators.timestamps import TimestampIds
from omnicli.scheduling.loops import lockstep
from omnicli.scheduling.policies.greedy import Greedy

WORDS, END, FIRST, VOCAB = 60, 60, 63, 263
RATE_HZ = 16_000


class Kept:
    """Rows of a cache: what each is to say."""

    def __init__(self, strides):
        self.k = [strides]

    def keep(self, rows):
        self.k = [self.k[0][rows]]


class Counter:
    """A row of stride n says 5, 5 + n, 5 + 2n … modulo the words."""

    config = SimpleNamespace(max_target_positions=448)
    embed_tokens = SimpleNamespace(weight=torch.zeros(VOCAB, 2))

    def listen(self, audio, mask):
        return Kept(audio[:, 0, 0])

    def new_cache(self, rows, room):
        return Kept(torch.zeros(rows))

    def __call__(self, frames, cache, cross):
        last = frames[:, -1]
        word = torch.where(last < WORDS, last + cross.k[0].long(), 5) % WORDS
        hidden = torch.nn.functional.one_hot(word, VOCAB).float() * 50
        return hidden[:, None].expand(-1, frames.shape[1], -1)

    def logits(self, hidden, bias=0.0):
        return hidden + bias


def transcribe(*strides):
    tokens = SimpleNamespace(
        times=TimestampIds(end=END, first=FIRST, max_initial=3),
        end=END,
        no_timestamps=62,
        no_speech=61,
        suppressed=(),
        suppressed_first=(),
        prompt=lambda language, task: [END + 1],
        text=lambda ids: " ".join(str(i) for i in ids if i < WORDS),
    )
    clip = AudioClip(samples=torch.zeros(3 * RATE_HZ), rate_hz=RATE_HZ)
    items = [
        Hearing(
            encoded=Encoded(embeds=torch.full((4, 2), float(n)), clip=i, valid_frames=4),
            clip=clip,
            language="en",
            task="transcribe",
            window="short",
            temperature=0.0,
            seed=0,
        )
        for i, n in enumerate(strides)
    ]
    made = dict(lockstep.run(Transcribe(Counter(), tokens), items, [0] * len(items), [Greedy()]))
    return [made[i] for i in range(len(items))]


def test_a_row_that_goes_in_circles_is_stopped_long_before_its_limit():
    once, fives, seven, long = transcribe(0, 12, 30, 1)
    limit = token_limit(3.0, 448)
    assert limit == 84
    for thought, period in ((once, 1), (fives, 5), (seven, 2)):
        words = thought.text.split()
        assert len(words) == max(20, 5 * period)
        assert words == words[:period] * (len(words) // period)
        assert (thought.finish_reason, thought.problem) == ("loop", "repetition")
    assert len(long.text.split()) == limit - 1, "all but the timestamp"
    assert (long.finish_reason, long.problem) == ("length", "runaway")


def test_what_a_row_has_said_stays_its_own_when_others_leave():
    *_, fives, ones = transcribe(0, 0, 0, 0, 0, 0, 5, 1)
    assert fives == replace(transcribe(5, 5, 5, 5)[0], clip=6)
    assert ones == replace(transcribe(1, 1, 1, 1)[0], clip=7)
    assert (fives.finish_reason, ones.finish_reason) == ("loop", "length")
