"""Excludes documents from the validation split that repeat training text. Repeats are found by windows of five lines.

Lines are stripped, and those without a letter or digit are ignored, so that indentation and layout do not hide a copy.
A window is five consecutive lines of what is left, or all of a shorter document. Windows are compared by hashes of 64
bits. Of a parent's text only the upper 32 bits are kept, so that a new window matches one of N distinct ones by chance
with probability N / 2**32: 4.4e-5 for the 189,152 of the builtin parent.

Whole documents are excluded, since text around a copy is mostly copied too: each with more than a tenth of its windows
in training text, and then those with the largest shares, until at most 2 % of the remaining windows are repeated.
"""

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import UserError
from nas.corpus.documents import SPLITS
from nas.storage import replace_file

MOST_GROUPS = 64  # documents whose loss is recorded separately; the error over 64 groups is as good as over thousands
MOST_KEPT = 1 << 22  # windows kept with a model: 16 MiB, and 0.1 % of other windows match by chance
READ_WINDOWS = 1 << 22  # at a time, which bounds memory
WINDOW_LINES = 5
# Shares of windows that may be repeated; copies have at least 44 % under Python 3.11 to 3.13, other files up to 1.6 %.
MOST_OF_A_DOCUMENT = 0.1
MOST_OF_ALL = 0.02
KEPT_TYPE = np.dtype("<u4")  # of windows kept with a parent
WINDOW_BYTES = 8  # of a window's hash in the cache

Windows = NDArray[np.uint64]
KeptWindows = NDArray[np.uint32]

_COUNTS = re.compile(r"[^\W_]")
# odd numbers with well-mixed bits, one for each place in a window
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """The validation documents, and how many documents were excluded because they repeat training text.

    file: name of the file with the tokens of the validation documents. documents: name and number of tokens of each
        validation document, in order, or of each group of neighbours (`grouped`). num_left_out, tokens_left_out:
        numbers of excluded documents and of their tokens.
    repeated_share: share of the windows of the validation documents that occur in the training text of the candidates
        or, as far as known, of the parent. For a second corpus, tokens_left_out and repeated_share are 0, not computed.
    """

    file: str = "held-out.bin"
    documents: tuple[tuple[str, int], ...] = ()
    num_left_out: int = 0
    tokens_left_out: int = 0
    repeated_share: float = 0.0


def hold_out(
    entry: Path, lengths: Mapping[str, int], dtype: np.dtype[Any], of_parent: KeptWindows | None, file: str
) -> HeldOut:
    """Exclude validation documents that repeat training text, and write the tokens of the others to `file`.

    entry: folder of the cache. lengths: how many tokens, windows or bytes of each prepared file to use. dtype: type of
        token ids. of_parent: windows of the parent's training text (`to_keep`); None if unknown. Raises UserError if
        no document is left, OSError if the file cannot be written.
    """
    lines = (entry / "documents.bin").read_bytes()[: lengths["documents"]].splitlines()
    names, num_tokens, num_windows = zip(*(json.loads(line) for line in lines), strict=True)
    windows = np.fromfile(entry / "validation-windows.bin", dtype=np.uint64, count=lengths["validation-windows"])
    repeats = repeated(windows, _parts(entry / "train-windows.bin", lengths["train-windows"]), of_parent)
    owners = np.repeat(np.arange(len(names)), num_windows)
    num_repeated = np.bincount(owners, repeats, len(names)).astype(np.int64)
    kept = kept_documents(np.array(num_windows), num_repeated) & (np.array(num_tokens) > 0)
    if not kept.any():
        raise UserError(
            f"the validation split must have a document that repeats nothing that was trained on, but each of its "
            f"{len(names)} shares more than a tenth of its windows of five lines; use text with fewer copies."
        )
    tokens = np.fromfile(entry / "validation.bin", dtype=dtype, count=lengths["validation"])
    replace_file(entry / file, tokens[np.repeat(kept, num_tokens)].tobytes())
    of_documents = [(name, size) for name, size, keep in zip(names, num_tokens, kept, strict=True) if keep]
    return HeldOut(
        file=file,
        documents=grouped(of_documents),
        num_left_out=int((~kept & (np.array(num_tokens) > 0)).sum()),
        tokens_left_out=int(np.array(num_tokens)[~kept].sum()),
        repeated_share=float(num_repeated[kept].sum() / max(1, np.array(num_windows)[kept].sum())),
    )


def trained_on(entry: Path) -> KeptWindows | None:
    """Return the hashes of the windows of all prepared training text, as they are stored with a model (`to_keep`).

    Return None if the text has more than MOST_KEPT windows, repeated ones included. entry: folder of the cache.
    """
    length = (entry / "train-windows.bin").stat().st_size // WINDOW_BYTES
    parts = _parts(entry / "train-windows.bin", length)
    return to_keep(np.concatenate([np.zeros(0, np.uint64), *parts])) if length <= MOST_KEPT else None


def stored_windows(entry: Path) -> Iterator[Windows]:
    """Yield the 64-bit hashes of the windows of all prepared text of both splits, in arrays of up to READ_WINDOWS."""
    for split in SPLITS:
        path = entry / f"{split}-windows.bin"
        yield from _parts(path, path.stat().st_size // WINDOW_BYTES)


def grouped(documents: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Return documents (name, number of tokens), with neighbours joined to MOST_GROUPS groups if there are more."""
    if len(documents) <= MOST_GROUPS:
        return tuple(documents)
    ends = [group * len(documents) // MOST_GROUPS for group in range(MOST_GROUPS + 1)]
    groups = [documents[start:end] for start, end in pairwise(ends)]
    return tuple((f"{group[0][0]} and {len(group) - 1} more", sum(size for _, size in group)) for group in groups)


def _parts(path: Path, length: int) -> Iterator[Windows]:
    for start in range(0, length, READ_WINDOWS):
        yield np.fromfile(path, np.uint64, min(READ_WINDOWS, length - start), offset=start * WINDOW_BYTES)


def window_hashes(text: str) -> Windows:
    """Return the 64-bit hash of every window of five lines of a text, in order, with repeats."""
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
    """Return the sorted, distinct upper 32 bits of the hashes of windows, which are stored with a model."""
    return np.unique((windows >> np.uint64(32)).astype(KEPT_TYPE))


def repeated(windows: Windows, trained_on: Iterable[Windows], of_parent: KeptWindows | None) -> NDArray[np.bool_]:
    """Return whether each window also occurs in the candidates' corpus or in the training text of their parent.

    windows: 64-bit hashes. trained_on: hashes of the corpus, in parts. of_parent: result of `to_keep`; None if unknown.
    """
    wanted, places = np.unique(windows, return_inverse=True)
    repeats = np.zeros(len(wanted), dtype=bool)
    if of_parent is not None:
        repeats |= np.isin((wanted >> np.uint64(32)).astype(KEPT_TYPE), of_parent)
    for part in trained_on:
        repeats |= np.isin(wanted, part)
    of_each: NDArray[np.bool_] = repeats[places]
    return of_each


def kept_documents(num_windows: NDArray[np.int64], num_repeated: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each document is used for validation. num_repeated: number of its windows that are repeated."""
    shares = num_repeated / np.maximum(num_windows, 1)
    kept: NDArray[np.bool_] = shares <= MOST_OF_A_DOCUMENT
    for document in np.argsort(-shares, kind="stable"):
        if num_repeated[kept].sum() <= MOST_OF_ALL * num_windows[kept].sum():
            break
        kept[document] = False
    return kept
