"""What an op graph is under `ckks`: steps, each with its levels and primitives, from shapes alone.

Packing: a ciphertext holds columns of `tokens` slots, a token each, one column behind the other; a matrix with more
columns than fit takes several ciphertexts, and one with fewer is repeated until the slots are full. So a rotation by a
column moves the features of all tokens. A linear multiplies generalised diagonals by baby and giant steps, both as
chains of one rotation each, so that two keys serve it. Scores are kept by the distance between query and key: column
`d` of a head's window has its scores of keys `d` tokens back, so that later keys are those that wrap around.

Sources: Pang et al. 2024, BOLT, https://eprint.iacr.org/2023/1893, section 4 (columns); Halevi and Shoup 2018,
https://eprint.iacr.org/2018/244 (diagonals); Juvekar et al. 2018, Gazelle, arXiv 1801.05507 (fewer outputs than
inputs); Kim et al. 2022, ARK, arXiv 2205.00922 (chains of one rotation).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from costmodel import ops
from costmodel.errors import UnpricedOpError, UserError
from costmodel.ops import Node, Op
from costmodel.protocols import ckks_forms as forms
from costmodel.protocols.ckks_forms import FORMS, Work, counted


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

    kind: what it does; `costmodel.engine.ckks_machine` runs it by this name. inputs: names of steps or graph inputs.
    depth: levels between the lowest input and the output; 0 where values are only moved and added.
    ciphertexts, distinct: of its output, and the slots of each before it repeats itself.
    """

    name: str
    node: Node
    kind: str
    inputs: tuple[str, ...]
    depth: int
    work: Work
    layout: Layout
    ciphertexts: int
    distinct: int


Part: TypeAlias = tuple[str, tuple[int, ...], int, Work, Layout]  # kind, operands, depth, work, output
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
        read = [layouts.get(name) or _external(shape, packing) for name, shape in shapes]
        names = [last.get(name, name) for name in node.inputs]
        try:
            parts = _parts(node, read, packing, wanted.get(node.name))
        except UserError as error:
            raise type(error)(f"op {node.name!r} must have a price: {error}") from None
        for kind, operands, depth, work, layout in parts:
            step = Step(
                name=f"{node.name}#{kind}{len(steps)}",
                node=node,
                kind=kind,
                inputs=tuple(names[operand] for operand in operands),
                depth=depth,
                work=+work,
                layout=layout,
                ciphertexts=packing.ciphertexts(layout),
                distinct=packing.tokens * max(map(packing.period, layout.sections)),
            )
            steps.append(step)
            names.append(step.name)
            layouts[node.name], last[node.name] = layout, step.name
    return steps


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


def _parts(node: Node, read: list[Layout], packing: Packing, wanted: tuple[int, ...] | None) -> list[Part]:
    op = node.op
    if op.public:
        raise _unpriced(op, "no layer is public, as weights are never encrypted", "weights of the server")
    if type(op) not in PROGRAMS:
        raise _unpriced(op, "its rows or columns have no packing", "TakeRows and PackHeads")
    if isinstance(op, ops.Linear) and wanted is not None:
        return _linear(read[0].sections[0], wanted, packing)
    return PROGRAMS[type(op)](op, read, packing)


def _unpriced(op: Op, why: str, instead: str) -> UnpricedOpError:
    return UnpricedOpError(
        f"protocol ckks has no form for {type(op).__name__}: {why}; there are forms for {instead}, or choose protocol "
        "semi2k, aby3 or cheetah."
    )


def _linear(in_width: int, sections: tuple[int, ...], packing: Packing) -> list[Part]:
    work: Work = Counter()
    for width in sections:
        baby, giant, folds = packing.linear(in_width, width)
        a, b = packing.num(in_width), packing.num(width)
        work.update({("plain_product", 0): a * b * baby * giant, ("rescale", 0): b, ("rotation", 1): b * folds})
        work[("rotation", 0)] += a * (baby - 1) + b * (giant - 1)
    return [("linear", (0,), 1, work, Layout(sections=sections))]


def _program(kind: str, operands: tuple[int, ...], out: Layout, packing: Packing, program: Any, *given: Any) -> Part:
    """A program on every ciphertext; an operand with fewer is shared by all sets, or by a whole row."""
    work, depth = counted(program, *given, inputs=len(operands))
    num = packing.ciphertexts(out)
    return kind, operands, depth, Counter({key: count * num for key, count in work.items()}), out


def _product(a: int, b: int, out: Layout, packing: Packing) -> Part:
    return _program("product", (a, b), out, packing, lambda m, x, y: m.product(x, y))


def _squared(out: Layout, packing: Packing) -> Part:
    return _program("square", (0,), out, packing, lambda m, x: m.product(x, x))


def _series(form: str, out: Layout, packing: Packing) -> Part:
    return _program(form, (0,), out, packing, forms.series, [1.0] * (FORMS[form].degree + 1), -1.0, 1.0)


def _scaled(op: Op, read: list[Layout], packing: Packing) -> list[Part]:
    """Products of every input with numbers of the server, added up."""
    return [_times(type(op).__name__, tuple(range(len(read))), read[0], packing)]


def _times(kind: str, operands: tuple[int, ...], out: Layout, packing: Packing) -> Part:
    num = packing.ciphertexts(out)
    return kind, operands, 1, Counter({("plain_product", 0): num * len(operands), ("rescale", 0): num}), out


def _moved(op: Op, read: list[Layout], packing: Packing) -> list[Part]:
    """What moves or adds numbers needs no product. Packed heads are sections; linears have repeated key heads."""
    out = read[0]
    if isinstance(op, ops.PackHeads):
        out = Layout(sections=tuple(width for layout in read for width in layout.sections))
    if isinstance(op, ops.RepeatHeads) and len(out.sections) != 3:
        raise _unpriced(op, "its heads do not come from linears", "heads of a linear or of three")
    return [("moved", tuple(range(len(read))), 0, Counter(), out)]


def _rotary(op: ops.Rotary, read: list[Layout], packing: Packing) -> list[Part]:
    """Queries and keys times cosines, plus either half turned the other way times sines."""
    num = sum(map(packing.num, read[0].sections[:2]))
    work: Work = Counter({("rotation", 0): 2 * num, ("plain_product", 0): 3 * num, ("rescale", 0): num})
    return [("rotary", (0,), 1, work, read[0])]


def _heads(op: Any, packing: Packing) -> tuple[int, int, int]:
    """Return the ciphertexts of all heads, those times keys, and sets; an error is raised for what has no packing."""
    if op.queries != op.keys:
        raise _unpriced(op, f"{op.queries} queries with {op.keys} keys have no packing", "whole prompts")
    if op.head_dim != power_of_two(op.head_dim):
        raise _unpriced(op, f"a head of {op.head_dim} features has no packing", "powers of two")
    if op.head_dim > packing.columns:
        raise UserError(
            f"protocol ckks packs a head's {op.head_dim} features of {packing.tokens} tokens in {packing.slots} slots, "
            f"which hold {packing.slots // op.head_dim} tokens at most; use a shorter prompt."
        )
    num = packing.num(op.heads // op.sequences * op.head_dim)
    return num, num * op.keys, -(-op.keys // op.head_dim)


def _causal(op: Any) -> None:
    if not op.causal:
        raise _unpriced(op, "scores of later keys wrap around", "causal attention")


def _scores(op: ops.AttentionScores, read: list[Layout], packing: Packing) -> list[Part]:
    """For each distance: queries times turned keys, added up over a head, one column of it kept and moved in place."""
    _causal(op)
    num, each, sets = _heads(op, packing)
    work: Work = Counter({("rotation", 0): each - num, ("product", 0): each, ("relinearisation", 0): each})
    work.update({("rescale", 0): each, ("rotation", 1): each * log2(op.head_dim) + each - num * sets})
    work.update({("plain_product", 1): each, ("rescale", 1): sets * num})
    out = Layout(sections=(op.heads // op.sequences * op.head_dim,), sets=sets, window=op.head_dim)
    return [("scores", (0,), 2, work, out)]


def _mix(op: ops.AttentionMix, read: list[Layout], packing: Packing) -> list[Part]:
    """For each distance: its column of attention spread over a head, times the turned values."""
    num, each, sets = _heads(op, packing)
    work: Work = Counter({("rotation", 0): 2 * each - num * (sets + 1), ("plain_product", 0): each})
    work.update({("rescale", 0): each, ("rotation", 1): each * log2(op.head_dim), ("product", 1): each})
    work.update({("relinearisation", 1): num, ("rescale", 1): num})
    return [("mix", (0, 1), 2, work, Layout(sections=(op.heads // op.sequences * op.head_dim,)))]


def _softmax(op: ops.Softmax, read: list[Layout], packing: Packing) -> list[Part]:
    """Numbers that are not negative, then their sums over a row, inverted, and the products of both.

    The maximum of `exact` is a public bound, which the function does not depend on.
    """
    _causal(op)
    scores, row = read[0], replace(read[0], sets=1)
    if op.form == "2quad":
        parts = [_squared(scores, packing)]
    elif op.form == "power8":
        parts = [_program("eighth_power", (0,), scores, packing, forms.eighth_power)]
    elif op.form == "relu":
        parts = _relu(op, read, packing)
    else:  # what the mask hides becomes 0
        parts = [_series("exponential", scores, packing), _times("hidden", (1,), scores, packing)]
    at, num = len(parts), packing.ciphertexts(row)
    folds = num * log2(scores.window)
    work: Work = Counter(
        {("rotation", 0): folds, ("plain_product", 0): num, ("rescale", 0): num, ("rotation", 1): folds}
    )
    inverted = _program("inverse", (at + 1,), row, packing, forms.inverse)
    return [*parts, ("row_sum", (at,), 1, work, row), inverted, _product(at, at + 2, scores, packing)]


def _relu(op: Op, read: list[Layout], packing: Packing) -> list[Part]:
    """x times a line of the sign of x, which is composed of polynomials; a slope is in the line."""
    num = forms.SIGN_G + forms.SIGN_F
    parts = [_program("sign", (at,), read[0], packing, forms.sign_part, forms.G3) for at in range(num)]
    return [*parts, _times("line", (num,), read[0], packing), _product(0, num + 1, read[0], packing)]


def _norm(op: Any, read: list[Layout], packing: Packing) -> list[Part]:
    """Mean squares of a row or of each group of it, inverse roots of these, and products."""
    out, groups = read[0], getattr(op, "groups", 1)
    window = packing.period(out.sections[0]) if groups == 1 else op.features // groups
    if window != power_of_two(window):
        raise _unpriced(op, f"a group of {window} features has no packing", "groups of a power of two")
    num, folds = packing.ciphertexts(out), log2(window)
    centred = [("centred", (0,), 1, _centring(num, folds, 1), out)] if isinstance(op, ops.LayerNorm) else []
    at, sums = len(centred), out if groups > 1 else Layout(sections=(window,))
    work, depth = Counter(_squared(out, packing)[3]), 1
    work[("rotation", 1)] = packing.ciphertexts(sums) * folds
    if groups > 1:  # the first column of each group has its sum, and is spread over the group
        work.update({("plain_product", 1): num, ("rescale", 1): num, ("rotation", 2): num * folds})
        depth = 2
    root = _program("inverse_root", (at + 1,), sums, packing, forms.inverse_root, [1.0] * (forms.ROOT_DEGREE + 1))
    gained = [_times("gained", (at + 3,), out, packing)] if op.affine else []
    return [*centred, ("mean_square", (at,), depth, work, sums), root, _product(at, at + 2, out, packing), *gained]


def _centring(num: int, folds: int, terms: int) -> Work:
    return Counter({("rotation", 0): folds, ("plain_product", 0): num * terms, ("rescale", 0): num})


def _frozen_norm(op: ops.FrozenNorm, read: list[Layout], packing: Packing) -> list[Part]:
    folds = log2(packing.period(read[0].sections[0])) if op.centred else 0
    work = _centring(packing.ciphertexts(read[0]), folds, 1 + op.centred)
    return [("frozen_norm", (0,), 1, work, read[0])]


def _gelu(op: ops.Gelu, read: list[Layout], packing: Packing) -> list[Part]:
    if op.form == "piecewise":
        raise _unpriced(op, "`form` piecewise compares with thresholds", "tanh and exact, by a series")
    return [_series("gelu", read[0], packing)]


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
    ops.Linear: lambda op, read, packing: _linear(read[0].sections[0], (op.out_features,), packing),
    ops.Rotary: _rotary,
    ops.AttentionScores: _scores,
    ops.Softmax: _softmax,
    ops.AttentionMix: _mix,
    ops.Gelu: _gelu,
    ops.Square: lambda op, read, packing: [_squared(read[0], packing)],
    ops.Silu: lambda op, read, packing: [_series("silu", read[0], packing)],
    ops.Sigmoid: lambda op, read, packing: [_series("sigmoid", read[0], packing)],
    ops.Tanh: lambda op, read, packing: [_series("tanh", read[0], packing)],
    ops.Multiply: lambda op, read, packing: [_product(0, 1, read[0], packing)],
    ops.VocabProjection: lambda op, read, packing: _linear(read[0].sections[0], (op.vocab,), packing),
}
