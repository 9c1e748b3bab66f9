"""Tokenises a source into growing files; a killed preparation is resumed from its last record.

`train.bin` and `validation.bin` have the tokens of the splits, and other files the hashes of their windows of five
lines (`nas.corpus.held_out`). `documents.bin` has one JSON line per validation document: its name, and its numbers of
tokens and windows. Only whole batches up to the last `progress.json` count; anything written later is cut off.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from costmodel.config.units import format_seconds
from costmodel.errors import UserError
from nas.corpus.documents import SPLITS, Batch, DocumentSource
from nas.corpus.held_out import WINDOW_BYTES, window_hashes
from nas.corpus.tokenizer import Encoder
from nas.storage import replace_file

PROGRESS_FILE = "progress.json"
LEVEL_TOKENS = 1 << 23  # a corpus is prepared to this many training tokens, times a power of two
VALIDATION_TOKENS = 1 << 22  # of a separate validation split: as many as the largest scale uses
COMMIT_TOKENS = 1 << 20  # about the most tokens that are made again after a kill, which takes seconds
LOG_EVERY_S = 5.0
FILES = (*SPLITS, "train-windows", "validation-windows", "documents")  # with suffix .bin

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparationProgress:
    """The prepared part of a corpus.

    lengths: number of tokens, windows or bytes in each of FILES. positions: position of each stream after the last
    document written; None if none was. ended: whether each stream has ended. cuts: by level (`level_of`), `lengths`
    when the training tokens had reached it and there were validation tokens, so that the corpus of a level does not
    depend on whether more was prepared.
    """

    lengths: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FILES, 0))
    positions: list[Any]
    ended: list[bool]
    cuts: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths[split] for split in SPLITS)


def level_of(tokens: int) -> int:
    """Return how many training tokens to prepare for a run on `tokens`: LEVEL_TOKENS, doubled until they suffice."""
    level = LEVEL_TOKENS
    while level < tokens:
        level *= 2
    return level


def extend(
    folder: Path, source: DocumentSource, encoder: Encoder, progress: PreparationProgress, level: int
) -> PreparationProgress:
    """Tokenise until there are at least `level` training tokens or no more documents, and return the new progress.

    A separate validation stream is read up to about VALIDATION_TOKENS; a stream of both splits also until it has
    validation tokens. progress: result of `read_progress`. Raises UserError if a document cannot be read or encoded or
    a split is empty, OSError if a file cannot be written; what PROGRESS_FILE records until then stays valid.
    """
    recorded = progress
    report = _progress_log(source, level)
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for name, size in _bytes(recorded, encoder.dtype.itemsize).items():
            files[name] = stack.enter_context((folder / f"{name}.bin").open("ab"))
            files[name].truncate(size)
        for index, stream in enumerate(source.streams):
            split, least = ("validation", VALIDATION_TOKENS) if stream.split == "validation" else ("train", level)
            with closing(stream.batches(progress.positions[index])) as batches:
                while not progress.ended[index]:
                    both = stream.split is not None or progress.lengths["validation"] > 0
                    if both and progress.lengths[split] >= least:
                        break
                    batch = next(batches, None)
                    progress = _appended(progress, index, batch, encoder, files)
                    report(progress, batch)
                    if progress.num_tokens - recorded.num_tokens >= COMMIT_TOKENS:
                        _record(folder, files, progress)
                        recorded = progress
        rule = "; it is a share of the files or rows, by hash, or the last lines of a single text: give it more of them"
        if source.chunked:
            rule = ": it has no document as long as a sequence; use longer documents or shorter sequences"
        if empty := [split for split in SPLITS if not progress.lengths[split]]:
            raise UserError(f"the {empty[0]} split of data {source.name!r} is empty{rule}.")
        _record(folder, files, progress)
    return progress


def _bytes(progress: PreparationProgress, itemsize: int) -> dict[str, int]:
    units = dict.fromkeys(SPLITS, itemsize) | dict.fromkeys(FILES[2:4], WINDOW_BYTES)
    return {name: progress.lengths[name] * units.get(name, 1) for name in FILES}


def read_progress(folder: Path, source: DocumentSource, itemsize: int) -> PreparationProgress:
    """Read the progress in a folder, or return the progress of a new preparation if a file is missing.

    itemsize: bytes of a token. Raises UserError if PROGRESS_FILE is damaged, or another file is shorter than it says.
    """
    path = folder / PROGRESS_FILE
    try:
        progress = PreparationProgress(**json.loads(path.read_text(encoding="utf-8")))
        for name, least in _bytes(progress, itemsize).items():
            if (size := (folder / f"{name}.bin").stat().st_size) < least:
                raise UserError(f"{name}.bin must have {least} bytes, but has {size}")
    except FileNotFoundError:
        return PreparationProgress(positions=[None] * len(source.streams), ended=[False] * len(source.streams))
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise UserError(f"{path} must be a record of the files beside it, but: {error}.") from None
    return progress


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder during a block; wait while another process holds it. The folder is made if needed."""
    with ExitStack() as stack:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # its last holder may have removed the folder
                file = stack.enter_context((folder / ".lock").open("w"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    _log.info(f"waiting for another process that prepares {folder}")
                    fcntl.flock(file, fcntl.LOCK_EX)
                if os.path.sameopenfile(file.fileno(), stack.enter_context((folder / ".lock").open()).fileno()):
                    break
        yield


def _appended(
    progress: PreparationProgress, index: int, batch: Batch | None, encoder: Encoder, files: dict[str, BinaryIO]
) -> PreparationProgress:
    """Write a batch of the stream `index`, None if it has ended, and return the progress after it."""
    if batch is None:
        return replace(progress, ended=[*progress.ended[:index], True, *progress.ended[index + 1 :]])
    lengths, cuts = dict(progress.lengths), dict(progress.cuts)
    encoded = encoder.encode([document.text for document in batch.documents])
    for document, ids in zip(batch.documents, encoded, strict=True):
        windows, split = window_hashes(document.text), document.split
        files[split].write(ids.tobytes())
        files[f"{split}-windows"].write(windows.tobytes())
        lengths[split] += len(ids)
        lengths[f"{split}-windows"] += len(windows)
        if split == "validation":
            line = json.dumps([document.name, len(ids), len(windows)]) + "\n"
            lengths["documents"] += files["documents"].write(line.encode())
    while lengths["validation"] and lengths["train"] >= (level := LEVEL_TOKENS << len(cuts)):
        cuts[str(level)] = lengths
    positions = [*progress.positions[:index], batch.position, *progress.positions[index + 1 :]]
    return replace(progress, lengths=lengths, positions=positions, cuts=cuts)


def _record(folder: Path, files: dict[str, BinaryIO], progress: PreparationProgress) -> None:
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    replace_file(folder / PROGRESS_FILE, json.dumps(asdict(progress)))


def _progress_log(source: DocumentSource, level: int) -> Callable[[PreparationProgress, Batch | None], None]:
    goal = level + VALIDATION_TOKENS * any(stream.split == "validation" for stream in source.streams)
    began = last = start = 0.0  # time of the first batch and of the last line; share after the first batch

    def report(progress: PreparationProgress, batch: Batch | None) -> None:
        nonlocal began, last, start
        tokens = progress.num_tokens
        read = batch.share if batch and batch.share and progress.lengths["train"] else 0.0
        share = min(1.0, max(tokens / goal, read))
        now = time.monotonic()
        if not began:
            began, last, start = now, now, share
        if now - last >= LOG_EVERY_S and share > start:
            last = now
            left_s = (now - began) * (1 - share) / (share - start)
            _log.info(f"preparing {source.name}: {tokens:,} tokens, {share:.0%}, ETA {format_seconds(left_s)}")

    return report
