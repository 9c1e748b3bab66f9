"""The memory and cores that the machine or its container allow a process; and settings of glibc's allocator.

By default, glibc returns the memory of a large tensor to the system as soon as the tensor is freed.
"""

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Source: mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
THRESHOLD_BYTES = 32 * 1024**2  # most that glibc accepts (HEAP_MAX_SIZE / 2); a micro-batch's tensors are smaller
KEPT_BYTES = 1024**3
MEMINFO = Path("/proc/meminfo")
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # cgroups(7)


def keep_freed_memory() -> None:
    """Make this process keep up to KEPT_BYTES of freed memory for later use. Without glibc, this does nothing.

    Blocks of THRESHOLD_BYTES or more are still returned to the system when they are freed.
    """
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
    """Return how many more bytes of memory machine and containers allow this process; None if that is unknown."""
    free = []
    if MEMINFO.is_file():
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
        free.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for group in _cgroups():
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (most := _numbers(group / limit)) and (now := _numbers(group / used)):
                stat = group / "memory.stat"
                lines = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
                files = int(lines.get("inactive_file", 0))  # of cached files, dropped when memory is short
                free.append(max(0, most[0] - now[0] + files))
    return min(free, default=None)


def num_cores() -> int:
    """Return how many cores CPU affinity and containers' quotas allow this process, rounded down, at least 1."""
    shares = [float(len(os.sched_getaffinity(0)))]
    for group in _cgroups():
        quotas = (_numbers(group / "cpu.max"), _numbers(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"))
        shares += [quota[0] / quota[1] for quota in quotas if len(quota) == 2 and quota[0] > 0]
    return max(1, int(min(shares)))


def _cgroups() -> Iterator[Path]:
    """Yield the folders of this process's control groups, of version 1 and 2, and of all that hold them."""
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.is_file() else ():
        controllers, path = line.split(":", 2)[1:]
        root = CGROUPS / controllers if controllers else CGROUPS
        own = root / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root) and folder.is_dir())


def _numbers(*paths: Path) -> list[int]:
    """Return the numbers in files; none if a file is missing or has other text, such as `max` for no limit."""
    try:
        return [int(word) for path in paths for word in path.read_text().split()]
    except (OSError, ValueError):
        return []
