"""What a file is, by its bytes: its kind, its layout, and whether it can be opened at all."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

from omnicli.errors import RequestError

LOWEST_HZ, HIGHEST_HZ = 1_000, 400_000  # beyond, a header is wrong
TRAILING_BYTES = 1024  # tags and padding behind a recording are no news


class _File(FileIO):
    """A file for PyAV, which would print the exception of an impossible seek to stderr."""

    def seek(self, place: int, whence: int = os.SEEK_SET, /) -> int:
        """The new place, -1 if there is no such place (damaged headers point anywhere)."""
        try:
            return super().seek(place, whence)
        except (OSError, OverflowError):
            return -1


def open_file(path: Path) -> FileIO:
    """A regular file, open for reading; never waits for whoever should write into a pipe."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _irregular(path)
        file = _File(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except PermissionError as error:
        raise RequestError("unreadable", "permission denied") from error
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # a NUL in the name
        raise RequestError("missing_file", "there is no such file") from error
    except OSError as error:
        code = "missing_file" if error.errno in (errno.ELOOP, errno.ENAMETOOLONG) else "unreadable"
        raise RequestError(code, error.strerror or str(error)) from error
    if os.fstat(file.fileno()).st_size == 0:
        file.close()
        raise RequestError("empty_file", "the file has 0 bytes")
    return file


def _irregular(path: Path) -> RequestError:
    if not path.is_dir():
        return RequestError("not_a_file", "a pipe, socket or device, not a file")
    if not os.access(path, os.R_OK | os.X_OK):
        return RequestError("unreadable", "permission denied")
    return RequestError("not_a_file", "a folder, not a file")


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of file."""

    name: str
    sort: str  # "sndfile" or "ffmpeg" (who reads it), "guess" (FFmpeg may), "other" (no sound)


HEAD_BYTES = 4096
# fmt: off
_FORMS = tuple((re.compile(pattern, re.DOTALL), Form(name, sort)) for pattern, name, sort in (
    (rb"(RIFF|RIFX|RF64|BW64)....WAVE", "WAV", "sndfile"),
    (rb"riff\x2e\x91\xcf\x11", "W64", "sndfile"),
    (rb"FORM....AIF[FC]", "AIFF", "sndfile"),
    (rb"fLaC", "FLAC", "sndfile"),
    (rb"OggS", "Ogg", "sndfile"),
    (rb"\.snd|dns\.", "AU", "sndfile"),
    (rb"caff", "CAF", "sndfile"),
    (rb"NIST_1A", "NIST SPHERE", "sndfile"),
    (rb"Creative Voice File", "VOC", "sndfile"),
    (rb"ID3", "MP3", "ffmpeg"),
    (rb"....(ftyp|moov|mdat|wide|free|skip|pnot)", "MP4", "ffmpeg"),
    (rb"\x1a\x45\xdf\xa3", "Matroska", "ffmpeg"),
    (rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "ASF", "ffmpeg"),
    (rb"#!AMR", "AMR", "ffmpeg"),
    (rb"RIFF....AVI ", "AVI", "ffmpeg"),
    (rb"wvpk", "WavPack", "ffmpeg"),
    (rb"MAC ", "Monkey's Audio", "ffmpeg"),
    (rb"TTA[12]", "TTA", "ffmpeg"),
    (rb"FLV\x01", "FLV", "ffmpeg"),
    (rb"\x00\x00\x01[\xba\xb3]", "MPEG", "ffmpeg"),
    (rb"\x89PNG", "a PNG image", "other"),
    (rb"\xff\xd8\xff", "a JPEG image", "other"),
    (rb"GIF8[79]a", "a GIF image", "other"),
    (rb"RIFF....WEBP", "a WebP image", "other"),
    (rb"%PDF-", "a PDF document", "other"),
    (rb"PK\x03\x04", "a ZIP archive", "other"),
    (rb"\x1f\x8b", "a gzip archive", "other"),
    (rb"BZh[1-9]", "a bzip2 archive", "other"),
    (rb"\xfd7zXZ|7z\xbc\xaf|Rar!", "an archive", "other"),
    (rb"\x7fELF", "a program", "other"),
    (rb"SQLite format 3", "a database", "other"),
    (rb"(\xef\xbb\xbf)?\s*(?i:<!doctype html|<html)", "an HTML page", "other"),
    (rb"\xff\xfe.\x00.\x00|\xfe\xff\x00.\x00.", "a text file", "other"),
    (rb"\x0b\x77", "AC-3", "guess"),
    (rb"\xff[\xf0\xf1\xf8\xf9]", "AAC", "guess"),  # ADTS: 12 bits of sync, layer 0
    (rb"\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff][\x00-\xef]", "MP3", "guess"),  # 11 bits of sync
))
# fmt: on
_UNKNOWN = Form("unknown content", "guess")
MOST_ACCENTS = 0.3  # of the bytes of a text in an old 8-bit code
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def form_of(file: FileIO) -> Form:
    """The kind of file, by its first bytes."""
    head = read_at(file, 0, HEAD_BYTES)
    found = next((form for pattern, form in _FORMS if pattern.match(head)), None)
    if found is None:
        return Form("a text file", "other") if _is_text(head) else _UNKNOWN
    if head.startswith(b"ID3") and read_at(file, tag_bytes(head), 4) == b"fLaC":
        return Form("FLAC", "sndfile")
    return found


def _is_text(head: bytes) -> bool:
    if _CONTROL.search(head):
        return False
    broken = head.decode("utf-8", "replace").count("\ufffd") > 1  # one: a letter cut in two
    return not broken or sum(byte >= 0x80 for byte in head) <= MOST_ACCENTS * len(head)


def read_at(file: FileIO, place: int, size: int) -> bytes:
    """Bytes at a place, fewer at the end."""
    file.seek(place)
    return file.read(size) or b""


def tag_bytes(head: bytes) -> int:
    """Length of an ID3v2 tag (id3.org, ID3v2.4 structure, 3.1): four times seven bits."""
    if len(head) < 10 or not head.startswith(b"ID3"):
        return 0
    a, b, c, d = (byte & 0x7F for byte in head[6:10])
    return 10 + (a << 21 | b << 14 | c << 7 | d)


_HEADS = (b"RIFF", b"RIFX", b"RF64", b"FORM")
_CHUNK_NAME = re.compile(rb"[ -~]{4}")
MOST_CHUNKS = 10_000
ENDLESS = 0x7FFF_0000  # what is written when the length is not known yet, or a little below 2^31
EXTENSIBLE = 0xFFFE


@dataclass(slots=True)
class Layout:
    """What was found by walking over the chunks."""

    notes: list[str] = field(default_factory=list)
    codec_tag: int = 0
    block_bytes: int = 1
    frames: int | None = None  # of codecs that pad their last block
    end: int = 0  # of the last chunk
    long_bytes: int = 0  # RF64: the length that does not fit into 32 bits
    sound: bool = True  # whether there is a chunk of samples


def layout_of(file: FileIO, form: Form) -> Layout:
    """Where the samples lie, as far as the chunks of a RIFF file tell."""
    layout = Layout()
    if form.name not in ("WAV", "AIFF"):
        return layout
    little = read_at(file, 0, 4) not in (b"RIFX", b"FORM")
    size = os.fstat(file.fileno()).st_size
    layout.sound = False
    for name, length, start in islice(_chunks(file, size, little), MOST_CHUNKS):
        if name in (b"data", b"SSND"):
            layout.sound = True
            length = _measure(layout, length, size - start)
        else:
            _note_chunk(layout, name, read_at(file, start, min(length, 40)), little)
        layout.end = start + length
    if layout.sound and size - layout.end > TRAILING_BYTES:
        layout.notes.append(f"trailing_data: {size - layout.end} bytes")
    return layout


def _chunks(file: FileIO, size: int, little: bool) -> Iterator[tuple[bytes, int, int]]:
    """Name, length and place of each chunk, as far as they follow each other."""
    place, pad = 12, 0
    while place + pad + 8 <= size:
        head = read_at(file, place, 9)
        if not _CHUNK_NAME.match(head, pad):
            pad = 1 - pad  # some writers forget the byte that makes a length even
        name, number = head[pad : pad + 4], head[pad + 4 : pad + 8]
        if len(number) < 4 or not _CHUNK_NAME.match(name) or name in _HEADS:
            return
        length = int.from_bytes(number, "little" if little else "big")
        place += pad + 8
        yield name, length, place
        place, pad = place + length, length % 2


def _measure(layout: Layout, length: int, present: int) -> int:
    """Length of the chunk of samples; a note if the file ends before it does."""
    promised = layout.long_bytes or length
    if not promised or (promised >= ENDLESS and not layout.long_bytes):
        return present
    if promised - present >= layout.block_bytes:
        layout.notes.append(f"truncated_input: {present} of {promised} bytes")
    return min(promised, present)


def _note_chunk(layout: Layout, name: bytes, body: bytes, little: bool) -> None:
    order: Any = "little" if little else "big"
    if name == b"fmt " and len(body) >= 16:
        tag = int.from_bytes(body[:2], order)
        layout.codec_tag = int.from_bytes(body[24:26], order) if tag == EXTENSIBLE else tag
        layout.block_bytes = max(1, int.from_bytes(body[12:14], order))
    elif name == b"fact" and len(body) >= 4:
        layout.frames = int.from_bytes(body[:4], order)
    elif name == b"ds64" and len(body) >= 16:
        layout.long_bytes = int.from_bytes(body[8:16], order)


_SECOND_HEAD = {
    "FLAC": b"fLaC\x00\x00\x00\x22",  # the marker and the head of its 34 bytes of STREAMINFO
    "Ogg": b"OggS\x00\x02",  # a page that begins a stream
}
_OGG_LATER_PAGE = re.compile(rb"OggS\x00[\x00\x01\x04\x05]")
SCAN_BYTES = 1 << 20


def is_chained(file: FileIO, form: Form) -> bool:
    """Whether several recordings were glued together; libsndfile would read the first only."""
    if (pattern := _SECOND_HEAD.get(form.name)) is None:
        return False
    place = tag_bytes(read_at(file, 0, 10)) + 4
    if form.name == "Ogg":  # all streams of one recording begin on its first pages
        later = _OGG_LATER_PAGE.search(read_at(file, 0, SCAN_BYTES))
        if later is None:
            return False
        place = later.end()
    file.seek(place)
    before = b""
    while read := file.read(SCAN_BYTES):
        if pattern in before + read:
            return True
        before = read[-len(pattern) :]
    return False


def checked_rate(rate_hz: int) -> int:
    """The rate, if a recording can have it."""
    if not LOWEST_HZ <= rate_hz <= HIGHEST_HZ:
        raise RequestError("unsupported_format", f"a sample rate of {rate_hz} Hz")
    return rate_hz


def is_length(frames: int) -> bool:
    """Streams that were never closed have 2^63 - 1 frames."""
    return frames < 1 << 62
