"""Memory that torch should keep, and memory that it should let go.

glibc hands buffers of some MiB back to the system when they are freed, which then clears their
pages again for the next call: a fifth of the vocoder's time in bfloat16, a quarter in float32.
"""

import ctypes
import mmap

from torch import Tensor

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


def forget_pages(tensor: Tensor) -> None:
    """Let go of the memory behind a tensor that is mapped from a file; it comes back when read.

    Pages of a file that was read once count as the process's own until somebody needs them. Tensors
    that are not mapped, or not shared with their file, are left alone: they have no other copy.
    """
    if tensor.device.type != "cpu" or tensor.untyped_storage().filename is None:
        return
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    last = tensor.data_ptr() + tensor.nbytes
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED)
    )
