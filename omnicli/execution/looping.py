"""Texts that go round in circles: as token ids while they grow, as letters once they are whole."""

import re
from collections.abc import Sequence

LONGEST_LOOP = 40  # tokens
FEW_LETTERS = 8
_START = r"(?:(?<!\S)|(?<=[\u2e80-\uffff]))"  # of a word, or anywhere among Chinese letters
# Stretches that follow themselves so often that nobody says so: phrases, words, letters.
_CIRCLE = re.compile(
    rf"{_START}(.{{8,160}}?)\1{{2,}}|{_START}(.{{1,7}}?)\2{{6,}}|(\S{{1,3}}?)\3{{9,}}", re.DOTALL
)


def loops(ids: Sequence[int], repeats: int, tokens: int) -> int:
    """Length of the stretch that the ids end with so many times in a row; 0 if they do not.

    All its repeats together are `tokens` long at the least.
    """
    for period in range(1, min(LONGEST_LOOP, len(ids) // repeats) + 1):
        circle = ids[-period * repeats :]
        if period * repeats >= tokens and circle[period:] == circle[:-period]:
            return period
    return 0


def before_loop(text: str) -> str:
    """A text up to where it goes in circles, with the first round; the whole text if it does not.

    Empty if it does hardly anything else.
    """
    match = _CIRCLE.search(f"{text} ")
    if match is None:
        return text
    once = match.group(1) or match.group(2) or match.group(3)
    begun = text[: match.start()].strip()
    return text[: match.start() + len(once)].strip() if len(begun) >= FEW_LETTERS else ""
