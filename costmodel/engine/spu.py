"""Runs op graphs under a real MPC engine, SecretFlow-SPU or CrypTen, and measures the cost of every op.

All parties run each op by itself, with its function from `execution.op_functions`, and its result stays secret-shared
for the next op. So costs are counted per op, and the ops that are priced are the ops that run. Before the run, weights
are secret-shared or stay with the server alone, unless all parties know them; the client shares its tokens, one-hot
encoded or as ids. Not counted are sharing inputs and weights, opening the logits, and messages before the first op. A
measurement is a session of one step (`engine.session`), run once or several times. Each party is a process with as many
threads as the setting says.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from costmodel.deployment.deploy import Deployment
from costmodel.engine.assignment import Assignment
from costmodel.engine.links import UNHINDERED, Link, tcp
from costmodel.engine.party import OpCost
from costmodel.engine.plan import Plan
from costmodel.engine.session import on_this_machine
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array, Weights
from costmodel.ops import Input, Node, Op, OpGraph
from costmodel.protocols.primitives import EngineSetting


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measured cost of an op or a whole graph; bytes and messages (send actions) are summed over parties.

    seconds: from the start of the op at its first party, or the end of the op before at its last party if that is
        later, to the end at its last party. All parties run on this machine. Preprocessing counts in the first op that
        needs it.
    rounds: None if the engine does not count them.
    """

    sent_bytes: int
    messages: int
    seconds: float
    rounds: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineRun:
    """Costs of ops in the graph's order, and the logits (tokens x vocab), which are opened after the run.

    `peak_bytes` is the peak memory of each party's process, by rank; None if it is unknown.
    """

    logits: Array
    by_op: tuple[tuple[Node, Measured], ...]
    peak_bytes: tuple[int | None, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One of several passes: its seconds, and the cost of every op in order.

    `peak_bytes` is the peak memory of each party's process during each op; None if it is unknown.
    """

    seconds: float
    by_op: tuple[Measured, ...]
    peak_bytes: tuple[tuple[int | None, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """A measurement to make: an op graph, its inputs by name, and its weights by `<node>.<suffix>`."""

    protocol: str
    setting: EngineSetting
    graph: OpGraph
    inputs: Mapping[str, Array]
    weights: Weights

    @property
    def client(self) -> Assignment:
        """Assignment of a client that has all data; a UserError is raised if no engine runs the protocol."""
        return Assignment(
            protocol=self.protocol,
            setting=self.setting,
            graph_of=partial(_given, self.graph),
            plan=Plan(kind="sequences", num_tokens=1),
            weights=self.weights,
        )


def _given(graph: OpGraph, num_tokens: int, deployment: Deployment) -> OpGraph:
    return graph


def graph_job(
    graph: OpGraph,
    weights: Weights,
    tokens: Array | None,
    caches: Mapping[str, Array] | None = None,
    *,
    protocol: str,
    setting: EngineSetting,
) -> Job:
    """Return the job of one forward pass of a sequence; arguments are as for `interpreter.execute`.

    Raise UserError if the tokens or caches do not fit the graph.
    """
    inputs = interpreter.inputs(graph, tokens, caches)
    return Job(protocol=protocol, setting=setting, graph=graph, inputs=inputs, weights=weights)


def ops_job(ops: Sequence[Op], *, protocol: str, setting: EngineSetting) -> Job:
    """Return a job that runs each op by itself on random numbers."""
    generator = np.random.default_rng(0)
    nodes: list[Node] = []
    inputs: dict[str, Array] = {}
    weights: dict[str, Array] = {}
    for index, op in enumerate(ops):
        name = f"{index}.{type(op).__name__}"
        shapes = {f"{name}.input.{position}": shape for position, shape in enumerate(op.input_shapes)}
        inputs |= {key: generator.standard_normal(shape) for key, shape in shapes.items()}
        nodes.append(Node(name=name, layer=0, op=op, inputs=tuple(shapes)))
        # far from 0, since some are divisors
        weights |= {f"{name}.{key}": generator.uniform(0.5, 1.5, shape) for key, shape in op.weight_shapes.items()}
    graph_inputs = tuple(Input(name=key, shape=value.shape) for key, value in inputs.items())
    graph = OpGraph(nodes=tuple(nodes), inputs=graph_inputs)
    return Job(protocol=protocol, setting=setting, graph=graph, inputs=inputs, weights=weights)


def total_measured(costs: Iterable[Measured]) -> Measured:
    """Return the total cost of ops that run one after another."""
    parts = list(costs)
    rounds = [cost.rounds for cost in parts if cost.rounds is not None]
    return Measured(
        sent_bytes=sum(cost.sent_bytes for cost in parts),
        messages=sum(cost.messages for cost in parts),
        seconds=sum(cost.seconds for cost in parts),
        rounds=sum(rounds) if len(rounds) == len(parts) else None,
    )


def run(
    graph: OpGraph,
    weights: Weights,
    tokens: Array | None,
    caches: Mapping[str, Array] | None = None,
    *,
    protocol: str,
    setting: EngineSetting,
) -> EngineRun:
    """Run one forward pass of a sequence under the engine; with kept weight masks, run two and return the second.

    Weights, tokens and caches are as for `interpreter.execute`, and errors as for `graph_job` and `passes`.
    """
    job = graph_job(graph, weights, tokens, caches, protocol=protocol, setting=setting)
    (*_, last), logits = passes(job, tcp, [UNHINDERED] * (2 if setting.weight_masks == "kept" else 1))
    peaks = tuple(None if None in of_all else max(of_all) for of_all in zip(*last.peak_bytes, strict=True))
    return EngineRun(logits=logits, by_op=tuple(zip(graph.nodes, last.by_op, strict=True)), peak_bytes=peaks)


def measure(ops: Sequence[Op], *, protocol: str, setting: EngineSetting) -> tuple[Measured, ...]:
    """Measure each op by itself on random numbers, for calibration and to check formulas.

    Preprocessing that the engine does once is part of the cost of the first op that needs it. Errors are as for
    `passes`.
    """
    (only,), _ = passes(ops_job(ops, protocol=protocol, setting=setting), tcp, [UNHINDERED])
    return only.by_op


def passes(job: Job, link: Link, delays_s: Sequence[float]) -> tuple[tuple[Pass, ...], Array]:
    """Run the same job several times by the same parties, each time under one delay of the link.

    Returns the passes and the last result. Raises UserError for an unknown protocol, a weight that does not fit, an
    engine that is not installed, or a delay that the link does not have; StoppedError, in one line, if the engine
    fails.
    """
    runs = []
    with on_this_machine(job.client, link) as (session, _):
        for delay_s in delays_s:
            session.set_delay(delay_s)
            runs.append(session.run(0, job.inputs))
        session.leave()
    return tuple(_pass(run.by_party) for run in runs), runs[-1].logits


def _pass(by_party: Sequence[Sequence[OpCost]]) -> Pass:
    by_op, ended_s = list[Measured](), float("-inf")
    for costs in zip(*by_party, strict=True):
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
    return Pass(
        seconds=ended_s - min(costs[0].start_s for costs in by_party),
        peak_bytes=tuple(tuple(cost.peak_bytes for cost in costs) for costs in zip(*by_party, strict=True)),
        by_op=tuple(by_op),
    )
