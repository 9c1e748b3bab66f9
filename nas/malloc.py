"""Keeps freed memory in the process: by default glibc returns every large tensor to the kernel and pages it in anew."""

import ctypes

# Source: mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
THRESHOLD_BYTES = 32 * 1024**2  # above a micro-batch's tensors; glibc refuses a larger one for mmap (HEAP_MAX_SIZE / 2)
KEPT_BYTES = 1024**3


def keep_freed_memory() -> None:
    """Lets this process keep freed memory from now on. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_TOP_PAD, THRESHOLD_BYTES)
