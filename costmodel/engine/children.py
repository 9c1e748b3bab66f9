"""Start, reuse, command and end child processes that run the engine, one per party.

Secrets reach a child through a socket, its standard input. On disk a child has two files without a name (its output,
and the name of the op that runs) and a folder for sockets and masks. The parent deletes this folder; so does a child
that ends itself, as it does if the parent was killed.
"""

import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Thread
from typing import Any, NoReturn, TypeAlias

from costmodel.engine.channel import Blob, Channel, Frame, GoneError

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
JOB, SOCKET = "job", "socket"  # in a child's folder, the folder of its job; in that, the socket that other parties call
MOST_NAME = 1024  # bytes of an op's name
LOG = 1  # descriptor of standard output, which is a file that the child also reads

Commands: TypeAlias = SimpleQueue[Frame]
Told: TypeAlias = SimpleQueue[tuple[dict[str, Any], Sequence[Blob]] | None]  # headers and blobs to send; None ends

# Children that wait for a job, by their number of threads; None outside `kept_children`.
_idle: ContextVar["dict[int, list[Child]] | None"] = ContextVar("idle", default=None)


def read_all(file: int, start: int = 0) -> bytes:
    """Return the bytes of an open file (a descriptor) from byte `start` on, without moving the file's position."""
    return os.pread(file, max(0, os.fstat(file).st_size - start), start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The name of the op that a party runs (empty for none), in a file (an open descriptor) that its parent reads."""

    file: int

    def write(self, op: str) -> None:
        os.pwrite(self.file, op.encode()[:MOST_NAME].ljust(MOST_NAME, b"\0"), 0)

    @property
    def at(self) -> str:
        """Text such as ` in op 'embed'` for the op that runs, or ran when the process ended; empty if none did."""
        op = os.pread(self.file, MOST_NAME, 0).rstrip(b"\0").decode(errors="replace")
        return f" in op {op!r}" if op else ""


@dataclass(kw_only=True, slots=True, eq=False)
class Child:
    """A child process. Closing `ending` ends it; `is_free` says whether it waits for a job.

    folder: the child's own folder. output: descriptor of the file with its output. progress: the op that it runs.
    commands: queue of the frames that are still to be sent to it through `channel`.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    channel: Channel
    output: int
    progress: Progress
    commands: Told
    ending: ExitStack
    is_free: bool = True

    @property
    def job_folder(self) -> Path:
        return self.folder / JOB

    @property
    def log(self) -> str:
        """The output of the child since its job began."""
        return read_all(self.output).decode(errors="replace")

    def begin(self, assignment: object, weights: object) -> None:
        """Begin a job with a party's assignment, and its weights (None except for the server)."""
        shutil.rmtree(self.job_folder, ignore_errors=True)
        self.job_folder.mkdir()
        os.truncate(self.output, 0)
        os.lseek(self.output, 0, os.SEEK_SET)  # the child's position too
        self.progress.write("")
        self.is_free = False
        self.tell("begin", assignment, weights)

    def tell(self, kind: str, *contents: object, **header: Any) -> None:
        """Queue a command with pickled contents, and return at once, even if the child is stopped or has ended."""
        self.commands.put(({"kind": kind, **header}, list(map(pickle.dumps, contents))))


@contextmanager
def kept_children() -> Iterator[None]:
    """Within the block, reuse children that finished a job, so that not every job has to import the engine.

    The children end with the block. A nested block changes nothing: its children belong to the outer block.
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
    """Within the block, start a new process for every job, and end it with the job, even inside `kept_children`."""
    token = _idle.set(None)
    try:
        yield
    finally:
        _idle.reset(token)


@contextmanager
def child_of(threads: int) -> Iterator[Child]:
    """Yield a child for one job, limited to `threads` threads.

    The child ends with the block. Within `kept_children`, a child that has done its job waits for another one instead.
    """
    idle = _idle.get()
    waiting = [] if idle is None else idle.setdefault(threads, [])
    while waiting and waiting[-1].process.poll() is not None:
        waiting.pop().ending.close()
    child = waiting.pop() if waiting else _started(threads)
    try:
        yield child
    finally:
        if idle is not None and child.is_free:
            shutil.rmtree(child.job_folder, ignore_errors=True)  # it may hold masks
            waiting.append(child)
        else:
            child.ending.close()


def _started(threads: int) -> Child:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="party-")))
        output, progress = (stack.enter_context(TemporaryFile()).fileno() for _ in range(2))
        ours, theirs = socket.socketpair()
        stack.callback((channel := Channel(ours)).close)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "costmodel.engine.party", str(folder), str(progress)],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                pass_fds=[progress],
                env=environment(threads),
            )
        stack.callback(process.wait)
        stack.callback(process.kill)
        commands: Told = SimpleQueue()
        Thread(target=_send, args=(commands, channel), daemon=True).start()
        stack.callback(commands.put, None)
        return Child(
            process=process,
            folder=folder,
            channel=channel,
            output=output,
            progress=Progress(file=progress),
            commands=commands,
            ending=stack.pop_all(),
        )


def _send(commands: Told, channel: Channel) -> None:
    with suppress(GoneError):
        while (command := commands.get()) is not None:
            channel.send(*command)
            del command  # it may hold weights


def environment(threads: int) -> dict[str, str]:
    """Return a child's environment: this process's, with its import path, a limit of threads and settings of malloc."""
    return os.environ | {
        THREAD_LIMIT: str(threads),
        TUNABLES: ":".join(filter(None, (*KEPT_MEMORY, os.environ.get(TUNABLES)))),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def commands_of_parent(channel: Channel, folder: Path) -> Commands:
    """Return a queue that a thread fills with the parent's commands; the thread calls `end` when the parent is gone."""
    commands: Commands = SimpleQueue()

    def read() -> None:
        with suppress(GoneError):
            while True:
                commands.put(channel.receive())
        end(folder, 0)

    Thread(target=read, daemon=True).start()
    return commands


def end(folder: Path, status: int) -> NoReturn:
    """Delete the folder of this process, and end the process with the exit status `status`."""
    for _ in range(10):  # the engine may still write to it
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


def parent_is_awake() -> bool:
    """Return whether the parent process is not stopped, as by Ctrl-Z; true if the system does not tell."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt"
    return True


def last_words(log: str) -> str:
    """Return a log's last line with an error or, without one, the last line without `[info]`, up to 300 characters."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and "[info]" not in line]
    errors = [line for line in lines if re.search(r"Enforce fail|Error\b|error:", line)]
    return f"{(errors or lines or ['no output'])[-1]:.300}"
