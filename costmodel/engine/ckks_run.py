"""Runs the steps of an op graph under a CKKS library, with bootstraps where they are placed.

The server folds public ranges, of a run in the clear, into its plaintexts: the greatest score, and the sums of a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel import ops
from costmodel.engine.ckks_library import Library
from costmodel.errors import UserError
from costmodel.execution.interpreter import Array, Weights, operands
from costmodel.ops import Node, OpGraph
from costmodel.protocols.ckks_forms import FORMS
from costmodel.protocols.ckks_placement import Placement
from costmodel.protocols.ckks_steps import Packing, Step, packing_of
from costmodel.rotary import rotary_rates

# kinds of steps that a library runs
KINDS = {"linear", "moved", "rotary", "scores", "eighth_power", "row_sum", "inverse", "product", "mix", "square"}


def check(placement: Placement, clear: Mapping[str, Array]) -> None:
    """Check that a library runs every step, and holds what is bootstrapped; `clear` are the outputs of all nodes."""
    lasts = {step.node.name: step for step in placement.steps}
    for step in placement.steps:
        if step.kind not in KINDS:
            raise UserError(
                "a library runs attention by eighth powers alone, gates of squares, rotary positions and linears, but "
                f"{step.node.name!r} has the step {step.kind.replace('_', ' ')}; only `estimate` it."
            )
    for _, step in placement.bootstrapped:
        if step and lasts[step.node.name] is step and (size := float(np.abs(clear[step.node.name]).max())) > 1:
            raise UserError(
                f"a bootstrap holds from -1 to 1, but {step.node.name!r} has {size:.3g}; scale its weights."
            )


def run(
    placement: Placement,
    library: Library,
    graph: OpGraph,
    weights: Weights,
    clear: Mapping[str, Array],
    inputs: Mapping[str, Array],
) -> Array:
    """Return the last step's output; `inputs` are matrices that the client encrypts. Values are dropped after use."""
    steps, packing = placement.steps, packing_of(graph.nodes, library.slots)
    values = {name: [library.encrypted(slots) for slots in packed(matrix, packing)] for name, matrix in inputs.items()}
    last_use = {name: index for index, step in enumerate(steps) for name in step.inputs}
    for index, step in enumerate(steps):
        for name in (name for at, name in placement.bootstraps if at == index):
            values[name] = library.bootstrapped(values[name])
        read = [values[name] for name in step.inputs]
        if step.depth:
            read = [library.lowered(value, placement.levels[index]) for value in read]
        library.named = Plaintexts(graph=graph, weights=weights, clear=clear, packing=packing, step=step).of
        values[step.name] = step.program(library, *read)
        for name in set(step.inputs):
            if last_use[name] == index:
                del values[name]
    columns = [library.decrypted(part).reshape(-1, packing.tokens) for part in values[steps[-1].name]]
    num_tokens, width = steps[-1].node.op.output_shape
    return np.concatenate(columns).T[:num_tokens, :width]


def packed(matrix: Array, packing: Packing) -> list[Array]:
    """Return the slots of each ciphertext of tokens x width, column after column, repeated until they are full."""
    num_tokens, width = matrix.shape
    num, period = packing.num(width), packing.period(width)
    padded = np.zeros((packing.tokens, num * period))
    padded[:num_tokens, :width] = matrix
    blocks = np.split(np.tile(padded, packing.columns // period), num, axis=1)
    return [block.T.reshape(-1) for block in blocks]


@dataclass(frozen=True, kw_only=True)
class Plaintexts:
    """What the server multiplies by and adds in a step: a method for each name that programs give it.

    clear: outputs of all nodes in the clear.
    """

    graph: OpGraph
    weights: Weights
    clear: Mapping[str, Array]
    packing: Packing
    step: Step

    def of(self, name: str, *given: int) -> Any:
        return getattr(self, name)(*given)

    def diagonals(self, section: int, first: int) -> Callable[[int, int], Array]:
        """Return the slots for an output and an input, which are `baby steps` times the ciphertexts of a row."""
        table, columns = self._table(section)[:-1], self.packing.columns
        (in_width, width), at_columns = table.shape, np.arange(columns)
        num, period = self.packing.num(in_width), self.packing.period
        padded = np.zeros((max(num * columns, in_width), max(self.packing.num(width) * columns, width)))
        padded[:in_width, :width] = table

        def slots(row: int, at: int) -> Array:
            baby, block = divmod(at, num)
            of = block * columns + (at_columns + first + baby) % period(in_width)
            into = row * columns + at_columns % period(width)
            return np.roll(padded[of, into], first).repeat(self.packing.tokens)

        return slots

    def bias(self, section: int) -> list[Array]:
        return packed(np.tile(self._table(section)[-1], (self.packing.tokens, 1)), self.packing)

    def _table(self, section: int) -> Array:
        """Return the weight over the bias of a section, each key head once per query head."""
        known, (first, *rest) = operands(self.step.node, self.weights), self.step.layout.sections
        table = np.vstack([known["weight"], known.get("bias", np.zeros(known["weight"].shape[1]))])
        if rest:
            table = [table[:, :first], *np.split(table[:, first:], len(rest), axis=1)][section]
        times = [first, *rest][section] // table.shape[1]
        heads = table.reshape(len(table), -1, self._window if times > 1 else table.shape[1])
        return heads.repeat(times, axis=1).reshape(len(table), -1)

    @property
    def _window(self) -> int:
        return next(node.op.head_dim for node in self.graph if isinstance(node.op, ops.AttentionScores))

    def added(self) -> list[Array]:
        op: Any = self.step.node.op
        if isinstance(op, ops.ScoreBound):
            return self._bounds(op)
        is_square = isinstance(op, ops.Square)
        matrix = np.full(op.output_shape, op.shift) if is_square else operands(self.step.node, self.weights)["weight"]
        return packed(matrix, self.packing)

    def _bounds(self, op: ops.ScoreBound) -> list[Array]:
        """Return what is added to scores that are seen; a row that sees one key attends to it, whatever its score is."""
        bound, sets = operands(self.step.node, self.weights)["weight"], self.step.layout.sets
        query, distance = np.arange(op.queries)[:, None], np.arange(sets * self.step.layout.window)
        seen = (query >= distance) & (query > 0)
        added = np.where(seen[None], -bound[:, None, None] / self._greatest_score, 0.0)  # heads x queries x distances
        added[:, 0, 0] = 1.0
        windows = np.split(added, sets, axis=2)
        return [part for one in windows for part in packed(np.concatenate(list(one), axis=1), self.packing)]

    def angles(self, which: int) -> list[Array]:
        """Return cosines, or the sines of the first or the second half of a head, which the other half is turned to."""
        op, results = self.step.node.op, list[Array]()
        assert isinstance(op, ops.Rotary)
        for width in self.step.layout.sections[:2]:
            features = np.arange(width) % self._window
            rates = np.array(rotary_rates(op.rotary_dim, op.base, op.scaling))
            angles = np.arange(op.past_len, op.past_len + op.rows)[:, None] * rates[features % len(rates)]
            is_first, is_turned = features < op.rotary_dim // 2, features < op.rotary_dim
            tables = (
                np.where(is_turned, np.cos(angles), 1.0),
                np.where(is_first, -np.sin(angles), 0.0),
                np.where(~is_first & is_turned, np.sin(angles), 0.0),
            )
            results += packed(tables[which], self.packing)
        return results

    def scores(self, distance: int) -> Array:
        op = self.step.node.op
        assert isinstance(op, ops.AttentionScores)
        factor = (op.head_dim**-0.5 if op.factor is None else op.factor) if op.scaled else 1.0
        return self._first(max(distance, 1), factor / self._greatest_score)  # the first query sees one key

    def attention(self, distance: int) -> Array:
        return self._first(distance, 1 / self._sums[0])

    def _first(self, distance: int, factor: float) -> Array:
        """Return a factor for the first column of every head, for queries that see a key so far back."""
        op, at = self._softmax.op, np.arange(self.packing.tokens)
        assert isinstance(op, ops.Softmax)
        seen = (at >= distance) & (at < op.queries)
        return np.outer(np.arange(self.packing.columns) % self._window == 0, seen * factor).reshape(-1)

    def row(self) -> list[Array]:
        """Return what scales the sums of a row to at most 1."""
        return [self._first(0, 1 / self._sums[1]) * (1 - unused) for unused in self.no_row()]

    def no_row(self) -> list[Array]:
        """Return 1 for each slot without a row, whose inverse is taken too."""
        op = self.step.node.op
        assert isinstance(op, ops.Softmax)
        return [1 - used for used in packed(np.ones((op.queries, op.heads * self._window)), self.packing)]

    def least_sum(self) -> float:
        """Return the least sum over the greatest, so that its inverse is at most 1; attention is divided by the least."""
        return self._sums[0] / self._sums[1]

    @property
    def _softmax(self) -> Node:
        layer = (node for node in self.graph if node.layer == self.step.node.layer)
        return next(node for node in layer if isinstance(node.op, ops.Softmax))

    @property
    def _greatest_score(self) -> float:
        scores = np.tril(self.clear[self._softmax.inputs[0]])[:, 1:]
        return float(np.abs(scores).max()) if scores.size else 1.0

    @property
    def _sums(self) -> tuple[float, float]:
        """The least and greatest sum of a row."""
        powers = np.tril((self.clear[self._softmax.inputs[0]] / self._greatest_score) ** 8)
        powers[:, 0, 0] = 1.0
        sums = powers.sum(axis=-1)
        low, high, bound = float(sums.min()), float(sums.max()), FORMS["inverse"].low
        if low < high * bound:
            raise UserError(
                f"row sums of {self._softmax.name!r} must be within a factor of {1 / bound:g} of one another, where "
                f"the inverse of ckks holds, but got {low:.3g} to {high:.3g}; use other weights."
            )
        return low, high
