"""Sessions as their parent process sees them: it starts the parties, commands the client, and ends the processes."""

import json
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NoReturn

import numpy as np

from costmodel.engine.channel import LEAVE, Frame, GoneError
from costmodel.engine.children import SOCKET, Child, child_of, last_words
from costmodel.engine.links import Link, refuse_delay, tcp
from costmodel.engine.party import OpCost
from costmodel.engine.plan import CLIENT, Assignment, part_of, ranks
from costmodel.engine.registry import check_installed
from costmodel.errors import StoppedError, UserError
from costmodel.execution.interpreter import Array

CAUSE_PATIENCE_S = 5.0  # wait for a failed party's error, which its peers report first as the loss of a peer
MOST_PATH = 100  # largest number of bytes in a socket's path; every system allows at least 103
STARTS = 3  # largest number of attempts to start; a port that was free a moment ago may be taken
KILLED = "killed, as happens if memory runs out; `costmodel estimate` prints the peak memory of a party"
PORT_TAKEN = re.compile(r"[Aa]ddress already in use|[Ff]ail to listen|start failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measured cost of an op or a whole graph; bytes and messages (send actions) are summed over parties.

    seconds: time by one clock, until all parties have ended the op. It begins when the first party starts the op, but
        not before all have ended the op before it. Preprocessing counts in the first op that needs it.
    rounds: None if the engine does not count them.
    """

    sent_bytes: int
    messages: int
    seconds: float
    rounds: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepRun:
    """The cost of a step, op by op for every party, and its logits (rows x vocab), opened after the run.

    by_party: costs by rank, then in the order of the ops. seconds: the client's time, from when it starts to share the
        inputs until it has the logits.
    """

    by_party: tuple[tuple[OpCost, ...], ...]
    seconds: float
    logits: Array

    @property
    def token(self) -> int:
        """The id of the most likely next token, by the last row of the logits."""
        return int(self.logits[-1].argmax())

    @property
    def by_op(self) -> tuple[Measured, ...]:
        """The cost of every op, in the graph's order; rounds are those of the party that waited for the most.

        Seconds are valid only if all parties run on one machine, since they compare the clocks of the parties.
        """
        by_op, ended_s = list[Measured](), float("-inf")
        for costs in zip(*self.by_party, strict=True):
            start_s, end_s = max(min(cost.start_s for cost in costs), ended_s), max(cost.end_s for cost in costs)
            by_op.append(
                Measured(
                    sent_bytes=sum(cost.sent_bytes for cost in costs),
                    messages=sum(cost.messages for cost in costs),
                    seconds=end_s - start_s,
                    rounds=max((cost.rounds for cost in costs if cost.rounds is not None), default=None),
                )
            )
            ended_s = end_s
        return tuple(by_op)

    @property
    def sent_bytes(self) -> int:
        return sum(cost.sent_bytes for party in self.by_party for cost in party)

    @property
    def messages(self) -> int:
        return sum(cost.messages for party in self.by_party for cost in party)

    @property
    def peak_bytes(self) -> tuple[int | None, ...]:
        """Peak memory of each party's process over all ops, in bytes, by rank; None where it is unknown."""
        peaks = [[cost.peak_bytes for cost in party if cost.peak_bytes is not None] for party in self.by_party]
        return tuple(max(peak, default=None) for peak in peaks)


class Session:
    """The processes (`children`, by rank) of the parties on this machine; other parties, if any, run elsewhere.

    set_delay: function that sets the one-way delay of the link between parties, in seconds, for later steps.
    op_graph, num_steps: the fingerprint and number of the steps' op graphs, on which all parties agreed.
    ready_s, shared_bytes: seconds from the start until the parties on this machine were ready, and bytes that they sent
        until then, mostly programs and shares of weights. `await_ready` sets these four attributes.
    """

    op_graph: str
    num_steps: int
    ready_s: float
    shared_bytes: int

    def __init__(self, children: dict[int, Child]) -> None:
        self.children = children
        self.set_delay: Callable[[float], None] = refuse_delay
        self._started_s = time.monotonic()
        self._answers: SimpleQueue[tuple[int, Frame]] = SimpleQueue()
        self._waiting: dict[int, deque[Frame]] = {rank: deque() for rank in children}
        for rank in children:
            Thread(target=self._listen, args=(rank,), daemon=True).start()

    def await_ready(self) -> None:
        """Wait until all parties have met, agreed on what to run, and shared the weights.

        Raise UserError, in one line, if parties do not meet or agree, certificates are missing, a step's graph cannot
        be made, an op cannot be run, a weight is missing or has another shape, or a GPU is missing or too small;
        StoppedError if a party fails otherwise.
        """
        answers = [self.answer(rank).header for rank in self.children]
        self.op_graph, self.num_steps = answers[0]["op_graph"], answers[0]["num_steps"]
        self.ready_s = time.monotonic() - self._started_s
        self.shared_bytes = sum(answer["shared_bytes"] for answer in answers)

    def run(self, step: int, inputs: Mapping[str, Array]) -> StepRun:
        """Run a step, given by its index, on inputs by name. Raise StoppedError, in one line, if a party fails."""
        self.children[CLIENT].tell("run", dict(inputs), step=step)
        answer, (costs, logits) = self.answer(CLIENT)
        return StepRun(
            by_party=tuple(tuple(OpCost(*cost) for cost in of_party) for of_party in json.loads(bytes(costs))),
            seconds=answer["seconds"],
            logits=np.frombuffer(logits, answer["dtype"]).reshape(answer["shape"]),
        )

    def leave(self) -> None:
        """End the session on all machines. Raise StoppedError if a party is gone."""
        self.children[CLIENT].tell(LEAVE)
        for rank in self.children:
            self.answer(rank)

    def answer(self, rank: int) -> Frame:
        """Wait for the next report of a party and return it. Raise UserError or StoppedError if a local party fails."""
        while not self._waiting[rank]:
            reporting, answer = self._answers.get()
            if "error" in answer.header:
                self._fail(answer.header)
            self._waiting[reporting].append(answer)
        return self._waiting[rank].popleft()

    def _listen(self, rank: int) -> None:
        child, answer = self.children[rank], Frame({})
        with suppress(GoneError):  # the child has ended, or the session is over
            while True:
                answer = child.channel.receive()
                child.is_free = "left" in answer.header
                self._answers.put((rank, answer))
                if child.is_free:
                    return
        if "error" not in answer.header:
            status = child.process.wait()
            with suppress(OSError):  # the session is over, and its files are closed
                said = KILLED if status == -signal.SIGKILL else last_words(child.log)
                ended = f"party {rank} has ended (status {status}){child.progress.at}: {said}"
                self._answers.put((rank, Frame({"error": ended})))

    def _fail(self, answer: dict[str, Any]) -> NoReturn:
        """Raise the error of the party that failed, rather than that of a party that only lost a peer."""
        with suppress(Empty):
            while answer.get("gone") in self.children:
                _, other = self._answers.get(timeout=CAUSE_PATIENCE_S)
                answer = other.header if "error" in other.header and "gone" not in other.header else answer
        raise (UserError if answer.get("usage") else StoppedError)(answer["error"])


@contextmanager
def started(assignments: Sequence[Assignment]) -> Iterator[Session]:
    """Yield a session with one process per assignment, until the block ends. First call `Session.await_ready`.

    Assignments without addresses must be those of all parties, in order of rank. Raise UserError if the engine is not
    installed, or TMPDIR is too deep for sockets.
    """
    check_installed(assignments[0].protocol)
    with ExitStack() as stack:
        children = {part.rank: stack.enter_context(child_of(part.setting.threads)) for part in assignments}
        here = tuple(str(child.job_folder / SOCKET) for child in children.values())
        if len(here[0].encode()) > MOST_PATH:
            raise UserError(f"TMPDIR must lead to paths of at most {MOST_PATH} bytes, but {here[0]} is longer.")
        for part in assignments:
            children[part.rank].begin(replace(part, addresses=part.addresses or here, weights=None), part.weights)
        yield Session(children)


@contextmanager
def alone(part: Assignment) -> Iterator[Session]:
    """Yield a ready session of one party, whose peers run elsewhere. Errors are as for `started` and `await_ready`."""
    with started([part]) as session:
        session.await_ready()
        yield session


@contextmanager
def on_this_machine(client: Assignment, link: Link = tcp) -> Iterator[Session]:
    """Yield a ready session with all parties on this machine, on a link of its own.

    client: an assignment with the data of all parties. Raise errors as `started`, `Session.await_ready` and the link.
    """
    for attempt in range(1, STARTS + 1):
        with ExitStack() as stack:
            wiring = stack.enter_context(link(len(ranks(client.protocol))))
            parts = [replace(part_of(client, rank), links=row) for rank, row in enumerate(wiring.addresses)]
            session = stack.enter_context(started(parts))
            session.set_delay = wiring.set_delay
            try:
                session.await_ready()
            except StoppedError:
                logs = [child.log for child in session.children.values()]
                if attempt == STARTS or not any(map(PORT_TAKEN.search, logs)):
                    raise
                continue
            yield session
            return
