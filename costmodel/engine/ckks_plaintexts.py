"""The plaintexts by which the server of a CKKS run multiplies ciphertexts, or which it adds to them, as slots.

They are weights, masks and scales. The ranges of scores, and of their sums over a row, come from a run in plaintext.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel import ops
from costmodel.errors import UserError
from costmodel.execution.interpreter import Array, Weights, operands
from costmodel.execution.op_functions import evaluate, numpy_library
from costmodel.ops import OpGraph
from costmodel.protocols.ckks_forms import FORMS, Packing
from costmodel.protocols.ckks_steps import Step


def packed(matrix: Array, packing: Packing) -> list[Array]:
    """Return the slots of each ciphertext of a matrix (tokens x width): columns in order, repeated until full."""
    num_tokens, width = matrix.shape
    num, period = packing.num(width), packing.period(width)
    padded = np.zeros((packing.tokens, num * period))
    padded[:num_tokens, :width] = matrix
    return [block.T.reshape(-1) for block in np.split(np.tile(padded, packing.columns // period), num, axis=1)]


@dataclass(frozen=True, kw_only=True)
class Plaintexts:
    """The server's plaintexts in one step, as slots; the step's program names a method and gives its arguments.

    clear: the outputs of all nodes in plaintext, by name.
    """

    graph: OpGraph
    weights: Weights
    clear: Mapping[str, Array]
    packing: Packing
    step: Step

    def diagonals(self, part: int, first: int) -> Callable[[int, int], Array]:
        """Return a function that gives the slots by which input `at` is multiplied for output ciphertext `row`.

        part: part of the linear's output, such as 0 for queries. first: rotation of the giant step, in columns. Inputs
        are all ciphertexts of a row after the first baby step, then all of them after the second, and so on.
        """
        table, columns = self._table(part)[:-1], self.packing.columns
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

    def bias(self, part: int) -> list[Array]:
        """Return the bias of this part of the linear's output, for every token."""
        return packed(np.tile(self._table(part)[-1], (self.packing.tokens, 1)), self.packing)

    def _table(self, part: int) -> Array:
        """Return the weight over the bias of a part, such as keys, each head once per query head."""
        known, (width, parts) = operands(self.step.node, self.weights), (self.step.output.width, self.step.output.parts)
        table = np.vstack([known["weight"], known.get("bias", np.zeros(known["weight"].shape[1]))])
        table = [table[:, :width], *np.array_split(table[:, width:], max(1, parts - 1), axis=1)][part]
        head, times = math.gcd(self._window, table.shape[1]), width // table.shape[1]
        return table.reshape(len(table), -1, head).repeat(times, axis=1).reshape(len(table), -1)

    @property
    def _window(self) -> int:
        return next(node.op.head_dim for node in self.graph if isinstance(node.op, ops.AttentionScores))

    def added(self) -> list[Array]:
        """Return what the op adds: positions, a shift, or minus a scaled bound (1 for the first query, of one key)."""
        op: Any = self.step.node.op
        if isinstance(op, ops.Square):
            return packed(np.full(op.output_shape, op.shift), self.packing)
        weight = operands(self.step.node, self.weights)["weight"]
        if not isinstance(op, ops.ScoreBound):
            return packed(weight, self.packing)
        sets, window = self.step.output.sets, self.step.output.window
        query, distance = np.arange(op.queries)[:, None], np.arange(sets * window)
        seen = (query >= distance) & (query > 0)
        added = np.where(seen[None], -weight[:, None, None] / self._greatest_score, 0.0)  # heads x queries x distances
        added[:, 0, 0] = 1.0
        by_set = [np.concatenate(list(window), axis=1) for window in np.split(added, sets, axis=2)]
        return [part for matrix in by_set for part in packed(matrix, self.packing)]

    def angles(self, which: int) -> list[Array]:
        """Return cosines (`which` 0), minus sines in a head's first half (1), or sines in its second half (2)."""
        op: Any = self.step.node.op
        num_heads, output = op.heads + 2 * (op.key_heads or op.heads), self.step.output
        is_first = np.arange(num_heads * self._window) % self._window < op.rotary_dim // 2
        halves = [np.tile(half.astype(float), (op.rows, 1)) for half in (is_first, ~is_first)]
        first, second = (evaluate(op, numpy_library(), {}, half) for half in halves)
        table: Array = np.where(is_first, *((first, second), (second, 0), (0, first))[which])
        return packed(table[:, : output.width], self.packing) * min(output.parts, 2)

    def scores(self, distance: int) -> Array:
        """Return factors for scores of keys `distance` tokens back, which include 1 / the greatest softmax input."""
        op: Any = self.step.node.op
        factor = (op.head_dim**-0.5 if op.factor is None else op.factor) if op.scaled else 1.0
        return self._first(max(distance, 1), factor / self._greatest_score)  # the first query sees one key

    def attention(self, distance: int) -> Array:
        """Return factors for attention weights of keys `distance` tokens back: 1 / the least row sum."""
        return self._first(distance, 1 / self._sums[0])

    def _first(self, distance: int, factor: float) -> Array:
        """Return a factor for the first column of every head, for queries that see a key so far back."""
        at, (_, num_queries, _) = np.arange(self.packing.tokens), self._softmax.op.output_shape
        seen = (at >= distance) & (at < num_queries)
        return np.outer(np.arange(self.packing.columns) % self._window == 0, seen * factor).reshape(-1)

    def row(self) -> list[Array]:
        """Return factors that scale the row sums of a softmax to at most 1."""
        return [self._first(0, 1 / self._sums[1]) * (1 - unused) for unused in self.no_row()]

    def no_row(self) -> list[Array]:
        """Return 1 in slots that no row uses, whose inverse is taken too, and 0 in the others."""
        num_heads, num_queries, _ = self.step.node.op.output_shape
        return [1 - used for used in packed(np.ones((num_queries, num_heads * self._window)), self.packing)]

    def least_sum(self) -> float:
        """Return the least row sum over the greatest; inverses of scaled row sums, times this ratio, are at most 1."""
        return self._sums[0] / self._sums[1]

    @property
    def _softmax(self) -> ops.Node:
        layer = self.step.node.layer
        return next(node for node in self.graph if node.layer == layer and isinstance(node.op, ops.Softmax))

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
