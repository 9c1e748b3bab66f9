"""A child process of a session: one party, which meets the others, gets its shares and runs step after step.

The client, rank 0, is driven by its parent: lines on stdin are JSON lists, `["run", STEP, TOKENS]` or `["leave"]`. The
others do what the client tells them by a frame. Answers are JSON lines on a pipe of their own, since the engine writes
its profile to stdout from C++. A process whose stdin ends, ends too, and so does one that lost a peer.
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
from typing import Any, TextIO

import numpy as np

from costmodel.engine.children import commands_of_parent, log_file
from costmodel.engine.profile import entries
from costmodel.engine.programs import Program
from costmodel.engine.runtimes import SERVER, dealt, linked_runtime, packed, rebuilt, run_program, unpacked
from costmodel.errors import UserError
from costmodel.execution import interpreter
from costmodel.generation.assignment import ASSIGNMENT, CLIENT, LOGITS, Assignment, role
from costmodel.generation.compiled import Compiled, compile_steps, from_blobs, to_blobs
from costmodel.generation.meeting import meet, require_equal, terms
from costmodel.generation.operands import operands
from costmodel.generation.peers import FAREWELL, Peers
from costmodel.generation.plan import Plan, fingerprint, graphs
from costmodel.generation.weight_shares import deal_weights, received_weights
from costmodel.ops import OpGraph

GRACE_S = 3.0  # a lost peer is noticed within it, and told rather than what the engine says of it
PARTING_S = 0.5  # peers find the same difference by themselves, and tell that rather than that we are gone
LOG_PATIENCE_S = 5.0  # the profile of a program that has run is in the log by then


@dataclass(kw_only=True, slots=True)
class Answers:
    """Where a party tells its parent. Once it has told an error, it ends."""

    pipe: TextIO
    lock: Any = field(default_factory=Lock)

    def tell(self, **answer: Any) -> None:
        with self.lock:
            print(json.dumps(answer), file=self.pipe, flush=True)

    def fail(self, error: str, **more: Any) -> None:
        """Never returns, whatever else the process is doing."""
        with self.lock:  # and is not released: a second error is no news
            print(json.dumps({"error": error, **more}), file=self.pipe, flush=True)
            os._exit(1)


@dataclass(kw_only=True, slots=True)
class Log:
    """The profile of this process, as far as it was read."""

    path: Path
    position: int = 0

    def traffic(self, num_programs: int) -> tuple[int, int]:
        """Bytes and messages that the last so many programs sent."""
        deadline = time.monotonic() + LOG_PATIENCE_S
        while True:
            with self.path.open("rb") as file:
                file.seek(self.position)
                content = file.read()
            found = [each for of_name in entries(content.decode(errors="replace")).values() for each in of_name]
            if len(found) >= num_programs or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        assert len(found) == num_programs, f"the profile of {num_programs} programs has {len(found)} entries"
        self.position += len(content)
        return sum(sent_bytes for sent_bytes, _ in found), sum(messages for _, messages in found)


@dataclass(kw_only=True, slots=True)
class Party:
    """One that is ready to run: it has met the others and holds its shares."""

    assignment: Assignment
    steps: tuple[OpGraph, ...]
    peers: Peers
    runtime: Any
    compiled: Compiled
    log: Log

    def run(self, step: int, tokens: Any) -> tuple[int, int, Any]:
        """Bytes and messages that this party sent in a step, and its share of the logits. tokens: its share of them."""
        self.runtime.set_var("tokens", tokens)
        for program in (programs := self.compiled.steps[step]):
            run_program(program, self.runtime)
        return *self.log.traffic(len(programs)), self.runtime.get_var(self.steps[step].nodes[-1].name)


def join(assignment: Assignment, folder: Path, answers: Answers) -> Party:
    """Meets the others, agrees with them on what is run, and gets programs and shares. Raises UserError as `meet`."""
    rank, protocol, setting = assignment.rank, assignment.protocol, assignment.setting
    channels = meet(rank, assignment.addresses, terms(protocol, setting), assignment.wait_s)
    peers = Peers(channels, lambda peer: _lost(assignment, peer, answers))
    steps = graphs(assignment.graph_of, _plan(assignment, peers))
    own = {"op graph": fingerprint(steps)}
    peers.send_all({"kind": "steps", **own})
    for peer in peers:
        require_equal(own, rank, peers.receive(peer).header, peer)
    answers.tell(agreed=own["op graph"], num_steps=len(steps))
    shares = {}
    if rank == SERVER:
        assert assignment.weights is not None
        shares = deal_weights(peers, operands(steps), assignment.weights, protocol, setting)
    if rank == CLIENT:
        compiled = compile_steps(steps, setting)
        peers.send_all({"kind": "programs"}, to_blobs(compiled))
    else:
        compiled = from_blobs(peers.receive(CLIENT).blobs)
    if rank != SERVER:
        shares = received_weights(peers)
    runtime = linked_runtime(protocol, setting, rank, [f"{host}:{port + 1}" for host, port in assignment.addresses])
    for name, share in shares.items():
        runtime.set_var(name, share)
    log = Log(path=log_file(folder, rank))
    _keep_masks(compiled.keepers, runtime, log)
    return Party(assignment=assignment, steps=steps, peers=peers, runtime=runtime, compiled=compiled, log=log)


def _keep_masks(keepers: tuple[Program, ...], runtime: Any, log: Log) -> None:
    for keeper in keepers:
        run_program(keeper, runtime)
    log.traffic(len(keepers))


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
    host, port = assignment.addresses[peer]
    answers.fail(f"party {peer} (the {role(peer)}, {host}:{port}) is gone; start all parties again.", gone=peer)


def serve(party: Party, answers: Answers) -> None:
    """What a party other than the client does, until that one says farewell."""
    totals = [0, 0, 0]
    while (frame := party.peers.receive(CLIENT)).header["kind"] != FAREWELL:
        sent_bytes, messages, logits = party.run(frame.header["step"], unpacked(frame.blobs))
        party.peers.send(CLIENT, {"kind": "ran", "sent_bytes": sent_bytes, "messages": messages}, packed(logits))
        totals = [totals[0] + 1, totals[1] + sent_bytes, totals[2] + messages]
    party.peers.send_all({"kind": FAREWELL})
    answers.tell(left=True, num_steps=totals[0], sent_bytes=totals[1], messages=totals[2])


def lead(party: Party, folder: Path, commands: "SimpleQueue[str]", answers: Answers) -> None:
    """What the client does: a step for every command, until it is told to leave."""
    while (command := json.loads(commands.get()))[0] == "run":
        _, step, tokens = command
        answers.tell(**_lead_step(party, step, np.asarray(tokens), folder))
    party.peers.send_all({"kind": FAREWELL})
    answers.tell(left=True)


def _lead_step(party: Party, step: int, tokens: Any, folder: Path) -> dict[str, Any]:
    """Shares tokens, one-hot, runs with the others, and opens the logits from what all of them send."""
    started, protocol, setting = time.monotonic(), party.assignment.protocol, party.assignment.setting
    own, *others = dealt(protocol, setting, interpreter.encoded(party.steps[step], tokens))
    for peer, share in zip(party.peers, others, strict=True):
        party.peers.send(peer, {"kind": "run", "step": step}, packed(share))
    sent_bytes, messages, logits = party.run(step, own)
    shares = [logits]
    for peer in party.peers:
        header, blobs = party.peers.receive(peer)
        sent_bytes, messages = sent_bytes + header["sent_bytes"], messages + header["messages"]
        shares.append(unpacked(blobs))
    np.save(folder / LOGITS, rebuilt(protocol, setting, shares))
    return {"sent_bytes": sent_bytes, "messages": messages, "seconds": time.monotonic() - started}


def _main(folder: Path, answers_to: int, rank: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to end
    commands = commands_of_parent()
    assignment: Assignment = pickle.loads((folder / ASSIGNMENT).read_bytes())
    (folder / ASSIGNMENT).unlink()
    with os.fdopen(answers_to, "w") as pipe:
        answers = Answers(pipe=pipe)
        os.chdir(folder)  # where the engine leaves the masks that it keeps
        try:
            party = join(assignment, folder, answers)
            answers.tell(ready=True, shared_bytes=party.peers.sent_bytes)
            if rank == CLIENT:
                lead(party, folder, commands, answers)
            else:
                serve(party, answers)
        except UserError as error:
            time.sleep(PARTING_S)
            answers.fail(str(error), usage=True)
        except Exception as error:
            time.sleep(GRACE_S)
            traceback.print_exc()
            answers.fail(f"the engine failed at party {rank}: {' '.join(str(error).split()):.300}")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
