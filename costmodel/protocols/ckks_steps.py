"""The steps of ops under `ckks`: programs whose primitives `Tally` counts from shapes alone, and which a library runs.

Programs name plaintexts, such as `("scores", 3)`; a run supplies their numbers. Some steps are only counted and never
run: in these, coefficients are 1, and products with whole numbers, which are free, are left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from costmodel import ops
from costmodel.errors import UnpricedOpError, UserError
from costmodel.ops import Node, Op
from costmodel.protocols import ckks_forms as forms
from costmodel.protocols.ckks_forms import FORMS, Packing, Value, Work, counted, log2, power_of_two


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A part of an op that runs without a bootstrap inside.

    kind: the step's role in the op, such as `square`. inputs: names of the steps or graph inputs that it reads.
    program: function of a machine (`ckks_forms.Machine`) and the inputs, which returns the output's ciphertexts.
    depth: levels that it uses up; 0 if values are only moved and added. work: number of runs of each primitive, by
    levels used up since the step began. output: the value that it makes. ciphertexts: number of ciphertexts of the
    output. distinct: number of slots after which the content of a ciphertext repeats.
    """

    node: Node
    kind: str
    inputs: tuple[str, ...]
    program: Callable[..., list[Any]]
    depth: int
    work: Work
    output: Value
    ciphertexts: int
    distinct: int

    @property
    def name(self) -> str:
        return self.output.name


@dataclass
class Steps:
    """Collects the steps of nodes in `done`. node: the node whose steps are added next.

    wanted: width and number of parts of the output of linears that make queries, keys or values, by node name.
    """

    packing: Packing
    wanted: dict[str, tuple[int, int]]
    node: Node = field(init=False)
    done: list[Step] = field(default_factory=list)
    counted: dict[object, tuple[Work, list[int]]] = field(default_factory=dict)  # layers repeat

    def num(self, value: Value) -> int:
        return value.sets * value.parts * self.packing.num(value.width)

    def add(
        self,
        kind: str,
        program: Callable[..., list[Any]],
        *read: Value,
        out: Value | None = None,
        sizes: tuple[int, ...] | None = None,
    ) -> Value:
        """Add a step that reads the values `read`, and return its output.

        out: layout of the output; None for that of the first input. sizes: number of ciphertexts that the program uses
        of each input; None for all.
        """
        node, layout, sizes = self.node, replace(out or read[0], name=""), sizes or tuple(map(self.num, read))
        if (key := (node.op, kind, layout, sizes)) not in self.counted:
            self.counted[key] = counted(program, sizes=sizes)
        work, used = self.counted[key]
        output = replace(layout, name=f"{node.name}#{kind}{len(self.done)}")
        self.done.append(
            Step(
                node=node,
                kind=kind,
                inputs=tuple(value.name for value in read),
                program=program,
                depth=max(used),
                work=work,
                output=output,
                ciphertexts=len(used),
                distinct=self.packing.tokens * self.packing.period(layout.width),
            )
        )
        return output

    def product(self, a: Value, b: Value) -> Value:
        """Add a product, and return its output; if b has fewer ciphertexts than a, they are used repeatedly."""
        return self.add("product", lambda m, x, y: m.product(x, y), a, b)

    def times(self, kind: str, *read: Value) -> Value:
        """Add a step that sums the products of every input with plaintexts of the server, and return its output."""
        return self.add(kind, lambda m, *values: m.combined(values, [1.0] * len(values)), *read)

    def series(self, form: str, x: Value) -> Value:
        coefficients = [1.0] * (FORMS[form].degree + 1)
        return self.add(form, lambda m, x: forms.series(m, x, coefficients, -1.0, 1.0), x)

    def row_total(self, m: Any, x: list[Any], window: int) -> Any:
        """Return the sum of all columns of x, which repeat after `window` columns, in each column; m is the machine."""
        return m.folded(m.summed(*([part] for part in x)), self.packing.tokens, log2(window))


def steps_of(nodes: Sequence[Node], packing: Packing) -> list[Step]:
    """Return the steps of an op graph, in order; a UserError is raised for an op without a program or packing."""
    steps, known = Steps(packing=packing, wanted=_written_apart(nodes)), dict[str, Value]()

    def outside(name: str, shape: tuple[int, ...]) -> Value:  # what no node makes: rows of features, or scores
        if len(shape) < 3:
            return Value(name=name, width=shape[-1])
        window = min(packing.columns, power_of_two(shape[2]))
        return Value(name=name, width=shape[0] * window, sets=-(-shape[2] // window), window=window)

    for node in nodes:
        shapes = zip(node.inputs, node.op.input_shapes, strict=False)  # a mix may read a packed value
        read = [known.get(name) or outside(name, shape) for name, shape in shapes]
        steps.node = node
        try:
            if node.op.public:
                raise _unpriced(node.op, "no layer is public, as weights are never encrypted", "weights of the server")
            if type(node.op) not in PROGRAMS:
                raise _unpriced(node.op, "its rows or columns have no packing", "TakeRows and PackHeads")
            known[node.name] = PROGRAMS[type(node.op)](steps, node.op, *read)
        except UserError as error:
            raise type(error)(f"op {node.name!r} must have a price: {error}") from None
    return steps.done


def _written_apart(nodes: Sequence[Node]) -> dict[str, tuple[int, int]]:
    """Return the width and number of queries, keys and values in a node, each key head once per query head."""
    mixed = {name for node in nodes if isinstance(node.op, ops.AttentionMix) for name in node.inputs}
    found: dict[str, tuple[int, int]] = {}
    for node in reversed(nodes):
        if isinstance(op := node.op, ops.AttentionScores):
            found[node.inputs[0]] = op.heads // op.sequences * op.head_dim, 3 if node.inputs[0] in mixed else 2
        elif node.name in found and isinstance(op, ops.PackHeads):
            found.update(dict.fromkeys(node.inputs, (found[node.name][0], 1)))
        elif node.name in found and isinstance(op, (ops.Rotary, ops.RepeatHeads, ops.RmsNorm, ops.LayerNorm)):
            found[node.inputs[0]] = found[node.name]
    return found


def _unpriced(op: Op, why: str, instead: str) -> UnpricedOpError:
    return UnpricedOpError(
        f"protocol ckks has no form for {type(op).__name__}: {why}; there are forms for {instead}, or choose "
        "protocol semi2k, aby3 or cheetah."
    )


def _linear(steps: Steps, op: Any, x: Value) -> Value:
    """Products of diagonals by baby and giant steps, then sums of what is left of a row."""
    if isinstance(op, ops.TokenEmbedding) and op.encoding != "one-hot":
        raise _unpriced(op, "with `encoding` lookup, secret tokens are compared with the vocabulary", "one-hot")
    packing, in_width = steps.packing, op.vocab if isinstance(op, ops.TokenEmbedding) else x.width
    width, parts = op.output_shape[-1], 1
    if isinstance(op, ops.Linear):
        width, parts = steps.wanted.get(steps.node.name, (width, parts))
    baby, giant, folds = packing.linear(in_width, width)

    def program(m: Any, x: list[Any]) -> list[Any]:
        results = []
        for part in range(parts):
            turned = [x]
            for _ in range(1, baby):
                turned.append(m.rotation(turned[-1], packing.tokens))
            read, total = [ciphertext for value in turned for ciphertext in value], None
            for first in reversed(range(0, baby * giant, baby)):
                term = m.plain(read, ("diagonals", part, first), packing.num(width))
                total = term if total is None else m.summed(m.rotation(total, baby * packing.tokens), term)
            whole = m.folded(m.rescaled(total), packing.period(width) * packing.tokens, folds)
            results += m.shifted(whole, ("bias", part))
        return results

    return steps.add("linear", program, x, out=Value(name="", width=width, parts=parts))


def _moved(steps: Steps, op: Any, *read: Value) -> Value:
    """What moves or adds numbers needs no product; linears have repeated key heads."""
    if isinstance(op, ops.RepeatHeads) and read[0].parts != 3:
        raise _unpriced(op, "its heads do not come from linears", "heads of a linear or of three")
    if isinstance(op, ops.PackHeads):
        return steps.add("moved", lambda m, *values: [*chain(*values)], *read, out=replace(read[0], parts=len(read)))
    kind = "taken" if isinstance(op, ops.TakeRows) else "moved"
    return steps.add(kind, lambda m, *values: m.summed(*values), *read)


def _rotary(steps: Steps, op: Any, x: Value) -> Value:
    """Queries and keys times cosines, plus either half turned the other way times sines."""
    num, half = min(x.parts, 2) * steps.packing.num(x.width), op.rotary_dim // 2 * steps.packing.tokens

    def program(m: Any, x: list[Any]) -> list[Any]:
        turned = x[:num], m.rotation(x[:num], half), m.rotation(x[:num], -half)
        return [*m.combined(turned, [("angles", which) for which in range(3)]), *x[num:]]

    return steps.add("rotary", program, x)


def _heads(steps: Steps, op: Any) -> tuple[int, Value]:
    """Return the ciphertexts of all heads, and their scores; an error is raised for what has no packing."""
    if op.queries != op.keys:
        raise _unpriced(op, f"{op.queries} queries with {op.keys} keys have no packing", "whole prompts")
    if op.head_dim != power_of_two(op.head_dim):
        raise _unpriced(op, f"a head of {op.head_dim} features has no packing", "powers of two")
    if op.head_dim > steps.packing.columns:
        tokens, slots = steps.packing.tokens, steps.packing.slots
        raise UserError(
            f"protocol ckks packs a head's {op.head_dim} features of {tokens} tokens in {slots} slots, "
            f"which hold {slots // op.head_dim} tokens at most; use a shorter prompt."
        )
    width = op.heads // op.sequences * op.head_dim
    return steps.packing.num(width), Value(name="", width=width, sets=-(-op.keys // op.head_dim), window=op.head_dim)


def _check_causal(op: Op) -> None:
    if not getattr(op, "causal", True):
        raise _unpriced(op, "scores of later keys wrap around", "causal attention")


def _scores(steps: Steps, op: Any, x: Value) -> Value:
    """For each distance: queries times turned keys, added up over a head, one column of it kept and moved in place."""
    _check_causal(op)
    (num, out), tokens, keys = _heads(steps, op), steps.packing.tokens, op.output_shape[-1]

    def program(m: Any, packed: list[Any]) -> list[Any]:
        query, key, kept = packed[:num], packed[num : 2 * num], list[Any]()
        for distance in range(keys):
            key = m.rotation(key, -1) if distance else key
            total = m.folded(m.product(query, key), tokens, log2(out.window))
            kept.append(m.plain(total, ("scores", distance)))
        results = []
        for first in range(0, keys, out.window):
            total, *others = reversed(kept[first : first + out.window])
            for other in others:
                total = m.summed(m.rotation(total, -tokens), other)
            results += m.rescaled(total)
        return results

    return steps.add("scores", program, x, out=out, sizes=(2 * num,))


def _mix(steps: Steps, op: Any, attention: Value, values: Value) -> Value:
    """For each distance: its column of attention spread over a head, times the turned values."""
    (num, scores), tokens = _heads(steps, op), steps.packing.tokens

    def program(m: Any, attention: list[Any], packed: list[Any]) -> Any:
        value, weight, pairs = packed[-num:], list[Any](), []
        for distance in range(op.keys):
            at, is_next = divmod(distance, op.head_dim)
            value = m.rotation(value, -1) if distance else value
            weight = m.rotation(weight, tokens) if is_next else attention[at * num : (at + 1) * num]
            column = m.rescaled(m.plain(weight, ("attention", distance)))
            pairs.append((m.folded(column, -tokens, log2(op.head_dim)), value))
        return m.inner(pairs)

    out = Value(name="", width=scores.width)
    return steps.add("mix", program, attention, values, out=out, sizes=(num * scores.sets, num))


def _softmax(steps: Steps, op: Any, x: Value) -> Value:
    """Numbers that are not negative, then their sums over a row, inverted, and the products of both.

    The maximum of `exact` is a public bound, which the function does not depend on.
    """
    _check_causal(op)
    if op.form == "2quad":
        x = steps.add("square", lambda m, x: m.product(x, x), x)
    elif op.form == "power8":
        x = steps.add("eighth_power", forms.eighth_power, x)
    elif op.form == "relu":
        x = _relu(steps, op, x)
    else:  # what the mask hides becomes 0
        x = steps.times("hidden", steps.series("exponential", x))
    row, tokens, folds = replace(x, sets=1), steps.packing.tokens, log2(x.window)
    num = steps.num(row)

    def row_sum(m: Any, x: list[Any]) -> Any:
        total = m.summed(*(x[first : first + num] for first in range(0, len(x), num)))
        total = m.combined([m.folded(total, tokens, folds)], [("row",)])
        return m.shifted(m.folded(total, -tokens, folds), ("no_row",))

    total = steps.add("row_sum", row_sum, x, out=row)
    inverse = steps.add("inverse", lambda m, x: forms.inverse(m, x, ("least_sum",)), total)
    return steps.product(x, inverse)


def _relu(steps: Steps, op: Any, x: Value) -> Value:
    """x times a line of the sign of x, which is composed of polynomials; a slope is in the line."""
    sign = x
    for _ in range(forms.SIGN_G + forms.SIGN_F):
        sign = steps.add("sign", lambda m, x: forms.sign_part(m, x, forms.G3), sign)
    return steps.product(x, steps.times("line", sign))


def _norm(steps: Steps, op: Any, x: Value) -> Value:
    """Mean squares of a row or of each group of it, inverse roots of these, and products."""
    groups, tokens = getattr(op, "groups", 1), steps.packing.tokens
    window = steps.packing.period(x.width) if groups == 1 else op.features // groups
    if window != power_of_two(window):
        raise _unpriced(op, f"a group of {window} features has no packing", "groups of a power of two")

    def centre(m: Any, x: list[Any]) -> Any:  # (n x - the sum of x) / n
        return m.combined([m.summed(x, m.negated(steps.row_total(m, x, window)))], [1.0])

    def mean_square(m: Any, x: list[Any]) -> Any:
        squares = m.product(x, x)
        if groups == 1:
            return steps.row_total(m, squares, window)
        # the first column of each group has its sum, and is spread over the group
        first = m.combined([m.folded(squares, tokens, log2(window))], [1.0])
        return m.folded(first, -tokens, log2(window))

    centred = steps.add("centred", centre, x) if isinstance(op, ops.LayerNorm) else x
    out = x if groups > 1 else Value(name="", width=window)
    mean = steps.add("mean_square", mean_square, centred, out=out)
    coefficients = [1.0] * (forms.ROOT_DEGREE + 1)
    root = steps.add("inverse_root", lambda m, x: forms.inverse_root(m, x, coefficients), mean)
    normed = steps.product(centred, root)
    return steps.times("gained", normed) if op.affine else normed


def _activation(steps: Steps, op: Any, x: Value) -> Value:
    if getattr(op, "form", None) == "piecewise":
        raise _unpriced(op, "`form` piecewise compares with thresholds", "tanh and exact, by a series")
    return steps.series(type(op).__name__.lower(), x)


def _frozen_norm(steps: Steps, op: Any, x: Value) -> Value:
    window = steps.packing.period(x.width)

    def program(m: Any, x: list[Any]) -> Any:
        mean = [steps.row_total(m, x, window) * len(x)] if op.centred else []
        return m.combined([x, *mean], [1.0] * (1 + op.centred))

    return steps.add("frozen_norm", program, x)


# op type -> function that adds its steps; an absent type is an error
PROGRAMS: dict[type, Callable[..., Value]] = {
    **dict.fromkeys((ops.TokenEmbedding, ops.Linear, ops.VocabProjection), _linear),
    **dict.fromkeys(
        (ops.PositionEmbedding, ops.ScoreBound),
        lambda steps, op, x: steps.add("moved", lambda m, x: m.shifted(x, ("added",)), x),
    ),
    **dict.fromkeys((ops.Add, ops.TakeRows, ops.RepeatHeads, ops.PackHeads), _moved),
    **dict.fromkeys(
        (ops.Temperature, ops.ShapedAttention, ops.Scale, ops.ScaledAdd),
        lambda steps, op, *read: steps.times("scaled", *read),
    ),
    **dict.fromkeys((ops.LayerNorm, ops.RmsNorm), _norm),
    **dict.fromkeys((ops.Relu, ops.LeakyRelu), _relu),
    ops.FrozenNorm: _frozen_norm,
    ops.Rotary: _rotary,
    ops.AttentionScores: _scores,
    ops.Softmax: _softmax,
    ops.AttentionMix: _mix,
    ops.Square: lambda steps, op, x: steps.add("square", lambda m, x: m.shifted(m.product(x, x), ("added",)), x),
    **dict.fromkeys((ops.Gelu, ops.Silu, ops.Sigmoid, ops.Tanh), _activation),
    ops.Multiply: lambda steps, op, a, b: steps.product(a, b),
}
