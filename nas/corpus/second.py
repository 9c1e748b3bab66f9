"""A second validation corpus: text of other authors, on which no candidate is trained.

It has the tokenizer of the first corpus, and no documents that repeat text of the first corpus or of the parent. The
source `dependencies` is Python code of packages that this one needs: FILES_OF_EACH installed files of each of PACKAGES,
with sizes in FILE_BYTES. They are chosen by the hashes of their paths, so that equal versions give equal choices.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from costmodel.config.bugs import default_cache_dir, require_writable_cache
from costmodel.config.files import decode, read_json
from costmodel.errors import UserError
from nas.corpus.corpus import Corpus, require_chunks
from nas.corpus.documents import Document, fingerprint
from nas.corpus.documents import documents as documents_of
from nas.corpus.held_out import (
    MOST_OF_A_DOCUMENT,
    HeldOut,
    KeptWindows,
    grouped,
    repeated,
    stored_windows,
    window_hashes,
)
from nas.corpus.local_files import digest
from nas.corpus.sources import open_source
from nas.corpus.tokenizer import given_encoder, kept_tokenizer
from nas.storage import replace_file

DEPENDENCIES = "dependencies"
PACKAGES = ("jsonargparse", "matplotlib", "networkx", "numpy", "ray", "rich", "scipy", "torch")
FILES_OF_EACH = 8  # 64 documents in all, few enough to record a loss for each
FILE_BYTES = range(2_000, 64_000)
NOT_THEIRS = frozenset({"test", "tests", "testing", "_vendor", "vendor", "thirdparty_files", "_vendored"})
READ_CHARACTERS = 1 << 22  # from the beginning of another source
A_COPY = 0.5  # share of repeated windows above which a document counts as the same file


class SecondSource(NamedTuple):
    """The documents of a second corpus. fingerprint: hash of the whole source, or of the files of `dependencies`."""

    fingerprint: str
    documents: list[Document]


def second_source(data: str) -> SecondSource:
    """Return the documents of `dependencies`, or the first documents of a source that `open_source` opens.

    The first documents are those that together reach READ_CHARACTERS. Of a larger folder, a sample of files is read.
    Raises UserError as `open_source` does, and for rows that cannot be read.
    """
    if data != DEPENDENCIES:
        source = open_source(data, sample=READ_CHARACTERS)
        first, num_characters = list[Document](), 0
        for document in documents_of(source):
            if num_characters >= READ_CHARACTERS:
                break
            first.append(document)
            num_characters += len(document.text)
        return SecondSource(source.fingerprint, first)
    chosen: list[tuple[str, Path]] = []
    for package in PACKAGES:
        sized = ((name, path) for name, path in package_files(package) if path.stat().st_size in FILE_BYTES)
        chosen += islice(sized, FILES_OF_EACH)
    documents = [Document("validation", path.read_text(encoding="utf-8"), name) for name, path in chosen]
    return SecondSource(fingerprint([[name, digest(path)] for name, path in chosen]), documents)


def second_corpus(data: str, source: SecondSource, first: Corpus, of_parent: KeptWindows | None) -> Corpus:
    """Return the corpus `first` with the documents of `source` as its validation split. It has no train split to read.

    Documents are excluded if more than a tenth of their windows (`nas.corpus.held_out`) occurs in `first` or in the
    training text of the parent. data: name of the source. of_parent: windows of that text (`to_keep`); None if unknown.
    Raises UserError if more than half of a document is repeated (unless `data` is `dependencies`), a text cannot be
    encoded, or the cache is not writable; OSError if writing fails.
    """
    parent = b"" if of_parent is None else of_parent.tobytes()
    key = hashlib.sha256(json.dumps([1, first.fingerprint, source.fingerprint]).encode() + parent).hexdigest()[:16]
    entry = default_cache_dir() / f"second-{key}"
    with suppress(OSError, ValueError):  # missing or damaged
        held_out = decode(HeldOut, read_json(entry / "held-out.json"), str(entry))
        return _beside(first, data, key, entry, held_out)
    windows = [window_hashes(document.text) for document in source.documents]
    all_windows = np.concatenate([np.zeros(0, np.uint64), *windows])
    repeats = repeated(all_windows, stored_windows(Path(first.folder)), of_parent)
    ends = np.cumsum([len(hashes) for hashes in windows])
    shares = [float(part.mean()) if len(part) else 0.0 for part in np.split(repeats, ends)[:-1]]
    copies = [document.name for document, share in zip(source.documents, shares, strict=True) if share > A_COPY]
    if copies and data != DEPENDENCIES:
        raise UserError(
            f"--second-eval-data {data} must be other text than --data {first.data} and what the parent was trained "
            f"on, but shares {len(copies)} files with them, {copies[0]} first; give other files, or none."
        )
    kept = [one for one, share in zip(source.documents, shares, strict=True) if share <= MOST_OF_A_DOCUMENT]
    encoder = given_encoder(kept_tokenizer(Path(first.folder), "first"), first.vocab_size, first.chunk_len)
    ids = encoder.encode([document.text for document in kept])
    sizes = [(document.name, len(tokens)) for document, tokens in zip(kept, ids, strict=True) if len(tokens)]
    held_out = HeldOut(documents=grouped(sizes), num_left_out=len(source.documents) - len(kept))
    corpus = _beside(first, data, key, entry, held_out)
    require_writable_cache()
    entry.mkdir(parents=True, exist_ok=True)
    replace_file(corpus.file("validation"), np.concatenate([*ids, np.zeros(0, encoder.dtype)]).tobytes())
    replace_file(entry / "held-out.json", json.dumps(asdict(held_out)))
    return corpus


def require_sequences(second: Corpus, seq_len: int) -> None:
    """Raise UserError unless `second` has a sequence of seq_len tokens and the token after, for an n-gram baseline."""
    if not second.held_out.documents or second.num_validation_tokens <= seq_len:
        raise UserError(
            f"--second-eval-data {second.data} must hold more than {seq_len} tokens for an n-gram baseline, but has "
            f"{second.num_validation_tokens}; give more text, or none."
        )
    require_chunks(second, seq_len)


def _beside(first: Corpus, data: str, key: str, entry: Path, held_out: HeldOut) -> Corpus:
    num_tokens = sum(size for _, size in held_out.documents)
    return replace(
        first, folder=str(entry), data=data, fingerprint=key, num_validation_tokens=num_tokens, held_out=held_out
    )


def package_files(package: str) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each Python file of an installed package, in the order of the names' hashes.

    Tests and vendored code (NOT_THEIRS) are left out. Nothing is yielded for a package that is not installed.
    """
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        return
    named = {file.as_posix(): Path(str(file.locate())) for file in files if file.suffix == ".py"}
    theirs = [name for name in named if not NOT_THEIRS.intersection(name.split("/"))]
    for name in sorted(theirs, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        if named[name].is_file():
            yield name, named[name]
