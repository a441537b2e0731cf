"""Sample-rate conversion of a stream, equal to converting the whole signal at once.

The filter is torchaudio's (Hann-windowed sinc, `lowpass_filter_width=6`, `rolloff=0.99`; Smith,
"Digital Audio Resampling", https://ccrma.stanford.edu/~jos/resample/). With both rates divided by
their greatest common divisor, the input is a row of periods of `old` samples, each of which becomes
`new` samples, and a period needs no more than `width` samples on either side of it.
"""

from collections.abc import Callable
from functools import lru_cache
from math import ceil, gcd

import torch
from torch import Tensor
from torchaudio.transforms import Resample

ZERO_CROSSINGS = 6  # torchaudio's lowpass_filter_width
ROLLOFF = 0.99  # torchaudio's
DENSE_TAPS = 1 << 20  # a filter bank up to this size runs as one strided convolution
CHUNK = 4096  # outputs that are made together where the bank is larger


def resampled_length(samples: int, from_hz: int, to_hz: int) -> int:
    """Samples that come out, rounded up as torchaudio does."""
    return -(-samples * to_hz // from_hz)


class StreamingResampler:
    """Blocks [C, n] at `from_hz` in, blocks [C, m] at `to_hz` out; `flush` gives the rest."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        divisor = gcd(from_hz, to_hz)
        self._old, self._new = from_hz // divisor, to_hz // divisor
        self._width = ceil(ZERO_CROSSINGS * self._old / _cutoff(self._old, self._new))
        self._context = ceil(self._width / self._old) * self._old
        self._convert = _converter(self._old, self._new, self._width)
        self._pending: Tensor | None = None
        self._done = 0  # samples at the start of `_pending` that are only there as context

    def push(self, block: Tensor) -> Tensor:
        """As much of the output as is certain by now: block [C, n] -> [C, m]."""
        if self._old == self._new:
            return block
        pending = block if self._pending is None else torch.cat([self._pending, block], dim=1)
        periods = max(0, (pending.shape[1] - self._done - self._width) // self._old)
        end = self._done + periods * self._old
        made = self._make(pending[:, : end + self._width], end) if periods else pending[:, :0]
        keep = max(0, end - self._context)
        self._pending, self._done = pending[:, keep:], end - keep
        return made

    def flush(self) -> Tensor | None:
        """The end of the signal [C, m], None if nothing waits; the next block begins a new one."""
        pending, self._pending = self._pending, None
        made = None if pending is None else self._make(pending, pending.shape[1])
        self._done = 0
        return made

    def _make(self, pending: Tensor, end: int) -> Tensor:
        first = self._done // self._old * self._new
        return self._convert(pending)[:, first : resampled_length(end, self._old, self._new)]


def _cutoff(old: int, new: int) -> float:
    return min(old, new) * ROLLOFF


@lru_cache(maxsize=8)
def _converter(old: int, new: int, width: int) -> Callable[[Tensor], Tensor]:
    """From a whole signal [C, n] to [C, m], for rates without a common divisor."""
    if new * (old + 2 * width) > DENSE_TAPS:
        return _SparseBank(old, new, width)
    dense: Callable[[Tensor], Tensor] = Resample(
        old, new, lowpass_filter_width=ZERO_CROSSINGS, rolloff=ROLLOFF, dtype=torch.float64
    ).float()  # by default the filters are computed in single precision and are off by 1e-5
    return dense


class _SparseBank:
    """The same filters without their zeros.

    For rates with a small common divisor (11,127 and 16,000 Hz) nearly all of torchaudio's filter
    bank [new, old + 2 width] is zero, and it would fill gigabytes.
    """

    def __init__(self, old: int, new: int, width: int) -> None:
        self._old, self._new, self._width = old, new, width
        self._taps = torch.arange(2 * width + 2)
        chunks = torch.split(torch.arange(new), CHUNK)
        self._weights = torch.cat([self._weigh(chunk) for chunk in chunks])  # [new, taps]

    def __call__(self, signal: Tensor) -> Tensor:
        """Signal [C, n] -> [C, m]."""
        outputs = torch.arange(resampled_length(signal.shape[1], self._old, self._new))
        padded = torch.nn.functional.pad(signal, (self._width, self._width + 1))
        return torch.cat(
            [self._filter(padded, chunk) for chunk in torch.split(outputs, CHUNK)], dim=1
        )

    def _filter(self, padded: Tensor, outputs: Tensor) -> Tensor:
        nearest = outputs * self._old // self._new
        picked = padded[:, nearest[:, None] + self._taps]  # [C, outputs, taps]
        return (picked * self._weights[outputs % self._new]).sum(dim=2)

    def _weigh(self, phases: Tensor) -> Tensor:
        """Filters [P, taps] of outputs [P]; tap `width` lies on the sample before the output."""
        scale = _cutoff(self._old, self._new) / self._old
        remainder = (phases * self._old % self._new).double() / self._new
        distance = self._taps - self._width - remainder[:, None]  # in input samples
        t = (distance * scale).clamp(-ZERO_CROSSINGS, ZERO_CROSSINGS)
        window = torch.cos(t * (torch.pi / ZERO_CROSSINGS / 2)) ** 2
        return (torch.sinc(t) * window * scale).float()
