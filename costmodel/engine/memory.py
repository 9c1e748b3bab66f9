"""Peak memory of this process, as Linux counts it; on other systems it is unknown."""

import ctypes
from pathlib import Path

PEAK, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc_pid_clear_refs(5): the resident memory becomes the peak


def give_back() -> None:
    """Return freed memory, which would count as resident, to the system, if the C library can do so."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def reset_peak() -> None:
    """Reset the peak to the memory that is resident now, if Linux allows it."""
    try:
        RESET.write_text(RESET_PEAK)
    except OSError:
        return


def peak_bytes() -> int | None:
    """Return the most bytes that were resident at once since the last reset; None if this is unknown."""
    try:
        lines = PEAK.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
