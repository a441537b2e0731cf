"""Loops and prose: what happens to a model's text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnicli.execution.families.cascade.writing import loops, spoken_prose

tokens = st.lists(st.integers(0, 9), max_size=20)


@given(tokens, st.lists(st.integers(0, 9), min_size=4, max_size=12))
def test_what_is_said_three_times_is_found(before, stretch):
    assert loops([*before, *stretch * 3]) > 0


@given(st.lists(st.integers(), unique=True, max_size=100))
def test_what_is_said_once_is_no_loop(ids):
    assert loops(ids) == 0


@given(tokens)
def test_a_loop_is_what_it_says(ids):
    period = loops(ids)
    if period:
        assert ids[-period:] == ids[-2 * period : -period] == ids[-3 * period : -2 * period]


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
