"""Text to sentences, by rules: for the sentences of a summary and for what is spoken in one breath.

A full stop ends a sentence unless what comes before it is an abbreviation, an initial or a list
number, or what follows begins in lower case. Nothing is lost: the words of the sentences are the
words of the text, in order.
"""

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Always followed by something that belongs to it: "Dr. Who", "e.g. this".
_NEVER_ENDS = _words("""
    mr mrs ms mx dr prof st mt messrs mme mlle rev hon gov sen gen col maj capt cmdr lt sgt cpl
    supt insp e.g i.e eg ie vs viz cf ca approx esp incl herr sra srta dra
""")
_PLACES = _words("st mt")  # as a name's end they may end a sentence: "on Main St. The"
# Belongs to a number that follows, and is a word or an end otherwise: "No. 5", "p. 12".
_BEFORE_NUMBER = _words("no nos nr p pp art sec ch fig figs vol eq par tel ext")
# May end a sentence; does so only if the next word commonly begins one.
_MAY_END = _words("""
    etc al inc ltd co corp bros llc plc dept jr sr esq ave rd blvd apt ste ft rep
    jan feb apr jun jul aug sept oct nov dec tues thurs
""")
_BEGINNERS = _words("""
    a after all also an and another any are as at because before both but by can did do does each
    finally first for from he her here his how however i if in instead is it its later let many
    meanwhile most my next no none nobody not now of on once one or other our please she since so
    some still such that the their then there these they this those though thus to today tomorrow
    two under until we well were what when where which while who why will with would yes
    yesterday yet you your
""")
_TERMINATORS = ".!?…"
_UNSPACED = "。！？｡।॥؟۔"  # end a sentence whatever follows
_CLOSERS = "\"'”’»)]}*_"
_END = re.compile(
    # Looking back keeps a run of stops from being tried again from each of them.
    rf"(?<![{_TERMINATORS}])[{_TERMINATORS}]+[{re.escape(_CLOSERS)}]*(?=\s)"
    rf"|[{_UNSPACED}]+[{re.escape(_CLOSERS)}]*"
)
_BREAK = re.compile(r"\n[^\S\n]*\n\s*")  # a blank line
_BULLET = re.compile(r"\n[^\S\n]*(?=(?:[-*•–]|\d{1,3}[.)])\s)")
_WORD_BEFORE = re.compile(r"[\w.'’-]+$")
_WORD_AFTER = re.compile(r"[^\w]*(\w*)")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]|[^\W\d_]{1,2}\.[^\W\d_]")  # J, U.S, Ph.D
_LIST_NUMBER = re.compile(r"\d{1,3}|[^\W\d_]")
_REACH = 40  # characters around a stop that decide


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, white space collapsed; none is empty."""
    return [s for paragraph in split_paragraphs(text) for s in _sentences(paragraph)]


def split_paragraphs(text: str) -> list[str]:
    """The paragraphs and list items of a text, white space collapsed; none is empty."""
    blocks = (item for block in _BREAK.split(text) for item in _BULLET.split(block))
    return [joined for block in blocks if (joined := " ".join(block.split()))]


def _sentences(paragraph: str) -> list[str]:
    found, begin = [], 0
    for match in _END.finditer(paragraph):
        if _is_end(paragraph, begin, match):
            found.append(paragraph[begin : match.end()].strip())
            begin = match.end()
    found.append(paragraph[begin:].strip())
    return [s for s in found if s]


def _is_end(text: str, begin: int, match: re.Match[str]) -> bool:
    mark = match.group().rstrip(_CLOSERS)
    if mark[-1] in _UNSPACED:
        return True
    after = text[match.end() : match.end() + _REACH].lstrip()
    if after.lstrip(_CLOSERS + "“‘«([{¿¡-–—")[:1].islower():
        return False
    if mark != ".":
        return True
    before = _WORD_BEFORE.search(text, max(begin, match.start() - _REACH), match.start())
    return before is None or _stop_ends(before.group(), after, at_start=before.start() <= begin + 1)


def _stop_ends(before: str, after: str, *, at_start: bool) -> bool:
    """Whether the full stop after the word `before` ends a sentence."""
    word = before.lower().strip(".'’-")
    if at_start and _LIST_NUMBER.fullmatch(word):
        return False
    if word in _NEVER_ENDS:
        return word in _PLACES and not at_start and _begins(after)
    if word in _BEFORE_NUMBER:
        return not after[:1].isdigit()
    if word in _MAY_END or _INITIALS.fullmatch(word):
        return _begins(after)
    return True


def _begins(after: str) -> bool:
    """Whether a sentence commonly begins like this."""
    match = _WORD_AFTER.match(after)
    return match is not None and match.group(1).lower() in _BEGINNERS
