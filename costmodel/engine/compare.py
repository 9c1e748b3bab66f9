"""Compare the costs that a protocol's formulas predict for an op graph with costs measured under its engine.

The graph runs in plaintext and under the engine on the same weights and tokens, so that costs and logits are checked
together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from costmodel import ops
from costmodel.engine import spu
from costmodel.engine.registry import walk
from costmodel.engine.session import Measured
from costmodel.engine.spu import MeasuredRounds
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array, Weights
from costmodel.execution.memory import PeakMemory, load_memory, peak_memory
from costmodel.ops import Node, Op, OpGraph
from costmodel.protocols import derived
from costmodel.protocols.primitives import Comm, EngineSetting, total_comm

SEED = 0
SPREAD = 0.1  # standard deviation of drawn gains and scalars around 1, and of drawn biases and slopes around 0
ABOUT_ZERO = ("bias", "slope")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Predicted and measured costs of a graph, op by op, and how far its logits are from those in plaintext.

    logits_max_abs_error: largest absolute error over all tokens and the vocabulary.
    top1_agreement: share of tokens, 0 to 1, with the same most likely entry of the vocabulary.
    by_op: every node with its predicted and its measured cost.
    predicted_s: predicted seconds of every op, with start-up in the embedding; None if the testbed was measured in
        another setting. range_s: lowest and highest predicted seconds in total, given the errors of the fit; None if
        `predicted_s` is None. testbed: file of the testbed; None for the package's.
    rounds: rounds measured by delays; None if no delays were given.
    memory: predicted peaks; None if the memory testbed does not cover this setting. peak_bytes: measured peak of each
        party's process, by rank; None where it is unknown.
    drawn_weights: whether weights were drawn at random.
    """

    protocol: str
    setting: EngineSetting
    drawn_weights: bool
    by_op: tuple[tuple[Node, Comm, Measured], ...]
    logits_max_abs_error: float
    top1_agreement: float
    predicted_s: tuple[float, ...] | None
    range_s: tuple[float, float] | None = None
    testbed: Path | None = None
    rounds: MeasuredRounds | None = None
    memory: PeakMemory | None = None
    peak_bytes: tuple[int | None, ...] = ()

    @property
    def predicted(self) -> Comm:
        return total_comm(comm for _, comm, _ in self.by_op)

    @property
    def measured(self) -> Measured:
        return spu.total_measured(cost for _, _, cost in self.by_op)


def predict(graph: OpGraph, protocol: str, setting: EngineSetting) -> tuple[Comm, ...]:
    """Return the predicted cost of every op, in order; no engine has to be installed.

    Raise UserError if no engine runs the protocol, an op has no formula, the protocol does not support the setting, or
    the ring is too small for an op.
    """
    return walk(protocol, [node.op for node in graph], setting)


def compare(
    graph: OpGraph,
    predicted: tuple[Comm, ...],
    *,
    protocol: str,
    setting: EngineSetting,
    weights: Weights | None = None,
    delays_s: Sequence[float] | None = None,
    testbed: Path | None = None,
) -> Comparison:
    """Run a graph under the engine on random tokens, and compare the run with predicted costs and with plaintext.

    predicted: result of `predict` for the same graph, protocol and setting. weights: as for `interpreter.execute`;
    drawn with seed 0 if None. delays_s: one-way delays in seconds with which rounds are measured, in more runs; None to
    measure no rounds. testbed: file for predicted seconds; None for the package's.

    Raise UserError if `testbed` is not valid or for another setting, no seconds are known for an op, or as `spu.passes`
    (such as for a missing engine or weight) and `spu.check_delays`; StoppedError as these and `spu.measured_rounds`.
    """
    pricer = (
        derived.load_if_measured(protocol, "loopback", setting)
        if testbed is None
        else derived.load(protocol, "loopback", testbed, setting)
    )
    predicted_s = None if pricer is None else tuple(pricer.price(node.op).latency_s for node in graph)
    generator = np.random.default_rng(SEED)
    drawn = drawn_weights(graph, generator)
    used = drawn if weights is None else weights
    tokens, caches = drawn_tokens(graph, generator), drawn_caches(graph, generator)
    clear = interpreter.execute(graph, used, tokens, caches)  # first: it refuses a graph that cannot be run
    run = spu.run(graph, used, tokens, caches, protocol=protocol, setting=setting)
    rounds = None
    if delays_s is not None:
        job = spu.graph_job(graph, used, tokens, caches, protocol=protocol, setting=setting)
        rounds = spu.measured_rounds(job, delays_s=delays_s)
    return Comparison(
        protocol=protocol,
        setting=setting,
        drawn_weights=weights is None,
        by_op=tuple(zip(graph.nodes, predicted, run.by_op, strict=True)),
        logits_max_abs_error=float(np.abs(run.logits - clear).max()),
        top1_agreement=float(np.mean(run.logits.argmax(axis=1) == clear.argmax(axis=1))),
        predicted_s=predicted_s,
        range_s=None if pricer is None else pricer.latency_s_range(graph),
        testbed=testbed,
        rounds=rounds,
        memory=peak_memory(graph, setting, load_memory(protocol)),
        peak_bytes=run.peak_bytes,
    )


def drawn_weights(graph: OpGraph, generator: np.random.Generator) -> dict[str, Array]:
    """Return random weights by `<node>.<suffix>`, drawn node after node; tied tables are drawn independently.

    Distributions N(mean, variance) are, for linears, N(0, 1 / (16 in_features)); output table, N(0, 1 / features);
    embedding and positions, N(0, 1/4); gains, temperatures, bounds and scalars, N(1, 0.01); biases and slopes,
    N(0, 0.01). Logits then have a standard deviation of 0.3 to 2; beyond 10, the engine's fixed point is less accurate.
    """
    return {
        name: _drawn(op, suffix, op.weight_shapes[suffix], generator)
        for name, (op, suffix) in interpreter.model_weights(graph).items()
    }


def _drawn(op: Op, suffix: str, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    if suffix in ABOUT_ZERO:
        return generator.normal(0.0, SPREAD, shape)
    if op.weight_std is not None:
        columns = shape[1] if suffix in op.transposed else 1
        return generator.normal(0.0, op.weight_std * float(columns) ** -0.5, shape)
    return generator.normal(1.0, SPREAD, shape)


def drawn_tokens(graph: OpGraph, generator: np.random.Generator) -> Array | None:
    """Return as many random tokens as the graph reads, uniform over its vocabulary; None if it reads none."""
    op = next((node.op for node in graph if isinstance(node.op, ops.TokenEmbedding)), None)
    return None if op is None else generator.integers(op.vocab, size=op.tokens)


def drawn_caches(graph: OpGraph, generator: np.random.Generator) -> dict[str, Array]:
    """Return random inputs other than tokens by name, such as cached keys or hidden states: N(0, variance 1 / 16)."""
    return {read.name: generator.normal(0.0, 0.25, read.shape) for read in graph.inputs}
