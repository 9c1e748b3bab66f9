"""Reads texts from files of rows: .jsonl, .json, .csv, .tsv and .parquet. All but .parquet may be compressed."""

import bz2
import csv
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from costmodel.config.files import MOST_LINE, MOST_ROWS, open_file, plain_json
from costmodel.errors import UserError

TEXT_FIELDS = ("text", "content")
NAMED = " or ".join(map(repr, TEXT_FIELDS))
MOST_JSON_BYTES = 1 << 30  # a .json file is read as a whole, in blocks until it is too large
BLOCK_BYTES = 1 << 20
MOST_CSV_CHARACTERS = (1 << 31) - 1  # of a cell, instead of 131,072


class _TooLargeError(UserError):
    """A file that is read as a whole has too many bytes."""


OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def kind_of(path: Path) -> str:
    """Return the suffix that decides how a file is read, in lower case, such as `.jsonl` for `a.JSONL.gz`."""
    kind = path.with_suffix("").suffix.lower() if path.suffix.lower() in OPENERS else path.suffix.lower()
    return path.suffix.lower() if kind in ("", ".parquet") else kind


@contextmanager
def opened(path: Path, most: int = MOST_ROWS) -> Iterator[IO[bytes]]:
    """Open a file for a block, and decompress it as it is read.

    Raises UserError if the file is larger on disk than `most` bytes or cannot be read, or for any OSError in the block.
    """
    try:
        file: IO[bytes] = open_file(path, most)
        if path.suffix.lower() in OPENERS:
            file.close()
            file = OPENERS[path.suffix.lower()](path, "rb")
        with file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def jsonl_texts(path: Path) -> Iterator[str]:
    """Yield the text of each line of a .jsonl file; blank lines are skipped.

    Raises UserError if the file cannot be read, or a line is too long or not a JSON object with a text.
    """
    yield from (_text_of(row, where) for row, where in jsonl_rows(path))


def jsonl_rows(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the data of each line of a .jsonl file, and words for its place (file and line); blank lines are skipped.

    Raises UserError if the file cannot be read, or a line is not JSON or too long.
    """
    with opened(path) as file:  # lines end with \\n only: JSON strings may contain U+2028
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), 1):
            if len(line) == MOST_LINE:
                raise UserError(f"{path}, line {number} must have less than {MOST_LINE:,} bytes.")
            if line.strip():
                yield _parsed(line, path, f", line {number}"), f"{path}, line {number}"


def json_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a .json file, which has a list of rows, a single row, or lines as in a .jsonl file.

    Raises UserError if the file cannot be read, is too large to be read as a whole, or has a row without a text;
    FileNotFoundError if it does not exist.
    """
    blocks, size = list[bytes](), path.stat().st_size
    if size <= MOST_JSON_BYTES:
        with opened(path) as file:
            size = 0
            while size <= MOST_JSON_BYTES and (block := file.read(BLOCK_BYTES)):
                blocks.append(block)
                size += len(block)
    if size > MOST_JSON_BYTES:
        raise _TooLargeError(f"{path} must be at most 1 GiB to be read as one JSON document; write it as .jsonl.")
    try:
        rows = _parsed(b"".join(blocks), path, "")
    except UserError:
        yield from jsonl_texts(path)
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield _text_of(row, f"{path}, row {number}")


def csv_texts(path: Path) -> Iterator[str]:
    """Yield the non-empty texts of a .csv or .tsv file, whose first line names its columns.

    Raises UserError, naming the file, if it cannot be read, is no table or not UTF-8, or has no column of texts.
    """
    csv.field_size_limit(MOST_CSV_CHARACTERS)
    try:
        with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            rows = csv.DictReader(text, delimiter="\t" if kind_of(path) == ".tsv" else ",")
            field = next((name for name in TEXT_FIELDS if name in (rows.fieldnames or ())), None)
            if field is None:
                raise UserError(f"{path} must have a column of texts named {NAMED}.")
            yield from (row[field] for row in rows if row[field])
    except UnicodeDecodeError:
        raise UserError(f"{path} must be text in UTF-8, but holds other bytes.") from None
    except csv.Error as error:
        raise UserError(f"{path} must be a table of comma-separated values, but: {error}.") from None


def _parsed(raw: bytes, path: Path, place: str) -> Any:
    try:
        return plain_json(raw.decode("utf-8-sig"), f"{path}{place} must be a JSON object")
    except UnicodeDecodeError:
        within = place.replace(", ", "", 1) or "it"
        raise UserError(f"{path} must be text in UTF-8, but {within} holds other bytes.") from None


def _text_of(row: Any, where: str) -> str:
    texts = [row[field] for field in TEXT_FIELDS if field in row] if isinstance(row, dict) else []
    if not texts or not isinstance(texts[0], str):
        raise UserError(f"{where} must be a JSON object with a text in {NAMED}.")
    try:
        texts[0].encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where} must hold Unicode text, but has half a surrogate pair.") from None
    return texts[0]


def parquet_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a parquet file; nulls are skipped.

    Raises UserError, naming the file, if it cannot be read as parquet or has no column of texts.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            schema = table.schema_arrow
            fields = [field for field in TEXT_FIELDS if field in schema.names]
            kind = schema.field(fields[0]).type if fields else pa.null()
            if (kind.value_type if pa.types.is_dictionary(kind) else kind) not in (
                pa.string(),
                pa.large_string(),
                pa.string_view(),
            ):
                has = ", ".join(f"{field.name} ({field.type})" for field in schema)
                raise UserError(f"{path} must have a column of texts named {NAMED}, but has {has:.200}.")
            for batch in table.iter_batches(columns=fields[:1]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{path} must be a whole parquet file, but cannot be read: {problem:.120}.") from None


ROW_READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".jsonl": jsonl_texts,
    ".parquet": parquet_texts,
    ".json": json_texts,
    ".csv": csv_texts,
    ".tsv": csv_texts,
}
MAY_LACK_TEXT = (".json", ".csv", ".tsv")  # often beside texts, as settings or numbers


def lacks_text(path: Path) -> str:
    """Return why to leave out an existing file, or ''. Only files of kinds in MAY_LACK_TEXT are read, up to a text."""
    if kind_of(path) not in MAY_LACK_TEXT:
        return ""
    try:
        return "" if next(ROW_READERS[kind_of(path)](path), None) is not None else "without rows"
    except _TooLargeError:
        return f"too large for {kind_of(path)}"
    except UserError:
        return f"without a text in {NAMED}"
