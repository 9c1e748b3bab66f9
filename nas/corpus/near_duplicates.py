"""Finds validation documents that repeat training text, by windows of five lines.

Lines are stripped and need a letter or a digit, so that indentation and layout do not hide a copy. A window is five
such consecutive lines, or all of a shorter document. Windows are compared by hashes of 64 bits. Of a parent's text only
the upper 32 bits are kept, so that a new window matches one of N distinct ones with probability N / 2**32: 4.4e-5 for
the 189,152 of the builtin parent.

Whole documents are excluded, since text around a copy is mostly copied too: each with more than a tenth of its windows
in training text, and then those with the largest shares, until at most 2 % of all windows are repeated.
"""

import re
import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

WINDOW_LINES = 5
MOST_OF_A_DOCUMENT = 0.1  # under Python 3.11 to 3.13, copies have at least 44 %, other files at most 1.6 %
MOST_OF_ALL = 0.02
KEPT_TYPE = np.dtype("<u4")  # of windows kept with a parent

Windows = NDArray[np.uint64]
KeptWindows = NDArray[np.uint32]

_COUNTS = re.compile(r"[^\W_]")
# odd numbers with well-mixed bits, one for each place in a window
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)


def window_hashes(text: str) -> Windows:
    """Return the hash of every window of a text, in order, with repeats."""
    stripped = (line.strip() for line in text.splitlines())
    lines = [zlib.crc32(line.encode("utf-8", "surrogatepass")) for line in stripped if _COUNTS.search(line)]
    if 0 < len(lines) < WINDOW_LINES:
        lines += [0] * (WINDOW_LINES - len(lines))
    hashes = np.array(lines, dtype=np.uint64)
    num_windows = max(0, len(lines) - WINDOW_LINES + 1)
    mixed = np.zeros(num_windows, dtype=np.uint64)
    for place, factor in enumerate(_FACTORS):
        mixed = (mixed ^ (hashes[place : place + num_windows] + np.uint64(place + 1))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def to_keep(windows: Windows) -> KeptWindows:
    """Return the sorted, distinct upper halves of windows, which are kept with a parent."""
    return np.unique((windows >> np.uint64(32)).astype(KEPT_TYPE))


def repeated(windows: Windows, trained_on: Iterable[Windows], of_parent: KeptWindows | None) -> NDArray[np.bool_]:
    """Whether each window occurs in the training text of candidates, given in parts, or of their parent."""
    wanted, places = np.unique(windows, return_inverse=True)
    repeats = np.zeros(len(wanted), dtype=bool)
    if of_parent is not None:
        repeats |= np.isin((wanted >> np.uint64(32)).astype(KEPT_TYPE), of_parent)
    for part in trained_on:
        repeats |= np.isin(wanted, part)
    of_each: NDArray[np.bool_] = repeats[places]
    return of_each


def kept_documents(num_windows: NDArray[np.int64], num_repeated: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each document is used for validation, from its numbers of windows and of repeated ones."""
    shares = num_repeated / np.maximum(num_windows, 1)
    kept: NDArray[np.bool_] = shares <= MOST_OF_A_DOCUMENT
    for document in np.argsort(-shares, kind="stable"):
        if num_repeated[kept].sum() <= MOST_OF_ALL * num_windows[kept].sum():
            break
        kept[document] = False
    return kept
