"""Finished parts of an evaluation, a line of JSON each, so that an interrupted evaluation continues.

A part is found by a key that depends on everything that decides its result, so a file may hold parts of several
evaluations.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from costmodel.config.files import MOST_LINE, plain_json, read_bytes
from costmodel.errors import UserError
from nas.corpus.documents import fingerprint

FORMAT = 1  # of results; part of a key
BEGINNING = b'{"key": "'


class Parts:
    """The finished parts of an evaluation, in a file that need not exist. Raises UserError for any other file."""

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, dict[str, Any]()
        data = read_bytes(path, MOST_LINE) if path.exists() else b""
        whole, _, torn = data.rpartition(b"\n")
        for number, line in enumerate(whole.splitlines(), 1):
            row = plain_json(line, rule := f"{path}, line {number} must be a part of an evaluation")
            if not isinstance(row, dict) or row.keys() != {"key", "part", "result"}:
                raise UserError(f"{rule}; name another --output.")
            self.known[row["key"]] = row["result"]
        if torn and not torn.startswith(BEGINNING[: len(torn)]):
            raise UserError(f"{path} must hold parts of an evaluation, but holds other data; name another --output.")
        self.num_torn = len(torn)

    def result(self, part: str, content: Any, computed: Callable[[], Any]) -> Any:
        """Return the result of a part as plain data, from the file if it is there, else computed and added to the file.

        content: plain data that decides the result. Raises OSError.
        """
        key = fingerprint([FORMAT, part, content])[:16]
        if key not in self.known:
            line = json.dumps({"key": key, "part": part, "result": computed()}, allow_nan=False)
            with self.path.open("ab") as file:
                if self.num_torn:  # of a process that was killed
                    file.truncate(file.tell() - self.num_torn)
                    self.num_torn = 0
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            self.known[key] = json.loads(line)["result"]
        return self.known[key]
