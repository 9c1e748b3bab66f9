"""Private inference step by step, and the same in the clear: a prompt and its greedy continuation, or sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.engine.agreement import Agreement, compared
from costmodel.engine.plan import variables
from costmodel.engine.session import Session, StepRun
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array, Weights
from costmodel.ops import OpGraph


class ClearRun:
    """A model in the clear and in double precision, graph after graph, with what each keeps for the next.

    weights: as `interpreter.execute` takes them.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._kept: dict[str, Array] = {}

    def logits(self, graph: OpGraph, tokens: Array) -> Array:
        """Logits of the next step: projected tokens x vocab. Raises UserError for inputs that do not fit the graph."""
        caches = {name: self._kept[variable] for name, variable in variables(graph).items()}
        self._kept = interpreter.values(graph, self.weights, np.asarray(tokens), caches)
        return self._kept[graph.nodes[-1].name]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrivateToken:
    """A new token, what its step cost, and how its logits agree with those in the clear; None if nobody has these."""

    token: int
    cost: StepRun
    agreement: Agreement | None


def generate(
    session: Session, graphs: Sequence[OpGraph], prompt: Sequence[int], clear: ClearRun | None, end: int | None
) -> Iterator[PrivateToken]:
    """Yields as many tokens as there are graphs, or up to `end`; each is the most likely and is fed to the next step.

    clear: the model in the clear, which is fed the same tokens. Raises StoppedError if a party cannot go on.
    """
    tokens: Array = np.asarray(prompt)
    for step, graph in enumerate(graphs):
        cost = session.run(step, {"tokens": interpreter.encoded(graph, tokens)})
        agreement = None if clear is None else compared(cost.logits[-1:], clear.logits(graph, tokens)[-1:])
        token = int(cost.logits[-1].argmax())
        yield PrivateToken(token=token, cost=cost, agreement=agreement)
        if token == end:
            return
        tokens = np.asarray([token])


def sequences(
    session: Session, graph: OpGraph, tokens: Sequence[Array], clear: ClearRun
) -> Iterator[tuple[StepRun, Array]]:
    """Each by itself, with its logits in the clear (tokens x vocab). Raises StoppedError if a party cannot go on."""
    for sequence in tokens:
        run = session.run(0, {"tokens": interpreter.encoded(graph, sequence)})
        yield run, clear.logits(graph, sequence)
