"""Which validation documents repeat text that was trained on: by windows of five lines, wherever they stand.

A line counts without the blanks around it, and only if it has a letter or a digit, so that neither indentation nor
layout hides a copy. A window is five such lines in a row, or all of a document of fewer. Equal windows are found by
hashes of 64 bits; of a parent's text the upper 32 are kept, so that of N distinct windows that it was trained on, one
that it was not is taken for one of them with probability N / 2**32: for the 189,152 of the builtin parent 4.4e-5.

Whole documents are left out, since what surrounds a copy is mostly copied too: each with more than a tenth of its
windows in what was trained on, and then those of the largest shares, until at most 2 % of all windows are.
"""

import re
import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

WINDOW_LINES = 5
MOST_OF_A_DOCUMENT = 0.1  # under Python 3.11 to 3.13, copies have 44 % and more, other files 1.6 % and less
MOST_OF_ALL = 0.02
KEPT_TYPE = np.dtype("<u4")  # of the windows that are kept with a parent

Windows = NDArray[np.uint64]
KeptWindows = NDArray[np.uint32]

_COUNTS = re.compile(r"[^\W_]")
# odd, of well mixed bits: of each place in the window another
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)


def window_hashes(text: str) -> Windows:
    """The hash of every window of a text, in order, with repeats."""
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
    """What is kept of windows with a parent: the distinct upper halves, rising."""
    return np.unique((windows >> np.uint64(32)).astype(KEPT_TYPE))


def repeated(windows: Windows, trained_on: Iterable[Windows], of_parent: KeptWindows | None) -> NDArray[np.bool_]:
    """Whether candidates, whose windows may come in parts, or their parent were trained on each window."""
    wanted, places = np.unique(windows, return_inverse=True)
    repeats = np.zeros(len(wanted), dtype=bool)
    if of_parent is not None:
        repeats |= np.isin((wanted >> np.uint64(32)).astype(KEPT_TYPE), of_parent)
    for part in trained_on:
        repeats |= np.isin(wanted, part)
    of_each: NDArray[np.bool_] = repeats[places]
    return of_each


def kept_documents(num_windows: NDArray[np.int64], num_repeated: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each document may validate, by how many windows it has and how many of them are repeated."""
    shares = num_repeated / np.maximum(num_windows, 1)
    kept: NDArray[np.bool_] = shares <= MOST_OF_A_DOCUMENT
    for document in np.argsort(-shares, kind="stable"):
        if num_repeated[kept].sum() <= MOST_OF_ALL * num_windows[kept].sum():
            break
        kept[document] = False
    return kept
