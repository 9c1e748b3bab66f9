"""Reports bugs: one line for the user; traceback, command and versions go to a file in a run's or the cache folder."""

import errno
import os
import platform
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

from costmodel.errors import StoppedError, UserError

TRACEBACK_FILE = "traceback.txt"  # in the folder of a run, a trial or a training
PACKAGE = "private-inference-nas"
EXPECTED = (UserError, StoppedError, OSError, MemoryError)  # faults of the input or the machine; anything else is a bug
CACHE_REMEDY = "name one that can be written to in the environment variable XDG_CACHE_HOME."
UNWRITTEN = "the traceback could not be written"
MAX_CHARS = 300  # greatest length of an exception's text in the line
SECRET = "--prompt"  # the flag whose value is not written
LEAST_SECRET = 4  # fewest characters of a prompt that is also replaced in the text of an exception


class BugError(RuntimeError):
    """A bug whose report is written already. The text is the line for the user, `__cause__` the original exception."""


def default_cache_dir() -> Path:
    """Return this package's folder in XDG_CACHE_HOME or, if unset, in ~/.cache; raise UserError if there is no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / PACKAGE
    except RuntimeError:  # a user without a passwd entry
        raise UserError(f"the cache must have a folder, but this user has no home; {CACHE_REMEDY}") from None


def require_writable_cache() -> None:
    """Make the cache folder; raise a UserError with the remedy if the folder cannot be made or written to."""
    folder, reason = default_cache_dir(), os.strerror(errno.EACCES)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return
    except OSError as error:
        reason = error.strerror or str(error)
    raise UserError(f"the cache {folder} must be a folder that can be written to, but: {reason}; {CACHE_REMEDY}")


@contextmanager
def bugs_reported(folder: Path, remedy: str = "") -> Iterator[None]:
    """Within this context, report unexpected exceptions to a file in `folder`, and raise a BugError with `remedy`."""
    try:
        yield
    except (*EXPECTED, BugError):
        raise
    except Exception as error:
        line = _bug_line(error, traceback_kept(error, folder))
        raise BugError(f"{line}; {remedy}" if remedy else line) from error


def report_bug(error: BaseException) -> str:
    """Report an unexpected exception to a file in the cache, or if that fails to stderr; return a line for the user."""
    kept = UNWRITTEN
    with suppress(UserError):  # there is no home
        name = f"{datetime.now(UTC):%Y-%m-%dT%H%M%S.%fZ}-{os.getpid()}.txt"
        kept = traceback_kept(error, default_cache_dir() / "bugs", name)
    if kept == UNWRITTEN:
        print(_report(error), file=sys.stderr)
    return _bug_line(error, kept)


def _bug_line(error: BaseException, kept: str) -> str:
    return f"unexpected {described(error)}; this is a bug: {kept}"


def described(error: BaseException) -> str:
    """Return the type and text of an exception on one line, the text cut after MAX_CHARS characters."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def _report(error: BaseException | str) -> str:
    text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
    try:
        ours = version(PACKAGE)
    except PackageNotFoundError:  # run from a folder that was never installed
        ours = "not installed"
    command = [
        argument.partition("=")[0] if argument.startswith(f"{SECRET}=") else argument for argument in sys.orig_argv
    ]
    prompts = {value for flag, value in pairwise(sys.orig_argv) if flag == SECRET}
    prompts |= {argument.partition("=")[2] for argument in sys.orig_argv if argument.startswith(f"{SECRET}=")}
    for prompt in filter(lambda prompt: len(prompt) >= LEAST_SECRET, prompts):
        text = text.replace(prompt, "...").replace(repr(prompt)[1:-1], "...")
    return (
        f"time: {datetime.now(UTC).isoformat(timespec='seconds')}\n"
        f"command: {shlex.join('...' if argument in prompts else argument for argument in command)}\n"
        f"versions: {PACKAGE} {ours}, python {platform.python_version()}\n\n{text.rstrip()}\n\n"
    )


def traceback_kept(error: BaseException | str, folder: Path, name: str = TRACEBACK_FILE) -> str:
    """Append a report on an exception, or a traceback as text, to a file; return in words where it is, or UNWRITTEN."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
            os.fchmod(descriptor, 0o600)  # of a file that was there, too
            file.write(_report(error))
    except (OSError, ValueError):  # ValueError: not a valid path
        return UNWRITTEN
    return f"the traceback is in {folder / name}"
