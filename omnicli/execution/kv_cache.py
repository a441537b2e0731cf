"""Keys and values of every layer for one batch: fixed capacity, one length per row.

A cache is an argument of `forward`, never an attribute of a network. Its layout:

    k, v      L tensors [B, H, capacity, d]
    lengths   [B] int64    slots [0, lengths[b]) of row b are valid
    reaches   [B] ints     slots from here on were never written, row by row
    reach     int          the largest of them

They are known without asking the device. A row's grows by the padded size of every write, so for
rows that began together it follows from a row's own edge and step: reading `[0, reach)` keeps
"company changes nothing" and spares the empty part of the capacity.
"""

import torch
from torch import Tensor

REACH_STEP = 32  # attention reads a multiple of this many slots: few shapes, aligned rows


class KVCache:
    """Keys and values of L layers; see the module's text for the layout."""

    def __init__(
        self,
        layers: int,
        shape: tuple[int, int, int, int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make room: shape is (B, H, capacity, d). Zeros, for a masked slot must be finite."""
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.lengths = torch.zeros(shape[0], dtype=torch.int64, device=device)
        self.capacity = shape[2]
        self.even: int | None = 0  # all rows' length where it is one, known without asking
        self.reaches = [0] * shape[0]

    def positions(self, new: int) -> Tensor:
        """Where the next `new` items of each row go -> [B, new] int64."""
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    @property
    def reach(self) -> int:
        """Slots that some row has written."""
        return max(self.reaches)

    @property
    def readable(self) -> int:
        """Slots that `write` returns once the next item of every row is in: `reach`, rounded up."""
        return min(self.capacity, -(-self.reach // REACH_STEP) * REACH_STEP)

    def extend(self, new: int) -> Tensor:
        """Open `new` slots after each row's end, before the layers write -> positions [B, new]."""
        self.reaches = [reach + new for reach in self.reaches]
        assert self.reach <= self.capacity, f"{self.reach} slots of {self.capacity}"
        return self.positions(new)

    def write(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [B, H, T, d] at positions [B, T] -> the layer's [B, H, readable, d]."""
        for cache, new in ((self.k[layer], k), (self.v[layer], v)):
            if self.reach == k.shape[2]:  # the first write of all rows
                cache[:, :, : self.reach] = new
            elif self.even is not None:
                cache[:, :, self.even : self.even + k.shape[2]] = new
            elif k.shape[2] == 1:  # a step: many times as fast as scattering
                cache[torch.arange(len(new), device=new.device), :, positions[:, 0]] = new[:, :, 0]
            else:
                cache.scatter_(2, positions[:, None, :, None].expand_as(new), new)
        size = self.readable
        return self.k[layer][:, :, :size], self.v[layer][:, :, :size]

    def advance(self, added: Tensor | int) -> None:
        """Count what the last writes added to each row: [B] int64, without its padding."""
        self.lengths = self.lengths + added
        even = self.even
        self.even = even + added if even is not None and isinstance(added, int) else None

    def clear(self) -> None:
        """As if nothing had been written; what was is never read."""
        self.lengths, self.even = torch.zeros_like(self.lengths), 0
        self.reaches = [0] * len(self.reaches)

    def keep(self, rows: Tensor) -> None:
        """Keep these rows [B'] int64, in this order; a repeated row is copied."""
        self.k = [x.index_select(0, rows) for x in self.k]
        self.v = [x.index_select(0, rows) for x in self.v]
        self.lengths = self.lengths.index_select(0, rows)
        self.reaches = [self.reaches[row] for row in rows.tolist()]

    def put(self, rows: Tensor, other: "KVCache") -> None:
        """Overwrite rows [N] int64 with the first N of another cache of the same capacity."""
        size, self.even = other.reach, None
        for mine, theirs in zip((*self.k, *self.v), (*other.k, *other.v), strict=True):
            mine[rows, :, :size] = theirs[: len(rows), :, :size]
            mine[rows, :, size:] = 0  # as if nobody had been there
        self.lengths[rows] = other.lengths[: len(rows)]
        for row, reach in zip(rows.tolist(), other.reaches, strict=False):
            self.reaches[row] = reach

    def fork(self, rows: Tensor) -> "KVCache":
        """Return a cache of its own that begins with copies of these rows [B'] int64."""
        twin = object.__new__(KVCache)
        twin.k, twin.v, twin.lengths = list(self.k), list(self.v), self.lengths
        twin.capacity, twin.reaches, twin.even = self.capacity, self.reaches, self.even
        twin.keep(rows)
        return twin

    @property
    def bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(x.nbytes for x in (*self.k, *self.v))
