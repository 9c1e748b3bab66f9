"""Runs the steps of an op graph under a CKKS library, with bootstraps where they are placed.

A value is a list of ciphertexts for each section of its layout. What the server knows, and may fold into its plaintexts,
includes public ranges: the greatest score and the sums of a row that a run in the clear has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    padded = np.zeros((packing.tokens, num * packing.columns if num > 1 else period))
    padded[:num_tokens, :width] = matrix
    blocks = np.split(padded, num, axis=1) if num > 1 else [np.tile(padded, packing.columns // period)]
    return [block.T.reshape(-1) for block in blocks]


def unpacked(slots: Sequence[Array], packing: Packing, num_tokens: int, width: int) -> Array:
    columns = np.concatenate([part.reshape(-1, packing.tokens) for part in slots])
    return columns.T[:num_tokens, :width]


@dataclass
class Machine:
    """The programs of `ckks_forms` on lists of ciphertexts; a shorter list is used again for every set."""

    library: Library

    def product(self, a: list[Any], b: list[Any]) -> list[Any]:
        library = self.library
        return [
            library.rescaled(library.relinearised(library.product(value, b[index % len(b)])))
            for index, value in enumerate(a)
        ]

    def combined(self, values: Sequence[list[Any]], factors: Sequence[float], number: float = 0.0) -> list[Any]:
        level = min(value[0].level for value in values)
        results = []
        for parts in zip(*values, strict=True):
            terms = [
                self.library.plain_product(self.library.lowered(part, level), self._all(factor))
                for part, factor in zip(parts, factors, strict=True)
            ]
            results.append(self.library.rescaled(self.added(terms)))
        return self.shifted(results, number) if number else results

    def summed(self, *values: list[Any]) -> list[Any]:
        level = min(value[0].level for value in values)
        return [
            self.added([self.library.lowered(part, level) for part in parts]) for parts in zip(*values, strict=True)
        ]

    def shifted(self, value: list[Any], number: float) -> list[Any]:
        return [self.library.shifted(part, self._all(number)) for part in value]

    def negated(self, value: list[Any]) -> list[Any]:
        return [self.library.negated(part) for part in value]

    def added(self, terms: Sequence[Any]) -> Any:
        total = terms[0]
        for term in terms[1:]:
            total = self.library.summed(total, term)
        return total

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
    values: dict[str, Value] = field(default_factory=dict)
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def machine(self) -> Machine:
        return Machine(self.library)

    def softmax(self, node: Node) -> tuple[ops.Softmax, float]:
        """Return the softmax that reads the scores of a node, and what they are divided by to stay below 1."""
        names, found = {node.name}, None
        for later in self.graph:
            if names.intersection(later.inputs):
                names.add(later.name)
                if isinstance(later.op, ops.Softmax):
                    found = later
                    break
        assert found is not None and isinstance(found.op, ops.Softmax)
        scores = np.tril(self.clear[found.inputs[0]])[:, 1:]
        return found.op, float(np.abs(scores).max()) if found.op.form == "power8" and scores.size else 1.0

    def by_window(self, columns: Callable[[int, int], Array], heads: int, window: int, num_sets: int) -> list[Array]:
        """Return the slots of scores: `columns(head, distance)` gives a number for every token."""
        sets = []
        for first in range(0, num_sets * window, window):
            matrix = np.stack([columns(head, first + at) for head in range(heads) for at in range(window)], axis=1)
            sets += packed(matrix, self.packing)
        return sets


def run(steps: Sequence[Step], placement: Placement, job: Run, inputs: Mapping[str, Array]) -> Array:
    """Return the last step's output; `inputs` are matrices that the client encrypts. Values are dropped after use."""
    for name, matrix in inputs.items():
        job.values[name] = [[job.library.encrypted(slots) for slots in packed(matrix, job.packing)]]
    last_use = {name: index for index, step in enumerate(steps) for name in step.inputs}
    for index, step in enumerate(steps):
        for name in sorted({name for at, name in placement.bootstraps if at == index}):
            job.values[name] = [[job.library.bootstrapped(part) for part in section] for section in job.values[name]]
        read = [job.values[name] for name in step.inputs]
        level = placement.levels[index]
        if step.depth:
            read = [[[job.library.lowered(part, level) for part in section] for section in value] for value in read]
        if step.kind not in KINDS:
            raise UserError(f"no library run has the step {step.kind!r} of {step.node.name!r}; only `estimate` it.")
        job.values[step.name] = KINDS[step.kind](job, step, read)
        for name in set(step.inputs):
            if last_use[name] == index:
                del job.values[name]
    width = steps[-1].layout.sections[0]
    return unpacked(
        [job.library.decrypted(part) for part in job.values[steps[-1].name][0]],
        job.packing,
        steps[-1].node.op.output_shape[0],
        width,
    )


def _linear(job: Run, step: Step, read: list[Value]) -> Value:
    """Multiply diagonals by baby and giant steps, then add up what is left of a row."""
    library, packing, added = job.library, job.packing, job.machine.added
    known = operands(step.node, job.weights)
    tokens, columns = packing.tokens, np.arange(packing.columns)
    in_width, source = known["weight"].shape[0], read[0][0]
    results = []
    for weight, bias in _by_section(job, step, known):
        width = weight.shape[1]
        baby, giant, num_folds = packing.linear(in_width, width)
        a, b = packing.num(in_width), packing.num(width)
        padded = np.zeros((max(a * packing.columns, in_width), max(b * packing.columns, width)))
        padded[:in_width, :width] = weight
        turned = [[value] for value in source]
        for row in turned:
            for _ in range(1, baby):
                row.append(library.rotation(row[-1], tokens))
        section = []
        for block in range(b):
            into = block * packing.columns + (columns if b > 1 else columns % packing.period(width))
            total = None
            for step_at in reversed(range(giant)):
                terms = []
                for part, row in enumerate(turned):
                    for at, value in enumerate(row):
                        distance = step_at * baby + at
                        of = columns + distance
                        of = part * packing.columns + of % (packing.columns if a > 1 else packing.period(in_width))
                        diagonal = np.roll(padded[of, into], step_at * baby)
                        terms.append(library.plain_product(value, diagonal.repeat(tokens)))
                if total is not None:
                    terms.append(library.rotation(total, baby * tokens))
                total = added(terms)
            total = library.rescaled(total)
            for fold in range(num_folds):
                total = library.summed(total, library.rotation(total, (packing.period(width) << fold) * tokens))
            section.append(library.shifted(total, packed(np.tile(bias, (tokens, 1)), packing)[block]))
        results.append(section)
    return results


def _by_section(job: Run, step: Step, known: Mapping[str, Array]) -> list[tuple[Array, Array]]:
    """Return the weight and bias of each section, with a key head for every query head."""
    table = np.vstack([known["weight"], known.get("bias", np.zeros(known["weight"].shape[1]))])
    first, rest = step.layout.sections[0], len(step.layout.sections) - 1
    parts = [table] if not rest else [table[:, :first], *np.split(table[:, first:], rest, axis=1)]
    results = []
    for part, width in zip(parts, step.layout.sections, strict=True):
        if part.shape[1] != width:
            heads = part.reshape(len(part), -1, _head_dim(job))
            part = heads.repeat(width // part.shape[1], axis=1).reshape(len(part), width)
        results.append((part[:-1], part[-1]))
    return results


def _head_dim(job: Run) -> int:
    return next(node.op.head_dim for node in job.graph if isinstance(node.op, ops.AttentionScores))


def _moved(job: Run, step: Step, read: list[Value]) -> Value:
    op, library = step.node.op, job.library
    if isinstance(op, ops.Add):
        return [job.machine.summed(*sections) for sections in zip(*read, strict=True)]
    if isinstance(op, ops.PackHeads):
        return [section for value in read for section in value]
    if isinstance(op, ops.PositionEmbedding):
        added = packed(operands(step.node, job.weights)["weight"], job.packing)
    elif isinstance(op, ops.ScoreBound):
        softmax, scale = job.softmax(step.node)
        bound = operands(step.node, job.weights)["weight"]
        tokens = np.arange(op.queries)

        def columns(head: int, distance: int) -> Array:
            seen = (tokens >= distance) & (distance < op.keys)
            moved = np.where(seen, -bound[head] / scale, 0.0)
            is_alone = softmax.form == "power8" and distance == 0
            return np.where(tokens == 0, 1.0, moved) if is_alone else moved

        added = job.by_window(columns, op.heads, step.layout.window, step.layout.sets)
    else:
        return read[0]
    return [[library.shifted(part, slots) for part, slots in zip(read[0][0], added, strict=True)]]


def _scores(job: Run, step: Step, read: list[Value]) -> Value:
    op, library, packing = step.node.op, job.library, job.packing
    assert isinstance(op, ops.AttentionScores)
    window, tokens = step.layout.window, packing.tokens
    softmax, scale = job.softmax(step.node)
    factor = (op.head_dim**-0.5 if op.factor is None else op.factor) if op.scaled else 1.0
    queries, keys = read[0][:2]
    sets: list[list[Any]] = [[] for _ in range(step.layout.sets)]
    for query, key in zip(queries, keys, strict=True):
        masked = []
        for distance in range(op.keys):
            key = library.rotation(key, -1) if distance else key
            total = library.rescaled(library.relinearised(library.product(query, key)))
            for fold in range(log2(window)):
                total = library.summed(total, library.rotation(total, tokens << fold))
            masked.append(library.plain_product(total, _first(job, op, window, distance, softmax, factor / scale)))
        for at, its in enumerate(sets):
            mine = masked[at * window : (at + 1) * window]
            total = mine[-1]
            for term in reversed(mine[:-1]):
                total = library.summed(library.rotation(total, -tokens), term)
            its.append(library.rescaled(total))
    return [[part for its in sets for part in its]]


def _first(job: Run, op: Any, window: int, distance: int, softmax: ops.Softmax | None, factor: float) -> Array:
    """Return the slots that keep the first column of every head, for queries that see a key so far back."""
    at = np.arange(job.packing.tokens)
    seen = (at >= distance) & (at < op.queries)
    if softmax is not None and softmax.form == "power8":
        seen &= at > 0  # a row that sees one key attends to it, whatever its score is
    is_first = np.arange(job.packing.columns) % window == 0
    return np.outer(is_first, seen * factor).reshape(-1)


def _row_sum(job: Run, step: Step, read: list[Value]) -> Value:
    """Sum the windows of all sets, scaled to at most 1; slots without a row become 1."""
    op, library, tokens, window = step.node.op, job.library, job.packing.tokens, step.layout.window
    assert isinstance(op, ops.Softmax)
    num, sums = job.packing.ciphertexts(step.layout), _row_sums(job, step)
    low, high = float(sums.min()), float(sums.max())
    if low < high * forms.FORMS["inverse"].low:
        raise UserError(
            f"rows of {step.node.name!r} must have sums within a factor of {1 / forms.FORMS['inverse'].low:g} of one "
            f"another, which the inverse under ckks holds for, but got {low:.3g} to {high:.3g}."
        )
    job.sums[step.node.name] = low, high
    used = packed(np.ones((op.queries, op.heads * window)), job.packing)
    section = []
    for at in range(num):
        total = job.machine.added(read[0][0][at::num])
        for fold in range(log2(window)):
            total = library.summed(total, library.rotation(total, tokens << fold))
        mask = _first(job, op, window, 0, None, 1 / high)
        total = library.rescaled(library.plain_product(total, mask * used[at]))
        for fold in range(log2(window)):
            total = library.summed(total, library.rotation(total, -(tokens << fold)))
        section.append(library.shifted(total, 1 - used[at]))
    return [section]


def _row_sums(job: Run, step: Step) -> Array:
    """Return the sums in the clear, of what this run adds up."""
    op = step.node.op
    scores = job.clear[step.node.inputs[0]]
    _, scale = job.softmax(next(node for node in job.graph if node.name == step.node.inputs[0]))
    numbers = NUMBERS[op.form](scores / scale)
    numbers = np.where(np.tri(op.queries, dtype=bool), numbers, 0.0)
    if op.form == "power8":
        numbers[:, 0, 0] = 1.0
    return numbers.sum(axis=-1)


NUMBERS: dict[str, Callable[[Array], Array]] = {"power8": lambda scores: scores**8}


def _inverse(job: Run, step: Step, read: list[Value]) -> Value:
    """Return the least sum over every sum, at most 1; what multiplies attention later divides by the least."""
    low, high = job.sums[step.node.name]
    return [forms.inverse(job.machine, read[0][0], low / high)]


def _mix(job: Run, step: Step, read: list[Value]) -> Value:
    op, library, tokens = step.node.op, job.library, job.packing.tokens
    assert isinstance(op, ops.AttentionMix)
    window, values = op.head_dim, read[1][-1]
    factor = 1 / job.sums[step.node.inputs[0]][0]
    section = []
    for at, value in enumerate(values):
        terms = []
        for distance in range(op.keys):
            value = library.rotation(value, -1) if distance else value
            if distance % window == 0:
                weight = read[0][0][(distance // window) * len(values) + at]
            else:
                weight = library.rotation(weight, tokens)
            one = library.rescaled(library.plain_product(weight, _first(job, op, window, distance, None, factor)))
            for fold in range(log2(window)):
                one = library.summed(one, library.rotation(one, -(tokens << fold)))
            terms.append(library.product(one, value))
        section.append(library.rescaled(library.relinearised(job.machine.added(terms))))
    return [section]


def _rotary(job: Run, step: Step, read: list[Value]) -> Value:
    """Queries and keys times cosines, plus either half of a head, turned to the other's place, times sines."""
    op, library, packing = step.node.op, job.library, job.packing
    assert isinstance(op, ops.Rotary)
    results = []
    for width, section in zip(step.layout.sections[:2], read[0], strict=False):
        heads = replace(op, heads=width // _head_dim(job), key_heads=None)
        ahead, behind, kept = _turns(heads, width)
        results.append([])
        for part, *slots in zip(section, *(packed(table, packing) for table in (kept, ahead, behind)), strict=True):
            half = op.rotary_dim // 2 * packing.tokens
            turned = (part, library.rotation(part, half), library.rotation(part, -half))
            terms = [library.plain_product(value, its) for value, its in zip(turned, slots, strict=True)]
            results[-1].append(library.rescaled(job.machine.added(terms)))
    return [*results, *read[0][2:]]


def _turns(op: ops.Rotary, width: int) -> tuple[Array, Array, Array]:
    """Return what multiplies the feature ahead of each by half a head, the one behind, and the feature itself."""
    head_dim = width // op.heads
    features = np.arange(width) % head_dim
    rates = np.array(rotary_rates(op.rotary_dim, op.base, op.scaling))
    angles = np.arange(op.past_len, op.past_len + op.rows)[:, None] * rates[features % len(rates)]
    first, turned = features < op.rotary_dim // 2, features < op.rotary_dim
    cosines, sines = np.where(turned, np.cos(angles), 1.0), np.sin(angles)
    return np.where(first, -sines, 0.0), np.where(~first & turned, sines, 0.0), cosines


def _square(job: Run, step: Step, read: list[Value]) -> Value:
    op = step.node.op
    if not isinstance(op, ops.Square):
        raise UserError(f"no library run has softmax of another form than power8, as {step.node.name!r} is.")
    results = [job.machine.product(section, section) for section in read[0]]
    shift = packed(np.full((op.rows, op.features), op.shift), job.packing)
    return [[job.library.shifted(part, slots) for part, slots in zip(results[0], shift, strict=True)]]


# kind of step -> what runs it
KINDS: dict[str, Callable[[Run, Step, list[Value]], Value]] = {
    "linear": _linear,
    "rotary": _rotary,
    "moved": _moved,
    "scores": _scores,
    "eighth_power": lambda job, step, read: [forms.eighth_power(job.machine, read[0][0])],
    "row_sum": _row_sum,
    "inverse": _inverse,
    "product": lambda job, step, read: [job.machine.product(read[0][0], read[1][0])],
    "mix": _mix,
    "square": _square,
}
