"""Documents of local files: folders of text and tables, or a single file.

A hash decides the split (of the relative path for files, of the text for rows), so that it depends neither on order nor
on other files. Exact copies of a file are read once, and rows with equal text are in the same split, so that no
validation text is trained on.
"""

import hashlib
import os
import sysconfig
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from costmodel.config.user_files import MOST_LINE, MOST_ROWS, MOST_TEXT, open_file, plain_json, read_bytes
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

TEXT_FIELDS = ("text", "content")
NAMED = " or ".join(map(repr, TEXT_FIELDS))

# Excluded because a model should not learn from it: tests, bundled packages, and tables with repetitive lines.
STDLIB_EXCLUDED = frozenset({
    "test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "turtledemo", "lib2to3", "encodings",
    "pydoc_data", "__pycache__",
})  # fmt: skip


def jsonl_texts(path: Path) -> Iterator[str]:
    """Yield the text of every line that is not blank.

    Raises UserError, naming file and line, if the file cannot be read or a line is not a JSON object with a text.
    """
    try:
        with open_file(path, MOST_ROWS) as file:  # lines end with \\n only: JSON strings may contain U+2028
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), 1):
                if len(line) == MOST_LINE:
                    raise UserError(f"{path}, line {number} must have less than {MOST_LINE:,} bytes.")
                if line.strip():
                    yield _text_of(line, path, number)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def _text_of(line: bytes, path: Path, number: int) -> str:
    try:
        row = plain_json(line.decode("utf-8"), f"{path}, line {number} must be a JSON object")
    except UnicodeDecodeError:
        raise UserError(f"{path} must be text in UTF-8, but line {number} holds other bytes.") from None
    texts = [row[field] for field in TEXT_FIELDS if field in row] if isinstance(row, dict) else []
    if not texts or not isinstance(texts[0], str):
        raise UserError(f"{path}, line {number} must be a JSON object with a text in {NAMED}.")
    try:
        texts[0].encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{path}, line {number} must hold Unicode text, but has half a surrogate pair.") from None
    return texts[0]


def parquet_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a table, without nulls.

    Raises UserError, naming the file, if it is damaged, not a parquet file, or has no column of texts.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            schema = table.schema_arrow
            fields = [field for field in TEXT_FIELDS if field in schema.names]
            if not fields or schema.field(fields[0]).type not in (pa.string(), pa.large_string()):
                raise UserError(f"{path} must have a column of texts named {NAMED}.")
            for batch in table.iter_batches(columns=fields[:1]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{path} must be a whole parquet file, but cannot be read: {problem:.120}.") from None


ROW_READERS: dict[str, Callable[[Path], Iterator[str]]] = {".jsonl": jsonl_texts, ".parquet": parquet_texts}
FILE_SUFFIXES = (".txt", ".py", ".md", *ROW_READERS)


class File(NamedTuple):
    size: int
    documents: Callable[[], Iterator[Document]]


def stdlib_source() -> DocumentSource:
    """Return the standard library of the running Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return _source("stdlib", *_listed(folder, stdlib_files(folder), None))


def folder_source(name: str, folder: Path, *, whole_files: bool = False) -> DocumentSource:
    """Return every text and table in a folder, split by hash.

    If all texts would be in one split, the end of each is held out instead, unless `whole_files` is set. Raises
    UserError if there is no text.
    """
    files, content = listed(folder, None)
    names = [relative for relative, _ in content]
    is_text = all(Path(relative).suffix.lower() not in ROW_READERS for relative in names)
    if whole_files or not is_text or len(set(map(by_hash, names))) > 1:
        return _source(name, files, content)
    warnings.warn(f"{folder} has too few files to hold some out: the end of each validates.", stacklevel=1)
    return _source(name, [_cut_file(folder / relative, relative) for relative in names], [*content, "cut"])


def txt_source(name: str, path: Path) -> DocumentSource:
    """Return one text, whose beginning is trained on and whose end is held out."""
    _decoded(path)  # refuses other encodings at once
    return _source(name, [_cut_file(path, path.name)], [".txt", digest(path)])


def _halves(text: str) -> tuple[str, str]:
    """Split off the end of a text: VALIDATION_SHARE of its lines, or of its words if it has too few lines."""
    lines = text.splitlines(keepends=True)
    if held_out := round(VALIDATION_SHARE * len(lines)):
        return "".join(lines[:-held_out]), "".join(lines[-held_out:])
    cut = len(text) - round(VALIDATION_SHARE * len(text))
    cut = text.find(" ", cut) + 1 or cut
    return text[:cut], text[cut:]


def rows_source(name: str, path: Path) -> DocumentSource:
    """Return the rows of one file, split by hash."""
    return _source(name, [_file(path, path.name, None)], [path.suffix, digest(path)])


def _source(name: str, files: Sequence[File], content: list[Any]) -> DocumentSource:
    return DocumentSource(name=name, fingerprint=fingerprint(content), streams=(file_stream(files, None),))


def listed(folder: Path, split: Split | None) -> tuple[list[File], list[Any]]:
    """Return the files in a folder that hold documents, and what their documents depend on.

    split: of all documents, or None to decide by hash. Raises UserError if there is no text.
    """
    paths = (path for path in folder.rglob("*") if path.suffix.lower() in FILE_SUFFIXES and path.is_file())
    return _listed(folder, paths, split)


def file_stream(files: Sequence[File], split: Split | None) -> Stream:
    """Stream the documents of files, one file after the other; a position is [file, number of its documents read]."""
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
    """Return the hexadecimal SHA-256 of a file that may not fit in memory."""
    try:
        with open_file(path, MOST_ROWS) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def _listed(folder: Path, paths: Iterable[Path], split: Split | None) -> tuple[list[File], list[Any]]:
    """List every UTF-8 text by relative path, then every file of rows, without exact copies."""
    texts: dict[str, tuple[str, Path]] = {}  # digest of the contents -> relative path, path
    tables: dict[str, tuple[str, Path]] = {}  # the same for files of rows
    any_text, others = False, list[str]()
    for relative, path in sorted((path.relative_to(folder).as_posix(), path) for path in paths):
        if path.suffix.lower() in ROW_READERS:
            tables.setdefault(digest(path), (relative, path))
            continue
        raw = _read(path)
        try:
            any_text |= bool(raw.decode("utf-8"))
        except UnicodeDecodeError:
            others.append(relative)
            continue
        texts.setdefault(hashlib.sha256(raw).hexdigest(), (relative, path))
    first, rest = (others or [""])[0], len(others) - 1
    bad = f"{first} is not UTF-8" if not rest else f"{first} and {rest} other files are not UTF-8"
    if not tables and not any_text:
        suffixes, found = ", ".join(FILE_SUFFIXES), bad if others else "there is none"
        raise UserError(f"{folder} must hold text in {suffixes} files (UTF-8), but {found}.")
    if others:
        warnings.warn(f"{folder}: {bad}, and left out; convert what should be read.", stacklevel=1)
    unique = [(relative, path, digest) for kind in (texts, tables) for digest, (relative, path) in kind.items()]
    files = [_file(path, relative, split) for relative, path, _ in unique]
    return files, [[relative, digest] for relative, _, digest in unique]


def stdlib_files(folder: Path) -> Iterator[Path]:
    """Yield files of the standard library, without entering excluded folders such as site-packages."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in STDLIB_EXCLUDED]
        yield from (
            Path(parent, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )


def _file(path: Path, relative: str, split: Split | None) -> File:
    def documents() -> Iterator[Document]:
        if path.suffix.lower() in ROW_READERS:
            rows = enumerate(ROW_READERS[path.suffix.lower()](path), 1)
            yield from (Document(split or by_hash(text), text, f"{relative}:{row}") for row, text in rows)
        else:
            yield Document(split or by_hash(relative), _decoded(path), relative)

    return File(path.stat().st_size, documents)


def _cut_file(path: Path, relative: str) -> File:
    def documents() -> Iterator[Document]:
        train, validation = _halves(_decoded(path))
        yield Document("train", train, relative)
        yield Document("validation", validation, relative)

    return File(path.stat().st_size, documents)


def _read(path: Path) -> bytes:
    return read_bytes(path, MOST_TEXT)


def _decoded(path: Path) -> str:
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} must be text in UTF-8, but holds other bytes.") from None
