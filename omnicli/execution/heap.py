"""Keep what torch frees.

glibc hands buffers of some MiB back to the system when they are freed, which then clears their
pages again for the next call: a fifth of the vocoder's time in bfloat16, a quarter in float32.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 256 << 20  # free memory at the heap's end that stays with the process
LARGEST_BYTES = 32 << 20  # buffers up to this come from the heap; more glibc does not allow


def keep_freed_memory() -> bool:
    """Set it for this process; False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    return bool(kept and mallopt(_M_MMAP_THRESHOLD, LARGEST_BYTES))
