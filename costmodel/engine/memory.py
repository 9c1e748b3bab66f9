"""Peak memory of this process, as Linux counts it; elsewhere nothing is known."""

import ctypes
from pathlib import Path

PEAK, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc_pid_clear_refs(5): what the process holds now becomes its peak


def give_back() -> None:
    """Returns what has been freed to the system, where the C library can: freed memory would count as held."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def reset_peak() -> None:
    """Makes the peak that since now, where Linux lets a process say so."""
    try:
        RESET.write_text(RESET_PEAK)
    except OSError:
        return


def peak_bytes() -> int | None:
    """The most bytes that were resident at once; None where there is no way to know."""
    try:
        lines = PEAK.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
