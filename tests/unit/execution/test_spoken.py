"""Text as it will be spoken."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnicli.execution.sentences import split_sentences
from omnicli.execution.spoken import to_sentences


def said(text, language="en"):
    return " ".join(s.text for s in to_sentences(text, language))


TABLE = [
    ("It costs $12.50.", "It costs twelve dollars and fifty cents."),
    ("Due 2024-03-05.", "Due March fifth, twenty twenty four."),
    ("At 14:30 sharp.", "At fourteen thirty sharp."),
    ("Pi is 3.14.", "Pi is three point one four."),
    ("It is 82% done.", "It is eighty two percent done."),
    ("Call 555-0123.", "Call five five five, zero one two three."),
    ("See https://www.example.com/a?b=1 now.", "See example dot com now."),
    ("Mail joe@example.org.", "Mail joe at example dot org."),
    ("<p>Hello <b>world</b></p>", "Hello world."),
    ("**Bold** and _soft_.", "Bold and soft."),
    ("Dr. Smith lives here.", "Doctor Smith lives here."),
    ("€1,200 in all.", "one thousand two hundred euros in all."),
]


@pytest.mark.parametrize(("text", "spoken"), TABLE)
def test_numbers_marks_and_names_are_words(text, spoken):
    assert said(text) == spoken


@pytest.mark.parametrize("text", ["", "   ", "...", "👍👍", "—", "\n\t", "***"])
def test_nothing_to_say(text):
    assert to_sentences(text, "en") == []


def test_every_digit_of_a_long_block_is_said_in_bounded_time():
    start = time.perf_counter()
    spoken = said("The code is " + "1234567890" * 50 + " and goes on.")
    assert time.perf_counter() - start < 2
    assert (
        len(re.findall(r"\b(one|two|three|four|five|six|seven|eight|nine|zero)\b", spoken)) == 500
    )
    assert spoken.endswith("goes on.")


def test_other_languages_keep_their_numbers_for_espeak():
    assert "12" in said("Es kostet 12 Euro.", "de")


words = st.text("abcdefghijklmnopqrstuvwxyz", min_size=2, max_size=10)


@given(st.lists(words.filter(lambda w: w not in ("st", "mt")), min_size=1, max_size=40))
def test_every_word_of_plain_prose_is_said_in_order(text):
    assert said(" ".join(text)).rstrip(".").split() == text


@given(st.text(max_size=400), st.sampled_from(["en", "de", "zh"]))
def test_any_text_ends(text, language):
    for sentence in to_sentences(text, language):
        assert sentence.text.strip()
        assert sentence.pause_s >= 0


@given(st.text(max_size=400))
def test_sentences_lose_no_word(text):
    assert " ".join(split_sentences(text)).split() == text.split()
