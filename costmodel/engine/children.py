"""Processes that run the engine: how one is started and told what to do, where its output goes, its last words."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TextIO

# The engine asks for 4 OpenMP threads in every matrix product of integers (linalg.h, matmul), which wait by spinning:
# with as many parties as cores, a product took up to 40 times as long as on one thread.
THREAD_LIMIT = "OMP_THREAD_LIMIT"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Child:
    """ranks: those it runs. answers: where it writes them."""

    process: subprocess.Popen[bytes]
    ranks: tuple[int, ...]
    answers: TextIO


def log_file(folder: Path, rank: int) -> Path:
    """Where the output of the process whose first rank this is goes."""
    return folder / f"log.{rank}"


@contextmanager
def started_child(
    module: str, folder: Path, ranks: Sequence[int], threads: int, prefix: Sequence[str] = ()
) -> Iterator[Child]:
    """A process of a module, which ends with the block, come what may; told its folder, where to answer, its ranks."""
    read_end, write_end = os.pipe()
    command = [*prefix, sys.executable, "-m", module, str(folder), str(write_end), *map(str, ranks)]
    with os.fdopen(read_end) as answers:
        try:
            with log_file(folder, ranks[0]).open("wb") as log:
                environment = os.environ | {THREAD_LIMIT: str(threads)}
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[write_end], env=environment
                )
        finally:
            os.close(write_end)
        try:
            yield Child(process=process, ranks=tuple(ranks), answers=answers)
        finally:
            process.kill()
            process.communicate()


def commands_of_parent() -> SimpleQueue[str]:
    """In a child: the lines on its stdin. It ends with that, whatever it is doing: its parent is done, or dead."""
    commands: SimpleQueue[str] = SimpleQueue()
    Thread(target=_read, args=(commands,), daemon=True).start()
    return commands


def _read(commands: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        commands.put(line)
    os._exit(0)


def last_words(log: str) -> str:
    """The line of an error, else the last line of the log that is not the profile's."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and "[info]" not in line]
    errors = [line for line in lines if re.search(r"Enforce fail|Error\b|error:", line)]
    return f"{(errors or lines or ['no output'])[-1]:.300}"
