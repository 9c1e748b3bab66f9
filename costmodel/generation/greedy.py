"""Private inference step by step: a prompt and its greedy continuation, or whole sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.execution.interpreter import Array
from costmodel.generation.agreement import Agreement, compared
from costmodel.generation.clear import ClearRun
from costmodel.generation.session import Session, StepRun
from costmodel.ops import OpGraph


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrivateToken:
    """A new token, what its step cost, and how its logits agree with those in the clear; None if nobody has these."""

    token: int
    cost: StepRun
    agreement: Agreement | None


def generate(
    session: Session, graphs: Sequence[OpGraph], prompt: Sequence[int], clear: ClearRun | None, end: int | None
) -> Iterator[PrivateToken]:
    """As many tokens as there are graphs, or up to `end`; each is the most likely one and is fed to the next step.

    clear: the model in the clear, which is fed the same tokens. Raises StoppedError if a party cannot go on.
    """
    tokens: Array = np.asarray(prompt)
    for step, graph in enumerate(graphs):
        cost = session.run(step, tokens)
        agreement = None if clear is None else compared(cost.logits[-1:], clear.logits(graph, tokens)[-1:])
        token = int(cost.logits[-1].argmax())
        yield PrivateToken(token=token, cost=cost, agreement=agreement)
        if token == end:
            return
        tokens = np.asarray([token])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrivateSequence:
    """A sequence's logits (tokens x vocab), privately and in the clear, and what they cost."""

    cost: StepRun
    clear: Any


def sequences(session: Session, graph: OpGraph, tokens: Sequence[Array], clear: ClearRun) -> Iterator[PrivateSequence]:
    """Each by itself. Raises StoppedError if a party cannot go on."""
    for each in tokens:
        yield PrivateSequence(cost=session.run(0, each), clear=clear.logits(graph, each))
