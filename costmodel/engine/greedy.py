"""Private inference next to inference in plaintext: a prompt and its greedy continuation, or whole sequences."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from costmodel.engine.agreement import Agreement, compared
from costmodel.engine.plan import variables
from costmodel.engine.session import Session, StepRun
from costmodel.execution import interpreter
from costmodel.execution.arithmetic import Arithmetic
from costmodel.execution.interpreter import Array, Weights
from costmodel.ops import OpGraph

NONE: Mapping[str, Array] = MappingProxyType({})


class ClearRun:
    """Plaintext inference in double precision, one graph after another, with the cached values that the next one reads.

    `weights` are as for `interpreter.execute`. `arithmetic`, if there is one, must hold every op of the
    steps after the first, which is checked before a run.
    """

    def __init__(self, weights: Weights, arithmetic: Arithmetic | None = None) -> None:
        self.weights, self.arithmetic = weights, arithmetic
        self._kept: dict[str, Array] = {}

    def output(self, graph: OpGraph, tokens: Array | None, given: Mapping[str, Array] = NONE) -> Array:
        """Return the output of the next step's last node, such as logits (projected tokens x vocab).

        `tokens` is None for a graph that reads none, and `given` holds its other inputs except for cached values.

        Raise UserError if the inputs do not fit the graph, and OutOfRangeError if the arithmetic does not hold an op.
        """
        caches = {name: self._kept[variable] for name, variable in variables(graph).items()}
        observed = self.arithmetic if self._kept else None
        observe = None if observed is None else observed.evaluate
        self._kept = interpreter.values(graph, self.weights, tokens, {**caches, **given}, observe)
        if observed is not None:
            observed.check_wrong()
            observed.wrong.clear()
        return self._kept[graph.nodes[-1].name]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClientLayers:
    """The layers that the client runs in plaintext; the graph of each step ends with the hidden states to share."""

    graphs: tuple[OpGraph, ...]
    run: ClearRun

    def stream(self, step: int, tokens: Array) -> dict[str, Array]:
        """Return the hidden states after these layers (rows x features), by the name of their node."""
        graph = self.graphs[step]
        return {graph.nodes[-1].name: self.run.output(graph, tokens)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrivateToken:
    """A new token, the cost of its step, and how its logits agree with plaintext ones; None if there are none."""

    token: int
    cost: StepRun
    agreement: Agreement | None


def generate(
    session: Session,
    graphs: Sequence[OpGraph],
    prompt: Sequence[int],
    clear: ClearRun | None,
    end: int | None,
    layers: ClientLayers | None = None,
) -> Iterator[PrivateToken]:
    """Yield the most likely token of each step, which the next step reads, up to the token `end` or the last graph.

    `clear` is the plaintext model, which reads the same tokens, and `layers` are the client's own; each may be None.
    Raise StoppedError if a party fails.
    """
    tokens: Array = np.asarray(prompt)
    for step, graph in enumerate(graphs):
        cost, expected = _run(session, step, graph, tokens, clear, layers)
        agreement = None if expected is None else compared(cost.logits[-1:], expected[-1:])
        token = int(cost.logits[-1].argmax())
        yield PrivateToken(token=token, cost=cost, agreement=agreement)
        if token == end:
            return
        tokens = np.asarray([token])


def sequences(
    session: Session,
    graph: OpGraph,
    tokens: Sequence[Array],
    clear: ClearRun,
    layers: ClientLayers | None = None,
) -> Iterator[tuple[StepRun, Array]]:
    """Yield the run of each sequence and its plaintext logits (tokens x vocab). Raise StoppedError if a party fails."""
    for sequence in tokens:
        run, expected = _run(session, 0, graph, sequence, clear, layers)
        assert expected is not None
        yield run, expected


def _run(
    session: Session, step: int, graph: OpGraph, tokens: Array, clear: ClearRun | None, layers: ClientLayers | None
) -> tuple[StepRun, Array | None]:
    """Run a step in plaintext, which may be out of range, then privately, with the client's tokens or hidden states."""
    if layers is None:
        expected = None if clear is None else clear.output(graph, tokens)
        return session.run(step, {"tokens": interpreter.encoded(graph, tokens)}), expected
    stream = layers.stream(step, tokens)
    expected = None if clear is None else clear.output(graph, None, stream)
    return session.run(step, stream), expected
