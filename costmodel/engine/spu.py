"""Runs op graphs under a real MPC engine, SecretFlow-SPU or CrypTen, and measures what every op sends and takes.

Every op is run by itself, by its function in `execution.op_functions`, and its result kept secret for the next op, so
that what is sent can be counted per op. Before the run, operands are secret-shared, but for those that
`execution.interpreter` calls public or the server keeps; the client shares its tokens, one-hot or as they are.
What is not counted: sharing inputs and weights, opening the logits, and what the parties exchange before the first op.

A measurement is a session of one step (`engine.session`), run once or several times: a process for each party, with all
of the engine's own parallelism off.
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
from costmodel.protocols import RunSetting


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The measured cost of an op, or a whole graph: bytes and messages (send actions) summed over parties.

    seconds: from when the first party started the op, but not before the last one had ended the op before, to when the
    last one ended it; all parties share this machine. Preprocessing is in the first op that needs it.
    rounds: None where the engine does not count them.
    """

    sent_bytes: int
    messages: int
    seconds: float
    rounds: int | None = None


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """A measurement to make: a graph on inputs by name, with weights by `<node>.<suffix>`."""

    protocol: str
    setting: RunSetting
    graph: OpGraph
    inputs: Mapping[str, Array]
    weights: Weights

    @property
    def client(self) -> Assignment:
        """A client that knows everything. Raises UserError for a protocol that no engine runs."""
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
    setting: RunSetting,
) -> Job:
    """One forward pass of a sequence; weights, tokens and caches as `interpreter.execute` takes them.

    Raises UserError for tokens or caches that do not fit the graph.
    """
    inputs = interpreter.inputs(graph, tokens, caches)
    return Job(protocol=protocol, setting=setting, graph=graph, inputs=inputs, weights=weights)


def ops_job(ops: Sequence[Op], *, protocol: str, setting: RunSetting) -> Job:
    """Each op by itself, on random numbers."""
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
    """The cost of ops that follow one another."""
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
    setting: RunSetting,
) -> EngineRun:
    """One forward pass of a sequence under the engine; where masks of weights are kept, the second of two.

    weights, tokens, caches: as `interpreter.execute` takes them. Raises as `graph_job` and `passes`.
    """
    job = graph_job(graph, weights, tokens, caches, protocol=protocol, setting=setting)
    (*_, last), logits = passes(job, tcp, [UNHINDERED] * (2 if setting.weight_masks == "kept" else 1))
    peaks = tuple(None if None in of_all else max(of_all) for of_all in zip(*last.peak_bytes, strict=True))
    return EngineRun(logits=logits, by_op=tuple(zip(graph.nodes, last.by_op, strict=True)), peak_bytes=peaks)


def measure(ops: Sequence[Op], *, protocol: str, setting: RunSetting) -> tuple[Measured, ...]:
    """Measures each op by itself, on random numbers: for calibration, and to check formulas.

    Preprocessing that the engine does once, at the first op that needs it, is in that op's cost. Raises as `passes`.
    """
    (only,), _ = passes(ops_job(ops, protocol=protocol, setting=setting), tcp, [UNHINDERED])
    return only.by_op


def passes(job: Job, link: Link, delays_s: Sequence[float]) -> tuple[tuple[Pass, ...], Array]:
    """The same job several times by the same parties, each time under a delay of the link; and the last result.

    Raises UserError for an unknown protocol, a weight that does not fit, an engine that is not installed, or a
    delay that the link does not have; StoppedError, in one line, if the engine fails.
    """
    runs = []
    with on_this_machine(job.client, link) as (session, _):
        for delay_s in delays_s:
            session.set_delay(delay_s)
            runs.append(session.run(0, job.inputs))
        session.leave()
    return tuple(_pass(run.by_party) for run in runs), runs[-1].logits


def _pass(by_party: Sequence[Sequence[OpCost]]) -> Pass:
    """The cost of a pass to all parties together."""
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
