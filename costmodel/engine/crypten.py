"""Runs op graphs under CrypTen, two parties on this machine, and measures what its own communicator counts.

What is not counted: sharing inputs and weights, which send nothing, opening the logits, and meeting. Bytes are those
that both parties send: each counts what it sends and what it receives.
"""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from costmodel.engine.children import last_words
from costmodel.engine.spu import EngineRun, Measured
from costmodel.errors import StoppedError, UserError
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array, Weights
from costmodel.ops import OpGraph
from costmodel.protocols.crypten import CryptenSetting
from costmodel.protocols.crypten_primitives import NUM_PARTIES

PACKAGE, LINK = "crypten", "gloo"
INSTALL = "python -m pip install omegaconf && python -m pip install --no-deps crypten==0.4.1"
LOOK_S = 0.05
JOB, RENDEZVOUS = "job", "rendezvous"  # in the folder that the parties share; a party leaves a file named by its rank


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartyJob:
    """inputs: of the graph by name. weights: by `<node>.<suffix>`."""

    graph: OpGraph
    inputs: Mapping[str, Array]
    weights: Mapping[str, Array]
    setting: CryptenSetting


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyCost:
    """A party's cost of an op. counted_bytes: sent and received. begin_s, end_s: on the machine's clock."""

    counted_bytes: int
    rounds: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartyResult:
    logits: Array
    by_op: tuple[PartyCost, ...]
    peak_bytes: int | None


def check_installed() -> None:
    """Raises UserError, with the command to run, if CrypTen cannot be imported here."""
    if not all(map(find_spec, (PACKAGE, "omegaconf", "torch"))):
        raise UserError(f"the engine CrypTen is not installed; run: {INSTALL}")


def run(
    graph: OpGraph,
    weights: Weights,
    tokens: Array | None,
    caches: Mapping[str, Array] | None = None,
    *,
    protocol: str,
    setting: CryptenSetting,
) -> EngineRun:
    """One forward pass of a sequence.

    weights, tokens, caches: as `interpreter.execute` takes them. Raises as `run_job`, and UserError for tokens, caches
    or weights that do not fit the graph.
    """
    inputs = interpreter.inputs(graph, tokens, caches)
    for node in graph:
        interpreter.operands(node, weights)
    return run_job(PartyJob(graph=graph, inputs=inputs, weights=dict(weights), setting=setting))


def run_job(job: PartyJob) -> EngineRun:
    """A graph on given inputs, a process for each party. Raises StoppedError, in one line, if a party fails."""
    first, second = _results(job)
    by_op, last_s = [], 0.0
    for node, cost, other in zip(job.graph, first.by_op, second.by_op, strict=True):
        end_s = max(cost.end_s, other.end_s)
        measured = Measured(
            sent_bytes=(cost.counted_bytes + other.counted_bytes) // 2,
            messages=cost.rounds + other.rounds,
            seconds=end_s - max(last_s, min(cost.begin_s, other.begin_s)),
            rounds=max(cost.rounds, other.rounds),
        )
        by_op.append((node, measured))
        last_s = end_s
    return EngineRun(logits=first.logits, by_op=tuple(by_op), peak_bytes=(first.peak_bytes, second.peak_bytes))


def _results(job: PartyJob) -> list[PartyResult]:
    """What each party leaves."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="crypten-")))
        (folder / JOB).write_bytes(pickle.dumps(job))
        logs = [stack.enter_context((folder / f"{rank}.log").open("wb")) for rank in range(NUM_PARTIES)]
        parties = [_started(folder, rank, log) for rank, log in enumerate(logs)]
        for party in parties:
            stack.callback(party.wait)
            stack.callback(party.kill)
        if (failed := _failed(parties)) is not None:
            said = last_words((folder / f"{failed}.log").read_text(errors="replace"))
            raise StoppedError(f"CrypTen failed at party {failed}: {said}")
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(NUM_PARTIES)]


def _started(folder: Path, rank: int, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "costmodel.engine.crypten_party", str(folder), str(rank)]
    return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _failed(parties: "Sequence[subprocess.Popen[bytes]]") -> int | None:
    """Waits until all have ended, or one has failed: the first of those that have; None if all did well."""
    while None in (codes := [party.poll() for party in parties]) and not any(codes):
        time.sleep(LOOK_S)
    return next((rank for rank, code in enumerate(codes) if code), None)
