"""The GGUF container: metadata and tensors of a file, without loading it.

Little endian: `GGUF`, u32 version, u64 tensors, u64 fields; per field a name, u32 type and a
value; per tensor its name, u32 rank, rank × u64 dimensions (the fastest first), u32 type, u64
offset; then the data, aligned. A text is a u64 length and UTF-8 (github.com/ggml-org/ggml,
docs/gguf.md). The package `gguf` knows how to undo every quantisation; its own reader is not
used, as it takes seconds for a vocabulary and does not bound what a damaged file claims.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from omnicli.errors import UserError
from omnicli.models.cursor import Cursor
from omnicli.models.weights import Array

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # unless the file says otherwise
BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
PLAIN = {0: np.float32, 1: np.float16}  # GGML_TYPE_F32, GGML_TYPE_F16: no blocks
MAX_RANK = 4
ROWS_AT_ONCE = 4096  # dequantised together: bounds the float32 copy


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in the file; `shape` is that of its numbers, not of the packed blocks."""

    shape: tuple[int, ...]
    stored: Array  # [rows, bytes of a row]
    type: int

    def values(self) -> Array:
        """As float16, the form in which models of this kind are kept."""
        from gguf import GGMLQuantizationType, dequantize

        found = np.empty((len(self.stored), self.shape[-1]), np.float16)
        for start in range(0, len(found), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            raw = self.stored[rows].view(PLAIN.get(self.type, np.uint8))
            found[rows] = dequantize(raw, GGMLQuantizationType(self.type))
        return found.reshape(self.shape)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors."""
    cursor = Cursor(path)
    if bytes(cursor.take(len(MAGIC))) != MAGIC:
        raise UserError(
            f"{path} is no GGUF file", hint="a .gguf of a Llama, Qwen2 or Qwen3 model is needed"
        )
    version = cursor.number("I")
    if version not in VERSIONS:
        raise UserError(
            f"{path} is of GGUF version {version}", hint="convert it again with a current llama.cpp"
        )
    tensors, fields = cursor.number("Q"), cursor.number("Q")
    values = dict(_field(cursor) for _ in range(fields))
    found = [_tensor_info(cursor) for _ in range(tensors)]
    alignment = values.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damaged(f"alignment {alignment}")
    start = -(-cursor.at // alignment) * alignment
    return values, {
        name: _tensor(cursor, start + offset, shape, kind) for name, shape, kind, offset in found
    }


def _field(cursor: Cursor) -> tuple[str, Any]:
    return cursor.text("Q"), _value(cursor, cursor.number("I"))


def _value(cursor: Cursor, kind: int) -> Any:
    if kind == STRING:
        return cursor.text("Q")
    if kind == ARRAY:
        return _array(cursor, cursor.number("I"), cursor.number("Q"))
    return _numbers(cursor, kind, 1)[0]


def _array(cursor: Cursor, kind: int, count: int) -> list[Any]:
    if kind == STRING:
        return [cursor.text("Q") for _ in range(count)]
    return _numbers(cursor, kind, count)


def _numbers(cursor: Cursor, kind: int, count: int) -> list[Any]:
    """Numbers of one type; arrays of arrays are not in use."""
    if kind not in NUMBERS:
        raise cursor.damaged(f"a value is of the unknown type {kind}")
    element = np.dtype(NUMBERS[kind])
    found = np.frombuffer(cursor.take(count * element.itemsize), element)
    return list(found.astype(bool).tolist() if kind == BOOL else found.tolist())


def _tensor_info(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, rank = cursor.text("Q"), cursor.number("I")
    if not 1 <= rank <= MAX_RANK:
        raise cursor.damaged(f"{name} has {rank} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(rank))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _tensor(cursor: Cursor, start: int, shape: tuple[int, ...], kind: int) -> Tensor:
    from gguf import GGML_QUANT_SIZES

    sizes = {int(type_): size for type_, size in GGML_QUANT_SIZES.items()}
    if kind not in sizes:
        raise UserError(
            f"{cursor.path} is quantised in an unknown way ({kind})",
            hint="take one of Q8_0 or Q4_K_M",
        )
    per_block, block_bytes = sizes[kind]
    if shape[-1] % per_block or not prod(shape):
        raise cursor.damaged(f"a tensor of shape {list(shape)} in blocks of {per_block}")
    row_bytes = shape[-1] // per_block * block_bytes
    cursor.at = min(start, len(cursor.data))
    data = cursor.take(prod(shape[:-1]) * row_bytes)
    return Tensor(shape, np.frombuffer(data, np.uint8).reshape(-1, row_bytes), kind)
