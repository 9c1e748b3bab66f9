"""A child process that runs one party: for every job it meets the other parties, gets its shares and runs the steps.

The parent sends frames through a socket that is this process's stdin: `begin` with an assignment and weights; then,
only to the client (rank 0), `run` with a step and its inputs, and at last `leave`. The client passes both on to the
other parties. A party reports on the same socket. The process ends when the socket closes, or after it has reported an
error such as a lost peer. Each job has its own runtime and links.
"""

import json
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from costmodel.engine.channel import FAREWELL, LEAVE, Blob, BrokenError, Channel, Frame, GoneError, Peers
from costmodel.engine.children import JOB, Commands, Progress, commands_of_parent, end, parent_is_awake
from costmodel.engine.meeting import difference, meet, shown, terms
from costmodel.engine.plan import (
    CLIENT,
    CRYPTEN,
    SERVER,
    Assignment,
    Plan,
    fingerprint,
    graphs,
    most_bytes,
    role,
    variables,
)
from costmodel.engine.programs import operands
from costmodel.engine.runtime import Runtime, give_back, reset_peak
from costmodel.engine.spu_runtime import SpuRuntime
from costmodel.errors import UserError
from costmodel.execution.interpreter import Weights
from costmodel.execution.memory import last_readers
from costmodel.ops import OpGraph

GRACE_S = 3.0  # wait before the engine's error is reported; if a peer was lost, that is reported in this time instead
PARTING_S = 0.5  # time for peers to find the same difference in terms, and report it instead of a lost party


class OpCost(NamedTuple):
    """The cost of an op to one party: bytes and messages that it sent.

    start_s, end_s: seconds of the monotonic clock of the party's machine. peak_bytes: peak memory of the party's
        process in the op (on a GPU, since the process started); None if unknown.
    rounds: number of rounds that the party waited for; None if they are not counted.
    """

    sent_bytes: int
    messages: int
    start_s: float
    end_s: float
    peak_bytes: int | None
    rounds: int | None = None


@dataclass(kw_only=True, slots=True)
class Answers:
    """The channel on which a party reports to its parent. The process ends once it has reported an error."""

    channel: Channel
    folder: Path
    lock: Any = field(default_factory=Lock)

    def report(self, *blobs: Blob, **answer: Any) -> None:
        with self.lock:
            self.channel.send(answer, blobs)

    def fail(self, error: str, **more: Any) -> None:
        """Report an error and end the process. more: `usage=True` for a UserError; `gone`, the rank of a lost peer."""
        with self.lock:  # which is never released, so that no second error is reported
            with suppress(GoneError):
                self.channel.send({"error": error, **more})
            end(self.folder, 1)


@dataclass(kw_only=True, slots=True)
class Party:
    """A party that has met the others and has its shares, so that it is ready to run.

    spent: for each step, by name of an op, the variables to drop after this op: no later op of the step and no op of
        the next step reads them.
    """

    assignment: Assignment
    steps: tuple[OpGraph, ...]
    spent: list[dict[str, list[str]]]
    peers: Peers
    runtime: Runtime
    progress: Progress

    def run(self, step: int) -> tuple[list[OpCost], Any]:
        """Run a step; return each op's cost to this party, and its share of the step's output (None at a dealer)."""
        nodes, times = self.steps[step].nodes, []
        give_back()
        for index, node in enumerate(nodes):
            self.progress.write(node.name)
            reset_peak()
            start_s = time.monotonic()
            self.runtime.run(step, index, node)
            times.append((start_s, time.monotonic(), self.runtime.peak_bytes()))
            for name in self.spent[step][node.name]:
                self.runtime.drop(name)
        logits = self.runtime.share(nodes[-1].name)
        traffic = zip(self.runtime.traffic(len(nodes)), times, strict=True)
        return [OpCost(sent.sent_bytes, sent.messages, *of_op, sent.rounds) for sent, of_op in traffic], logits

    def part(self) -> None:
        """End the session at the same time as the other parties, once the client has told them to leave."""
        self.runtime.stop()
        self.peers.send_all({"kind": FAREWELL})
        self.peers.close()


def join(assignment: Assignment, weights: list[Blob], answers: Answers, progress: Progress) -> Party:
    """Meet the other parties, agree on the steps, get programs and shares, and return the party, ready to run.

    weights: a list with the pickled weights. The server removes them from it, so that they do not stay in memory.
    answers: receives `op_graph`, `num_steps` and `shared_bytes` once the party is ready, or that a peer is lost, after
        which the process ends.

    Raise UserError as `meet`, `Assignment.keys` and `graph_of`, or if op graphs differ, an op cannot be run, a weight
    is missing or has another shape, or a GPU is missing or too small.
    """
    rank, protocol, setting = assignment.rank, assignment.protocol, assignment.setting
    ours = terms(protocol, setting) | {"range check": "on" if assignment.is_in_range else "off (--allow-out-of-range)"}
    channels = meet(rank, assignment.addresses, ours, assignment.wait_s, assignment.keys)
    is_awake = (lambda: True) if isinstance(assignment.addresses[0], str) else parent_is_awake
    peers = Peers(channels, lambda *lost: _lost(assignment, answers, *lost), assignment.idle_s, is_awake)
    runtime = _runtime(assignment, peers, progress)
    steps = graphs(assignment.graph_of, _plan(assignment, peers))
    for channel in channels.values():  # for what peers send once they know that all have these steps
        channel.max_blob_bytes = most_bytes(steps, protocol, setting)
    agreed = {"op graph": fingerprint(steps)}
    peers.send_all({"kind": "steps", **agreed})
    for peer in peers:
        if line := difference(agreed, rank, peers.receive(peer).header, peer):
            raise UserError(line)
    shares = _share_weights(peers, steps, runtime, pickle.loads(weights.pop())) if rank == SERVER else {}
    runtime.prepare(steps)
    if rank != SERVER:
        shares, _ = _received_shares(peers, SERVER, runtime)
    runtime.connect()
    runtime.hold(shares)
    runtime.start()
    answers.report(op_graph=agreed["op graph"], num_steps=len(steps), shared_bytes=peers.sent_bytes)
    spent = []
    for graph, following in zip(steps, [*steps[1:], None], strict=True):
        kept = set() if following is None else set(variables(following).values())  # for the next step
        readers = last_readers(graph.nodes).items()
        spent.append({name: [output for output in outputs if output not in kept] for name, outputs in readers})
    return Party(assignment=assignment, steps=steps, spent=spent, peers=peers, runtime=runtime, progress=progress)


def _runtime(assignment: Assignment, peers: Peers, progress: Progress) -> Runtime:
    if assignment.protocol != CRYPTEN:
        return SpuRuntime(assignment, peers, progress)
    from costmodel.engine.crypten_runtime import CryptenRuntime  # torch takes a second to import

    return CryptenRuntime(assignment, peers)


def _plan(assignment: Assignment, peers: Peers) -> Plan:
    """Return the plan, which the client has and sends to the other parties."""
    if assignment.rank != CLIENT:
        header = peers.receive(CLIENT).header
        return Plan(kind=header["of"], num_tokens=header["num_tokens"], num_new=header["num_new"])
    plan = assignment.plan
    assert plan is not None
    peers.send_all({"kind": "plan", "of": plan.kind, "num_tokens": plan.num_tokens, "num_new": plan.num_new})
    return plan


def _lost(assignment: Assignment, answers: Answers, peer: int, why: Exception) -> None:
    address = assignment.addresses[peer]
    where = "" if isinstance(address, str) else f", {shown(address)}"
    does, gone = f"sent what led to {why!r:.100}", {}
    if isinstance(why, BrokenError):
        does = str(why)
    elif isinstance(why, GoneError):
        does, gone = "is gone", {"gone": peer}  # a peer that is silent has no cause to report
    party = f"party {peer} (the {role(peer, assignment.protocol)}{where})"
    answers.fail(f"{party} {does}; start all parties again.", **gone)


def _share_weights(peers: Peers, steps: tuple[OpGraph, ...], runtime: Runtime, weights: Weights) -> dict[str, Any]:
    """Send every party its shares of the weights; return the server's. Raise UserError if a weight does not fit."""
    kept = {}
    for operand in operands(steps):
        shares = runtime.shares(operand.of(weights), operand.node.op)
        kept[operand.variable] = _send_shares(peers, SERVER, operand.variable, shares, runtime)
    peers.send_all({"kind": "shared"})
    return kept


def _send_shares(peers: Peers, sender: int, name: str, shares: list[Any], runtime: Runtime) -> Any:
    """Send every other computing party its share of a variable, and return the sender's own."""
    for peer in (peer for peer in peers if peer < len(shares)):
        peers.send(peer, {"kind": "share", "name": name}, runtime.packed(shares[peer]))
    return shares[sender]


def _received_shares(peers: Peers, rank: int, runtime: Runtime) -> tuple[dict[str, Any], Frame]:
    """Return the shares, by variable, that a party sends, and the frame that follows them."""
    shares = {}
    while (frame := peers.receive(rank)).header["kind"] == "share":
        shares[frame.header["name"]] = runtime.unpacked(frame.blobs)
    return shares, frame


def serve(party: Party) -> dict[str, int]:
    """Run a party that is not the client until the client tells it to leave, and return what it sent.

    The result has `num_steps`, and the `sent_bytes` and `messages` that this party sent in the ops of these steps.
    """
    peers, totals = party.peers, {"num_steps": 0, "sent_bytes": 0, "messages": 0}
    while True:
        shares, frame = _received_shares(peers, CLIENT, party.runtime)
        if frame.header["kind"] == LEAVE:
            return totals
        party.runtime.hold(shares)
        peers.send(CLIENT, {"kind": "holds"})
        peers.receive(CLIENT)
        costs, logits = party.run(frame.header["step"])
        peers.send(CLIENT, {"kind": "ran", "costs": costs}, [] if logits is None else party.runtime.packed(logits))
        totals["num_steps"] += 1
        totals["sent_bytes"] += sum(cost.sent_bytes for cost in costs)
        totals["messages"] += sum(cost.messages for cost in costs)


def lead(party: Party, commands: Commands, answers: Answers) -> None:
    """Run the client, one step for each command of the parent, until the command to leave.

    In a step, share the inputs, run the ops, and report the costs of all parties and the opened logits to the parent.
    """
    peers, runtime = party.peers, party.runtime
    while (command := commands.get()).header["kind"] != LEAVE:
        step, started = command.header["step"], time.monotonic()
        for name, value in pickle.loads(command.blobs[0]).items():
            runtime.hold({name: _send_shares(peers, CLIENT, name, runtime.shares(value), runtime)})
        peers.send_all({"kind": "shared", "step": step})
        for peer in peers:
            peers.receive(peer)  # all parties hold their shares
        peers.send_all({"kind": "run"})
        costs, share = party.run(step)
        by_party, shares = [costs], [share]
        for peer in peers:
            header, blobs = peers.receive(peer)
            by_party.append(header["costs"])
            if blobs:
                shares.append(runtime.unpacked(blobs))
        logits = runtime.opened(shares)
        answers.report(
            json.dumps(by_party).encode(),
            logits.tobytes(),
            seconds=time.monotonic() - started,
            shape=logits.shape,
            dtype=logits.dtype.str,
        )
    peers.send_all({"kind": LEAVE})


def take_part(commands: Commands, answers: Answers, progress: Progress) -> None:
    """Wait for the command `begin`, and run that job to its end; if it fails, report the error and end the process."""
    first, *weights = commands.get().blobs
    assignment: Assignment = pickle.loads(first)
    try:
        os.chdir(answers.folder / JOB)  # the engine keeps its masks here; the parent may be gone, and so the folder
        party, left = join(assignment, weights, answers, progress), {}
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
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        answers.fail(f"the engine failed at party {assignment.rank}{progress.at}: {why:.300}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    own_folder = Path(sys.argv[1])
    parent = Answers(channel=Channel(socket.socket(fileno=os.dup(0))), folder=own_folder)
    told = commands_of_parent(parent.channel, own_folder)
    while True:
        take_part(told, parent, Progress(file=int(sys.argv[2])))
