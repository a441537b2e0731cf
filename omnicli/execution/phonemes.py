"""Text to the phoneme ids that Piper voices were trained with.

espeak-ng comes with the `piper-tts` package, which is GPL and therefore an extra of ours: nothing
here is imported before a voice is asked for.
"""

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

from omnicli.errors import UserError

BEGIN, END, PAD = "^", "$", "_"
ESPEAK, LETTERS = "espeak", "text"  # kinds of alphabet: phonemes, or the letters themselves
INSTALL = "pip install 'omnicli[speech]'"

_espeak_lock = Lock()  # espeak keeps its voice and its text in globals


@dataclass(frozen=True, slots=True, kw_only=True)
class Alphabet:
    """How a voice spells: which phonemes it knows, and their numbers."""

    kind: str
    espeak_voice: str
    ids: Mapping[str, tuple[int, ...]]
    clusters: frozenset[tuple[str, ...]] = frozenset()  # vowels that count as one phoneme

    def __post_init__(self) -> None:
        if self.kind not in (ESPEAK, LETTERS):
            raise UserError(f"voices that spell with {self.kind!r} are not supported")
        if missing := {BEGIN, END, PAD} - self.ids.keys():
            raise UserError(f"the voice's phoneme_id_map lacks {sorted(missing)}")


def installed() -> bool:
    """Whether the speech extra is there."""
    return find_spec("piper") is not None


def require(alphabet: Alphabet) -> None:
    """Raise `UserError` if texts cannot be spelled for this voice on this machine."""
    if alphabet.kind != ESPEAK:
        return
    if not installed():
        raise UserError("speaking needs the speech extra (piper-tts)", hint=INSTALL)
    try:
        _espeak("a", alphabet)
    except ImportError as error:
        raise UserError(f"the speech extra does not load: {error}", hint=INSTALL) from error
    except RuntimeError as error:
        message = f"espeak-ng has no voice {alphabet.espeak_voice!r}"
        raise UserError(message, hint="espeak.voice in the voice's config names it") from error


def phoneme_ids(text: str, alphabet: Alphabet) -> list[tuple[int, ...]]:
    """The ids of each sentence that espeak finds; phonemes unknown to the voice drop out."""
    clean = text.encode("utf-8", "ignore").decode("utf-8").replace("\0", " ")
    spelled = _espeak(clean, alphabet) if alphabet.kind == ESPEAK else [_letters(clean)]
    return [to_ids(phonemes, alphabet.ids) for phonemes in spelled if _is_speech(phonemes)]


def to_ids(phonemes: Iterable[str], ids: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Begin, every phoneme, end, with a pad between any two."""
    found = [*ids[BEGIN], *ids[PAD]]
    for phoneme in phonemes:
        if phoneme in ids:
            found += (*ids[phoneme], *ids[PAD])
    return (*found, *ids[END])


def _is_speech(phonemes: Iterable[str]) -> bool:
    """Whether there is more than punctuation and white space."""
    return any(unicodedata.category(p[0])[0] in "LN" for p in phonemes)


def _letters(text: str) -> list[str]:
    return list(unicodedata.normalize("NFD", text))


def _espeak(text: str, alphabet: Alphabet) -> list[list[str]]:
    with _espeak_lock:
        spelled: list[list[str]] = _phonemizer().phonemize(
            alphabet.espeak_voice, text, alphabet.clusters or None
        )
    return spelled


@cache
def _phonemizer() -> Any:
    from piper.phonemize_espeak import EspeakPhonemizer

    return EspeakPhonemizer()
