"""Where the files of a recording go: an id becomes a path in the output folder, without suffix.

The tree of the input is mirrored: `calls/may 3.wav` -> `calls/may 3`, beside which writers put
`.txt`, `.summary.txt`, `.wav` and so on. Any text may be an id, so what a file system or another
system's would refuse or misread is replaced; then a short hash of the id is added.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import count
from pathlib import Path, PurePosixPath

NAME_BYTES = 255  # the longest name on ext4, APFS and (in UTF-16 units) NTFS
ROOM_BYTES = 32  # for `.translation.txt`, or `.` and `.4194304.part` around it while it is written
LAST_BYTES = NAME_BYTES - ROOM_BYTES
STEM_BYTES = 1024  # of the whole path; Linux takes 4096, macOS 1024, the output folder included
HASH_DIGITS = 8

# fmt: off
AUDIO_SUFFIXES = frozenset({
    ".3ga", ".3gp", ".aac", ".ac3", ".aif", ".aifc", ".aiff", ".alac", ".amr", ".ape", ".au",
    ".awb", ".caf", ".ds2", ".dss", ".flac", ".gsm", ".m4a", ".m4b", ".mka", ".mkv", ".mov", ".mp2",
    ".mp3", ".mp4", ".mpeg", ".mpga", ".oga", ".ogg", ".opus", ".ra", ".snd", ".sph", ".spx",
    ".tta", ".voc", ".w64", ".wav", ".wave", ".weba", ".webm", ".wma", ".wv",
})
# fmt: on
# What the writers put behind a stem: `call.summary.wav` must not meet the summary of `call.wav`,
ANSWER_ENDINGS = (".summary", ".reply", ".translation", ".transcript", ".answer", ".say")
# nor a folder one of their files.
FILE_ENDINGS = (".txt", ".json", ".jsonl", ".srt", ".vtt", ".tsv", ".wav")

# Control characters, half surrogates, and what Windows forbids (Microsoft, "Naming Files").
_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f-\x9f\ud800-\udfff<>:"\\|?*]')
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]) *(\..*)?", re.I | re.DOTALL)


def stem_of(request_id: str) -> PurePosixPath:
    """The stem of an id if no other id stands in its way: relative, and safe on every system."""
    return PurePosixPath(_stem(request_id, keep_suffix=False))


def claim(request_id: str, taken: Callable[[str], bool]) -> str:
    """A stem for this id alone; `taken` is asked whether the key (see `key_of`) of one is in use.

    `call.wav` gets `call`; after it `call.mp3` gets `call.mp3`; then there is a hash.
    """
    return next(stem for stem in _choices(request_id) if not taken(key_of(stem)))


def key_of(stem: str) -> str:
    """Equal for stems that are one path on some disk: case and composition of accents aside."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", stem).casefold())


def occupied(folder: Path, stem: str) -> bool:
    """Whether the spoken answer would replace a file, perhaps a recording, that lies there."""
    return (folder / f"{stem}.wav").exists()


def _choices(request_id: str) -> Iterator[str]:
    yield _stem(request_id, keep_suffix=False)
    yield _stem(request_id, keep_suffix=True)
    for salt in count():
        yield _stem(request_id, keep_suffix=False, salt=salt)


def _stem(request_id: str, *, keep_suffix: bool, salt: int | None = None) -> str:
    """One choice of stem; a salt always adds a hash."""
    *folders, name = request_id.split("/")
    name = name if keep_suffix else _without_suffix(name)
    safe_folders = [_safe_folder(f) for f in folders if f not in ("", ".", "..")]
    safe_name = _guarded("" if name in (".", "..") else name)
    if safe_folders:
        safe_folders[0] = _not_ours(safe_folders[0])
    else:
        safe_name = _not_ours(safe_name)
    same = [*safe_folders, safe_name] == [*folders, name]
    stem = "/".join([*safe_folders, safe_name])
    if salt is None and same and not _ends_as_ours(stem) and _fits(stem):
        return stem
    digest = sha256(f"{salt or ''}{request_id}".encode("utf-8", "surrogatepass")).hexdigest()
    hashed = f"{_cut(safe_name, LAST_BYTES - HASH_DIGITS - 2)}-{digest[:HASH_DIGITS]}"
    stem = "/".join([*safe_folders, hashed])
    return stem if _fits(stem) else _not_ours(hashed)


def _without_suffix(name: str) -> str:
    """`call.2024-01-02.wav` -> `call.2024-01-02`; only a known suffix goes, never a whole name."""
    front, dot, suffix = name.rpartition(".")
    known = (dot + suffix).lower() in AUDIO_SUFFIXES
    return front if known and front else name


def _guarded(name: str) -> str:
    """Replace what cannot stand in a name; `con` and its like are devices on Windows."""
    name = _FORBIDDEN.sub("_", name)
    return f"_{name}" if not name or _DEVICE.fullmatch(name) else name


def _safe_folder(name: str) -> str:
    """A folder's name stands alone: no dot or space at its end, and not that of a writer's file."""
    name = _cut(_guarded(name), NAME_BYTES - 1)
    return f"{name}_" if name.endswith((".", " ")) or name.lower().endswith(FILE_ENDINGS) else name


def _not_ours(top: str) -> str:
    """`.omni` at the top is the run's own."""
    return f"_{top}" if key_of(top).startswith(".omni") else top


def _ends_as_ours(stem: str) -> bool:
    return key_of(stem) == "results" or key_of(stem).endswith(ANSWER_ENDINGS)


def _fits(stem: str) -> bool:
    whole, last = (len(s.encode()) for s in (stem, stem.rpartition("/")[2]))
    return last <= LAST_BYTES and whole <= STEM_BYTES


def _cut(name: str, most_bytes: int) -> str:
    return name.encode()[:most_bytes].decode(errors="ignore")
