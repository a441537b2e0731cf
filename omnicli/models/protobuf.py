"""Just enough of the protobuf wire format to read weights out of an ONNX file.

https://protobuf.dev/programming-guides/encoding: a message is a row of fields, each a varint
`number << 3 | wire type` and a value. Nothing is copied: length-delimited values are views.
"""

from collections.abc import Iterator

from omnicli.errors import UserError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10

Value = int | memoryview


def fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """Field number and value, in order; fixed-width values come as views of their bytes."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = varint(message, at)
            yield number, value
        else:
            size, at = _size(message, at, kind)
            if size > len(message) - at:
                raise damaged("a field is longer than what is left")
            yield number, message[at : at + size]
            at += size


def views(message: memoryview, number: int) -> Iterator[memoryview]:
    """All values of one length-delimited field."""
    for found, value in fields(message):
        if found == number and isinstance(value, memoryview):
            yield value


def varint(message: memoryview, at: int) -> tuple[int, int]:
    """An unsigned number and the place behind it."""
    value = 0
    for index, byte in enumerate(message[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise damaged("a number does not end")


def numbers(value: Value) -> Iterator[int]:
    """A repeated integer field, packed or not."""
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        number, at = varint(value, at)
        yield number


def text(value: Value) -> str:
    """A string field."""
    if isinstance(value, int):
        raise damaged("a name is a number")
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError as error:
        raise damaged("a name is not text") from error


def _size(message: memoryview, at: int, kind: int) -> tuple[int, int]:
    if kind == BYTES:
        return varint(message, at)
    if kind in (FIXED64, FIXED32):
        return (8 if kind == FIXED64 else 4), at
    raise damaged(f"wire type {kind}")


def damaged(what: str) -> UserError:
    """The error for bytes that are no such message."""
    return UserError(f"this is no ONNX file, or a damaged one: {what}", hint="fetch the file again")
