"""What an op graph is under `ckks`: steps, each with its levels and primitives, from shapes alone.

Packing: a ciphertext holds columns of `tokens` slots, a token each, one column behind the other; a matrix with more
columns than fit takes several ciphertexts, and one with fewer is repeated until the slots are full. So a rotation by a
column moves the features of all tokens. A linear multiplies generalised diagonals by baby and giant steps, both as
chains of one rotation each, so that two keys serve it. Scores are kept by the distance between query and key: column
`d` of a head's window has its scores of keys `d` tokens back, so that later keys are those that wrap around.

Sources: Pang et al. 2024, BOLT, https://eprint.iacr.org/2023/1893, section 4 (columns); Halevi and Shoup 2018,
https://eprint.iacr.org/2018/244 (diagonals); Juvekar et al. 2018, Gazelle, https://arxiv.org/abs/1801.05507 (hybrid, for
fewer outputs than inputs); Kim et al. 2022, ARK, https://arxiv.org/abs/2205.00922 (chains of one rotation).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from costmodel import ops
from costmodel.errors import UnpricedOpError, UserError
from costmodel.ops import Node, Op
from costmodel.protocols import ckks_forms as forms
from costmodel.protocols.ckks_forms import FORMS, Work, counted

OTHERS = "choose protocol semi2k, aby3 or cheetah"


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

    def distinct(self, layout: Layout) -> int:
        """The slots of a ciphertext before it repeats itself: those of its bootstrap."""
        return self.tokens * max(map(self.period, layout.sections))

    def linear(self, in_width: int, out_width: int) -> tuple[int, int, int]:
        """The baby steps, giant steps and rotations that add up parts, of a product with a matrix."""
        read, written = self.period(in_width), self.period(out_width)
        num_diagonals = min(read, written)
        sizes = [1 << k for k in range(num_diagonals.bit_length())]
        few = min(
            sizes, key=lambda baby: self.num(in_width) * (baby - 1) + self.num(out_width) * (num_diagonals // baby - 1)
        )
        return few, num_diagonals // few, log2(max(1, read // written))


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


Part: TypeAlias = tuple[str, tuple[int, ...], int, Work, Layout]  # kind, operands, depth, work of all, output


def power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def log2(power: int) -> int:
    return power.bit_length() - 1


def packing_of(nodes: Sequence[Node], slots: int) -> Packing:
    """Return the packing of a graph, by its longest matrix of tokens; a UserError is raised if that does not fit."""
    rows = max((node.op.output_shape[0] for node in nodes if _is_of_tokens(node.op)), default=1)
    if (tokens := power_of_two(rows)) > slots:
        raise UserError(
            f"protocol ckks packs a column of tokens in the {slots} slots of a ciphertext, but got {rows} tokens at "
            "once, of which not even a vocabulary projection fits; use a shorter prompt or a smaller batch."
        )
    return Packing(tokens=tokens, slots=slots)


def _is_of_tokens(op: Op) -> bool:
    return isinstance(op, (ops.TokenEmbedding, ops.Linear, ops.VocabProjection, ops.LayerNorm, ops.RmsNorm, ops.Add))


def steps_of(nodes: Sequence[Node], packing: Packing) -> list[Step]:
    """Return the steps of an op graph, in order; a UserError is raised for an op without a polynomial form."""
    wanted, layouts = _sections(nodes), dict[str, Layout]()
    steps: list[Step] = []
    last: dict[str, str] = {}  # node -> its last step
    for node in nodes:
        read = [layouts.get(name) or _external(shape, packing) for name, shape in _operands(node)]
        names = [last.get(name, name) for name in node.inputs]
        try:
            parts = _parts(node, read, packing, wanted.get(node.name))
        except UserError as error:
            raise type(error)(f"op {node.name!r} must have a price: {error}") from None
        for kind, operands, depth, work, layout in parts:
            name = f"{node.name}#{kind}{len(steps)}"
            size = {"ciphertexts": packing.ciphertexts(layout), "distinct": packing.distinct(layout)}
            inputs = tuple(names[operand] for operand in operands)
            steps.append(
                Step(name=name, node=node, kind=kind, inputs=inputs, depth=depth, work=work, layout=layout, **size)
            )
            names.append(name)
            layouts[node.name], last[node.name] = layout, name
    return steps


def _operands(node: Node) -> Iterable[tuple[str, tuple[int, ...]]]:
    return zip(node.inputs, node.op.input_shapes, strict=False)  # a mix may read a packed value


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

    for node in nodes:
        if isinstance(op := node.op, ops.AttentionScores):
            width = op.heads // op.sequences * op.head_dim
            mixes = [mix for mix in nodes if isinstance(mix.op, ops.AttentionMix) and node.inputs[0] in mix.inputs]
            mark(node.inputs[0], (width,) * (3 if mixes else 2))
    return widths


def _parts(node: Node, read: list[Layout], packing: Packing, wanted: tuple[int, ...] | None) -> list[Part]:
    op = node.op
    if op.public:
        raise UnpricedOpError(
            "`public_layers` go with protocols semi2k, aby3 and cheetah, but got protocol ckks, whose weights are the "
            "server's and never encrypted; price under it with no layer public."
        )
    if type(op) not in PROGRAMS:
        raise unpriced(op, "its rows or columns have no packing", "TakeRows and PackHeads")
    if isinstance(op, ops.Linear) and wanted is not None:
        return [_linear(packing, read[0], Layout(sections=wanted))]
    return PROGRAMS[type(op)](op, read, packing)


def unpriced(op: Op, why: str, instead: str) -> UnpricedOpError:
    return UnpricedOpError(
        f"protocol ckks has no form for {type(op).__name__}: {why}; there are forms for {instead}, or {OTHERS}."
    )


def times(work: Work, count: int) -> Work:
    return Counter({key: number * count for key, number in work.items()})


def _linear(packing: Packing, read: Layout, out: Layout) -> Part:
    work: Work = Counter()
    for at, width in enumerate(out.sections):
        baby, giant, num_folds = packing.linear(read.sections[0], width)
        a, b = packing.num(read.sections[0]), packing.num(width)
        work.update({("plain_product", 0): a * b * baby * giant, ("rescale", 0): b, ("rotation", 1): b * num_folds})
        work[("rotation", 0)] += a * (baby - 1) + b * (giant - 1)
    return "linear", (0,), 1, +work, out


def _elementwise(
    kind: str, operands: tuple[int, ...], layout: Layout, packing: Packing, program: Any, *arguments: Any
) -> Part:
    work, depth = counted(program, *arguments, inputs=len(operands))
    return kind, operands, depth, times(work, packing.ciphertexts(layout)), layout


def product(m: forms.Machine, a: Any, b: Any) -> Any:
    return m.product(a, b)


def square(m: forms.Machine, a: Any) -> Any:
    return m.product(a, a)


def _scaled(kind: str, op: Op, read: list[Layout], packing: Packing) -> list[Part]:
    """Products of every input with numbers of the server, added up."""
    num = packing.ciphertexts(read[0])
    work: Work = Counter({("plain_product", 0): num * len(read), ("rescale", 0): num})
    return [(kind, tuple(range(len(read))), 1, work, read[0])]


def _moved(op: Op, read: list[Layout], packing: Packing) -> list[Part]:
    """What moves or adds numbers needs no product. Heads that are packed are the sections of one value."""
    out = read[0]
    if isinstance(op, ops.PackHeads):
        out = Layout(sections=tuple(width for layout in read for width in layout.sections))
    return [("moved", tuple(range(len(read))), 0, Counter(), out)]


def _repeat(op: ops.RepeatHeads, read: list[Layout], packing: Packing) -> list[Part]:
    """The linears have written each key head once per query head."""
    if len(set(read[0].sections)) > 1 or len(read[0].sections) != 3:
        raise unpriced(op, "its heads do not come from linears", "heads of a linear or of three")
    return _moved(op, read, packing)


def _rotary(op: ops.Rotary, read: list[Layout], packing: Packing) -> list[Part]:
    """Queries and keys times cosines, plus either half turned the other way times sines."""
    rotated = sum(map(packing.num, read[0].sections[:2]))
    work: Work = Counter({("rotation", 0): 2 * rotated, ("plain_product", 0): 3 * rotated, ("rescale", 0): rotated})
    return [("rotary", (0,), 1, work, read[0])]


def _head(op: Any, packing: Packing) -> tuple[int, int]:
    """Return a head's columns and the ciphertexts of all heads; a UserError is raised for what has no packing."""
    if op.queries != op.keys:
        raise unpriced(op, f"{op.queries} queries with {op.keys} keys have no packing", "whole prompts")
    if op.head_dim != power_of_two(op.head_dim):
        raise unpriced(op, f"a head of {op.head_dim} features has no packing", "powers of two")
    if op.head_dim > packing.columns:
        raise UserError(
            f"protocol ckks packs a head's {op.head_dim} features of {packing.tokens} tokens in {packing.slots} slots, "
            f"which holds {packing.slots // op.head_dim} tokens at most; use a shorter prompt."
        )
    return op.head_dim, packing.num(op.heads // op.sequences * op.head_dim)


def _scores(op: ops.AttentionScores, read: list[Layout], packing: Packing) -> list[Part]:
    """For each distance: queries times turned keys, added up over a head, one column of it kept and moved in place."""
    if not op.causal:
        raise unpriced(op, "scores of later keys wrap around", "causal attention")
    window, num = _head(op, packing)
    sets = -(-op.keys // window)
    each = num * op.keys
    work: Work = Counter(
        {("rotation", 0): num * (op.keys - 1), ("product", 0): each, ("relinearisation", 0): each, ("rescale", 0): each}
    )
    work.update({("rotation", 1): each * log2(window) + num * (op.keys - sets), ("plain_product", 1): each})
    work[("rescale", 1)] = sets * num
    width = op.heads // op.sequences * op.head_dim
    return [("scores", (0,), 2, +work, Layout(sections=(width,), sets=sets, window=window))]


def _mix(op: ops.AttentionMix, read: list[Layout], packing: Packing) -> list[Part]:
    """For each distance: its column of attention spread over a head, times the turned values."""
    window, num = _head(op, packing)
    each, sets = num * op.keys, -(-op.keys // window)
    work: Work = Counter({("rotation", 0): num * (op.keys - sets) + num * (op.keys - 1), ("plain_product", 0): each})
    work.update({("rescale", 0): each, ("rotation", 1): each * log2(window), ("product", 1): each})
    work.update({("relinearisation", 1): num, ("rescale", 1): num})
    return [("mix", (0, 1), 2, +work, Layout(sections=(op.heads // op.sequences * op.head_dim,)))]


def _softmax(op: ops.Softmax, read: list[Layout], packing: Packing) -> list[Part]:
    """Positive numbers, then their sums over a row, inverted, and the products of both."""
    if not op.causal:
        raise unpriced(op, "scores of later keys wrap around", "causal attention")
    scores = read[0]
    row = replace(scores, sets=1)
    numbers = {
        "2quad": lambda: [_elementwise("square", (0,), scores, packing, square)],
        "power8": lambda: [_elementwise("eighth_power", (0,), scores, packing, forms.eighth_power)],
        "relu": lambda: _relu(op, read, packing),
    }
    parts = numbers.get(op.form, lambda: _exponential(scores, packing))()
    at, num, folds = len(parts), packing.ciphertexts(row), log2(scores.window)
    work: Work = Counter({("rotation", 0): num * folds, ("plain_product", 0): num, ("rescale", 0): num})
    work[("rotation", 1)] = num * folds
    return [
        *parts,
        ("row_sum", (at,), 1, +work, row),
        _elementwise("inverse", (at + 1,), row, packing, forms.inverse),
        _spread(at, at + 2, scores, packing),
    ]


def _spread(a: int, b: int, layout: Layout, packing: Packing) -> Part:
    """Products of every ciphertext with the one that all its sets or all of a row share."""
    return _elementwise("product", (a, b), layout, packing, product)


def _exponential(scores: Layout, packing: Packing) -> list[Part]:
    num = packing.ciphertexts(scores)
    hidden: Work = Counter({("plain_product", 0): num, ("rescale", 0): num})  # what the mask hides becomes 0
    program = _series("exponential", "exponential", (0,), scores, packing)
    return [program, ("hidden", (1,), 1, hidden, scores)]


def _series(kind: str, form: str, operands: tuple[int, ...], layout: Layout, packing: Packing) -> Part:
    coefficients = [1.0] * (FORMS[form].degree + 1)
    return _elementwise(kind, operands, layout, packing, forms.series, coefficients, -1.0, 1.0)


def _relu(op: Op, read: list[Layout], packing: Packing) -> list[Part]:
    """x times a line of the sign of x, which is composed of polynomials."""
    num = forms.SIGN_G + forms.SIGN_F
    parts = [_elementwise("sign", (at,), read[0], packing, forms.sign_part, forms.G3) for at in range(num)]
    line = _elementwise("line", (num,), read[0], packing, lambda m, x: m.combined([x], [0.5], 0.5))
    return [*parts, line, _spread(0, num + 1, read[0], packing)]


def _norm(op: Any, read: list[Layout], packing: Packing) -> list[Part]:
    """Mean squares of a row or of each group of it, inverse roots of these, and products."""
    width, parts = read[0].sections[0], list[Part]()
    groups = getattr(op, "groups", 1)
    window = packing.period(width) if groups == 1 else op.features // groups
    if window != power_of_two(window):
        raise unpriced(op, f"a group of {window} features has no packing", "groups of a power of two")
    num, folds = packing.ciphertexts(read[0]), log2(window)
    if isinstance(op, ops.LayerNorm):
        centring: Work = Counter({("rotation", 0): folds, ("plain_product", 0): num, ("rescale", 0): num})
        parts.append(("centred", (0,), 1, +centring, read[0]))
    at, sums = len(parts), read[0] if groups > 1 else Layout(sections=(packing.period(width),))
    squares, _ = counted(square)
    work = times(squares, num)
    work[("rotation", 1)] = packing.ciphertexts(sums) * folds
    depth = 1
    if groups > 1:  # the first column of each group has its sum, and is spread over the group
        depth = 2
        work.update({("plain_product", 1): num, ("rescale", 1): num, ("rotation", 2): num * folds})
    parts.append(("mean_square", (at,), depth, +work, sums))
    root = [1.0] * (forms.ROOT_DEGREE + 1)
    parts.append(_elementwise("inverse_root", (at + 1,), sums, packing, forms.inverse_root, root))
    parts.append(_spread(at, at + 2, read[0], packing))
    if op.affine:
        scaled = _scaled("gained", op, read[:1], packing)[0]
        parts.append((scaled[0], (at + 3,), *scaled[2:]))
    return parts


def _frozen_norm(op: ops.FrozenNorm, read: list[Layout], packing: Packing) -> list[Part]:
    num = packing.ciphertexts(read[0])
    folds = log2(packing.period(read[0].sections[0])) if op.centred else 0
    work: Work = Counter({("rotation", 0): folds, ("plain_product", 0): num * (1 + op.centred), ("rescale", 0): num})
    return [("frozen_norm", (0,), 1, +work, read[0])]


def _activation(form: str) -> Callable[[Op, list[Layout], Packing], list[Part]]:
    return lambda op, read, packing: [_series(form, form, (0,), read[0], packing)]


def _gelu(op: ops.Gelu, read: list[Layout], packing: Packing) -> list[Part]:
    if op.form == "piecewise":
        raise unpriced(op, "`form` piecewise compares with thresholds", "tanh and exact, by a series")
    return _activation("gelu")(op, read, packing)


def _embed(op: ops.TokenEmbedding, read: list[Layout], packing: Packing) -> list[Part]:
    if op.encoding != "one-hot":
        raise unpriced(op, "with `encoding` lookup, secret tokens are compared with the vocabulary", "one-hot")
    return [_linear(packing, Layout(sections=(op.vocab,)), Layout(sections=(op.features,)))]


Program: TypeAlias = Callable[[Any, list[Layout], Packing], list[Part]]
# op type -> its parts; an absent type is an error
PROGRAMS: Mapping[type, Program] = {
    ops.TokenEmbedding: _embed,
    ops.PositionEmbedding: _moved,
    ops.LayerNorm: _norm,
    ops.RmsNorm: _norm,
    ops.FrozenNorm: _frozen_norm,
    ops.Linear: lambda op, read, packing: [_linear(packing, read[0], Layout(sections=(op.out_features,)))],
    ops.PackHeads: _moved,
    ops.Rotary: _rotary,
    ops.RepeatHeads: _repeat,
    ops.AttentionScores: _scores,
    ops.Temperature: lambda op, read, packing: _scaled("temperature", op, read, packing),
    ops.ScoreBound: _moved,
    ops.Softmax: _softmax,
    ops.ShapedAttention: lambda op, read, packing: _scaled("shaped", op, read, packing),
    ops.AttentionMix: _mix,
    ops.Gelu: _gelu,
    ops.Relu: _relu,
    ops.LeakyRelu: _relu,
    ops.Square: lambda op, read, packing: [_elementwise("square", (0,), read[0], packing, square)],
    ops.Silu: _activation("silu"),
    ops.Sigmoid: _activation("sigmoid"),
    ops.Tanh: _activation("tanh"),
    ops.Multiply: lambda op, read, packing: [_spread(0, 1, read[0], packing)],
    ops.Scale: lambda op, read, packing: _scaled("scaled", op, read, packing),
    ops.Add: _moved,
    ops.ScaledAdd: lambda op, read, packing: _scaled("scaled_add", op, read, packing),
    ops.TakeRows: _moved,
    ops.VocabProjection: lambda op, read, packing: [_linear(packing, read[0], Layout(sections=(op.vocab,)))],
}
