"""Opens the files that users name, so that none can hang or fill the memory: regular ones of bounded size.

Plain data of such a file nests at most MOST_LEVELS deep, so that whatever walks it ends.
"""

import json
import os
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

from costmodel.errors import UserError

MOST_YAML = 1_000_000  # bytes, which take seconds; the largest committed file has 13 kB
MOST_JSON = 256_000_000  # bytes; the tokenizer of a vocabulary of 256,000 tokens has 33 MB
MOST_TEXT = 16_000_000_000  # bytes of a file of documents, each of which is read whole
MOST_ROWS = 100_000_000_000  # bytes of a file of rows, which are read one by one
MOST_WEIGHTS = 100_000_000_000  # bytes of a file of weights
MOST_LINE = 1_000_000_000  # bytes of such a row
MOST_LEVELS = 64  # lists and mappings within each other; ours have 8
_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
_UNSIZED = 1 << 16  # bytes that are read of a file whose size the system does not tell, as under /proc


def open_file(path: Path, most: int) -> BufferedReader:
    """Open a regular file to read its bytes. A UserError is raised for another kind, or more than `most` bytes."""
    try:
        # a pipe that nobody writes to must not block
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= most:
        return file
    file.close()
    if stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} must have at most {most:,} bytes, but has {status.st_size:,}; give a smaller file.")
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "special file")
    raise UserError(f"{path} must be a regular file, but is a {kind}; give a file.")


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file. A UserError is raised as by `open_file`."""
    try:
        with open_file(path, most) as file:
            return file.read(-1 if os.fstat(file.fileno()).st_size else _UNSIZED)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def read_text(path: Path, most: int) -> str:
    """Return the text of a regular file. A UserError is raised as by `read_bytes`, or for other text than UTF-8."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} must be text in UTF-8, but holds binary data.") from None


def read_json(path: Path, rule: str = "must be JSON") -> Any:
    """Return the plain data of a file; a UserError that states the rule is raised if it cannot be read."""
    return plain_json(read_text(path, MOST_JSON), f"{path} {rule}")


def plain_json(text: str | bytes, rule: str) -> Any:
    """Return JSON as plain data; a UserError that begins with the rule is raised for other text or too deep nesting."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{rule}, but cannot be parsed: {getattr(error, 'msg', error)!s:.200}.") from None
    level = [data]
    for _ in range(MOST_LEVELS):
        if not (level := [part for whole in level if isinstance(whole, dict | list) for part in _parts(whole)]):
            return data
    raise UserError(f"{rule}, but nests lists and mappings more than {MOST_LEVELS} deep.")


def _parts(whole: Any) -> Iterable[Any]:
    return whole.values() if isinstance(whole, dict) else whole
