"""Streams of documents: batches in a fixed order, each with the position from which the stream can be resumed.

A document is a text file, a part of one, or the text in a row of a table or data set. It is assigned to a split.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

OWN_RULE, NO_TOKEN = "tokenizer", "none"  # what begins a text: the tokenizer's own rule, nothing, or a named token
VALIDATION_SHARE = 0.05  # of files or rows: about 90,000 tokens of the standard library
BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 22  # bounds memory for books
MOST_REASONS = 10  # reasons why files were not read that `Reading.lines` lists


class Document(NamedTuple):
    """A text and its split. name: the file or row that it comes from; empty for a data set of the hub."""

    split: Split
    text: str
    name: str = ""


class Batch(NamedTuple):
    """Some documents of a stream.

    position: JSON data from which the stream is resumed after these documents. share: share of the stream read so far,
        from 0 to 1; None if unknown.
    """

    documents: list[Document]
    position: Any
    share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """A stream of documents.

    split: the split of all documents; None if the stream has documents of both. batches: generates the batches after
        the one with this position, or all batches for None. A resumed stream has the same batches as one read at once.
    """

    split: Split | None
    batches: Callable[[Any], Generator[Batch, None, None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTokenizer:
    """A tokenizer of a corpus or model.

    json: text of its tokenizer.json, whose post-processor says with which token a text begins. end_of_text: the token
    that ends a document. files: names and contents of the tokenizer's other files, which exports include.
    """

    name: str
    json: str
    end_of_text: str
    files: tuple[tuple[str, bytes], ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Which files of a folder are read as text, and which are left out.

    read: number of files that are read, by kind, such as `.txt`. num_bytes: size of these files. left_out: by reason,
        the number of files that are left out, and the name of one.
    """

    folder: str
    read: dict[str, int]
    num_bytes: int
    left_out: dict[str, tuple[int, str]]

    @property
    def lines(self) -> list[str]:
        """One line on the files that are read and, if any are left out, one on these: by reason, number and example."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.read.items())
        num_read, num_left = sum(self.read.values()), sum(count for count, _ in self.left_out.values())
        lines = [
            f"text of {self.folder}: {num_read:,} of {num_read + num_left:,} files, {self.num_bytes:,} bytes ({kinds})"
        ]
        if self.left_out:
            ordered = sorted(self.left_out.items(), key=lambda item: -item[1][0])
            parts = [
                f"{count:,} {reason} ({'' if count == 1 else 'such as '}{name})"
                for reason, (count, name) in ordered[:MOST_REASONS]
            ]
            rest = sum(count for _, (count, _) in ordered[MOST_REASONS:])
            lines.append(f"not read: {'; '.join(parts)}" + (f"; {rest:,} more" if rest else ""))
        return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentSource:
    """The documents of a corpus.

    name: as the user wrote it. fingerprint: hexadecimal SHA-256 of everything that the documents depend on. streams:
    one with both splits, or one for each, validation first. tokenizer: function that takes the largest size of the
    vocabulary and returns the corpus's own tokenizer, or None if it has none that fits. chunked: whether each document
    is cut into sequences, and the rest of it dropped. read: which files are read of each folder.
    """

    name: str
    fingerprint: str
    streams: tuple[Stream, ...]
    tokenizer: Callable[[int], GivenTokenizer | None] = lambda vocab_size: None
    chunked: bool = False
    read: tuple[Reading, ...] = ()


def documents(source: DocumentSource, split: Split | None = None) -> Iterator[Document]:
    """Yield all documents of a split, or of both splits for None."""
    for stream in source.streams:
        if split is None or stream.split in (None, split):
            with closing(stream.batches(None)) as batches:
                for batch in batches:
                    yield from (document for document in batch.documents if split in (None, document.split))


def texts(source: DocumentSource, split: Split) -> Iterator[str]:
    """Yield the texts of all documents of a split."""
    return (document.text for document in documents(source, split))


def in_batches(
    documents: Iterable[Document], position: Callable[[], Any], share: Callable[[], float | None]
) -> Generator[Batch, None, None]:
    """Yield documents in batches. A batch is full at BATCH_DOCUMENTS documents or BATCH_CHARACTERS characters.

    position, share: functions that return these fields of a `Batch`, called after its last document was read.
    """
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if len(batch) == BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield Batch(batch, position(), share())
            batch, size = [], 0
    if batch:
        yield Batch(batch, position(), share())


def by_hash(key: str) -> Split:
    """Return the split of a document, decided by the hash of `key`: the document's relative path or its text."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return "validation" if int.from_bytes(digest[:8], "big") < VALIDATION_SHARE * 2**64 else "train"


def fingerprint(content: Any) -> str:
    """Return the hexadecimal SHA-256 of plain data, written as JSON."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
