"""Child processes that run the engine, one per party: started or reused, told what to do, and ended."""

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
# The engine allocates new arrays in every op. By default, glibc returns large ones to the kernel, which pages them in
# again, 4 KiB at a time: this took 3 to 4 of the 6 s of a product with 28 million weights (SmolLM2's logits), and a
# quarter of the time of one with 900,000. `mallopt` cannot set huge pages, hence the environment variable; a user's own
# settings come after these, and so take precedence.
TUNABLES = "GLIBC_TUNABLES"
KEPT_MEMORY = (
    "glibc.malloc.hugetlb=1",
    "glibc.malloc.mmap_max=0",
    f"glibc.malloc.trim_threshold={1 << 40}",
    "glibc.malloc.arena_max=1",
)
LOG, JOB = "log", "job"  # in the folder of a child: its output, and the files of its job
PROGRESS = "progress"  # in the folder of a job: the op that the party runs

# Children that wait for a job, by their number of threads; None outside `kept_children`.
_idle: ContextVar["dict[int, list[Child]] | None"] = ContextVar("idle", default=None)


@dataclass(kw_only=True, slots=True, eq=False)
class Child:
    """A child process. `answers` are its lines of JSON, `ending` ends it, `is_free` is whether it waits for a job."""

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
        """Output since its job began."""
        return (self.folder / LOG).read_text(errors="replace")

    @property
    def at(self) -> str:
        """The op that it runs, or ran when it ended, in words; empty if unknown."""
        with suppress(FileNotFoundError):
            if op := (self.job_folder / PROGRESS).read_text():  # empty while it is being written
                return f" in op {op!r}"
        return ""

    def begin(self, files: dict[str, Any]) -> None:
        """Begin a job, with its files (content by name) pickled into the job's folder."""
        shutil.rmtree(self.job_folder, ignore_errors=True)
        self.job_folder.mkdir()
        os.truncate(self.folder / LOG, 0)
        for name, content in files.items():
            (self.job_folder / name).write_bytes(pickle.dumps(content))
        self.is_free = False
        self.tell("begin")

    def tell(self, *command: Any) -> None:
        """Send a command. Nothing is raised if the child has ended, because its reader reports that."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()


@contextmanager
def kept_children() -> Iterator[None]:
    """Within the block, reuse children that finished a job, so that not every job has to import the engine.

    In a nested block, children belong to the outer one.
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
    """Within the block, start a new process for every job, which ends with it, even inside `kept_children`."""
    token = _idle.set(None)
    try:
        yield
    finally:
        _idle.reset(token)


@contextmanager
def child_of(threads: int) -> Iterator[Child]:
    """Yield a child for a job; it ends with the block, unless it is free again and children are kept."""
    idle = _idle.get()
    waiting = [] if idle is None else idle.setdefault(threads, [])
    while waiting and waiting[-1].process.poll() is not None:
        waiting.pop().ending.close()
    child = waiting.pop() if waiting else _started(threads)
    try:
        yield child
    finally:
        if idle is not None and child.is_free:
            shutil.rmtree(child.job_folder, ignore_errors=True)  # it holds a prompt, logits and masks
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
    """Return the environment of a child. It can import what this process can, since jobs refer to functions by name."""
    return os.environ | {
        THREAD_LIMIT: str(threads),
        TUNABLES: ":".join(filter(None, (*KEPT_MEMORY, os.environ.get(TUNABLES)))),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def commands_of_parent() -> SimpleQueue[list[Any]]:
    """Return a queue of the parent's commands. The process ends with its stdin, as its parent is then done or dead."""
    commands: SimpleQueue[list[Any]] = SimpleQueue()
    Thread(target=_read, args=(commands,), daemon=True).start()
    return commands


def _read(commands: SimpleQueue[list[Any]]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    os._exit(0)


def last_words(log: str) -> str:
    """Return the line of an error, or else the last line of the log that is not part of the profile."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and "[info]" not in line]
    errors = [line for line in lines if re.search(r"Enforce fail|Error\b|error:", line)]
    return f"{(errors or lines or ['no output'])[-1]:.300}"
