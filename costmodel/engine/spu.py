"""Runs an op graph under a real MPC engine, SecretFlow-SPU, and measures what it sends.

Every op is compiled by itself from its function in `execution.op_functions`, run by all parties, and its result kept
secret for the next op, so that the engine's counters can be read per op and what is priced is what is run. Before the
run, all operands are secret-shared but those that `execution.interpreter` calls public, or are put in the hands of the
server alone; the client shares its tokens, one-hot or as they are.
What is not counted: sharing inputs and weights, opening the logits, and what the parties exchange before the first op.

The engine is a C++ library that writes its profile to stdout, so it runs in child processes with captured output
(`engine.session`), with all of its own parallelism off: all parties in one, linked in memory, or a process for each.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from costmodel.engine.job import Job, graph_job, ops_job
from costmodel.engine.links import LINKS, UNHINDERED, Condition, Link
from costmodel.engine.profile import entries
from costmodel.engine.session import EngineError, run_passes
from costmodel.errors import UserError
from costmodel.execution.interpreter import Array, Weights
from costmodel.ops import Node, Op, OpGraph
from costmodel.protocols.primitives import EngineSetting

__all__ = ["EngineError", "EngineRun", "Measured", "Pass", "check_installed", "measure", "passes", "run"]

INSTALL = "python3.11 -m pip install 'spu==0.9.5' 'numpy<2'"
NEWEST_PYTHON = (3, 11)  # the engine has wheels for 3.10 and 3.11


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one op, or a whole graph, cost: bytes and messages (send actions) summed over parties.

    seconds: from when the first party started the op, but not before the last one had ended the op before, to when the
    last one ended it; all parties share this machine. Set-up is in the first op that needs it.
    """

    sent_bytes: int
    messages: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineRun:
    """by_op: in the graph's order. logits: tokens x vocab, opened after the run.

    peak_bytes: the most memory that each process held, the first party's first; None where that is not known.
    """

    logits: Array
    by_op: tuple[tuple[Node, Measured], ...]
    peak_bytes: tuple[int | None, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass of several. seconds: of the whole; by_op: what each op cost, in order.

    peak_bytes: in each op, the most memory that each process held; None where that is not known.
    """

    seconds: float
    by_op: tuple[Measured, ...]
    peak_bytes: tuple[tuple[int | None, ...], ...] = ()


def total_measured(costs: Iterable[Measured]) -> Measured:
    """What ops that follow one another cost together."""
    parts = list(costs)
    return Measured(
        sent_bytes=sum(cost.sent_bytes for cost in parts),
        messages=sum(cost.messages for cost in parts),
        seconds=sum(cost.seconds for cost in parts),
    )


def run(
    graph: OpGraph,
    weights: Weights,
    tokens: Array,
    caches: Mapping[str, Array] | None = None,
    *,
    protocol: str,
    setting: EngineSetting,
    link: str = "memory",
) -> EngineRun:
    """One forward pass of a sequence under the engine; where masks of weights are kept, the second of two.

    weights, tokens, caches: as `interpreter.execute` takes them. link: a key of `links.LINKS`.

    Raises UserError for an unknown protocol or link, inputs that do not fit the graph, or an engine that is not
    installed; EngineError if the engine fails.
    """
    job = graph_job(graph, weights, tokens, caches, protocol=protocol, setting=setting)
    conditions = [UNHINDERED] * (2 if setting.weight_masks == "kept" else 1)
    (*_, last), logits = passes(job, _link(link), conditions)
    peaks = tuple(None if None in of_all else max(of_all) for of_all in zip(*last.peak_bytes, strict=True))
    return EngineRun(logits=logits, by_op=tuple(zip(graph.nodes, last.by_op, strict=True)), peak_bytes=peaks)


def measure(ops: Sequence[Op], *, protocol: str, setting: EngineSetting, link: str = "memory") -> tuple[Measured, ...]:
    """What each op costs by itself, on random numbers: for calibration, and to check formulas.

    Set-up that the engine does once, at the first op that needs it, is in that op's cost.

    Raises UserError for an unknown protocol or link or an engine that is not installed; EngineError as `run`.
    """
    (only,), _ = passes(ops_job(ops, protocol=protocol, setting=setting), _link(link), [UNHINDERED])
    return only.by_op


def passes(
    job: Job, link: Link, conditions: Sequence[Condition], *, timeout_s: float | None = None
) -> tuple[tuple[Pass, ...], Array]:
    """The same job several times by the same parties, each time under a condition of the link; and the last result.

    Raises UserError for an engine that is not installed or a condition that the link does not have; EngineError if the
    engine fails or takes longer than `timeout_s`.
    """
    check_installed()
    done = run_passes(job, link, conditions, timeout_s)
    names = [node.name for node in job.nodes]
    traffic = _traffic([entries(log) for log in done.logs], names, len(conditions))
    return tuple(map(_pass, traffic, done.times, done.peak_bytes)), done.result


def _pass(
    traffic: Sequence[tuple[int, int]],
    times: Sequence[Sequence[tuple[float, float]]],
    peak_bytes: tuple[tuple[int | None, ...], ...] = (),
) -> Pass:
    """From every op's bytes and messages, and from when to when every party ran it."""
    ends = [max(end for _, end in of_op) for of_op in times]
    starts = [min(start for start, _ in of_op) for of_op in times]
    seconds = [end - max(start, before) for end, start, before in zip(ends, starts, [starts[0], *ends], strict=False)]
    return Pass(
        seconds=ends[-1] - starts[0],
        peak_bytes=peak_bytes,
        by_op=tuple(
            Measured(sent_bytes=sent_bytes, messages=messages, seconds=of_op)
            for (sent_bytes, messages), of_op in zip(traffic, seconds, strict=True)
        ),
    )


def _link(name: str) -> Link:
    if name not in LINKS:
        raise UserError(f"`link` must be one of {', '.join(LINKS)}, but got {name!r}.")
    return LINKS[name]


def check_installed() -> None:
    """Raises UserError, with the command to run, if the engine cannot be imported here."""
    if find_spec("spu") is None:
        have = ".".join(map(str, sys.version_info[:2]))
        old = (
            "" if sys.version_info[:2] <= NEWEST_PYTHON else f", and has no wheel for this Python {have}, but for 3.11"
        )
        needs = "it needs Python < 3.12 and numpy < 2"
        raise UserError(f"the MPC engine SecretFlow-SPU is not installed{old}; {needs}; run: {INSTALL}")


def _traffic(
    logs: Sequence[dict[str, list[tuple[int, int]]]], names: Sequence[str], num_passes: int
) -> list[list[tuple[int, int]]]:
    """By pass and op, bytes and messages of all parties: every party of a log ran every op once a pass."""

    def of_pass(entries: list[tuple[int, int]], index: int) -> list[tuple[int, int]]:
        parties = len(entries) // num_passes
        return entries[index * parties : (index + 1) * parties]

    def summed(name: str, index: int) -> tuple[int, int]:
        parts = [part for log in logs for part in of_pass(log[name], index)]
        return sum(sent_bytes for sent_bytes, _ in parts), sum(messages for _, messages in parts)

    return [[summed(name, index) for name in names] for index in range(num_passes)]
