"""The file `model.bin` of CTranslate2, read without CTranslate2.

Little endian: u32 version; the specification's name; u32 revision; u32 number of variables; for
each its name, u8 rank, rank × u32 dimensions, u8 type, u32 bytes, raw data; then u32 number of
aliases, each two names. A name is a u16 length with a final NUL counted. Version 3 and older give
an item's size in place of its type (github.com/OpenNMT/CTranslate2, src/models/model.cc).
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from omnicli.errors import UserError
from omnicli.models.cursor import Cursor
from omnicli.models.weights import Array

VERSIONS = range(4, 7)  # with typed variables; the writers of older ones knew no Whisper
TYPES = (
    "float32",
    "int8",
    "int16",
    "int32",
    "float16",
    "bfloat16",
)  # in the order of their numbers
NUMPY = {
    "float32": "<f4",
    "int8": "<i1",
    "int16": "<i2",
    "int32": "<i4",
    "float16": "<f2",
    "bfloat16": "<u2",
}
QUANTISED = ("int8", "int16")
MAX_RANK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A tensor in the file."""

    type: str
    stored: Array  # a view; bfloat16 as its 16 bits

    def values(self) -> Array:
        """As numbers: bfloat16 is the upper half of a float32."""
        if self.type == "bfloat16":
            return (self.stored.astype(np.uint32) << 16).view(np.float32)
        return self.stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A file's specification and its variables, aliases among them."""

    path: Path
    specification: str
    variables: dict[str, Variable]

    def __getitem__(self, name: str) -> Variable:
        if name not in self.variables:
            raise UserError(
                f"{self.path} lacks the variable {name}",
                hint="convert the model again with a current CTranslate2",
            )
        return self.variables[name]

    def number(self, name: str) -> int:
        """A variable that is one whole number."""
        stored = self[name].stored
        if stored.size != 1:
            raise UserError(
                f"{self.path} is damaged: {name} is no single number", hint="fetch the file again"
            )
        return int(stored.reshape(()))

    def weight(self, name: str, rows: slice = slice(None)) -> Array:
        """Rows of a weight as floating-point numbers; a quantised one is `stored / scale`."""
        variable = self[name]
        values = variable.values()[rows]
        if variable.type not in QUANTISED or not values.ndim:
            return values
        scale = self[f"{name}_scale"].values().astype(np.float32).reshape(-1)
        if len(scale) not in (1, len(variable.stored)) or not np.all(scale > 0):
            raise UserError(f"{self.path} is damaged: {name}_scale", hint="fetch the file again")
        per_row = scale if len(scale) == 1 else scale[rows]
        return values.astype(np.float32) / per_row.reshape(-1, *[1] * (values.ndim - 1))


def read(path: Path) -> Checkpoint:
    """Open a `model.bin`; the tensors stay in the file until they are used."""
    cursor = Cursor(path)
    version = cursor.number("I")
    if version not in VERSIONS:
        raise UserError(
            f"{path} is no CTranslate2 model of version {VERSIONS[0]} to {VERSIONS[-1]}",
            hint="fetch the file again, or convert the model with a current CTranslate2",
        )
    specification = _name(cursor)
    cursor.number("I")  # the specification's revision
    variables = dict(_variable(cursor) for _ in range(cursor.number("I")))
    for _ in range(cursor.number("I")):
        _alias(variables, alias=_name(cursor), of=_name(cursor))
    return Checkpoint(path=path, specification=specification, variables=variables)


def _alias(variables: dict[str, Variable], *, alias: str, of: str) -> None:
    """An alias stands for the scale of a quantised variable too."""
    for suffix in ("", "_scale"):
        if of + suffix in variables:
            variables[alias + suffix] = variables[of + suffix]


def _variable(cursor: Cursor) -> tuple[str, Variable]:
    name = _name(cursor)
    shape = [cursor.number("I") for _ in range(cursor.number("B"))]
    kind = cursor.number("B")
    if kind >= len(TYPES):
        raise cursor.damaged(f"{name} is of the unknown type {kind}")
    element = np.dtype(NUMPY[TYPES[kind]])
    data = cursor.take(cursor.number("I"))
    if not prod(shape) * element.itemsize == len(data) > 0 or len(shape) > MAX_RANK:
        raise cursor.damaged(f"{name} has {len(data)} bytes for shape {shape}")
    return name, Variable(type=TYPES[kind], stored=np.frombuffer(data, element).reshape(shape))


def _name(cursor: Cursor) -> str:
    return cursor.text("H").rstrip("\0")
