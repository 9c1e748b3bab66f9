"""The validation split without near-duplicates of training text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.errors import UserError
from nas.corpus.near_duplicates import KeptWindows, Windows, kept_documents, repeated, to_keep
from nas.corpus.token_files import SPLITS, WINDOW_BYTES
from nas.storage import replace_file

MOST_GROUPS = 64  # documents whose loss is recorded separately; the error over 64 groups is as good as over thousands
MOST_KEPT = 1 << 22  # windows kept with a model: 16 MiB, and 0.1 % of other windows match by chance
READ_WINDOWS = 1 << 22  # at a time, which bounds memory


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """The validation documents, and those excluded because they repeat training text.

    file: the file of their tokens. documents: name and number of tokens of each, in order; if there are more than
        MOST_GROUPS, of groups of neighbours. num_left_out, tokens_left_out: excluded documents and their tokens.
    repeated_share: share of the windows of validation documents that occur in the training text of the candidates or,
        as far as known, of the parent.
    """

    file: str = "held-out.bin"
    documents: tuple[tuple[str, int], ...] = ()
    num_left_out: int = 0
    tokens_left_out: int = 0
    repeated_share: float = 0.0


def hold_out(
    entry: Path, lengths: Mapping[str, int], dtype: np.dtype[Any], of_parent: KeptWindows | None, file: str
) -> HeldOut:
    """Write the validation tokens among the first `lengths` that are prepared in a folder, into a file there.

    of_parent: windows of the parent's training text, as far as known. Raises UserError if no document is left, OSError
        if the file cannot be written.
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
    """Return the windows of all prepared training text, to be kept with a model; None if there are too many."""
    length = (entry / "train-windows.bin").stat().st_size // WINDOW_BYTES
    return to_keep(np.concatenate([*_parts(entry / "train-windows.bin", length)])) if length <= MOST_KEPT else None


def stored_windows(entry: Path) -> Iterator[Windows]:
    """Yield the windows of all prepared text of both splits, in parts."""
    for split in SPLITS:
        path = entry / f"{split}-windows.bin"
        yield from _parts(path, path.stat().st_size // WINDOW_BYTES)


def grouped(documents: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Return the documents, or MOST_GROUPS groups of neighbours of nearly equal size."""
    if len(documents) <= MOST_GROUPS:
        return tuple(documents)
    ends = [group * len(documents) // MOST_GROUPS for group in range(MOST_GROUPS + 1)]
    groups = [documents[start:end] for start, end in pairwise(ends)]
    return tuple((f"{group[0][0]} and {len(group) - 1} more", sum(size for _, size in group)) for group in groups)


def _parts(path: Path, length: int) -> Iterator[Windows]:
    for start in range(0, length, READ_WINDOWS):
        yield np.fromfile(path, np.uint64, min(READ_WINDOWS, length - start), offset=start * WINDOW_BYTES)
