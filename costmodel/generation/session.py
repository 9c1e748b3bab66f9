"""The parent's side of a session: starts parties as processes, drives the client, and ends them, come what may."""

import json
import pickle
import socket
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NoReturn

import numpy as np

from costmodel.engine.children import Child, last_words, log_file, started_child
from costmodel.engine.links import LOOPBACK
from costmodel.engine.spu import check_installed
from costmodel.errors import StoppedError, UserError
from costmodel.execution.interpreter import Array
from costmodel.generation.assignment import ASSIGNMENT, CLIENT, LOGITS, Assignment, part_of
from costmodel.protocols.derived import NUM_PARTIES

CAUSE_PATIENCE_S = 5.0  # a party that failed says why, later than its peers say that it is gone


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRun:
    """What a step cost, bytes and messages summed over parties, and its logits (projected tokens x vocab).

    seconds: of the client, from sharing the tokens to having the logits.
    """

    sent_bytes: int
    messages: int
    seconds: float
    logits: Array


class Session:
    """Parties that this machine runs, by rank; the others, if any, run elsewhere."""

    def __init__(self, children: dict[int, Child], folders: dict[int, Path]) -> None:
        self.children, self._folders = children, folders
        self._heard: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
        self._waiting: dict[int, deque[dict[str, Any]]] = {rank: deque() for rank in children}
        for rank in children:
            Thread(target=self._listen, args=(rank,), daemon=True).start()

    def run(self, step: int, tokens: Array) -> StepRun:
        """The next step, on the client's tokens. Raises StoppedError, in one line, if a party cannot go on."""
        self._tell("run", step, np.asarray(tokens).tolist())
        cost = self.answer(CLIENT)
        return StepRun(**cost, logits=np.load(self._folders[CLIENT] / LOGITS))

    def leave(self) -> None:
        """Ends the session on all machines. Raises StoppedError if a party is gone."""
        self._tell("leave")
        for rank in self.children:
            self.answer(rank)

    def answer(self, rank: int) -> dict[str, Any]:
        """What a party says next. Raises UserError or StoppedError, in one line, if it or another one here ended."""
        while not self._waiting[rank]:
            who, said = self._heard.get()
            if "error" in said:
                self._fail(said)
            self._waiting[who].append(said)
        return self._waiting[rank].popleft()

    def _tell(self, *command: Any) -> None:
        stdin = self.children[CLIENT].process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and is heard to have
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()

    def _listen(self, rank: int) -> None:
        child, said = self.children[rank], {}
        with suppress(ValueError):  # a line that was cut off
            for line in child.answers:
                said = json.loads(line)
                self._heard.put((rank, said))
        if "error" not in said and "left" not in said:
            status = child.process.wait()
            with suppress(FileNotFoundError):  # the session is over, and nobody asks
                log = log_file(self._folders[rank], rank).read_text(errors="replace")
                self._heard.put((rank, {"error": f"party {rank} has ended (status {status}): {last_words(log)}"}))

    def _fail(self, said: dict[str, Any]) -> NoReturn:
        """Of a party that lost another one here, what that one has to say."""
        with suppress(Empty):
            while said.get("gone") in self.children:
                _, other = self._heard.get(timeout=CAUSE_PATIENCE_S)
                said = other if "error" in other and "gone" not in other else said
        raise (UserError if said.get("usage") else StoppedError)(said["error"])


@contextmanager
def started(assignments: Sequence[Assignment]) -> Iterator[Session]:
    """A process for each of these parties, which end with the block.

    Raises UserError for an engine that is not installed.
    """
    check_installed()
    with tempfile.TemporaryDirectory(prefix="parties-") as name, ExitStack() as stack:
        folders, children = {}, {}
        for assignment in assignments:
            folder = folders[assignment.rank] = Path(name) / f"party{assignment.rank}"
            folder.mkdir(mode=0o700)
            (folder / ASSIGNMENT).write_bytes(pickle.dumps(assignment))
            threads = assignment.setting.threads
            child = started_child("costmodel.generation.party", folder, (assignment.rank,), threads)
            children[assignment.rank] = stack.enter_context(child)
        yield Session(children, folders)


def await_ready(session: Session) -> dict[int, dict[str, Any]]:
    """Waits until all parties here have met, agreed and shared; what each says of that.

    Raises UserError, in one line, if they do not meet or agree; StoppedError if one fails.
    """
    return {rank: session.answer(rank) | session.answer(rank) for rank in session.children}


def on_loopback(client: Assignment) -> list[Assignment]:
    """An assignment for every party, at addresses of this machine. client: as `part_of` takes it."""
    return [part_of(client, rank) for rank in range(NUM_PARTIES[client.protocol])]


def loopback_addresses(protocol: str) -> tuple[tuple[str, int], ...]:
    """A free port for every party, with a free one after it, all different."""
    while True:
        ports = [_free_pair() for _ in range(NUM_PARTIES[protocol])]
        if len({each for port in ports for each in (port, port + 1)}) == 2 * len(ports):
            return tuple((LOOPBACK, port) for port in ports)


def _free_pair() -> int:
    while True:
        with socket.create_server((LOOPBACK, 0)) as first:
            port: int = first.getsockname()[1]
            with suppress(OSError, OverflowError), socket.create_server((LOOPBACK, port + 1)):
                return port
