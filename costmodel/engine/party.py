"""A child process that is a party: job after job it meets the others, gets its shares and runs step after step.

Its parent begins a job by a line on stdin, `["begin"]`, and leaves its assignment in the job's folder. The client, rank
0, is driven by more of them: `["run", STEP]`, with the inputs in a file, or `["leave"]`. The others do what the client
tells them by a frame. Answers are JSON lines on a pipe of their own, since the engine writes its profile to stdout from
C++. A process whose stdin ends, ends too, and so does one that lost a peer. A job has a runtime and links of its own.
"""

import json
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple, TextIO

import numpy as np

from costmodel.engine import memory
from costmodel.engine.assignment import CLIENT, CRYPTEN, Assignment, role
from costmodel.engine.channel import FAREWELL, Frame, Peers
from costmodel.engine.children import JOB, LOG, PROGRESS, commands_of_parent
from costmodel.engine.meeting import meet, require_equal, shown, terms
from costmodel.engine.plan import Plan, fingerprint, graphs, variables
from costmodel.engine.programs import operands
from costmodel.engine.runtime import Runtime
from costmodel.engine.runtimes import SERVER
from costmodel.engine.spu_runtime import SpuRuntime
from costmodel.errors import UserError
from costmodel.execution.interpreter import Weights
from costmodel.execution.memory import last_readers
from costmodel.ops import OpGraph

ASSIGNMENT, WEIGHTS, INPUTS, LOGITS = "assignment.pickle", "weights.pickle", "inputs.pickle", "logits.npy"
GRACE_S = 3.0  # a lost peer is noticed within it, and reported rather than what the engine says of it
PARTING_S = 0.5  # peers find the same difference by themselves, and report that rather than that we are gone


class OpCost(NamedTuple):
    """The cost of an op to one party. start_s, end_s: by its machine's monotonic clock; peak_bytes: held meanwhile.

    rounds: that it waited for; None where the engine does not count them.
    """

    sent_bytes: int
    messages: int
    start_s: float
    end_s: float
    peak_bytes: int | None
    rounds: int | None = None


@dataclass(kw_only=True, slots=True)
class Answers:
    """The pipe by which a party reports to its parent. Once it has reported an error, it ends."""

    pipe: TextIO
    lock: Any = field(default_factory=Lock)

    def report(self, **answer: Any) -> None:
        with self.lock:
            print(json.dumps(answer), file=self.pipe, flush=True)

    def fail(self, error: str, **more: Any) -> None:
        """Never returns, whatever else the process is doing."""
        with self.lock:  # and is not released: a second error is no news
            print(json.dumps({"error": error, **more}), file=self.pipe, flush=True)
            os._exit(1)


@dataclass(kw_only=True, slots=True)
class Party:
    """A party that is ready to run: it has met the others and holds its shares. spent: see `_spent`."""

    assignment: Assignment
    steps: tuple[OpGraph, ...]
    spent: tuple[dict[str, list[str]], ...]
    peers: Peers
    runtime: Runtime

    def run(self, step: int) -> tuple[list[OpCost], Any]:
        """Runs a step; the costs of its ops to this party, and its share of the logits."""
        nodes, times = self.steps[step].nodes, []
        memory.give_back()
        for index, node in enumerate(nodes):
            Path(PROGRESS).write_text(node.name)
            memory.reset_peak()
            start_s = time.monotonic()
            self.runtime.run(step, index, node)
            times.append((start_s, time.monotonic(), self.runtime.peak_bytes()))
            for name in self.spent[step][node.name]:
                self.runtime.drop(name)
        logits = self.runtime.share(nodes[-1].name)
        traffic = self.runtime.traffic(len(nodes))
        costs = [
            OpCost(sent.sent_bytes, sent.messages, *of_op, sent.rounds)
            for sent, of_op in zip(traffic, times, strict=True)
        ]
        return costs, logits

    def part(self) -> None:
        """Ends with the others at once."""
        self.peers.send_all({"kind": FAREWELL})
        self.runtime.stop()
        self.peers.close()


def join(assignment: Assignment, answers: Answers, log: Path) -> Party:
    """Meets the others, agrees with them on what is run, and gets programs and shares. Raises UserError as `meet`."""
    rank, protocol, setting = assignment.rank, assignment.protocol, assignment.setting
    weights = _taken(WEIGHTS) if rank == SERVER else {}
    channels = meet(rank, assignment.addresses, terms(protocol, setting), assignment.wait_s)
    peers = Peers(channels, lambda peer: _lost(assignment, peer, answers))
    runtime = _runtime(assignment, peers, log)
    steps = graphs(assignment.graph_of, _plan(assignment, peers))
    agreed = {"op graph": fingerprint(steps)}
    peers.send_all({"kind": "steps", **agreed})
    for peer in peers:
        require_equal(agreed, rank, peers.receive(peer).header, peer)
    shares = _share_weights(peers, steps, runtime, weights) if rank == SERVER else {}
    del weights
    runtime.prepare(steps)
    if rank != SERVER:
        shares, _ = _received_shares(peers, SERVER, runtime)
    runtime.connect()
    runtime.hold(shares)
    runtime.start()
    answers.report(op_graph=agreed["op graph"], num_steps=len(steps), shared_bytes=peers.sent_bytes)
    spent = tuple(map(_spent, steps, [*steps[1:], None]))
    return Party(assignment=assignment, steps=steps, spent=spent, peers=peers, runtime=runtime)


def _runtime(assignment: Assignment, peers: Peers, log: Path) -> Runtime:
    if assignment.protocol != CRYPTEN:
        return SpuRuntime(assignment, peers, log)
    from costmodel.engine.crypten_runtime import CryptenRuntime  # torch takes a second to import

    return CryptenRuntime(assignment, peers)


def _spent(graph: OpGraph, following: OpGraph | None) -> dict[str, list[str]]:
    """Outputs by the op of a step after which nothing reads them, in this step or the one that follows."""
    kept = set() if following is None else set(variables(following).values())
    return {
        name: [output for output in spent if output not in kept] for name, spent in last_readers(graph.nodes).items()
    }


def _plan(assignment: Assignment, peers: Peers) -> Plan:
    """The client's, which it tells the others."""
    if assignment.rank != CLIENT:
        header = peers.receive(CLIENT).header
        return Plan(kind=header["of"], num_tokens=header["num_tokens"], num_new=header["num_new"])
    plan = assignment.plan
    assert plan is not None
    peers.send_all({"kind": "plan", "of": plan.kind, "num_tokens": plan.num_tokens, "num_new": plan.num_new})
    return plan


def _lost(assignment: Assignment, peer: int, answers: Answers) -> None:
    address = assignment.addresses[peer]
    where = "" if isinstance(address, str) else f", {shown(address)}"
    answers.fail(
        f"party {peer} (the {role(peer, assignment.protocol)}{where}) is gone; start all parties again.", gone=peer
    )


def _taken(name: str) -> Any:
    """What a file of the job holds; a secret leaves the disk with it."""
    content = pickle.loads(Path(name).read_bytes())
    Path(name).unlink()
    return content


def _share_weights(peers: Peers, steps: tuple[OpGraph, ...], runtime: Runtime, weights: Weights) -> dict[str, Any]:
    """The server sends every party its shares of the weights and keeps its own; UserError for a bad weight."""
    kept = {}
    for operand in operands(steps):
        shares = runtime.shares(operand.of(weights), operand.node.op)
        kept[operand.variable] = _send_shares(peers, SERVER, operand.variable, shares, runtime)
    peers.send_all({"kind": "shared"})
    return kept


def _send_shares(peers: Peers, sender: int, name: str, shares: list[Any], runtime: Runtime) -> Any:
    """Sends each of the others that compute its share of a variable; returns the sender's."""
    for peer in (peer for peer in peers if peer < len(shares)):
        peers.send(peer, {"kind": "share", "name": name}, runtime.packed(shares[peer]))
    return shares[sender]


def _received_shares(peers: Peers, rank: int, runtime: Runtime) -> tuple[dict[str, Any], Frame]:
    """The shares by variable that a party sends, and the frame after them."""
    shares = {}
    while (frame := peers.receive(rank)).header["kind"] == "share":
        shares[frame.header["name"]] = runtime.unpacked(frame.blobs)
    return shares, frame


def serve(party: Party) -> dict[str, int]:
    """Runs the steps of a party other than the client, until that one says farewell; returns all that it sent."""
    peers, totals = party.peers, {"num_steps": 0, "sent_bytes": 0, "messages": 0}
    while True:
        shares, frame = _received_shares(peers, CLIENT, party.runtime)
        if frame.header["kind"] == FAREWELL:
            return totals
        party.runtime.hold(shares)
        peers.send(CLIENT, {"kind": "holds"})
        peers.receive(CLIENT)
        costs, logits = party.run(frame.header["step"])
        peers.send(CLIENT, {"kind": "ran", "costs": costs}, [] if logits is None else party.runtime.packed(logits))
        totals["num_steps"] += 1
        totals["sent_bytes"] += sum(cost.sent_bytes for cost in costs)
        totals["messages"] += sum(cost.messages for cost in costs)


def lead(party: Party, commands: "SimpleQueue[list[Any]]", answers: Answers) -> None:
    """Runs the client: a step for every command, until it is told to leave."""
    while (command := commands.get())[0] == "run":
        answers.report(**_lead_step(party, command[1]))


def _lead_step(party: Party, step: int) -> dict[str, Any]:
    """Shares the inputs, runs with the others once all hold theirs, and opens the logits from what all of them send."""
    started, peers, runtime = time.monotonic(), party.peers, party.runtime
    for name, value in _taken(INPUTS).items():
        runtime.hold({name: _send_shares(peers, CLIENT, name, runtime.shares(value), runtime)})
    peers.send_all({"kind": "shared", "step": step})
    for peer in peers:
        peers.receive(peer)
    peers.send_all({"kind": "run"})
    costs, logits = party.run(step)
    by_party, shares = [costs], [logits]
    for peer in peers:
        header, blobs = peers.receive(peer)
        by_party.append(header["costs"])
        if blobs:
            shares.append(runtime.unpacked(blobs))
    np.save(LOGITS, runtime.opened(shares))
    return {"seconds": time.monotonic() - started, "by_party": by_party}


def take_part(assignment: Assignment, log: Path, commands: "SimpleQueue[list[Any]]", answers: Answers) -> None:
    """One job, to its end."""
    try:
        party, left = join(assignment, answers, log), {}
        if assignment.rank == CLIENT:
            lead(party, commands, answers)
        else:
            left = serve(party)
        party.part()
        answers.report(left=True, **left)
    except UserError as error:
        time.sleep(PARTING_S)
        answers.fail(str(error), usage=True)
    except Exception as error:
        time.sleep(GRACE_S)
        traceback.print_exc()
        at = f" in op {Path(PROGRESS).read_text()!r}" if Path(PROGRESS).exists() else ""
        answers.fail(f"the engine failed at party {assignment.rank}{at}: {' '.join(str(error).split()):.300}")


def _main(folder: Path, answers_to: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to end
    commands = commands_of_parent()
    with os.fdopen(answers_to, "w") as pipe:
        answers = Answers(pipe=pipe)
        while commands.get():  # to begin
            os.chdir(folder / JOB)  # where the engine leaves the masks that it keeps
            assignment = pickle.loads(Path(ASSIGNMENT).read_bytes())
            take_part(assignment, folder / LOG, commands, answers)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
