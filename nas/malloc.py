"""Free memory of the machine; glibc's allocator, which by default returns large tensors, so that new ones are slow."""

import ctypes
import gc
from pathlib import Path

# Source: mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
THRESHOLD_BYTES = 32 * 1024**2  # above a micro-batch's tensors; glibc's limit for mmap is HEAP_MAX_SIZE / 2
KEPT_BYTES = 1024**3
MEMINFO = Path("/proc/meminfo")


def keep_freed_memory() -> None:
    """Make this process keep freed memory from now on. Does nothing if the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_TOP_PAD, THRESHOLD_BYTES)


def release_freed_memory() -> None:
    """Collect garbage and, with glibc, return freed memory to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_bytes() -> int | None:
    """Return the memory that programs may still take, or None if the system does not say."""
    if not MEMINFO.is_file():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
