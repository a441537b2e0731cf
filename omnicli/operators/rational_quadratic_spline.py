"""The inverse of a monotonic rational-quadratic spline (Durkan et al. 2019, "Neural Spline Flows").

The spline maps [-bound, bound] onto itself through K + 1 knots; outside it is the identity, and
the slope at both ends is one, so the two meet smoothly.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_BIN = 1e-3  # of the interval; keeps every bin open
MIN_SLOPE = 1e-3
_FLAT = math.log(math.expm1(1 - MIN_SLOPE))  # softplus turns it into a slope of 1 - MIN_SLOPE


@dataclass(frozen=True, slots=True)
class _Bin:
    """The bin that each value falls into; all [...]."""

    left: Tensor
    width: Tensor
    bottom: Tensor
    height: Tensor
    slope: Tensor  # at its left knot
    next_slope: Tensor


def invert_spline(
    y: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, bound: float
) -> Tensor:
    """x [...] with spline(x) = y [...]; widths and heights [..., K], slopes [..., K - 1], raw."""
    inside = y.abs() <= bound
    at = y.clamp(-bound, bound)
    x = _invert_inside(at, _bin_of(at, _knots(widths, bound), _knots(heights, bound), slopes))
    return torch.where(inside, x, y)


def _knots(raw: Tensor, bound: float) -> Tensor:
    """Raw sizes [..., K] -> knots [..., K + 1] from -bound to bound."""
    bins = raw.shape[-1]
    sizes = MIN_BIN + (1 - MIN_BIN * bins) * raw.softmax(-1)
    knots = F.pad(2 * bound * sizes.cumsum(-1) - bound, (1, 0), value=-bound)
    knots[..., -1] = bound
    return knots


def _bin_of(y: Tensor, x_knots: Tensor, y_knots: Tensor, raw_slopes: Tensor) -> _Bin:
    slopes = MIN_SLOPE + F.softplus(F.pad(raw_slopes, (1, 1), value=_FLAT))
    index = (y[..., None] >= y_knots[..., 1:-1]).sum(-1, keepdim=True)

    def pick(values: Tensor, offset: int = 0) -> Tensor:
        return values.gather(-1, index + offset)[..., 0]

    left, bottom = pick(x_knots), pick(y_knots)
    return _Bin(
        left=left,
        width=pick(x_knots, 1) - left,
        bottom=bottom,
        height=pick(y_knots, 1) - bottom,
        slope=pick(slopes),
        next_slope=pick(slopes, 1),
    )


def _invert_inside(y: Tensor, at: _Bin) -> Tensor:
    """Solve equation 6 of the paper, a quadratic in the place within the bin."""
    mean_slope = at.height / at.width
    up = y - at.bottom
    bend = at.slope + at.next_slope - 2 * mean_slope
    a = up * bend + at.height * (mean_slope - at.slope)
    b = at.height * at.slope - up * bend
    c = -mean_slope * up
    # Rounding may push the discriminant of a value on a knot just below zero.
    root = (b.square() - 4 * a * c).clamp(min=0).sqrt()
    return 2 * c / (-b - root) * at.width + at.left
