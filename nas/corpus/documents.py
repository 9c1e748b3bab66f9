"""Streams of documents: batches in an order that is always the same, each with the position at which to go on after it.

A document is one file of text, one line of a .jsonl or one row of a table, already given to a split. Local files and
datasets of the hub are read alike.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Split = Literal["train", "validation"]

VALIDATION_SHARE = 0.05  # of files or rows: about 90,000 tokens of the standard library
BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 22  # bounds memory where documents are books


class Document(NamedTuple):
    """name: of its file, or of its row; empty where it has none."""

    split: Split
    text: str
    name: str = ""


class Batch(NamedTuple):
    """position: JSON data, where the stream goes on after these documents. share: of the stream read, if known."""

    documents: list[Document]
    position: Any
    share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """split: of all its documents, or None if each is given to one by hash.

    batches: the documents after a position, or all for None. The batches after a position are the same whether the
        stream was read through or opened there.
    """

    split: Split | None
    batches: Callable[[Any], Generator[Batch, None, None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTokenizer:
    """A tokenizer that comes with the corpus. json: its tokenizer.json. end_of_text: its token after a document."""

    name: str
    json: str
    end_of_text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentSource:
    """Documents of a corpus.

    name: as the user asked for it. fingerprint: hexadecimal SHA-256 of everything the documents depend on.
    streams: one with both splits, or one of each, validation first.
    tokenizer: reads the one that comes with it into a vocabulary of this many entries; None if one must be trained.
    chunked: whether a sequence never crosses the end of a document, and what is left of a document is dropped.
    """

    name: str
    fingerprint: str
    streams: tuple[Stream, ...]
    tokenizer: Callable[[int], GivenTokenizer | None] = lambda vocab_size: None
    chunked: bool = False


def texts(source: DocumentSource, split: Split) -> Iterator[str]:
    """The documents of a split, from the first."""
    for stream in source.streams:
        if stream.split in (None, split):
            with closing(stream.batches(None)) as batches:
                for batch in batches:
                    yield from (document.text for document in batch.documents if document.split == split)


def in_batches(
    documents: Iterable[Document], position: Callable[[], Any], share: Callable[[], float | None]
) -> Generator[Batch, None, None]:
    """Documents in batches bounded in number and size; position and share are asked when one is full."""
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
    """The split of the document with this key: a relative path or its text."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return "validation" if int.from_bytes(digest[:8], "big") < VALIDATION_SHARE * 2**64 else "train"


def fingerprint(content: Any) -> str:
    """Hexadecimal SHA-256 of JSON data."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
