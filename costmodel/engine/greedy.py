"""Private inference step by step, and the same in the clear: a prompt and its greedy continuation, or sequences."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from costmodel.engine.agreement import Agreement, compared
from costmodel.engine.plan import variables
from costmodel.engine.session import Session, StepRun
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array, Weights
from costmodel.ops import OpGraph

NONE: Mapping[str, Array] = MappingProxyType({})


class ClearRun:
    """A model in the clear and in double precision, graph after graph, with what each keeps for the next.

    weights: as `interpreter.execute` takes them.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._kept: dict[str, Array] = {}

    def output(self, graph: OpGraph, tokens: Array | None, given: Mapping[str, Array] = NONE) -> Array:
        """The output of the next step's last node, such as logits (projected tokens x vocab).

        tokens: None for a graph that reads none. given: what else it reads, beside what was kept.

        Raises UserError for inputs that do not fit the graph.
        """
        caches = {name: self._kept[variable] for name, variable in variables(graph).items()}
        self._kept = interpreter.values(graph, self.weights, tokens, {**caches, **given})
        return self._kept[graph.nodes[-1].name]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClientLayers:
    """The client's own layers in the clear. graphs: of every step, ending with the stream that it shares."""

    graphs: tuple[OpGraph, ...]
    run: ClearRun

    def stream(self, step: int, tokens: Array) -> dict[str, Array]:
        """The stream behind them, by the name of its node: rows x features."""
        graph = self.graphs[step]
        return {graph.nodes[-1].name: self.run.output(graph, tokens)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrivateToken:
    """A new token, what its step cost, and how its logits agree with those in the clear; None if nobody has these."""

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
    """Yields as many tokens as there are graphs, or up to `end`; each is the most likely and is fed to the next step.

    clear: the model in the clear, which is fed the same. layers: the client's own, if it has any. Raises StoppedError
    if a party cannot go on.
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
    """Each by itself, with its logits in the clear (tokens x vocab). Raises StoppedError if a party cannot go on."""
    for sequence in tokens:
        run, expected = _run(session, 0, graph, sequence, clear, layers)
        assert expected is not None
        yield run, expected


def _run(
    session: Session, step: int, graph: OpGraph, tokens: Array, clear: ClearRun | None, layers: ClientLayers | None
) -> tuple[StepRun, Array | None]:
    """A step, privately and in the clear, on what the client shares: its tokens, or the stream behind its layers."""
    if layers is None:
        run = session.run(step, {"tokens": interpreter.encoded(graph, tokens)})
        return run, None if clear is None else clear.output(graph, tokens)
    stream = layers.stream(step, tokens)
    return session.run(step, stream), None if clear is None else clear.output(graph, None, stream)
