"""The folder of runs, locks on the folders of runs and trainings, and files that are replaced in one step."""

import csv
import fcntl
import io
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from costmodel.errors import UserError

RUNS = Path("runs")
LOCK_FILE = ".lock"
LOCK_PATIENCE_S = 1.0  # time to wait for a lock, which `is_running` takes for a moment to test it


def newest(file: str) -> Path | None:
    """Return the subfolder of RUNS whose file named `file` was modified last; None if none has such a file."""
    newest_path = max(RUNS.glob(f"*/{file}"), key=lambda path: path.stat().st_mtime, default=None)
    return newest_path and newest_path.parent


def replace_file(path: Path, content: str | bytes) -> None:
    """Write or replace a file in one step; if that fails, raise OSError and leave the old file as it was.

    content: text is written as UTF-8. If several processes replace a file at once, the last one wins.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        write_through(partial, content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_through(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a run or training inside a `with` block.

    Raises UserError if it stays locked elsewhere for LOCK_PATIENCE_S, OSError if its lock file cannot be written.
    """
    with (folder / LOCK_FILE).open("w") as file:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while not _took(file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                raise UserError(f"{folder} is being run by another process; wait for it or stop it first.")
            time.sleep(LOCK_PATIENCE_S / 20)
        yield


def is_running(folder: Path) -> bool:
    """Whether a process has locked the folder of a run or training. Works without write access."""
    try:
        file = (folder / LOCK_FILE).open("rb")
    except FileNotFoundError:
        return False
    with file:
        return not _took(file.fileno(), fcntl.LOCK_SH)


def _took(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Write a table with a header as CSV, in place of any file at `path`. Raises OSError."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    replace_file(path, text.getvalue())
