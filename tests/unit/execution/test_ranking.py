"""Ranking: how texts are cut, what is picked, and that a packed row says what plain passes say."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnicli.data import Segment
from omnicli.execution.families.cascade.ranking import (
    MOST_PICKS,
    PART_TOKENS,
    UNIT_CHARS,
    UNIT_TOKENS,
    UNIT_WORDS,
    Rank,
    Ranked,
    best_first,
    edge_tokens,
    extract,
    join_units,
    make_items,
    packed_mask,
    picks,
    standard,
    units_of,
)
from omnicli.execution.nets.llama import Llama, LlamaConfig

words = st.text("abcdefgh.,?", min_size=1, max_size=12)
texts = st.lists(words, max_size=200).map(" ".join)
scores = st.floats(-5, 5)


class Letters:
    """A tokenizer of letters."""

    def encode(self, text):
        return [1 + ord(c) % 50 for c in text]

    def slots(self, messages):
        return [51, 52, 53], [54, 55]


def segments_of(*texts):
    return [Segment(start_s=i, end_s=i + 1, text=t) for i, t in enumerate(texts)]


# --- text ---


@given(texts)
def test_no_word_is_lost_and_no_unit_is_long(text):
    units = units_of(text)
    assert " ".join(units).split() == text.split()
    assert all(0 < len(u.split()) <= UNIT_WORDS for u in units)


@given(st.text("好的abc ", max_size=900))
def test_no_character_is_lost_without_spaces(text):
    units = units_of(text)
    assert "".join("".join(units).split()) == "".join(text.split())
    assert all(len(u) <= UNIT_CHARS + UNIT_WORDS for u in units)


def test_text_without_stops_is_cut_where_segments_end():
    said = [" ".join(f"w{i}" for i in range(a, a + 20)) for a in (0, 20, 40)]
    assert units_of(" ".join(said), segments_of(*said)) == said
    assert [len(u.split()) for u in units_of(" ".join(said))] == [30, 30]
    other = segments_of("these are not its words")
    assert [len(u.split()) for u in units_of(" ".join(said), other)] == [30, 30]


def test_a_sentence_over_two_segments_stays_whole():
    said = segments_of("We meet at", "noon. Bring cake.")
    assert units_of("We meet at noon. Bring cake.", said) == ["We meet at noon.", "Bring cake."]


def test_units_are_joined_as_they_are_written():
    assert join_units(["One.", "Two."]) == "One. Two."
    assert join_units(["好的。", "明天见。", "Bye."]) == "好的。明天见。 Bye."


# --- parts ---


@given(st.lists(st.text("abc", min_size=1, max_size=150), min_size=1, max_size=60))
def test_every_unit_is_in_one_part_and_no_part_is_long(units):
    items = make_items(Letters(), units)
    alone = [ids for item in items for ids in item.alone]
    assert alone == [tuple(Letters().encode(u)[:UNIT_TOKENS]) for u in units]
    assert all(sum(map(len, item.placed)) <= PART_TOKENS + UNIT_TOKENS for item in items)
    assert all(item.placed and len(item.placed) == len(item.alone) for item in items)
    assert all(item.frame == 5 for item in items)


@given(st.integers(1, 9000))
def test_edges_grow_by_a_quarter(tokens):
    edge = edge_tokens(tokens)
    assert tokens <= edge < max(33, 1.25 * tokens + 33)
    assert edge % 32 == 0
    assert edge_tokens(edge) == edge


# --- choosing ---


@given(st.integers(1, 500), st.integers(1, 60))
def test_a_summary_is_shorter_than_its_text(units, parts):
    count = picks(units, parts)
    assert 1 <= count <= MOST_PICKS
    assert count <= units or parts > 1
    assert picks(units) <= picks(units + 1)
    if units > 2:
        assert picks(units) < units


@st.composite
def ranked(draw):
    parts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    values = draw(st.lists(scores, min_size=sum(parts), max_size=sum(parts)))
    units = tuple(f"Sentence {i}." for i in range(sum(parts)))
    return Ranked(units=units, parts=tuple(parts), scores=tuple(values))


@given(ranked())
def test_the_best_of_every_part_comes_first(found):
    order = best_first(found)
    assert sorted(order) == list(range(len(found.units)))
    begins = [sum(found.parts[:i]) for i in range(len(found.parts) + 1)]
    heads = order[: len(found.parts)]
    for a, b in pairwise(begins):
        [head] = [i for i in heads if a <= i < b]
        assert found.scores[head] == max(found.scores[a:b])
    tail = [found.scores[i] for i in order[len(found.parts) :]]
    assert tail == sorted(tail, reverse=True)


@given(ranked())
def test_an_extract_is_in_the_order_of_the_text(found):
    said = extract(found).split(". ")
    numbers = [int(s.removeprefix("Sentence ").strip(".")) for s in said]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == min(len(found.units), picks(len(found.units), len(found.parts)))


def test_what_is_said_twice_is_picked_once():
    units = ("Yes.", "The lock is broken.", "the lock is broken.", "Bye.", "Send somebody.")
    found = Ranked(units=units, parts=(5,), scores=(0.0, 3.0, 2.9, 0.1, 1.0))
    assert best_first(found) == [1, 4, 3, 0, 2]
    assert extract(found) == "The lock is broken. Send somebody."


@given(st.lists(scores, min_size=1, max_size=30))
def test_standard_scores_have_mean_0_and_deviation_1(values):
    found = torch.tensor(standard(values), dtype=torch.float64)
    assert abs(found.mean()) < 1e-6
    assert found.std(correction=0) == pytest.approx(1, abs=1e-6) or not found.any()


# --- the stage ---


def test_packed_mask():
    mask = packed_mask(torch.tensor([[0, 0, 1, 1, 2]]))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    shape = LlamaConfig(
        kind="llama", width=32, inner=48, layers=3, heads=4, kv_heads=2, head_width=8, vocab=61,
        eps=1e-5, theta=1e4, positions=256, tied=True,
    )  # fmt: skip
    made = Llama(shape)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.ready("cpu")
    return made.requires_grad_(False)


def test_one_packed_row_says_what_a_pass_for_each_sentence_says(net):
    units = ["We met.", "The lock is broken since May.", "Bye."]
    items = make_items(Letters(), units) + make_items(Letters(), units[1:])
    head, tail = Letters().slots(())
    for item, figures in zip(items, Rank(net, Letters()).figures(items), strict=True):
        said = [token for unit in item.placed for token in unit]
        context = [*head, *said, *tail]
        for place, unit in enumerate(item.alone):
            ids = torch.tensor([[*context, *unit]])
            hidden = net(ids, net.new_cache(1, ids.shape[1]))[0]
            steps = net.logits(hidden[len(context) - 1 : -1]).log_softmax(1)
            expected = steps.gather(1, torch.tensor(unit)[:, None]).sum().item()
            assert figures.answer[place] == pytest.approx(expected, abs=1e-3)
        positions = torch.arange(len(context))[None]
        mask = packed_mask(torch.zeros_like(positions))
        middle = net.read(torch.tensor([context]), positions, mask, depth=2)[0][0]
        whole = middle[len(head) : len(head) + len(said)].mean(0)
        begin = len(head)
        for place, unit in enumerate(item.placed):
            mean = middle[begin : begin + len(unit)].mean(0)
            expected = torch.cosine_similarity(mean, whole, dim=0).item()
            assert figures.central[place] == pytest.approx(expected, abs=1e-4)
            begin += len(unit)
        assert figures.tokens == tuple(map(len, item.alone))
