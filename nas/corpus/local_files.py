"""Documents of local files: folders of text and tables, or one file of them.

The split is decided by a hash (of the relative path for files, of the text for rows), so that it never depends on order
or on what else is there; exact copies of a file are read once and rows with equal text fall on one side, so that
nothing validated was trained on.
"""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from costmodel.errors import UserError
from nas.corpus.documents import (
    VALIDATION_SHARE,
    Batch,
    Document,
    DocumentSource,
    Split,
    Stream,
    by_hash,
    fingerprint,
    in_batches,
)
from nas.corpus.row_files import ROW_READERS

FILE_SUFFIXES = (".txt", ".py", ".md", *ROW_READERS)

# Not code that a model should learn from: tests, bundled packages, and tables that repeat each other line by line.
STDLIB_EXCLUDED = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "site-packages",
        "dist-packages",
        "turtledemo",
        "lib2to3",
        "encodings",
        "pydoc_data",
        "__pycache__",
    }
)


class File(NamedTuple):
    size: int
    documents: Callable[[], Iterator[Document]]


def stdlib_source() -> DocumentSource:
    """The running Python's standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files, manifest = _listed(folder, _stdlib_files(folder), None)
    return DocumentSource(name="stdlib", fingerprint=fingerprint(manifest), streams=(file_stream(files, None),))


def folder_source(name: str, folder: Path) -> DocumentSource:
    """Every text and table under a folder, split by hash. Raises UserError if there is no text."""
    files, manifest = listed(folder, None)
    return DocumentSource(name=name, fingerprint=fingerprint(manifest), streams=(file_stream(files, None),))


def txt_source(name: str, path: Path) -> DocumentSource:
    """One text: the first lines are trained on, the last ones held out."""
    raw = _read(path)
    _decoded(raw, path)

    def documents() -> Iterator[Document]:
        lines = _decoded(_read(path), path).splitlines(keepends=True)
        cut = len(lines) - round(VALIDATION_SHARE * len(lines))
        yield Document("train", "".join(lines[:cut]))
        yield Document("validation", "".join(lines[cut:]))

    content = [".txt", hashlib.sha256(raw).hexdigest()]
    return DocumentSource(
        name=name, fingerprint=fingerprint(content), streams=(file_stream([File(len(raw), documents)], None),)
    )


def rows_source(name: str, path: Path) -> DocumentSource:
    """The rows of one file, split by hash."""
    stream = file_stream([_file(path, path.name, None)], None)
    return DocumentSource(name=name, fingerprint=fingerprint([path.suffix, digest(path)]), streams=(stream,))


def listed(folder: Path, split: Split | None) -> tuple[list[File], list[Any]]:
    """The files under a folder that hold documents, and what they depend on.

    split: of all documents, or None to decide by hash. Raises UserError if there is no text.
    """
    paths = (path for path in folder.rglob("*") if path.suffix in FILE_SUFFIXES and path.is_file())
    return _listed(folder, paths, split)


def file_stream(files: Sequence[File], split: Split | None) -> Stream:
    """The documents of files, one file after the other; a position is [file, its documents read]."""
    total = max(1, sum(file.size for file in files))

    def batches(position: Any) -> Generator[Batch, None, None]:
        index, done = position or (0, 0)
        read = sum(file.size for file in files[:index])

        def documents() -> Iterator[Document]:
            nonlocal index, done, read
            while index < len(files):
                for document in islice(files[index].documents(), done, None):
                    done += 1
                    yield document
                read += files[index].size
                index, done = index + 1, 0

        return in_batches(documents(), lambda: [index, done], lambda: read / total)

    return Stream(split=split, batches=batches)


def digest(path: Path) -> str:
    """Hexadecimal SHA-256 of a file that may be larger than the memory."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def _listed(folder: Path, paths: Iterable[Path], split: Split | None) -> tuple[list[File], list[Any]]:
    """Every UTF-8 text once, by relative path, then every file of rows once; of exact copies the first."""
    texts: dict[str, tuple[str, Path]] = {}  # digest of the contents -> relative path, path
    tables: dict[str, tuple[str, Path]] = {}  # the same of files that are read row by row
    any_text = False
    for relative, path in sorted((path.relative_to(folder).as_posix(), path) for path in paths):
        if path.suffix in ROW_READERS:
            tables.setdefault(digest(path), (relative, path))
            continue
        raw = _read(path)
        try:
            any_text |= bool(raw.decode("utf-8"))
        except UnicodeDecodeError:
            continue  # not text
        texts.setdefault(hashlib.sha256(raw).hexdigest(), (relative, path))
    if not tables and not any_text:
        raise UserError(f"{folder} must hold text in {', '.join(FILE_SUFFIXES)} files (UTF-8), but there is none.")
    found = [(relative, path, digest) for kind in (texts, tables) for digest, (relative, path) in kind.items()]
    files = [_file(path, relative, split) for relative, path, _ in found]
    return files, [[relative, digest] for relative, _, digest in found]


def _stdlib_files(folder: Path) -> Iterator[Path]:
    """Folders that are left out are not entered: one of them may hold every installed package."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in STDLIB_EXCLUDED]
        yield from (
            Path(parent, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )


def _file(path: Path, relative: str, split: Split | None) -> File:
    def documents() -> Iterator[Document]:
        if path.suffix in ROW_READERS:
            yield from (Document(split or by_hash(text), text) for text in ROW_READERS[path.suffix](path))
        else:
            yield Document(split or by_hash(relative), _decoded(_read(path), path))

    return File(path.stat().st_size, documents)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def _decoded(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} must be text in UTF-8, but holds other bytes.") from None
