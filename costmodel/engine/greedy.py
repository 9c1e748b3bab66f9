"""Generate tokens greedily by private inference, and compare the logits of each step with those in plaintext."""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from costmodel.engine.plan import variables
from costmodel.engine.session import Session, StepRun
from costmodel.execution import interpreter
from costmodel.execution.arithmetic import Arithmetic
from costmodel.execution.interpreter import Array, Weights
from costmodel.ops import OpGraph

Z_95 = 1.959963984540054  # 0.975 quantile of the standard normal distribution
NONE: Mapping[str, Array] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How far private logits agree with those in plaintext, over `num_positions` positions.

    num_equal: positions with the same most likely token. largest_error: largest absolute error of any logit.
    largest_share: largest error over the largest absolute logit in plaintext; after `joined`, the largest such ratio.
    """

    num_positions: int
    num_equal: int
    largest_error: float
    largest_share: float = 0.0

    @property
    def top1(self) -> float:
        """Share of positions with the same most likely token, from 0 to 1."""
        return self.num_equal / self.num_positions

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of `top1`. Source: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953."""
        share, spread = self.top1, Z_95**2 / self.num_positions
        centre = (share + spread / 2) / (1 + spread)
        half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
        return max(0.0, centre - half), min(1.0, centre + half)


def compared(private: Array, clear: Array) -> Agreement:
    """Return the agreement of private logits with those in plaintext, each positions x vocab."""
    error, largest = float(np.abs(private - clear).max()), float(np.abs(clear).max())
    return Agreement(
        num_positions=len(clear),
        num_equal=int((private.argmax(axis=-1) == clear.argmax(axis=-1)).sum()),
        largest_error=error,
        largest_share=error / largest if largest else error,
    )


def joined(parts: list[Agreement]) -> Agreement:
    """Return the agreement over the positions of all `parts`, a list that must not be empty."""
    return Agreement(
        num_positions=sum(part.num_positions for part in parts),
        num_equal=sum(part.num_equal for part in parts),
        largest_error=max(part.largest_error for part in parts),
        largest_share=max(part.largest_share for part in parts),
    )


class ClearRun:
    """Plaintext inference in double precision, step after step, each with the keys and values of the steps before.

    weights: as for `interpreter.execute`. arithmetic: the engine's emulated fixed point, whose range is checked for
        every op from the second step on; None to check nothing.
    """

    def __init__(self, weights: Weights, arithmetic: Arithmetic | None = None) -> None:
        self.weights, self.arithmetic = weights, arithmetic
        self._kept: dict[str, Array] = {}

    def output(self, graph: OpGraph, tokens: Array | None, given: Mapping[str, Array] = NONE) -> Array:
        """Run the next step, and return the output of its last node, such as logits (rows x vocab).

        tokens: ids; None for a graph that reads none. given: the graph's other inputs by name, such as hidden states,
            without cached keys and values.

        Raise UserError if the inputs or weights do not fit the graph, and OutOfRangeError if an op leaves the
        arithmetic's range, or too many results are expected to be wrong.
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
    """The first layers of a model, which the client runs in plaintext.

    graphs: for each step, the op graph of these layers, which ends with the hidden states to share. run: runs them.
    """

    graphs: tuple[OpGraph, ...]
    run: ClearRun

    def stream(self, step: int, tokens: Array) -> dict[str, Array]:
        """Return the hidden states after these layers (rows x features), by the name of their node."""
        graph = self.graphs[step]
        return {graph.nodes[-1].name: self.run.output(graph, tokens)}


def generate(
    session: Session,
    graphs: Sequence[OpGraph],
    prompt: Sequence[int],
    clear: ClearRun | None,
    ends: Container[int] = (),
    layers: ClientLayers | None = None,
) -> Iterator[tuple[StepRun, Agreement | None]]:
    """Yield, for each step, its private run and the agreement of the last token's logits with those in plaintext.

    The first step reads the prompt. Each later step, in plaintext too, reads the most likely token of the private run
    before it. Generation ends after the last graph, or earlier after a token of `ends`.

    graphs: the op graph of each step, without the layers in `layers`. prompt: token ids. clear: computes the plaintext
        logits; None to yield None in place of the agreement. layers: layers that the client runs in plaintext, or None.

    Raise StoppedError if a party fails, and errors as `ClearRun.output`.
    """
    tokens: Array = np.asarray(prompt)
    for step, graph in enumerate(graphs):
        run, expected = run_step(session, step, graph, tokens, clear, layers)
        yield run, None if expected is None else compared(run.logits[-1:], expected[-1:])
        if run.token in ends:
            return
        tokens = np.asarray([run.token])


def run_step(
    session: Session, step: int, graph: OpGraph, tokens: Array, clear: ClearRun | None, layers: ClientLayers | None
) -> tuple[StepRun, Array | None]:
    """Return the private run of a step, and the step's logits in plaintext (None without `clear`).

    step, graph, tokens: index of the step, its op graph, and its token ids; other arguments are as for `generate`.

    Plaintext runs first, because it raises OutOfRangeError if `clear` finds that the engine would leave its range.
    Raise StoppedError if a party fails.
    """
    if layers is None:
        expected = None if clear is None else clear.output(graph, tokens)
        return session.run(step, {"tokens": interpreter.encoded(graph, tokens)}), expected
    stream = layers.stream(step, tokens)
    expected = None if clear is None else clear.output(graph, None, stream)
    return session.run(step, stream), expected
