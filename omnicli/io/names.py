"""File names as text that can be shown anywhere."""

import os
import re

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def printable(name: str) -> str:
    r"""A file name as text that encodes as UTF-8: other bytes and controls become `\xNN`.

    A terminal would obey controls, so no message holds them.
    """
    if name.isascii() and name.isprintable():
        return name
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
