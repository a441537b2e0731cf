"""Products between stages: in memory up to a budget, beyond it in files that vanish by themselves.

A tensor that does not fit is written to a file of its own, mapped back and the file unlinked at
once: the pages live as long as the tensor, and a killed run leaves nothing behind.
"""

import os
import tempfile
import weakref
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
SMALL_BYTES = 64 * 1024  # not worth a file


class Scratch:
    """Counts the bytes that products hold, and spills what goes beyond the budget."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self.spilled_bytes = 0

    def settle(self, product: T) -> T:
        """The same product, its tensors perhaps mapped from disk."""
        changed: dict[str, Tensor | tuple[Tensor, ...]] = {}
        for field in fields(product):  # type: ignore[arg-type]
            value = getattr(product, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = self._settled(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], Tensor):
                changed[field.name] = tuple(self._settled(v) for v in value)
        return replace(product, **changed) if changed else product  # type: ignore[type-var]

    def _settled(self, tensor: Tensor) -> Tensor:
        size = tensor.nbytes
        fits = self.held_bytes + size <= self.budget_bytes
        if fits or size < SMALL_BYTES or tensor.device.type != "cpu":
            self.held_bytes += size
            weakref.finalize(tensor, self._freed, size)
            return tensor
        self.spilled_bytes += size
        return spilled(tensor, self.folder)

    def _freed(self, size: int) -> None:
        self.held_bytes -= size


def spilled(tensor: Tensor, folder: Path) -> Tensor:
    """A copy of the tensor, mapped from a file that is gone from its folder already."""
    handle, name = tempfile.mkstemp(prefix="spill-", dir=folder)
    try:
        raw = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        with os.fdopen(handle, "wb") as file:
            file.write(raw.data)
        return torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(
            tensor.shape
        )
    finally:
        Path(name).unlink()
