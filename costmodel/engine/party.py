"""A child process that is a party: job after job it meets the others, gets its shares and runs step after step.

Its parent begins a job by a line on stdin, `["begin"]`, and leaves its assignment in the job's folder. The client, rank
0, is driven by more of them: `["run", STEP]`, with the inputs in a file, or `["leave"]`. The others do what the client
tells them by a frame. Answers are JSON lines on a pipe of their own, since the engine writes its profile to stdout from
C++. A process whose stdin ends, ends too, and so does one that lost a peer. A job has a runtime and links of its own.
"""

import gc
import json
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple, TextIO

import numpy as np

from costmodel.engine import memory
from costmodel.engine.assignment import CLIENT, Assignment, role
from costmodel.engine.channel import FAREWELL, Frame, Peers
from costmodel.engine.children import JOB, LOG, PROGRESS, commands_of_parent
from costmodel.engine.meeting import meet, require_equal, shown, terms
from costmodel.engine.plan import Plan, fingerprint, graphs, variables
from costmodel.engine.programs import Compiled, compile_steps, from_blobs, operand_visibility, operands, to_blobs
from costmodel.engine.runtimes import (
    SERVER,
    linked_runtime,
    make_shares,
    owner_of_weights,
    packed,
    reconstruct,
    run_program,
    unpacked,
)
from costmodel.errors import UserError
from costmodel.execution.interpreter import Weights
from costmodel.execution.memory import last_readers
from costmodel.ops import OpGraph

ASSIGNMENT, WEIGHTS, INPUTS, LOGITS = "assignment.pickle", "weights.pickle", "inputs.pickle", "logits.npy"
GRACE_S = 3.0  # a lost peer is noticed within it, and reported rather than what the engine says of it
_LINK = re.compile(r"Link details: total send bytes (?P<sent_bytes>\d+),.* send actions (?P<messages>\d+),")
PATIENCE_S = 5.0  # the profile of a program that has run is in the log by then
PARTING_S = 0.5  # peers find the same difference by themselves, and report that rather than that we are gone


class OpCost(NamedTuple):
    """The cost of an op to one party. start_s, end_s: by its machine's monotonic clock; peak_bytes: held meanwhile."""

    sent_bytes: int
    messages: int
    start_s: float
    end_s: float
    peak_bytes: int | None


def entries(log: str) -> list[tuple[int, int]]:
    """Bytes and messages of every program, in the order in which they ran."""
    return [(int(match["sent_bytes"]), int(match["messages"])) for match in _LINK.finditer(log)]


@dataclass(kw_only=True, slots=True)
class Log:
    """The log of this process, as far as it was read: the engine writes its profile there."""

    path: Path
    position: int = 0

    def traffic(self, num_programs: int) -> list[tuple[int, int]]:
        """Bytes and messages of each of the last so many programs."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self.path.open("rb") as file:
                file.seek(self.position)
                content = file.read()
            programs = entries(content.decode(errors="replace"))
            if len(programs) >= num_programs or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        assert len(programs) == num_programs, f"the profile of {num_programs} programs has {len(programs)} entries"
        self.position += len(content)
        return programs


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
    runtime: Any
    link: Any
    compiled: Compiled
    log: Log

    def run(self, step: int) -> tuple[list[OpCost], Any]:
        """Runs a step; the costs of its ops to this party, and its share of the logits."""
        programs, times = self.compiled.steps[step], []
        memory.give_back()
        for program in programs:
            Path(PROGRESS).write_text(program.name)
            memory.reset_peak()
            start_s, end_s = run_program(program, self.runtime)
            times.append((start_s, end_s, memory.peak_bytes()))
            for name in self.spent[step][program.name]:
                self.runtime.del_var(name)
        logits = self.runtime.get_var(programs[-1].output)
        traffic = self.log.traffic(len(programs))
        costs = [(*sent, *of_op) for sent, of_op in zip(traffic, times, strict=True)]
        return list(map(OpCost._make, costs)), logits

    def hold(self, shares: Mapping[str, Any]) -> None:
        for name, share in shares.items():
            self.runtime.set_var(name, share)

    def part(self) -> None:
        """Ends with the others at once: a link still sends while it is stopped, and waits for what they send."""
        self.peers.send_all({"kind": FAREWELL})
        self.runtime = None
        gc.collect()
        self.link.stop_link()
        self.peers.close()


def join(assignment: Assignment, answers: Answers, log: Log) -> Party:
    """Meets the others, agrees with them on what is run, and gets programs and shares. Raises UserError as `meet`."""
    rank, protocol, setting = assignment.rank, assignment.protocol, assignment.setting
    weights = _taken(WEIGHTS) if rank == SERVER else {}
    channels = meet(rank, assignment.addresses, terms(protocol, setting), assignment.wait_s)
    peers = Peers(channels, lambda peer: _lost(assignment, peer, answers))
    import_module("spu.api")  # takes a second: all parties at once
    steps = graphs(assignment.graph_of, _plan(assignment, peers))
    agreed = {"op graph": fingerprint(steps)}
    peers.send_all({"kind": "steps", **agreed})
    for peer in peers:
        require_equal(agreed, rank, peers.receive(peer).header, peer)
    shares = _share_weights(peers, steps, assignment, weights) if rank == SERVER else {}
    del weights
    if rank == CLIENT:
        compiled = compile_steps(steps, setting, Path(PROGRESS).write_text)
        Path(PROGRESS).unlink()
        peers.send_all({"kind": "programs"}, to_blobs(compiled))
    else:
        compiled = from_blobs(peers.receive(CLIENT).blobs)
    if rank != SERVER:
        shares, _ = _received_shares(peers, SERVER)
    runtime, link = linked_runtime(protocol, setting, rank, assignment.engine_addresses)
    spent = tuple(map(_spent, steps, [*steps[1:], None]))
    party = Party(
        assignment=assignment,
        steps=steps,
        spent=spent,
        peers=peers,
        runtime=runtime,
        link=link,
        compiled=compiled,
        log=log,
    )
    party.hold(shares)
    for keeper in compiled.keepers:
        run_program(keeper, runtime)
    log.traffic(len(compiled.keepers))
    answers.report(op_graph=agreed["op graph"], num_steps=len(steps), shared_bytes=peers.sent_bytes)
    return party


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
    answers.fail(f"party {peer} (the {role(peer)}{where}) is gone; start all parties again.", gone=peer)


def _taken(name: str) -> Any:
    """What a file of the job holds; a secret leaves the disk with it."""
    content = pickle.loads(Path(name).read_bytes())
    Path(name).unlink()
    return content


def _share_weights(
    peers: Peers, steps: tuple[OpGraph, ...], assignment: Assignment, weights: Weights
) -> dict[str, Any]:
    """The server sends every party its shares of the weights; those that it keeps, by variable.

    Raises UserError for a weight that is missing or of another shape.
    """
    protocol, setting, kept = assignment.protocol, assignment.setting, {}
    owner = owner_of_weights(setting)
    for operand in operands(steps):
        visibility = operand_visibility(operand.node.op)
        shares = make_shares(protocol, setting, operand.of(weights), visibility, owner)
        kept[operand.variable] = _send_shares(peers, SERVER, operand.variable, shares)
    peers.send_all({"kind": "shared"})
    return kept


def _send_shares(peers: Peers, sender: int, name: str, shares: list[Any]) -> Any:
    """Sends each of the others its share of a variable; returns the sender's."""
    for peer in peers:
        peers.send(peer, {"kind": "share", "name": name}, packed(shares[peer]))
    return shares[sender]


def _received_shares(peers: Peers, rank: int) -> tuple[dict[str, Any], Frame]:
    """The shares by variable that a party sends, and the frame after them."""
    shares = {}
    while (frame := peers.receive(rank)).header["kind"] == "share":
        shares[frame.header["name"]] = unpacked(frame.blobs)
    return shares, frame


def serve(party: Party) -> dict[str, int]:
    """Runs the steps of a party other than the client, until that one says farewell; returns all that it sent."""
    peers, totals = party.peers, {"num_steps": 0, "sent_bytes": 0, "messages": 0}
    while True:
        shares, frame = _received_shares(peers, CLIENT)
        if frame.header["kind"] == FAREWELL:
            return totals
        party.hold(shares)
        peers.send(CLIENT, {"kind": "holds"})
        peers.receive(CLIENT)
        costs, logits = party.run(frame.header["step"])
        peers.send(CLIENT, {"kind": "ran", "costs": costs}, packed(logits))
        totals["num_steps"] += 1
        totals["sent_bytes"] += sum(cost.sent_bytes for cost in costs)
        totals["messages"] += sum(cost.messages for cost in costs)


def lead(party: Party, commands: "SimpleQueue[list[Any]]", answers: Answers) -> None:
    """Runs the client: a step for every command, until it is told to leave."""
    while (command := commands.get())[0] == "run":
        answers.report(**_lead_step(party, command[1]))


def _lead_step(party: Party, step: int) -> dict[str, Any]:
    """Shares the inputs, runs with the others once all hold theirs, and opens the logits from what all of them send."""
    started, peers = time.monotonic(), party.peers
    protocol, setting = party.assignment.protocol, party.assignment.setting
    for name, value in _taken(INPUTS).items():
        party.hold({name: _send_shares(peers, CLIENT, name, make_shares(protocol, setting, value))})
    peers.send_all({"kind": "shared", "step": step})
    for peer in peers:
        peers.receive(peer)
    peers.send_all({"kind": "run"})
    costs, logits = party.run(step)
    by_party, shares = [costs], [logits]
    for peer in peers:
        header, blobs = peers.receive(peer)
        by_party.append(header["costs"])
        shares.append(unpacked(blobs))
    np.save(LOGITS, reconstruct(protocol, setting, shares))
    return {"seconds": time.monotonic() - started, "by_party": by_party}


def take_part(assignment: Assignment, log: Log, commands: "SimpleQueue[list[Any]]", answers: Answers) -> None:
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
            take_part(assignment, Log(path=folder / LOG), commands, answers)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
