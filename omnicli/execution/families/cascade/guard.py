"""Whether a summary that a model wrote freely says only what the transcript says.

A word guard: every number, name and content word must stand in the transcript, and each sentence
must be negated if, and only if, the sentence of the transcript is that shares most words with it.
It cannot prove a summary true; it catches what small models do most, copying among it.
"""

import re

from omnicli.execution.sentences import split_sentences

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
COPIED_WORDS, COPIED_SHARE = 20, 0.9  # of the transcript's beginning, word for word


def copied(summary: str, transcript: str) -> bool:
    """Whether a summary is but the transcript itself, or a long beginning of it."""
    words, said = _words(summary), _words(transcript)
    enough = min(COPIED_WORDS, COPIED_SHARE * len(said))
    return words == said[: len(words)] and len(words) >= enough


def faithful(summary: str, transcript: str) -> bool:
    """Whether nothing in the summary is foreign to the transcript, nor turned into its opposite."""
    if not _content(summary) <= {stem(word) for word in _words(transcript)}:
        return False
    said = split_sentences(transcript)
    return all(_agrees(sentence, said) for sentence in split_sentences(summary))


def _agrees(sentence: str, said: list[str]) -> bool:
    """Whether a sentence is negated as its nearest relatives among the said ones are."""
    content = _content(sentence)
    shared = [len(content & _content(other)) for other in said]
    nearest = [o for o, n in zip(said, shared, strict=True) if n == max(shared)]
    return any(_negated(sentence) == _negated(other) for other in nearest)


def _words(text: str) -> list[str]:
    return [word.casefold().replace("’", "'") for word in _WORD.findall(text)]


def _content(text: str) -> set[str]:
    words = (w for w in _words(text) if w not in _FUNCTION and not _is_negation(w))
    return {stem(word) for word in words}


def _negated(text: str) -> bool:
    return any(map(_is_negation, _words(text)))


def _is_negation(word: str) -> bool:
    return word in _NEGATIONS or word.endswith("n't")


def stem(word: str) -> str:
    """A word without its English ending, and numbers as digits."""
    word = _NUMBERS.get(word, word).removesuffix("'s")
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word
