"""Whether a summary that a model wrote freely says only what the transcript says.

A word guard: every number, name and content word must stand in the transcript, and negations must
be as frequent. It cannot prove a summary true; it catches what small models do most.
"""

import re

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_NEGATIONS = frozenset(
    "no not never none nobody nothing neither nor cannot without nein nicht kein keine nie".split()
)
# Words that say nothing about the matter: a summary may add them.
_FUNCTION = frozenset(
    """a about after all also an and another any are as asks asked at be because been before being
    both but by call called caller calls can could did do does during each for from had has have he
    her him his how i if in into is it its like may me mentions message might more most must my of
    on one or other our out over own person please recording request requests said says say she
    should so some someone speaker speaking states such than that the their them then there these
    they this those to too up us very was we were what when where which while who will wants wish
    with would you your""".split()
)
_ENDINGS = ("ing", "ed", "es", "s", "ly", "e", "d")
_NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve".split()
    )
}


def faithful(summary: str, transcript: str) -> bool:
    """Whether nothing in the summary is foreign to the transcript."""
    known = {stem(word) for word in _words(transcript)}
    foreign = [w for w in _words(summary) if w not in _FUNCTION and stem(w) not in known]
    return not foreign and _negations(summary) <= _negations(transcript)


def _words(text: str) -> list[str]:
    return [word.casefold().replace("’", "'") for word in _WORD.findall(text)]


def _negations(text: str) -> int:
    return sum(word in _NEGATIONS or word.endswith("n't") for word in _words(text))


def stem(word: str) -> str:
    """A word without its English ending, and numbers as digits."""
    word = _NUMBERS.get(word, word).removesuffix("'s")
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word
