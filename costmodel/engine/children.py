"""Processes that run the engine, one a party: started, or kept from an earlier job, told what to do, and ended."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, TextIO

# The engine asks for 4 OpenMP threads in every matrix product of integers (linalg.h, matmul), which wait by spinning:
# with as many parties as cores, a product took up to 40 times as long as on one thread.
THREAD_LIMIT = "OMP_THREAD_LIMIT"
# The engine makes its arrays anew in every op. glibc by default returns the large ones to the kernel, which pages them
# in again, 4 KiB at a time: 3 to 4 of 6 s of a product with 28 million weights (SmolLM2's logits), a quarter of one
# with 900,000. `mallopt` knows no huge pages, so that it takes the environment; what a user states there comes after
# these, and holds.
TUNABLES = "GLIBC_TUNABLES"
KEPT_MEMORY = (
    "glibc.malloc.hugetlb=1",
    "glibc.malloc.mmap_max=0",
    f"glibc.malloc.trim_threshold={1 << 40}",
    "glibc.malloc.arena_max=1",
)
LOG, JOB = "log", "job"  # in the folder of a child: its output, and all that its job leaves
PROGRESS = "progress"  # in the folder of a job: which op the party is in

# By threads, children that wait for their next job; None where none is kept.
_idle: ContextVar["dict[int, list[Child]] | None"] = ContextVar("idle", default=None)


@dataclass(kw_only=True, slots=True, eq=False)
class Child:
    """answers: where it writes lines of JSON. ending: ends it. is_free: whether it waits for a job."""

    process: subprocess.Popen[bytes]
    folder: Path
    answers: TextIO
    ending: ExitStack
    is_free: bool = True

    @property
    def job_folder(self) -> Path:
        return self.folder / JOB

    @property
    def log(self) -> str:
        """Its output since it got its job."""
        return (self.folder / LOG).read_text(errors="replace")

    @property
    def at(self) -> str:
        """The op that it is in, or was in when it ended, in words."""
        with suppress(FileNotFoundError):
            return f" in op {(self.job_folder / PROGRESS).read_text()!r}"
        return ""

    def begin(self, files: dict[str, Any]) -> None:
        """Gives it a job: files that it finds in the job's folder, pickled by name."""
        shutil.rmtree(self.job_folder, ignore_errors=True)
        self.job_folder.mkdir()
        os.truncate(self.folder / LOG, 0)
        for name, content in files.items():
            (self.job_folder / name).write_bytes(pickle.dumps(content))
        self.is_free = False
        self.tell("begin")

    def tell(self, *command: Any) -> None:
        """A child that has ended is not told, and heard to have."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()


@contextmanager
def kept_children() -> Iterator[None]:
    """Within the block, who has done its job well waits for another, rather than each start importing the engine.

    A block in another leaves its children to that one.
    """
    if _idle.get() is not None:
        yield
        return
    idle: dict[int, list[Child]] = {}
    token = _idle.set(idle)
    try:
        yield
    finally:
        _idle.reset(token)
        with ExitStack() as stack:  # each is ended, whatever becomes of the others
            for child in (child for children in idle.values() for child in children):
                stack.push(child.ending)


@contextmanager
def own_children() -> Iterator[None]:
    """Within the block, every process is started anew and ends with its job, also inside `kept_children`."""
    token = _idle.set(None)
    try:
        yield
    finally:
        _idle.reset(token)


@contextmanager
def child_of(threads: int) -> Iterator[Child]:
    """A child for a job; it ends with the block, come what may, unless it is free again and children are kept."""
    idle = _idle.get()
    waiting = [] if idle is None else idle.setdefault(threads, [])
    while waiting and waiting[-1].process.poll() is not None:
        waiting.pop().ending.close()
    child = waiting.pop() if waiting else _started(threads)
    try:
        yield child
    finally:
        if idle is not None and child.is_free:
            shutil.rmtree(child.job_folder, ignore_errors=True)  # a prompt, logits, masks
            waiting.append(child)
        else:
            child.ending.close()


def _started(threads: int) -> Child:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="party-")))
        read_end, write_end = os.pipe()
        answers = stack.enter_context(os.fdopen(read_end))
        command = [sys.executable, "-m", "costmodel.engine.party", str(folder), str(write_end)]
        with os.fdopen(write_end), (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write_end],
                env=environment(threads),
            )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        return Child(process=process, folder=folder, answers=answers, ending=stack.pop_all())


def environment(threads: int) -> dict[str, str]:
    """What a child is started in. It can import what this process can, wherever it has gone: jobs name functions."""
    return os.environ | {
        THREAD_LIMIT: str(threads),
        TUNABLES: ":".join(filter(None, (*KEPT_MEMORY, os.environ.get(TUNABLES)))),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def commands_of_parent() -> SimpleQueue[list[Any]]:
    """Commands that a child is told. It ends with its stdin, whatever it is doing: its parent is done, or dead."""
    commands: SimpleQueue[list[Any]] = SimpleQueue()
    Thread(target=_read, args=(commands,), daemon=True).start()
    return commands


def _read(commands: SimpleQueue[list[Any]]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    os._exit(0)


def last_words(log: str) -> str:
    """The line of an error, else the last line of the log that is not the profile's."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and "[info]" not in line]
    errors = [line for line in lines if re.search(r"Enforce fail|Error\b|error:", line)]
    return f"{(errors or lines or ['no output'])[-1]:.300}"
