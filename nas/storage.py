"""Where this package keeps things on disk: its runs, their lock, and the one way a file is replaced."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from costmodel.errors import UserError

RUNS = Path("runs")
LOCK_FILE = ".lock"
LOCK_PATIENCE_S = 1.0  # a reader that asks whether a run is held holds it for a moment itself


def newest(file: str) -> Path | None:
    """The folder under RUNS whose file of that name was written last, None if there is none."""
    newest_path = max(RUNS.glob(f"*/{file}"), key=lambda path: path.stat().st_mtime, default=None)
    return newest_path and newest_path.parent


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a whole file, text as UTF-8, through to the disk, or leaves the old one. Raises OSError.

    Of several processes that write it at once the last one's is whole.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        write_through(partial, content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_through(path: Path, content: bytes) -> None:
    """Writes a file and waits until it is on the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run for this process. Raises UserError if another process is running it."""
    with (folder / LOCK_FILE).open("w") as file:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while not _took(file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                raise UserError(f"{folder} is being run by another process; wait for it or stop it first.")
            time.sleep(LOCK_PATIENCE_S / 20)
        yield


def is_running(folder: Path) -> bool:
    """Whether a process holds the run. Reads only, so it also works in a folder of someone else's."""
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
