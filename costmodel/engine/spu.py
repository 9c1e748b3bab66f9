"""Run op graphs under a real MPC engine, SecretFlow-SPU or CrypTen, and measure the cost of every op.

The parties run one op after the other, each by its function in `execution.op_functions`, and results stay
secret-shared between ops. So costs are counted per op, and the ops that are priced are the ops that run. Before the
run, hidden weights are secret-shared or stay with the server, and the client shares its tokens, one-hot encoded or as
ids. This sharing, other messages before the first op, and opening the logits are not counted. A measurement is a
session of one step (`engine.session`), run once or several times. Each party is a process with as many threads as the
setting says.

CrypTen counts its rounds. SecretFlow-SPU counts messages, but does not wait for most of them, so its rounds are
measured: the same parties run the same ops several times through a relay that delays every message. The slope of wall
time over the one-way delay is the number of delays that follow one another, which is the number of rounds. As in a
normal run, there is no barrier between ops, so a party that does not wait in one op is ahead in the next.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from costmodel.config.units import parse_seconds
from costmodel.deployment.deploy import Deployment
from costmodel.engine.links import UNHINDERED, Link, delayed, tcp
from costmodel.engine.plan import Assignment, Plan
from costmodel.engine.session import Measured, StepRun, on_this_machine
from costmodel.errors import StoppedError, UserError
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array, Weights
from costmodel.ops import Input, Node, Op, OpGraph
from costmodel.protocols.cheetah_preprocessing import BATCH_MESSAGES
from costmodel.protocols.primitives import EngineSetting

LEAST_DELAYS = 3  # any two times lie on a line
REPEATS = 2  # measured passes with each delay
WARM_UPS = 2  # passes before these, for set-up and for oblivious transfers that the first of them nearly used up


class Job(NamedTuple):
    """A step to measure: the client's assignment, with plan and weights, and the step's inputs by name."""

    client: Assignment
    inputs: Mapping[str, Array]


def graph_job(
    graph: OpGraph,
    weights: Weights,
    tokens: Array | None,
    caches: Mapping[str, Array] | None = None,
    *,
    protocol: str,
    setting: EngineSetting,
) -> Job:
    """Return a job that runs `graph`; weights, tokens and caches are as for `interpreter.execute`.

    Raise UserError if no engine runs the protocol, or the tokens or caches do not fit the graph.
    """
    client = Assignment(
        protocol=protocol,
        setting=setting,
        graph_of=partial(_given, graph),
        plan=Plan(kind="sequences", num_tokens=1),
        weights=weights,
    )
    return Job(client, interpreter.inputs(graph, tokens, caches))


def _given(graph: OpGraph, num_tokens: int, deployment: Deployment) -> OpGraph:
    return graph


def ops_job(ops: Sequence[Op], *, protocol: str, setting: EngineSetting) -> Job:
    """Return a job that runs each op on random numbers (seed 0). Raise UserError if no engine runs the protocol."""
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
    return graph_job(graph, weights, None, inputs, protocol=protocol, setting=setting)


def total_measured(costs: Iterable[Measured]) -> Measured:
    """Return the total cost of ops that run one after another; rounds are None if they are None for any op."""
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
) -> StepRun:
    """Return the run of a graph under the engine; with kept weight masks, the second of two runs, which reuses them.

    Weights, tokens and caches are as for `interpreter.execute`, and errors as for `graph_job` and `passes`.
    """
    job = graph_job(graph, weights, tokens, caches, protocol=protocol, setting=setting)
    return passes(job, tcp, [UNHINDERED] * (2 if setting.weight_masks == "kept" else 1))[-1]


def measure(ops: Sequence[Op], *, protocol: str, setting: EngineSetting) -> tuple[Measured, ...]:
    """Return the measured cost of each op on random numbers, for calibration and to check formulas.

    Preprocessing that the engine does once is part of the cost of the first op that needs it. Errors are as for
    `graph_job` and `passes`.
    """
    return passes(ops_job(ops, protocol=protocol, setting=setting), tcp, [UNHINDERED])[0].by_op


def passes(job: Job, link: Link, delays_s: Sequence[float]) -> list[StepRun]:
    """Return several runs of one job by the same parties, one for each one-way delay of the link, in seconds.

    Raise UserError for a weight that is missing or has another shape, an op that cannot be run, an engine or device
    that this machine lacks, a TMPDIR too deep for sockets, or a delay that the link cannot make; StoppedError, in one
    line, if the engine fails.
    """
    runs = []
    with on_this_machine(job.client, link) as session:
        for delay_s in delays_s:
            session.set_delay(delay_s)
            runs.append(session.run(0, job.inputs))
        session.leave()
    return runs


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRounds:
    """Rounds of the ops of a job, measured with delays.

    by_op: rounds of each op, in order: the slope of its seconds over the one-way delay, hence not a whole number.
    seconds: pairs of a delay and the total seconds of all ops with it. residual_s: largest distance of such a total
        from the fitted line, in seconds.
    """

    by_op: tuple[float, ...]
    seconds: tuple[tuple[float, float], ...]
    residual_s: float

    @property
    def rounds(self) -> float:
        """Rounds of all ops together."""
        return sum(self.by_op)


def check_delays(delays_s: Sequence[float]) -> None:
    """Raise UserError unless there are at least three different delays, none of them negative."""
    if len(set(delays_s)) < LEAST_DELAYS or min(delays_s) < 0:
        raise UserError(
            f"rounds are a slope over at least {LEAST_DELAYS} different one-way delays, but got {list(delays_s)} s; "
            "10ms, 20ms and 40ms will do."
        )


def parse_delays(text: str) -> tuple[float, ...]:
    """Return delays such as `10ms,20ms,40ms` in seconds. Raise UserError for 0 or other text, or as `check_delays`."""
    delays_s = tuple(parse_seconds(part, "--delays") for part in text.split(","))
    check_delays(delays_s)
    return delays_s


def measured_rounds(job: Job, *, delays_s: Sequence[float]) -> MeasuredRounds:
    """Return the rounds of one pass, without one-time set-up and without batches of oblivious transfers.

    Under cheetah, the rounds of making triples for small products are included, if a pass makes any.

    `delays_s` are one-way delays in seconds. Raise UserError as `check_delays` and `passes`; StoppedError if the engine
    fails, or if every pass with one of the delays made a batch of oblivious transfers.
    """
    check_delays(delays_s)
    delays = sorted(set(delays_s))
    done = passes(job, delayed, [*[UNHINDERED] * WARM_UPS, *delays * REPEATS])
    rest, fastest = done[WARM_UPS:], []
    most = (
        min(run.messages for run in rest) + BATCH_MESSAGES - 1
    )  # cheetah makes triples in smaller batches, which stay
    for index, delay_s in enumerate(delays):
        without_batch = [run.by_op for run in rest[index :: len(delays)] if run.messages <= most]
        if not without_batch:
            raise StoppedError(f"every pass with {delay_s} s made oblivious transfers ahead; use more repeats.")
        # the fastest, since whatever else the machine does only adds to a pass
        fastest.append(min(without_batch, key=lambda by_op: sum(cost.seconds for cost in by_op)))
    table = np.array([[cost.seconds for cost in by_op] for by_op in fastest])  # delays x ops
    (slopes, intercepts), seconds = np.polyfit(delays, table, 1), table.sum(axis=1)
    residuals = np.outer(delays, slopes).sum(axis=1) + intercepts.sum() - seconds
    return MeasuredRounds(
        by_op=tuple(slopes.tolist()),
        seconds=tuple(zip(delays, seconds.tolist(), strict=True)),
        residual_s=float(np.abs(residuals).max()),
    )
