"""CKKS by a library on the CPU, on one thread; every call is counted and timed by primitive.

The library is DESILO's, by DESILO Inc. (https://desilo.ai): under Python 3.11 the wheels of others do not import. Its
rings with a bootstrap have N = 2^16 and 128 bits of security, with keys of 5 GB. In smaller rings, which it has for
fewer levels, a bootstrap is decrypted and encrypted by the holder of the secret key: for tests of counts and results.

Steps run with bootstraps where they are placed. The server folds public ranges, of a run in the clear, into its
plaintexts: the greatest score, and the sums of a row.
"""

import importlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np

from costmodel import ops
from costmodel.errors import UserError
from costmodel.execution.interpreter import Array, Weights, operands
from costmodel.execution.op_functions import evaluate, numpy_library
from costmodel.ops import Node, OpGraph
from costmodel.protocols.ckks import Placement
from costmodel.protocols.ckks_forms import FORMS, Machine, Packing, packing_of
from costmodel.protocols.ckks_steps import Step

PACKAGE, VERSION = "desilofhe", "2.0.0"
Value: TypeAlias = list[Any]
# kinds of steps that a library runs
KINDS = {"linear", "moved", "rotary", "scores", "eighth_power", "row_sum", "inverse", "product", "mix", "square"}


def load_library() -> Any:
    """Return the library's module; a UserError is raised if it is not installed."""
    try:
        return importlib.import_module(PACKAGE)
    except ImportError:
        raise UserError(
            f"protocol ckks runs under {PACKAGE}, which is not installed; run: python -m pip install "
            f"{PACKAGE}=={VERSION} (free for non-commercial use alone)."
        ) from None


class Library(Machine):
    """The machine of steps, under a key pair of its own; `counts` and `seconds` (of CPU) are by primitive.

    A value is a list of ciphertexts; a shorter list is used again for every set. levels: levels of a fresh or
    bootstrapped ciphertext. is_bootstrapped: whether bootstraps are real. named: returns the plaintexts of a name.
    """

    def __init__(self, levels: int, *, is_bootstrapped: bool) -> None:
        kind = {"bootstrap": True} if is_bootstrapped else {"max_level": levels}
        self.engine = engine = load_library().Engine(thread_count=1, **kind)
        self.is_bootstrapped, self.levels, self.slots = is_bootstrapped, engine.max_level, engine.slot_count
        self.secret_key = key = engine.create_secret_key()
        self.public_key = engine.create_public_key(key)
        self.product_key = engine.create_relinearization_key(key)
        self.rotations = engine.create_roll_key(key)  # a bootstrap needs it, and it turns by 1, 2, 4, ... at once
        self.right: dict[int, Any] = {}
        if is_bootstrapped:
            small = engine.create_small_bootstrap_key(key)
            self.bootstrap_keys = self.product_key, engine.create_conjugation_key(key), self.rotations, small
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.named: Callable[..., Any] = lambda name, *given: None

    def _timed(self, primitive: str, call: Any, *given: Any) -> Any:
        started = time.process_time()
        result = call(*given)
        self.seconds[primitive] += time.process_time() - started
        self.counts[primitive] += 1
        return result

    def encrypted(self, slots: Array, level: int | None = None) -> Any:
        return self.engine.encrypt(_turned(slots), self.public_key, self.levels if level is None else level)

    def decrypted(self, part: Any) -> Array:
        return _turned(np.asarray(self.engine.decrypt(part, self.secret_key)).real)

    def bootstrapped(self, value: Value) -> Value:
        """Return the value at the highest level; its slots must be from -1 to 1."""
        if self.is_bootstrapped:
            lowered = self.lowered(value, 0)
            return [self._timed("bootstrap", self.engine.bootstrap, part, *self.bootstrap_keys) for part in lowered]
        return [self._timed("bootstrap", lambda one: self.encrypted(self.decrypted(one)), part) for part in value]

    def lowered(self, value: Value, level: int) -> Value:
        return [part if part.level == level else self.engine.level_down(part, level) for part in value]

    def aligned(self, values: Sequence[Value]) -> list[Value]:
        level = min(part.level for value in values for part in value)
        return [self.lowered(value, level) for value in values]

    def rotation(self, value: Value, left: int) -> Value:
        """Rotate by a power of two, to the left or, with a key of its own, to the right."""
        if left > 0:
            return [self._timed("rotation", self.engine.roll, part, self.rotations, left) for part in value]
        if left not in self.right:
            self.right[left] = self.engine.create_fixed_rotation_key(self.secret_key, -left)
        return [self._timed("rotation", self.engine.rotate, part, self.right[left]) for part in value]

    def plain(self, value: Value, slots: Any, into: int = 0) -> Value:
        """Encode and multiply plaintexts; the caller rescales. into: ciphertexts that the products are added up to."""
        if into:
            of = self.named(*slots)
            rows = [self.plain(value, [of(row, at) for at in range(len(value))]) for row in range(into)]
            return [reduce(self.engine.add, row) for row in rows]
        pairs = zip(value, self._slots(slots, len(value)), strict=True)
        return [self._timed("plain_product", self.engine.multiply, part, _turned(by)) for part, by in pairs]

    def rescaled(self, value: Value) -> Value:
        return [self._timed("rescale", self.engine.rescale, part) for part in value]

    def multiplied(self, a: Value, b: Value) -> Value:
        return [self._timed("product", self.engine.multiply, *pair) for pair in zip(a, cycle(b), strict=False)]

    def relinearised(self, value: Value) -> Value:
        return [self._timed("relinearisation", self.engine.relinearize, part, self.product_key) for part in value]

    def summed(self, *values: Value) -> Value:
        return [reduce(self.engine.add, parts) for parts in zip(*self.aligned(values), strict=True)]

    def shifted(self, value: Value, number: Any) -> Value:
        pairs = zip(value, self._slots(number, len(value)), strict=True)
        return [self.engine.add(part, _turned(slots)) for part, slots in pairs]

    def negated(self, value: Value) -> Value:
        return [self.engine.negate(part) for part in value]

    def _slots(self, plaintexts: Any, num: int) -> Sequence[Array]:
        """Return the slots of each ciphertext's plaintext: of a list, a name, or a number in all of them."""
        given = self.named(*plaintexts) if isinstance(plaintexts, tuple) else plaintexts
        return given if isinstance(given, list) else [np.full(self.slots, given)] * num


def _turned(slots: Array) -> Array:
    """Return slots from last to first, as the library has them, whose key turns by any power of two to its right."""
    return np.ascontiguousarray(slots[::-1])


def check(placement: Placement, clear: Mapping[str, Array]) -> None:
    """Check that a library runs every step, and holds what is bootstrapped; `clear` are the outputs of all nodes."""
    lasts = {step.node.name: step for step in placement.steps}
    for step in placement.steps:
        if step.kind not in KINDS:
            raise UserError(
                "a library runs attention by eighth powers alone, gates of squares, rotary positions and linears, but "
                f"{step.node.name!r} has the step {step.kind.replace('_', ' ')}; only `estimate` it."
            )
    for _, of in placement.bootstrapped:
        if of and lasts[of.node.name] is of and (size := float(np.abs(clear[of.node.name]).max())) > 1:
            raise UserError(f"a bootstrap holds from -1 to 1, but {of.node.name!r} has {size:.3g}; scale its weights.")


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
    """The server's plaintexts in a step: masks, weights and biases. Programs name each one by the method that makes it.

    clear: outputs of all nodes in the clear.
    """

    graph: OpGraph
    weights: Weights
    clear: Mapping[str, Array]
    packing: Packing
    step: Step

    def of(self, name: str, *given: int) -> Any:
        return getattr(self, name)(*given)

    def diagonals(self, part: int, first: int) -> Callable[[int, int], Array]:
        """Return a function from an output and an input (`baby steps` x the ciphertexts of a row) to its slots."""
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
        op: Any = self.step.node.op
        if isinstance(op, ops.ScoreBound):
            return self._bounds(op)
        is_square = isinstance(op, ops.Square)
        matrix = np.full(op.output_shape, op.shift) if is_square else operands(self.step.node, self.weights)["weight"]
        return packed(matrix, self.packing)

    def _bounds(self, op: ops.ScoreBound) -> list[Array]:
        """Return what is added to scores that are seen; a row that sees one key attends to it."""
        bound, sets = operands(self.step.node, self.weights)["weight"], self.step.output.sets
        query, distance = np.arange(op.queries)[:, None], np.arange(sets * self.step.output.window)
        seen = (query >= distance) & (query > 0)
        added = np.where(seen[None], -bound[:, None, None] / self._greatest_score, 0.0)  # heads x queries x distances
        added[:, 0, 0] = 1.0
        windows = np.split(added, sets, axis=2)
        return [part for one in windows for part in packed(np.concatenate(list(one), axis=1), self.packing)]

    def angles(self, which: int) -> list[Array]:
        """Return cosines (0), or the sines in the slots of a head's first half (1) or second half (2), 0 elsewhere."""
        op: Any = self.step.node.op
        num_heads, output = op.heads + 2 * (op.key_heads or op.heads), self.step.output
        is_first = np.arange(num_heads * self._window) % self._window < op.rotary_dim // 2
        halves = [np.tile(half.astype(float), (op.rows, 1)) for half in (is_first, ~is_first)]
        first, second = (evaluate(op, numpy_library(), {}, half) for half in halves)
        table: Array = np.where(is_first, *((first, second), (second, 0), (0, first))[which])
        return packed(table[:, : output.width], self.packing) * min(output.parts, 2)

    def scores(self, distance: int) -> Array:
        op: Any = self.step.node.op
        factor = (op.head_dim**-0.5 if op.factor is None else op.factor) if op.scaled else 1.0
        return self._first(max(distance, 1), factor / self._greatest_score)  # the first query sees one key

    def attention(self, distance: int) -> Array:
        return self._first(distance, 1 / self._sums[0])

    def _first(self, distance: int, factor: float) -> Array:
        """Return a factor for the first column of every head, for queries that see a key so far back."""
        at, (_, num_queries, _) = np.arange(self.packing.tokens), self._softmax.op.output_shape
        seen = (at >= distance) & (at < num_queries)
        return np.outer(np.arange(self.packing.columns) % self._window == 0, seen * factor).reshape(-1)

    def row(self) -> list[Array]:
        """Return factors that scale the sums of a row to at most 1."""
        return [self._first(0, 1 / self._sums[1]) * (1 - unused) for unused in self.no_row()]

    def no_row(self) -> list[Array]:
        """Return 1 in every slot without a row, since the inverse of those slots is taken too, else 0."""
        num_heads, num_queries, _ = self.step.node.op.output_shape
        return [1 - used for used in packed(np.ones((num_queries, num_heads * self._window)), self.packing)]

    def least_sum(self) -> float:
        """Return least sum / greatest sum: inverses of scaled sums, times this, are at most 1."""
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
