"""Text to sentences that a voice can say: markup, links and emoji go, long strings are bounded.

For English, numbers and signs become words too (`spoken_english`). Other languages leave those to
espeak, which reads numbers in all of them.
"""

import html
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from omnicli.execution.sentences import split_paragraphs, split_sentences
from omnicli.execution.spoken_english import digit_groups, speak_signs

SENTENCE_PAUSE_S = 0.2
PARAGRAPH_PAUSE_S = 0.5
CUT_PAUSE_S = 0.05  # inside a sentence that is too long for one breath
MAX_LETTERS = 300  # of a sentence; about 20 s
MAX_WORD = 200  # letters of a word that are said, in pieces
WORD_PIECE = 30
MAX_CODE = 64  # letters and digits of a code (base64, hashes) that are said
SPELLED_DIGITS = 7  # from this length on a number is said digit by digit


@dataclass(frozen=True, slots=True)
class Sentence:
    """What is said in one go, and the silence after it."""

    text: str
    pause_s: float


def to_sentences(text: str, language: str) -> list[Sentence]:
    """What there is to say in a text; nothing if it holds neither a letter nor a digit."""
    found: list[Sentence] = []
    for paragraph in split_paragraphs(_without_markup(text)):
        said = [
            piece for raw in split_sentences(paragraph) for piece in _pieces(raw, language == "en")
        ]
        found += said[:-1]
        found += [Sentence(last.text, PARAGRAPH_PAUSE_S) for last in said[-1:]]
    return [*found[:-1], *(Sentence(last.text, 0.0) for last in found[-1:])]


def cut(text: str, most: int) -> list[str]:
    """Pieces of at most `most` characters: cut at commas, else at spaces, else anywhere."""
    pieces, begin = [], 0
    while len(text) - begin > most:
        end = _last_break(text, begin, most)
        pieces.append(text[begin:end].strip())
        begin = end
    return [p for p in (*pieces, text[begin:].strip()) if p]


def _last_break(text: str, begin: int, most: int) -> int:
    for marks in (",;:", " "):
        end = max(text.rfind(mark, begin + most // 3, begin + most) for mark in marks) + 1
        if end:
            return end
    return begin + most


def _pieces(raw: str, english: bool) -> Iterator[Sentence]:
    text = _bounded(_named_links(raw, english))
    text = speak_signs(text) if english else _LONG_DIGITS.sub(_spaced_digits, text)
    pieces = [p for p in cut(_tidy(text), MAX_LETTERS) if any(c.isalnum() for c in p)]
    for i, piece in enumerate(pieces):
        yield Sentence(_ended(piece), CUT_PAUSE_S if i < len(pieces) - 1 else SENTENCE_PAUSE_S)


# -- markup

_TAG_BLOCK = re.compile(
    r"</?(?:p|br|div|li|ul|ol|h[1-6]|tr|table|section|article|blockquote)\b[^<>]{0,500}>", re.I
)
_TAG = re.compile(r"<!--[^<>]{0,500}-->|<[/!?]?[a-zA-Z][^<>]{0,500}>")
_MANY_SPACES = re.compile(r"[ \t]+")
_MANY_LINES = re.compile(r"\n[ \n]*\n")
_MARKDOWN = (
    (re.compile(r"^[ \t]*(?:```|~~~).*$", re.M), "\n\n"),  # fences
    (re.compile(r"^[ \t]*([-*_=])(?:[ \t]*\1){2,}[ \t]*$", re.M), "\n\n"),  # rules
    (re.compile(r"^[ \t]*\|?(?:[ \t]*:?-+:?[ \t]*\|)+[-:| \t]*$", re.M), ""),  # table heads
    (re.compile(r"^[ \t]{0,3}#{1,6}[ \t]+(.*)$", re.M), r"\n\n\1\n\n"),  # headings
    (re.compile(r"^[ \t]*(?:>[ \t]?)+", re.M), ""),  # quotations
    (re.compile(r"^[ \t]*[-*+•‣◦][ \t]+(?:\[[ xX]\][ \t]+)?", re.M), "\n\n"),  # bullets
    (re.compile(r"^[ \t]*(\d{1,3})[.)][ \t]+(?=\S)", re.M), r"\n\n\1, "),  # numbered items
    (re.compile(r"!?\[([^\[\]]{0,300})\]\([^()\s]{0,1000}(?:[ \t]\"[^\"]{0,200}\")?\)"), r"\1"),
    (re.compile(r"\[([^\[\]]{1,300})\]\[[^\[\]]{0,100}\]"), r"\1"),  # links by reference
    (re.compile(r"\[\^?\d{1,3}\]"), ""),  # footnotes
    (re.compile(r"\\([\\`*_{}\[\]()#+.!-])"), r"\1"),  # escapes
    (re.compile(r"(?<=\d)[ \t]*\*[ \t]*(?=\d)"), " × "),
    (re.compile(r"[*`]+|~~+|(?<!\w)_+|_+(?!\w)"), ""),  # emphasis, code
    (re.compile(r"_+"), " "),
    (re.compile(r"[ \t]*\|[ \t]*"), ", "),  # table cells
)


def _without_markup(text: str) -> str:
    text = _TAG.sub("", _TAG_BLOCK.sub("\n\n", text.replace("\r\n", "\n").replace("\r", "\n")))
    text = _plain_characters(html.unescape(text))
    text = _MANY_LINES.sub("\n\n", _MANY_SPACES.sub(" ", text))
    for pattern, said in _MARKDOWN:
        text = pattern.sub(said, text)
    return text


_KEPT = {"\n": "\n", "\t": " ", "°": "°", "№": "№", "℃": "°C", "℉": "°F"}
_DROPPED = {"Cc", "Cf", "Cs", "Co", "Cn", "So", "Sk", "Me"}  # controls, emoji, lone accents
_FANCY = {"Lu", "Ll", "Nd"}  # letters and digits in other clothes: 𝐀, ｱ, ５


def _plain_characters(text: str) -> str:
    """Without emoji and invisible characters, letters and digits in their usual form."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_plain_character, unicodedata.normalize("NFC", text)))


def _plain_character(c: str) -> str:
    kind = unicodedata.category(c)
    if c in _KEPT:
        return _KEPT[c]
    if kind in _DROPPED or "\ufe00" <= c <= "\ufe0f":  # variation selectors
        return "" if kind == "Cf" else " "
    if kind[0] == "Z":
        return " " if kind == "Zs" else "\n"
    return unicodedata.normalize("NFKC", c) if kind in _FANCY else c


# -- links, codes

_URL = re.compile(r"\b(?:https?|ftp)://[^\s<>\"]{1,3000}|\bwww\.[^\s<>\"]{1,3000}", re.I)
_HOST = re.compile(r"^(?:\w{1,8}://)?(?:[^/?#@]*@)?(?:www\.)?([^/?#:]*)", re.I)
_EMAIL = re.compile(r"(?<![\w.+-])([\w.+-]{1,64})@([\w-]{1,63}(?:\.[\w-]{1,63}){1,8})")
_DOTTED = re.compile(r"(?<=[^\W_]{2})\.(?=[a-z][a-z0-9-])")
_TRAILING = ".,;:!?)]}'\"’”"
_LONG_WORD = re.compile(rf"[^\W\d_]{{{WORD_PIECE + 1},}}")
_LONG_CODE = re.compile(rf"(?=[A-Za-z+/=_-]{{0,200}}\d)[\w+/=-]{{{MAX_CODE + 1},}}")
_LONG_DIGITS = re.compile(rf"(?<![\d.,])(?:\d{{{SPELLED_DIGITS},}}|0\d+)(?![.,]?\d)")


def _named_links(text: str, english: bool) -> str:
    """Of a link only its host is said; an English voice says dots and at signs."""
    text = _URL.sub(_host_of, text)
    if not english:
        return text
    text = _EMAIL.sub(lambda m: f"{_said_name(m[1])} at {_said_name(m[2])}", text)
    return _DOTTED.sub(" dot ", text)


def _host_of(match: re.Match[str]) -> str:
    url = match.group()
    end = url[len(url.rstrip(_TRAILING)) :]
    host = _HOST.match(url.rstrip(_TRAILING))
    return f"{host[1] if host else ''}{end}"


def _said_name(name: str) -> str:
    signs = {".": " dot ", "-": " dash ", "_": " underscore ", "+": " plus "}
    return "".join(signs.get(c, c) for c in name)


def _bounded(text: str) -> str:
    """Words and codes that nobody would say are cut short; digits alone never are."""
    text = _LONG_CODE.sub(_short_code, text)
    return _LONG_WORD.sub(_in_pieces, text)


def _short_code(match: re.Match[str]) -> str:
    code = match.group()
    return code[:MAX_CODE] if any(c.isalpha() for c in code) else code


def _in_pieces(match: re.Match[str]) -> str:
    word = match.group()[:MAX_WORD]
    return " ".join(word[i : i + WORD_PIECE] for i in range(0, len(word), WORD_PIECE))


def _spaced_digits(match: re.Match[str]) -> str:
    return ", ".join(" ".join(group) for group in digit_groups(match.group()))


# -- punctuation

_TIDY = (
    (re.compile(r"[“”„«»‹›\"]"), ""),
    (re.compile(r"[‘’`´]"), "'"),
    (re.compile(r"\s*(?:[—–]|\s-+\s|--+)\s*"), ", "),
    (re.compile(r"[\[\]{}()<>\\^~|=#]+"), ", "),
    (re.compile(r"(?:\.\s?){2,}\.?|…+"), ", "),
    (re.compile(r"([!?])[!?.,]+"), r"\1"),
    (re.compile(r"\s+(?=[,;:.!?])"), ""),
    (re.compile(r"[,;:]+(?=[.!?,;:])"), ""),
    (re.compile(r"^[\s,;:.!?'-]+"), ""),
    (re.compile(r"\s+"), " "),
)
_CLOSED = re.compile(r"[.!?。！？؟।]['’]?$")


def _tidy(text: str) -> str:
    for pattern, said in _TIDY:
        text = pattern.sub(said, text)
    return text.strip()


def _ended(piece: str) -> str:
    """Voices fall at the end of a sentence only if they see that it ends."""
    return piece if _CLOSED.search(piece) else piece.rstrip(" ,;:-") + "."
