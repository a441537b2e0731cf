"""A place in a file of little-endian numbers and texts that never runs over its end."""

import struct
from pathlib import Path

import numpy as np

from omnicli.errors import UserError


class Cursor:
    """Reads forward through a file that is mapped, not loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = mapped(path)
        self.at = 0

    def take(self, size: int) -> memoryview:
        """The next bytes, as a view."""
        if size > len(self.data) - self.at:
            raise self.damaged(f"its {len(self.data)} bytes end in the middle of something")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> int:
        """The next whole number, by its code in `struct`."""
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(code)))
        return int(value)

    def text(self, length_code: str) -> str:
        """A text behind its length."""
        raw = bytes(self.take(self.number(length_code)))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.damaged("a text is not UTF-8") from error

    def damaged(self, what: str) -> UserError:
        """The error for a file that is not what it should be."""
        return UserError(f"{self.path} is damaged: {what}", hint="fetch the file again")


def mapped(path: Path) -> memoryview:
    """A file's bytes, brought in as they are touched."""
    return np.memmap(path, np.uint8, "r").data if path.stat().st_size else memoryview(b"")
