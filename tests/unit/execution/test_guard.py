"""The word guard: what a free summary may not do."""

import pytest

from omnicli.execution.families.cascade.guard import copied, faithful

CALL = (
    "Hello, this is Karen. Your appointment on Tuesday was moved to Thursday at 10:30. "
    "I am home after five. The parking lot isn't open on Sundays."
)


@pytest.mark.parametrize(
    "summary",
    [
        "Karen says that the appointment was moved to Thursday.",
        "The appointment is moved from Tuesday to Thursday at 10:30.",
        "She is home after 5.",
        "The parking lot is not open on Sundays.",
    ],
)
def test_words_of_the_transcript_pass(summary):
    assert faithful(summary, CALL)


@pytest.mark.parametrize(
    ("summary", "why"),
    [
        ("The appointment was moved to Friday.", "a day that was never said"),
        ("The appointment is at 11:30.", "another number"),
        ("Susan moved the appointment.", "a name"),
        ("Karen is sorry for the loss.", "an invention"),
        ("Karen is not home after five.", "a negation that nobody said"),
        ("The parking lot is open on Sundays.", "a negation that was lost"),
    ],
)
def test_what_is_foreign_does_not(summary, why):
    assert not faithful(summary, CALL), why


@pytest.mark.parametrize(
    ("summary", "transcript", "is_copy"),
    [
        (CALL, CALL, True),
        (CALL.lower().replace(".", ","), CALL, True),
        (CALL[:-12], CALL, True),
        ("Hello, this is Karen.", CALL, False),
        ("The parking lot isn't open on Sundays.", CALL, False),
        (" ".join(CALL.split()[:21]), CALL + " I will call again. " * 9, True),
        (" ".join(CALL.split()[:15]), CALL + " I will call again. " * 9, False),
        ("Yes, please.", "Yes, please!", True),
    ],
)
def test_the_transcript_over_again_is_a_copy(summary, transcript, is_copy):
    assert copied(summary, transcript) is is_copy
