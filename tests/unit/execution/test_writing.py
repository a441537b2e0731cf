"""Drafts: those that loop are stopped and told from others, and prose has no markup."""

from types import SimpleNamespace

import pytest
import torch

from omnicli.data import Draft
from omnicli.execution.families.cascade.writing import Write, WriteItem, spoken_prose, trouble_of
from omnicli.scheduling.loops import lockstep
from omnicli.scheduling.policies.greedy import Greedy


@pytest.mark.parametrize(
    ("text", "prose"),
    [
        ("**Thank you** for _your_ call.", "Thank you for your call."),
        ("# Reply\n\nI will come.", "Reply I will come."),
        ("- rice\n- two onions\n1. milk", "rice two onions milk"),
        ("Best regards, [Your Name].", "Best regards,."),
        ("<think>hm</think> Yes.", "Yes."),
        ("<think>never ends", ""),
        ('"Quoted."', "Quoted."),
        ("2 * 3 and 4", "2 * 3 and 4"),
    ],
)
def test_prose_has_no_markup(text, prose):
    assert spoken_prose(text) == prose


END, VOCAB = 9, 10


class Cache:
    def keep(self, rows):
        pass

    def advance(self, steps):
        pass


class Parrot:
    """Goes on from its last token: to the next one below 5, round and round; or to the end."""

    config = SimpleNamespace(vocab=VOCAB)
    embed_tokens = SimpleNamespace(weight=torch.zeros(VOCAB, 2))

    def new_cache(self, rows, room):
        return Cache()

    def __call__(self, ids, cache):
        following = torch.where(ids < 5, (ids + 1) % 5, (ids + 1).clamp(max=END))
        return torch.nn.functional.one_hot(following, VOCAB).float() * 9

    def logits(self, hidden):
        return hidden


def drafts(*last_tokens, limit=40):
    chat = SimpleNamespace(
        end_ids=frozenset({END}),
        control_ids=frozenset(),
        vocab=VOCAB,
        decode=lambda ids: " ".join(f"w{i}" for i in ids),
    )
    items = [WriteItem(ids=(token,), max_new_tokens=limit) for token in last_tokens]
    made = dict(lockstep.run(Write(Parrot(), chat), items, [0] * len(items), [Greedy()]))
    return [made[i] for i in range(len(items))]


def test_a_draft_that_loops_is_stopped_and_says_so():
    loop, ends, silent, other = drafts(4, 5, 8, 2)
    assert (loop.text, loop.finish_reason) == ("w0 w1 w2 w3 w4", "loop")
    assert (other.text, other.finish_reason) == ("w3 w4 w0 w1 w2", "loop")
    assert (ends.text, ends.finish_reason) == ("w6 w7 w8", "stop")
    assert (silent.text, silent.finish_reason) == ("", "stop")
    assert [trouble_of(d) for d in (loop, ends, silent)] == ["runaway", "", "no_answer"]
    [cut] = drafts(4, limit=8)
    assert (cut.finish_reason, trouble_of(cut)) == ("length", "")


@pytest.mark.parametrize("text", ["", "...", "…", "?!", "👍"])
def test_a_text_without_a_word_is_no_answer(text):
    assert trouble_of(Draft(text=text, finish_reason="stop")) == "no_answer"


def test_a_number_is_an_answer():
    assert trouble_of(Draft(text="7.", finish_reason="stop")) == ""
