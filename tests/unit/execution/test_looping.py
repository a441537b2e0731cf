"""Circles: found while a text grows and once it is whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnicli.execution.looping import before_loop, loops

tokens = st.lists(st.integers(0, 9), max_size=20)


@given(tokens, st.lists(st.integers(0, 9), min_size=4, max_size=12))
def test_what_is_said_three_times_is_found(before, stretch):
    assert loops([*before, *stretch * 3], 3, 12) > 0


@given(st.lists(st.integers(), unique=True, max_size=100))
def test_what_is_said_once_is_no_loop(ids):
    assert loops(ids, 3, 12) == 0


@given(tokens, st.integers(2, 5), st.integers(4, 20))
def test_a_loop_is_what_it_says(ids, repeats, enough):
    period = loops(ids, repeats, enough)
    if period:
        assert period * repeats >= enough
        assert ids[-period * repeats :] == ids[-period:] * repeats


def test_a_word_that_is_said_a_few_times_is_no_loop():
    assert loops([7] * 11, 3, 12) == 0
    assert loops([7] * 12, 3, 12) > 0


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Come on Monday. I am sorry. I am sorry. I am sorry.", "Come on Monday. I am sorry."),
        ("Come on Monday. I am sorry. I am sorry. I am sorry. I", "Come on Monday. I am sorry."),
        ("And then I said no no no no no no no no", "And then I said no"),
        ("Then it went brrrrrrrrrrrrrrr", "Then it went br"),
        (
            "请在星期一早上打电话过来谢谢大家观看我的视频谢谢大家观看我的视频谢谢大家观看我的视频",
            "请在星期一早上打电话过来谢谢大家观看我的视频",
        ),
        ("The number is seven seven seven, please.", "The number is seven seven seven, please."),
        ("No, no, no, no. I said no.", "No, no, no, no. I said no."),
        ("I will call N-N-N-N-N-N-N-N-N-N", "I will call N-"),
        ("N-N-N-N-N-N-N-N-N-N", ""),
        ("R小小小小小小小小小小小小", ""),
        ("Thank you. Thank you. Thank you. Thank you.", ""),
        ("", ""),
    ],
)
def test_a_text_ends_with_the_first_round_of_its_circle(text, kept):
    assert before_loop(text) == kept


@given(st.text(max_size=60))
def test_what_is_kept_is_the_beginning(text):
    assert text.strip().startswith(before_loop(text).strip())
