"""Runs the steps of an op graph under a CKKS library, with bootstraps where they are placed.

A value is a list of ciphertexts for each section of its layout. The server folds public ranges, of a run in the clear,
into its plaintexts: the greatest score, and the sums of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

from costmodel import ops
from costmodel.engine.ckks_library import Library
from costmodel.errors import UserError
from costmodel.execution.interpreter import Array, Weights, operands
from costmodel.ops import Node, OpGraph
from costmodel.protocols import ckks_forms as forms
from costmodel.protocols.ckks_placement import Placement
from costmodel.protocols.ckks_steps import Packing, Step, log2
from costmodel.rotary import rotary_rates

Value: TypeAlias = list[list[Any]]  # section x ciphertext


def packed(matrix: Array, packing: Packing) -> list[Array]:
    """Return the slots of each ciphertext of tokens x width, column after column, repeated until they are full."""
    num_tokens, width = matrix.shape
    num, period = packing.num(width), packing.period(width)
    padded = np.zeros((packing.tokens, num * period))
    padded[:num_tokens, :width] = matrix
    blocks = np.split(np.tile(padded, packing.columns // period), num, axis=1)
    return [block.T.reshape(-1) for block in blocks]


@dataclass
class Machine:
    """The programs of `ckks_forms` on lists of ciphertexts; a shorter list is used again for every set."""

    library: Library

    def product(self, a: list[Any], b: list[Any]) -> list[Any]:
        done = [self.library.product(value, b[index % len(b)]) for index, value in enumerate(a)]
        return [self.library.rescaled(self.library.relinearised(value)) for value in done]

    def combined(self, values: Sequence[list[Any]], factors: Sequence[float], number: float = 0.0) -> list[Any]:
        level, results = min(value[0].level for value in values), []
        for parts in zip(*values, strict=True):
            pairs = zip(parts, factors, strict=True)
            terms = [self.library.plain_product(self.library.lowered(part, level), self._all(by)) for part, by in pairs]
            results.append(self.library.rescaled(self.added(terms)))
        return self.shifted(results, number)

    def summed(self, *values: list[Any]) -> list[Any]:
        level = min(value[0].level for value in values)
        return [self.added([self.library.lowered(one, level) for one in parts]) for parts in zip(*values, strict=True)]

    def shifted(self, value: list[Any], number: float) -> list[Any]:
        return [self.library.shifted(part, self._all(number)) for part in value]

    def negated(self, value: list[Any]) -> list[Any]:
        return [self.library.negated(part) for part in value]

    def added(self, terms: Sequence[Any]) -> Any:
        return reduce(self.library.summed, terms)

    def folded(self, value: Any, slots: int, times: int) -> Any:
        """Add the value to itself, turned by so many slots, then by twice as many, and so on."""
        for fold in range(times):
            value = self.library.summed(
                value, self.library.rotation(value, slots << fold if slots > 0 else slots * 2**fold)
            )
        return value

    def _all(self, number: float) -> Array:
        return np.full(self.library.slots, number)


@dataclass
class Run:
    """A run of steps. clear: outputs of all nodes in the clear. sums: least and greatest row sum of each softmax."""

    graph: OpGraph
    weights: Weights
    clear: Mapping[str, Array]
    packing: Packing
    library: Library
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def machine(self) -> Machine:
        return Machine(self.library)

    def softmax(self, node: Node) -> float:
        """Return what scores are divided by to stay below 1; a UserError is raised if no eighth powers read them."""
        names, later = {node.name}, node
        for other in self.graph:
            if not isinstance(later.op, ops.Softmax) and names.intersection(other.inputs):
                names, later = names | {other.name}, other
        if not isinstance(later.op, ops.Softmax) or later.op.form != "power8":
            raise UserError(f"a library runs attention by eighth powers alone, but {node.name!r} is of another form.")
        scores = np.tril(self.clear[later.inputs[0]])[:, 1:]
        return float(np.abs(scores).max()) if scores.size else 1.0

    def first(self, op: Any, distance: int, factor: float, *, alone: bool = True) -> Array:
        """Return the slots that keep the first column of every head, for queries that see a key so far back.

        alone: whether the first query counts, which sees one key.
        """
        at = np.arange(self.packing.tokens)
        seen = (at >= max(distance, not alone)) & (at < op.queries)
        return np.outer(np.arange(self.packing.columns) % self.window == 0, seen * factor).reshape(-1)

    @property
    def window(self) -> int:
        return next(node.op.head_dim for node in self.graph if isinstance(node.op, ops.AttentionScores))


def run(steps: Sequence[Step], placement: Placement, job: Run, inputs: Mapping[str, Array]) -> Array:
    """Return the last step's output; `inputs` are matrices that the client encrypts. Values are dropped after use."""
    library, packing = job.library, job.packing
    values: dict[str, Value] = {
        name: [[library.encrypted(slots) for slots in packed(matrix, packing)]] for name, matrix in inputs.items()
    }
    last_use = {name: index for index, step in enumerate(steps) for name in step.inputs}
    for index, step in enumerate(steps):
        if step.kind not in KINDS:
            raise UserError(f"no library run has the step {step.kind!r} of {step.node.name!r}; only `estimate` it.")
        for name in sorted(name for at, name in placement.bootstraps if at == index):
            values[name] = [[library.bootstrapped(part) for part in section] for section in values[name]]
        read = [values[name] for name in step.inputs]
        if step.depth:
            level = placement.levels[index]
            read = [[[library.lowered(part, level) for part in section] for section in value] for value in read]
        values[step.name] = KINDS[step.kind](job, step, read)
        for name in set(step.inputs):
            if last_use[name] == index:
                del values[name]
    columns = [library.decrypted(part).reshape(-1, packing.tokens) for part in values[steps[-1].name][0]]
    num_tokens, width = steps[-1].node.op.output_shape
    return np.concatenate(columns).T[:num_tokens, :width]


def _linear(job: Run, step: Step, read: list[Value]) -> Value:
    """Multiply diagonals by baby and giant steps, then add up what is left of a row."""
    library, packing, machine = job.library, job.packing, job.machine
    known, tokens, columns = operands(step.node, job.weights), job.packing.tokens, np.arange(job.packing.columns)
    in_width, results = known["weight"].shape[0], list[list[Any]]()
    table = np.vstack([known["weight"], known.get("bias", np.zeros(known["weight"].shape[1]))])
    for part, width in zip(_by_section(table, step), step.layout.sections, strict=True):
        repeated = part.reshape(len(part), -1, min(job.window, part.shape[1])) if part.shape[1] != width else part
        weight = repeated.repeat(width // part.shape[1], axis=1).reshape(len(part), width)
        (baby, giant, folds), a, b = packing.linear(in_width, width), packing.num(in_width), packing.num(width)
        padded = np.zeros((max(a * packing.columns, in_width), max(b * packing.columns, width)))
        padded[:in_width, :width] = weight[:-1]
        turned = [[value] for value in read[0][0]]
        for row in turned:
            for _ in range(1, baby):
                row.append(library.rotation(row[-1], tokens))
        results.append([])
        for block in range(b):
            into, total = block * packing.columns + columns % packing.period(width), None
            for first in reversed(range(0, baby * giant, baby)):
                terms = [] if total is None else [library.rotation(total, baby * tokens)]
                for index, row in enumerate(turned):
                    for at, value in enumerate(row):
                        of = index * packing.columns + (columns + first + at) % packing.period(in_width)
                        terms.append(library.plain_product(value, np.roll(padded[of, into], first).repeat(tokens)))
                total = machine.added(terms)
            total = machine.folded(library.rescaled(total), packing.period(width) * tokens, folds)
            bias = packed(np.tile(weight[-1], (tokens, 1)), packing)[block]
            results[-1].append(library.shifted(total, bias))
    return results


def _by_section(table: Array, step: Step) -> list[Array]:
    first, rest = step.layout.sections[0], len(step.layout.sections) - 1
    return [table[:, :first], *np.split(table[:, first:], rest, axis=1)] if rest else [table]


def _moved(job: Run, step: Step, read: list[Value]) -> Value:
    op = step.node.op
    if isinstance(op, ops.Add):
        return [job.machine.summed(*sections) for sections in zip(*read, strict=True)]
    if isinstance(op, ops.PositionEmbedding):
        added = packed(operands(step.node, job.weights)["weight"], job.packing)
    elif isinstance(op, ops.ScoreBound):
        added = _bounds(job, step, op)
    else:
        return [section for value in read for section in value]
    return [[job.library.shifted(part, slots) for part, slots in zip(read[0][0], added, strict=True)]]


def _bounds(job: Run, step: Step, op: ops.ScoreBound) -> list[Array]:
    """Return what is added to scores that are seen; a row that sees one key attends to it, whatever its score is."""
    bound, scale = operands(step.node, job.weights)["weight"], job.softmax(step.node)
    query, distance = np.arange(op.queries)[:, None], np.arange(step.layout.sets * job.window)
    seen = (query >= distance) & (query > 0)
    added = np.where(seen[None], -bound[:, None, None] / scale, 0.0)  # heads x queries x distances
    added[:, 0, 0] = 1.0
    sets = np.split(added, step.layout.sets, axis=2)
    return [part for one in sets for part in packed(np.concatenate(list(one), axis=1), job.packing)]


def _rotary(job: Run, step: Step, read: list[Value]) -> Value:
    """Queries and keys times cosines, plus either half of a head, turned to the other's place, times sines."""
    op, library, packing, results = step.node.op, job.library, job.packing, list[list[Any]]()
    assert isinstance(op, ops.Rotary)
    half = op.rotary_dim // 2 * packing.tokens
    for width, section in zip(step.layout.sections[:2], read[0], strict=False):
        features = np.arange(width) % job.window
        rates = np.array(rotary_rates(op.rotary_dim, op.base, op.scaling))
        angles = np.arange(op.past_len, op.past_len + op.rows)[:, None] * rates[features % len(rates)]
        is_first, is_turned = features < op.rotary_dim // 2, features < op.rotary_dim
        behind = np.where(~is_first & is_turned, np.sin(angles), 0.0)
        tables = (np.where(is_turned, np.cos(angles), 1.0), np.where(is_first, -np.sin(angles), 0.0), behind)
        results.append([])
        for part, *slots in zip(section, *(packed(table, packing) for table in tables), strict=True):
            turned = zip((part, library.rotation(part, half), library.rotation(part, -half)), slots, strict=True)
            terms = [library.plain_product(value, its) for value, its in turned]
            results[-1].append(library.rescaled(job.machine.added(terms)))
    return [*results, *read[0][2:]]


def _scores(job: Run, step: Step, read: list[Value]) -> Value:
    op, library, machine, tokens, window = step.node.op, job.library, job.machine, job.packing.tokens, job.window
    assert isinstance(op, ops.AttentionScores)
    factor = (op.head_dim**-0.5 if op.factor is None else op.factor) if op.scaled else 1.0
    factor, sets = factor / job.softmax(step.node), [list[Any]() for _ in range(step.layout.sets)]
    for query, key in zip(*read[0][:2], strict=True):
        masked = []
        for distance in range(op.keys):
            key = library.rotation(key, -1) if distance else key
            total = machine.folded(machine.product([query], [key])[0], tokens, log2(window))
            masked.append(library.plain_product(total, job.first(op, distance, factor, alone=False)))
        for at, its in enumerate(sets):
            total, *others = reversed(masked[at * window : (at + 1) * window])
            for term in others:
                total = library.summed(library.rotation(total, -tokens), term)
            its.append(library.rescaled(total))
    return [[part for its in sets for part in its]]


def _row_sum(job: Run, step: Step, read: list[Value]) -> Value:
    """Sum the windows of all sets, scaled to at most 1; slots without a row become 1."""
    op, library, machine, tokens = step.node.op, job.library, job.machine, job.packing.tokens
    assert isinstance(op, ops.Softmax)
    num, folds = job.packing.ciphertexts(step.layout), log2(job.window)
    powers = np.tril((job.clear[step.node.inputs[0]] / job.softmax(step.node)) ** 8)
    powers[:, 0, 0] = 1.0
    sums = powers.sum(axis=-1)
    low, high, bound = float(sums.min()), float(sums.max()), forms.FORMS["inverse"].low
    if low < high * bound:
        raise UserError(
            f"row sums of {step.node.name!r} must be within a factor of {1 / bound:g} of one another, where the "
            f"inverse of ckks holds, but got {low:.3g} to {high:.3g}; use other weights."
        )
    job.sums[step.node.name] = low, high
    used = packed(np.ones((op.queries, op.heads * job.window)), job.packing)
    section = []
    for at in range(num):
        total = machine.folded(machine.added(read[0][0][at::num]), tokens, folds)
        total = library.rescaled(library.plain_product(total, job.first(op, 0, 1 / high) * used[at]))
        section.append(library.shifted(machine.folded(total, -tokens, folds), 1 - used[at]))
    return [section]


def _inverse(job: Run, step: Step, read: list[Value]) -> Value:
    """Return the least sum over every sum, at most 1; what multiplies attention later divides by the least."""
    low, high = job.sums[step.node.name]
    return [forms.inverse(job.machine, read[0][0], low / high)]


def _mix(job: Run, step: Step, read: list[Value]) -> Value:
    op, library, machine, tokens = step.node.op, job.library, job.machine, job.packing.tokens
    assert isinstance(op, ops.AttentionMix)
    values, section = read[1][-1], []
    for at, value in enumerate(values):
        terms, weight = list[Any](), None
        for distance in range(op.keys):
            value = library.rotation(value, -1) if distance else value
            number = distance // op.head_dim
            is_next = distance % op.head_dim
            weight = library.rotation(weight, tokens) if is_next else read[0][0][number * len(values) + at]
            mask = job.first(op, distance, 1 / job.sums[step.node.inputs[0]][0])
            one = library.rescaled(library.plain_product(weight, mask))
            terms.append(library.product(machine.folded(one, -tokens, log2(op.head_dim)), value))
        section.append(library.rescaled(library.relinearised(machine.added(terms))))
    return [section]


def _square(job: Run, step: Step, read: list[Value]) -> Value:
    op = step.node.op
    assert isinstance(op, ops.Square)
    shift = packed(np.full((op.rows, op.features), op.shift), job.packing)
    squares = job.machine.product(read[0][0], read[0][0])
    return [[job.library.shifted(part, slots) for part, slots in zip(squares, shift, strict=True)]]


# kind of step -> what runs it
KINDS: dict[str, Callable[[Run, Step, list[Value]], Value]] = {
    "linear": _linear,
    "moved": _moved,
    "rotary": _rotary,
    "scores": _scores,
    "eighth_power": lambda job, step, read: [forms.eighth_power(job.machine, read[0][0])],
    "row_sum": _row_sum,
    "inverse": _inverse,
    "product": lambda job, step, read: [job.machine.product(read[0][0], read[1][0])],
    "mix": _mix,
    "square": _square,
}
