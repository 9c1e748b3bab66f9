"""What an op graph is under `ckks`: steps, each a program over a machine, with its levels and primitives.

One program is counted by `Tally`, from shapes alone, and run by a library. A value is a list of ciphertexts, and a
plaintext is named, as `("mask", 3)`, since only a run has its numbers. What a library does not run is counted alone, so
coefficients of a series are all 1, and products with whole numbers, which are free, are left out.

Packing: a ciphertext holds columns of `tokens` slots, a token each, one column behind the other; a matrix with more
columns than fit takes several ciphertexts, and one with fewer is repeated until the slots are full. So a rotation by a
column moves the features of all tokens. A linear multiplies generalised diagonals by baby and giant steps, both as
chains of one rotation each, so that two keys serve it. Scores are kept by the distance between query and key: column
`d` of a head's window has its scores of keys `d` tokens back, so that later keys are those that wrap around.

Sources: Pang et al. 2024, BOLT, https://eprint.iacr.org/2023/1893, section 4 (columns); Halevi and Shoup 2018,
https://eprint.iacr.org/2018/244 (diagonals); Juvekar et al. 2018, Gazelle, arXiv 1801.05507 (fewer outputs than
inputs); Kim et al. 2022, ARK, arXiv 2205.00922 (chains of one rotation).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from costmodel import ops
from costmodel.errors import UnpricedOpError, UserError
from costmodel.ops import Node, Op
from costmodel.protocols import ckks_forms as forms
from costmodel.protocols.ckks_forms import FORMS, Work, counted, folded


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a value lies in ciphertexts.

    sections: columns of each part that starts in a ciphertext of its own, such as queries, keys and values.
    sets: ciphertexts per ciphertext of a section, of scores over more keys than a head's window has columns.
    window: columns of a head of scores; 0 for other values.
    """

    sections: tuple[int, ...]
    sets: int = 1
    window: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """tokens: slots of a column, a power of two. slots: of a ciphertext."""

    tokens: int
    slots: int

    @property
    def columns(self) -> int:
        return self.slots // self.tokens

    def period(self, width: int) -> int:
        """The columns after which a section of so many is repeated."""
        return min(power_of_two(width), self.columns)

    def num(self, width: int) -> int:
        """The ciphertexts of a section."""
        return -(-width // self.columns)

    def ciphertexts(self, layout: Layout) -> int:
        return layout.sets * sum(map(self.num, layout.sections))

    def linear(self, in_width: int, out_width: int) -> tuple[int, int, int]:
        """The baby steps, giant steps and rotations that add up parts, of a product with a matrix."""
        read, written = self.period(in_width), self.period(out_width)
        diagonals, a, b = min(read, written), self.num(in_width), self.num(out_width)
        baby = min(
            (1 << k for k in range(diagonals.bit_length())), key=lambda n: a * (n - 1) + b * (diagonals // n - 1)
        )
        return baby, diagonals // baby, log2(max(1, read // written))


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A part of an op that runs without a bootstrap inside.

    kind: what it does. inputs: names of steps or graph inputs.
    depth: levels between the lowest input and the output; 0 where values are only moved and added.
    ciphertexts, distinct: of its output, and the slots of each before it repeats itself.
    """

    name: str
    node: Node
    kind: str
    inputs: tuple[str, ...]
    program: Callable[..., list[Any]]
    depth: int
    work: Work
    layout: Layout
    ciphertexts: int
    distinct: int


class Part(NamedTuple):
    """A step before it is counted.

    operands: inputs of the op, and behind them the outputs of its parts. sizes: ciphertexts of operands; None for those
    of their layouts.
    """

    kind: str
    operands: tuple[int, ...]
    layout: Layout
    program: Callable[..., list[Any]]
    sizes: tuple[int, ...] | None = None


Program: TypeAlias = Callable[[Any, list[Layout], Packing], list[Part]]


def power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def log2(power: int) -> int:
    return power.bit_length() - 1


def packing_of(nodes: Sequence[Node], slots: int) -> Packing:
    """Return the packing of a graph, by its longest matrix of tokens; a UserError is raised if that does not fit."""
    of_tokens = ops.TokenEmbedding, ops.Linear, ops.VocabProjection, ops.LayerNorm, ops.RmsNorm, ops.Add
    rows = max((node.op.output_shape[0] for node in nodes if isinstance(node.op, of_tokens)), default=1)
    if (tokens := power_of_two(rows)) > slots:
        raise UserError(
            f"protocol ckks packs a column of tokens in the {slots} slots of a ciphertext, but got {rows} tokens at "
            "once, of which not even a vocabulary projection fits; use a shorter prompt or a smaller batch."
        )
    return Packing(tokens=tokens, slots=slots)


def steps_of(nodes: Sequence[Node], packing: Packing) -> list[Step]:
    """Return the steps of an op graph, in order; a UserError is raised for an op without a form or packing."""
    wanted, layouts, last = _sections(nodes), dict[str, Layout](), dict[str, str]()
    steps: list[Step] = []
    for node in nodes:
        shapes = zip(node.inputs, node.op.input_shapes, strict=False)  # a mix may read a packed value
        read = tuple(layouts.get(name) or _external(shape, packing) for name, shape in shapes)
        names = [last.get(name, name) for name in node.inputs]
        try:
            parts = _counted_parts(node.op, read, packing, wanted.get(node.name))
        except UserError as error:
            raise type(error)(f"op {node.name!r} must have a price: {error}") from None
        for operands, known in parts:
            name, inputs = f"{node.name}#{known['kind']}{len(steps)}", tuple(names[operand] for operand in operands)
            steps.append(Step(name=name, node=node, inputs=inputs, **known))
            names.append(name)
            layouts[node.name], last[node.name] = known["layout"], name
    return steps


@lru_cache(maxsize=4096)
def _counted_parts(
    op: Op, read: tuple[Layout, ...], packing: Packing, wanted: tuple[int, ...] | None
) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """Return the operands of each step of an op, and all of the step that does not depend on the op's place."""
    if op.public:
        raise _unpriced(op, "no layer is public, as weights are never encrypted", "weights of the server")
    if type(op) not in PROGRAMS:
        raise _unpriced(op, "its rows or columns have no packing", "TakeRows and PackHeads")
    is_apart = isinstance(op, ops.Linear) and wanted is not None
    parts = _linear(op.in_features, wanted, packing) if is_apart else PROGRAMS[type(op)](op, list(read), packing)
    layouts, results = [*read, *(part.layout for part in parts)], []
    for kind, operands, layout, program, given in parts:
        sizes = given or tuple(packing.ciphertexts(layouts[operand]) for operand in operands)
        work, used = counted(program, sizes=sizes)
        known = {"kind": kind, "program": program, "depth": max(used), "work": work, "layout": layout}
        distinct = packing.tokens * max(map(packing.period, layout.sections))
        results.append((operands, {**known, "ciphertexts": len(used), "distinct": distinct}))
    return results


def _external(shape: tuple[int, ...], packing: Packing) -> Layout:
    """The layout of what no node makes: rows of features, or scores by themselves."""
    if len(shape) < 3:
        return Layout(sections=(shape[-1],))
    window = min(packing.columns, power_of_two(shape[2]))
    return Layout(sections=(shape[0] * window,), sets=-(-shape[2] // window), window=window)


def _sections(nodes: Sequence[Node]) -> dict[str, tuple[int, ...]]:
    """Return the widths of queries, keys and values that linears write apart, each key head once per query head."""
    by_name, widths = {node.name: node for node in nodes}, dict[str, tuple[int, ...]]()

    def mark(name: str, parts: tuple[int, ...]) -> None:
        node = by_name.get(name)
        if node is None:
            return
        if isinstance(node.op, ops.PackHeads):
            for source, part in zip(node.inputs, parts, strict=True):
                mark(source, (part,))
        elif isinstance(node.op, (ops.Rotary, ops.RepeatHeads, ops.RmsNorm, ops.LayerNorm)):
            mark(node.inputs[0], parts)
        elif isinstance(node.op, ops.Linear):
            widths[name] = parts

    mixed = {name for node in nodes if isinstance(node.op, ops.AttentionMix) for name in node.inputs}
    for node in nodes:
        if isinstance(op := node.op, ops.AttentionScores):
            width = op.heads // op.sequences * op.head_dim
            mark(node.inputs[0], (width,) * (3 if node.inputs[0] in mixed else 2))
    return widths


def _unpriced(op: Op, why: str, instead: str) -> UnpricedOpError:
    return UnpricedOpError(
        f"protocol ckks has no form for {type(op).__name__}: {why}; there are forms for {instead}, or choose protocol "
        "semi2k, aby3 or cheetah."
    )


def _linear(in_width: int, sections: tuple[int, ...], packing: Packing) -> list[Part]:
    """Products of diagonals by baby and giant steps, then sums of what is left of a row."""

    def program(m: Any, x: list[Any]) -> list[Any]:
        results = []
        for section, width in enumerate(sections):
            baby, giant, folds = packing.linear(in_width, width)
            turned = [x]
            for _ in range(1, baby):
                turned.append(m.rotation(turned[-1], packing.tokens))
            read, total = [part for value in turned for part in value], None
            for first in reversed(range(0, baby * giant, baby)):
                term = m.plain(read, ("diagonals", section, first), packing.num(width))
                total = term if total is None else m.summed(m.rotation(total, baby * packing.tokens), term)
            whole = folded(m, m.rescaled(total), packing.period(width) * packing.tokens, folds)
            results += m.shifted(whole, ("bias", section))
        return results

    return [Part("linear", (0,), Layout(sections=sections), program)]


def _product(a: int, b: int, out: Layout) -> Part:
    """The product of two values; if the other one has fewer ciphertexts, all sets or a whole row share it."""
    return Part("product", (a, b), out, lambda m, x, y: m.product(x, y))


def _square(op: ops.Square, read: list[Layout], packing: Packing) -> list[Part]:
    return [Part("square", (0,), read[0], lambda m, x: m.shifted(m.product(x, x), ("added",)))]


def _series(form: str, out: Layout) -> Part:
    coefficients = [1.0] * (FORMS[form].degree + 1)
    return Part(form, (0,), out, lambda m, x: forms.series(m, x, coefficients, -1.0, 1.0))


def _by_series(form: str) -> Program:
    return lambda op, read, packing: [_series(form, read[0])]


def _scaled(op: Op, read: list[Layout], packing: Packing) -> list[Part]:
    """Products of every input with numbers of the server, added up."""
    return [_times(type(op).__name__, tuple(range(len(read))), read[0])]


def _times(kind: str, operands: tuple[int, ...], out: Layout) -> Part:
    return Part(kind, operands, out, lambda m, *values: m.combined(values, [1.0] * len(values)))


def _moved(op: Op, read: list[Layout], packing: Packing) -> list[Part]:
    """What moves or adds numbers needs no product. Packed heads are sections; linears have repeated key heads."""
    out, kind = read[0], "taken" if isinstance(op, ops.TakeRows) else "moved"
    if isinstance(op, ops.PackHeads):
        out = Layout(sections=tuple(width for layout in read for width in layout.sections))
        return [Part(kind, tuple(range(len(read))), out, lambda m, *values: [part for one in values for part in one])]
    if isinstance(op, ops.RepeatHeads) and len(out.sections) != 3:
        raise _unpriced(op, "its heads do not come from linears", "heads of a linear or of three")
    if isinstance(op, (ops.PositionEmbedding, ops.ScoreBound)):
        return [Part(kind, (0,), out, lambda m, x: m.shifted(x, ("added",)))]
    return [Part(kind, tuple(range(len(read))), out, lambda m, *values: m.summed(*values))]


def _rotary(op: ops.Rotary, read: list[Layout], packing: Packing) -> list[Part]:
    """Queries and keys times cosines, plus either half turned the other way times sines."""
    num, half = sum(map(packing.num, read[0].sections[:2])), op.rotary_dim // 2 * packing.tokens

    def program(m: Any, x: list[Any]) -> list[Any]:
        turned = x[:num], m.rotation(x[:num], half), m.rotation(x[:num], -half)
        return [*m.combined(turned, [("angles", which) for which in range(3)]), *x[num:]]

    return [Part("rotary", (0,), read[0], program)]


def _heads(op: Any, packing: Packing) -> tuple[int, int]:
    """Return the ciphertexts of all heads, and sets; an error is raised for what has no packing."""
    if op.queries != op.keys:
        raise _unpriced(op, f"{op.queries} queries with {op.keys} keys have no packing", "whole prompts")
    if op.head_dim != power_of_two(op.head_dim):
        raise _unpriced(op, f"a head of {op.head_dim} features has no packing", "powers of two")
    if op.head_dim > packing.columns:
        raise UserError(
            f"protocol ckks packs a head's {op.head_dim} features of {packing.tokens} tokens in {packing.slots} slots, "
            f"which hold {packing.slots // op.head_dim} tokens at most; use a shorter prompt."
        )
    return packing.num(op.heads // op.sequences * op.head_dim), -(-op.keys // op.head_dim)


def _causal(op: Any) -> None:
    if not op.causal:
        raise _unpriced(op, "scores of later keys wrap around", "causal attention")


def _scores(op: ops.AttentionScores, read: list[Layout], packing: Packing) -> list[Part]:
    """For each distance: queries times turned keys, added up over a head, one column of it kept and moved in place."""
    _causal(op)
    (num, sets), size = _heads(op, packing), op.head_dim

    def program(m: Any, packed: list[Any]) -> list[Any]:
        query, key, kept = packed[:num], packed[num : 2 * num], list[Any]()
        for distance in range(op.keys):
            key = m.rotation(key, -1) if distance else key
            total = folded(m, m.product(query, key), packing.tokens, log2(size))
            kept.append(m.plain(total, ("scores", distance)))
        results = []
        for first in range(0, op.keys, size):
            total, *others = reversed(kept[first : first + size])
            for other in others:
                total = m.summed(m.rotation(total, -packing.tokens), other)
            results += m.rescaled(total)
        return results

    out = Layout(sections=(op.heads // op.sequences * size,), sets=sets, window=size)
    return [Part("scores", (0,), out, program, (2 * num,))]


def _mix(op: ops.AttentionMix, read: list[Layout], packing: Packing) -> list[Part]:
    """For each distance: its column of attention spread over a head, times the turned values."""
    (num, sets), size = _heads(op, packing), op.head_dim

    def program(m: Any, attention: list[Any], packed: list[Any]) -> list[Any]:
        value, weight, pairs = packed[-num:], list[Any](), []
        for distance in range(op.keys):
            at, is_next = divmod(distance, size)
            value = m.rotation(value, -1) if distance else value
            weight = m.rotation(weight, packing.tokens) if is_next else attention[at * num : (at + 1) * num]
            column = m.rescaled(m.plain(weight, ("attention", distance)))
            pairs.append((folded(m, column, -packing.tokens, log2(size)), value))
        return list(m.inner(pairs))

    out = Layout(sections=(op.heads // op.sequences * size,))
    return [Part("mix", (0, 1), out, program, (num * sets, num))]


def _softmax(op: ops.Softmax, read: list[Layout], packing: Packing) -> list[Part]:
    """Numbers that are not negative, then their sums over a row, inverted, and the products of both.

    The maximum of `exact` is a public bound, which the function does not depend on.
    """
    _causal(op)
    scores, row = read[0], replace(read[0], sets=1)
    num, folds = packing.ciphertexts(row), log2(scores.window)
    if op.form == "2quad":
        parts = [Part("square", (0,), scores, lambda m, x: m.product(x, x))]
    elif op.form == "power8":
        parts = [Part("eighth_power", (0,), scores, forms.eighth_power)]
    elif op.form == "relu":
        parts = _relu(op, read, packing)
    else:  # what the mask hides becomes 0
        parts = [_series("exponential", scores), _times("hidden", (1,), scores)]

    def row_sum(m: Any, x: list[Any]) -> list[Any]:
        total = m.summed(*(x[first : first + num] for first in range(0, len(x), num)))
        total = m.combined([folded(m, total, packing.tokens, folds)], [("row",)])
        return list(m.shifted(folded(m, total, -packing.tokens, folds), ("no_row",)))

    at = len(parts)
    inverse = Part("inverse", (at + 1,), row, lambda m, x: forms.inverse(m, x, ("least_sum",)))
    return [*parts, Part("row_sum", (at,), row, row_sum), inverse, _product(at, at + 2, scores)]


def _relu(op: Op, read: list[Layout], packing: Packing) -> list[Part]:
    """x times a line of the sign of x, which is composed of polynomials; a slope is in the line."""
    num = forms.SIGN_G + forms.SIGN_F
    parts = [Part("sign", (at,), read[0], lambda m, x: forms.sign_part(m, x, forms.G3)) for at in range(num)]
    return [*parts, _times("line", (num,), read[0]), _product(0, num + 1, read[0])]


def _norm(op: Any, read: list[Layout], packing: Packing) -> list[Part]:
    """Mean squares of a row or of each group of it, inverse roots of these, and products."""
    out, groups = read[0], getattr(op, "groups", 1)
    window = packing.period(out.sections[0]) if groups == 1 else op.features // groups
    if window != power_of_two(window):
        raise _unpriced(op, f"a group of {window} features has no packing", "groups of a power of two")

    def mean_square(m: Any, x: list[Any]) -> list[Any]:
        squares = m.product(x, x)
        if groups == 1:
            return _row_total(m, squares, window, packing)
        # the first column of each group has its sum, and is spread over the group
        first = m.combined([folded(m, squares, packing.tokens, log2(window))], [1.0])
        return list(folded(m, first, -packing.tokens, log2(window)))

    def root(m: Any, x: list[Any]) -> list[Any]:
        return list(forms.inverse_root(m, x, [1.0] * (forms.ROOT_DEGREE + 1)))

    def centre(m: Any, x: list[Any]) -> list[Any]:  # (n x - the sum of x) / n
        return list(m.combined([m.summed(x, m.negated(_row_total(m, x, window, packing)))], [1.0]))

    centred = [Part("centred", (0,), out, centre)] if isinstance(op, ops.LayerNorm) else []
    at, sums = len(centred), out if groups > 1 else Layout(sections=(window,))
    gained = [_times("gained", (at + 3,), out)] if op.affine else []
    means, roots = Part("mean_square", (at,), sums, mean_square), Part("inverse_root", (at + 1,), sums, root)
    return [*centred, means, roots, _product(at, at + 2, out), *gained]


def _row_total(m: Any, x: list[Any], window: int, packing: Packing) -> list[Any]:
    return list(folded(m, m.summed(*([part] for part in x)), packing.tokens, log2(window)))


def _frozen_norm(op: ops.FrozenNorm, read: list[Layout], packing: Packing) -> list[Part]:
    def program(m: Any, x: list[Any]) -> list[Any]:
        mean = [_row_total(m, x, packing.period(read[0].sections[0]), packing)] if op.centred else []
        return list(m.combined([x, *mean], [1.0] * (1 + op.centred)))

    return [Part("frozen_norm", (0,), read[0], program)]


def _gelu(op: ops.Gelu, read: list[Layout], packing: Packing) -> list[Part]:
    if op.form == "piecewise":
        raise _unpriced(op, "`form` piecewise compares with thresholds", "tanh and exact, by a series")
    return [_series("gelu", read[0])]


def _embed(op: ops.TokenEmbedding, read: list[Layout], packing: Packing) -> list[Part]:
    if op.encoding != "one-hot":
        raise _unpriced(op, "with `encoding` lookup, secret tokens are compared with the vocabulary", "one-hot")
    return _linear(op.vocab, (op.features,), packing)


# op type -> its parts; an absent type is an error
PROGRAMS: dict[type, Program] = {
    ops.TokenEmbedding: _embed,
    **dict.fromkeys((ops.PositionEmbedding, ops.PackHeads, ops.RepeatHeads, ops.ScoreBound), _moved),
    **dict.fromkeys((ops.Add, ops.TakeRows), _moved),
    **dict.fromkeys((ops.Temperature, ops.ShapedAttention, ops.Scale, ops.ScaledAdd), _scaled),
    **dict.fromkeys((ops.LayerNorm, ops.RmsNorm), _norm),
    **dict.fromkeys((ops.Relu, ops.LeakyRelu), _relu),
    ops.FrozenNorm: _frozen_norm,
    ops.Linear: lambda op, read, packing: _linear(op.in_features, (op.out_features,), packing),
    ops.Rotary: _rotary,
    ops.AttentionScores: _scores,
    ops.Softmax: _softmax,
    ops.AttentionMix: _mix,
    ops.Gelu: _gelu,
    ops.Square: _square,
    ops.Silu: _by_series("silu"),
    ops.Sigmoid: _by_series("sigmoid"),
    ops.Tanh: _by_series("tanh"),
    ops.Multiply: lambda op, read, packing: [_product(0, 1, read[0])],
    ops.VocabProjection: lambda op, read, packing: _linear(op.features, (op.vocab,), packing),
}
