"""Texts of the rows of a file: one JSON object a line (.jsonl), or a table (.parquet). Files are read row by row."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from costmodel.errors import UserError

TEXT_FIELDS = ("text", "content")
NAMED = " or ".join(map(repr, TEXT_FIELDS))


def jsonl_texts(path: Path) -> Iterator[str]:
    """The text of every line that is not blank.

    Raises UserError, naming file and line, if the file cannot be read or a line is no JSON object with a text.
    """
    try:
        with path.open("rb") as file:  # lines end at \\n alone: a JSON string may hold U+2028 and its like
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_of(line, path, number)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def _text_of(line: bytes, path: Path, number: int) -> str:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{path} must be text in UTF-8, but line {number} holds other bytes.") from None
    except (ValueError, RecursionError) as error:
        problem = getattr(error, "msg", error)
        raise UserError(f"{path}, line {number} must be a JSON object, but cannot be parsed: {problem}.") from None
    texts = [row[field] for field in TEXT_FIELDS if field in row] if isinstance(row, dict) else []
    if not texts or not isinstance(texts[0], str):
        raise UserError(f"{path}, line {number} must be a JSON object with a text in {NAMED}.")
    try:
        texts[0].encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{path}, line {number} must hold Unicode text, but has half a surrogate pair.") from None
    return texts[0]


def parquet_texts(path: Path) -> Iterator[str]:
    """The texts of a table, nulls left out.

    Raises UserError, naming the file, if it is damaged or no parquet, or has no column of texts.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            schema = table.schema_arrow
            fields = [field for field in TEXT_FIELDS if field in schema.names]
            if not fields or not _is_text(schema.field(fields[0]).type):
                raise UserError(f"{path} must have a column of texts named {NAMED}.")
            for batch in table.iter_batches(columns=fields[:1]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{path} must be a whole parquet file, but cannot be read: {problem:.120}.") from None


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


ROW_READERS: dict[str, Callable[[Path], Iterator[str]]] = {".jsonl": jsonl_texts, ".parquet": parquet_texts}
