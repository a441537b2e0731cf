"""Safetensors: checked before use, and written one tensor at a time.

The format (github.com/huggingface/safetensors): u64 length of a JSON header, the header
`{name: {dtype, shape, data_offsets}}`, then the bytes of all tensors without gaps.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnicli.errors import UserError

Array = NDArray[Any]

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor, made only when its bytes are due: a large model never lies in memory whole."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of DTYPES
    make: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def write(path: Path, weights: Sequence[Weight], step: Callable[[int], object]) -> None:
    """Write all tensors; `step` hears of every tensor's bytes."""
    ordered = sorted(
        weights, key=lambda w: (-DTYPES[w.dtype].itemsize, w.name)
    )  # keeps them aligned
    header = _header(ordered)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(LENGTH_BYTES, "little"))
        file.write(header)
        for weight in ordered:
            file.write(_made(weight).data)
            step(weight.nbytes)


def _made(weight: Weight) -> Array:
    with np.errstate(all="ignore"):  # what does not fit is found below
        array = np.asarray(weight.make(), DTYPES[weight.dtype], order="C")
    assert array.shape == weight.shape, (weight.name, array.shape, weight.shape)
    if not np.isfinite(array).all():
        raise UserError(
            f"the weight {weight.name} holds values that are no numbers, or too large",
            hint="the model is damaged: fetch it again",
        )
    return array


def _header(ordered: Sequence[Weight]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for weight in ordered:
        end = start + weight.nbytes
        entries[weight.name] = {
            "dtype": weight.dtype,
            "shape": weight.shape,
            "data_offsets": (start, end),
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % LENGTH_BYTES)


def names(path: Path) -> frozenset[str]:
    """The tensors of a file, after a check that all their bytes are there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if header_bytes > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise _damaged(path)
        entries = _entries(path, file.read(header_bytes))
    ends = [_end(path, entry) for entry in entries.values()]
    if LENGTH_BYTES + header_bytes + max(ends, default=0) != size:
        raise _damaged(path)
    return frozenset(entries)


def _entries(path: Path, header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header)
    except ValueError as error:
        raise _damaged(path) from error
    if not isinstance(entries, dict):
        raise _damaged(path)
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}


def _end(path: Path, entry: Any) -> int:
    match entry:
        case {"data_offsets": [int(start), int(end)]} if 0 <= start <= end:
            return end
    raise _damaged(path)


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is cut short or damaged", hint="fetch the file again")
