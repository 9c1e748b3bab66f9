"""How values are packed in ciphertexts under `ckks`, and polynomials that approximate functions, as programs.

A ciphertext holds the columns of a matrix (features) one after the other, each in `tokens` slots, one per token. A
matrix with more columns than fit takes several ciphertexts; one with fewer is repeated until the slots are full. So a
rotation by `tokens` slots moves the features of all tokens. A linear multiplies generalised diagonals by baby and giant
steps; each kind of step repeats one rotation, so two rotation keys suffice. Scores are stored by the distance between
query and key: column `d` of a head has its scores for the keys `d` tokens back; scores for later keys wrap around.

A program runs on a machine (argument `m`), which multiplies and adds ciphertexts. `Tally` only counts primitives, by
level; `costmodel.engine.ckks_library` runs a library; tests run numpy, with which the errors in `FORMS` were measured.

Sources: Pang et al. 2024, BOLT, https://eprint.iacr.org/2023/1893, section 4 (columns); Halevi and Shoup 2018,
https://eprint.iacr.org/2018/244 (diagonals); Juvekar et al. 2018, Gazelle, arXiv 1801.05507 (fewer outputs than
inputs); Kim et al. 2022, ARK, arXiv 2205.00922 (chains of one rotation); Chen et al. 2018,
https://eprint.iacr.org/2018/1043 (Chebyshev series by baby and giant steps); Cheon et al. 2019,
https://eprint.iacr.org/2019/417 (inverse by Goldschmidt's products) and https://eprint.iacr.org/2019/1234 (sign by f3
and g3). The inverse root is a series with Newton steps.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from costmodel import ops
from costmodel.errors import UserError
from costmodel.ops import Node

Primitive = Literal["rotation", "plain_product", "product", "relinearisation", "rescale"]
PRIMITIVES: tuple[Primitive, ...] = get_args(Primitive)
# number of runs by primitive and by the number of levels used up since the step began
Work: TypeAlias = Counter[tuple[Primitive, int]]
Levels: TypeAlias = list[int]  # number of levels that each ciphertext of a value has used up


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A polynomial that approximates a function: its degree, its range, and its greatest error on that range.

    The error is relative for `inverse` and `inverse root`, and absolute for others.
    """

    degree: int
    low: float
    high: float
    error: float


INVERSE_STEPS = 10  # products with 1 + a^(2^k), where a = 1 - x, so 2^11 terms of a geometric series
ROOT_DEGREE, NEWTON_STEPS = 31, 2
SIGN_G, SIGN_F = 2, 2  # how often each of g3 and f3 is composed
G3 = tuple(number / 2**10 for number in (4589, -16577, 25614, -12860))  # coefficients of x, x^3, x^5 and x^7
F3 = tuple(number / 2**4 for number in (35, -35, 21, -5))
FORMS = {
    "gelu": Form(degree=63, low=-12.0, high=12.0, error=2e-7),
    "silu": Form(degree=63, low=-16.0, high=16.0, error=2e-5),
    "sigmoid": Form(degree=63, low=-16.0, high=16.0, error=3e-6),
    "tanh": Form(degree=63, low=-8.0, high=8.0, error=5e-6),
    "exponential": Form(degree=31, low=-32.0, high=0.0, error=1e-12),
    "inverse": Form(degree=2 ** (INVERSE_STEPS + 1) - 1, low=2**-7, high=1.0, error=2e-7),
    "inverse root": Form(degree=ROOT_DEGREE * 9 + 4, low=2**-8, high=1.0, error=1e-7),
    "sign": Form(degree=7 ** (SIGN_G + SIGN_F), low=2**-5, high=1.0, error=2e-4),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How a matrix is packed in ciphertexts of `slots` slots, each column in `tokens` slots; both are powers of two."""

    tokens: int
    slots: int

    @property
    def columns(self) -> int:
        return self.slots // self.tokens

    def period(self, width: int) -> int:
        """Return the number of columns after which a matrix of `width` columns is repeated in a ciphertext."""
        return min(power_of_two(width), self.columns)

    def num(self, width: int) -> int:
        """Return the number of ciphertexts of a matrix of `width` columns."""
        return -(-width // self.columns)

    def linear(self, in_width: int, out_width: int) -> tuple[int, int, int]:
        """Return a linear's numbers of baby steps, of giant steps, and of the final rotations that add partial sums."""
        read, written, a, b = *map(self.period, (in_width, out_width)), *map(self.num, (in_width, out_width))
        diagonals = min(read, written)
        powers = [1 << k for k in range(diagonals.bit_length())]
        baby = min(powers, key=lambda steps: a * (steps - 1) + b * (diagonals // steps - 1))
        return baby, diagonals // baby, log2(max(1, read // written))


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """The output of a step, or an input of the graph, and how it is packed in ciphertexts.

    width: columns of a part. parts: number of parts, such as queries, keys and values, each in separate ciphertexts.
    sets: number of groups of ciphertexts; more than 1 only for scores with more keys than `window`.
    window: columns of one head of scores; 0 for other values.
    """

    name: str
    width: int
    parts: int = 1
    sets: int = 1
    window: int = 0


def power_of_two(count: int) -> int:
    """Return the least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def log2(power: int) -> int:
    return power.bit_length() - 1


def packing_of(nodes: Sequence[Node], slots: int) -> Packing:
    """Return a graph's packing, in which `tokens` is the largest number of output rows, rounded up to a power of two.

    Only token embeddings, linears, vocabulary projections, LayerNorms, RMSNorms and additions count; `tokens` is 1 if
    there are none. A UserError is raised if `tokens` exceeds `slots`.
    """
    of_tokens = ops.TokenEmbedding, ops.Linear, ops.VocabProjection, ops.LayerNorm, ops.RmsNorm, ops.Add
    rows = max((node.op.output_shape[0] for node in nodes if isinstance(node.op, of_tokens)), default=1)
    if (tokens := power_of_two(rows)) > slots:
        raise UserError(
            f"protocol ckks packs a column of tokens in the {slots} slots of a ciphertext, but got {rows} tokens at "
            "once, of which not even a vocabulary projection fits; use a shorter prompt or a smaller batch."
        )
    return Packing(tokens=tokens, slots=slots)


class Machine:
    """Operations made of primitives, which subclasses such as `Tally` define; a value is a list of ciphertexts."""

    def product(self: Any, a: Any, b: Any) -> Any:
        return self.inner([(a, b)])

    def inner(self: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
        """Return the sum, over pairs of values, of the product of both."""
        terms = [self.multiplied(*self.aligned(pair)) for pair in pairs]
        return self.rescaled(self.relinearised(self.summed(*terms)))

    def combined(self: Any, values: Sequence[Any], factors: Sequence[Any], number: Any = 0.0) -> Any:
        """Return the sum of values, each times its factor (a number or plaintext), plus `number`."""
        terms = [self.plain(value, by) for value, by in zip(self.aligned(values), factors, strict=True)]
        return self.shifted(self.rescaled(self.summed(*terms)), number)

    def folded(self: Any, value: Any, slots: int, times: int) -> Any:
        """Add to a value its rotation by `slots`, to this sum its rotation by 2 x `slots`, and so on, `times` times."""
        for fold in range(times):
            value = self.summed(value, self.rotation(value, slots << fold))
        return value


@dataclass
class Tally(Machine):
    """A machine that only counts primitives; a ciphertext is the number of levels that it has used up."""

    work: Work = field(default_factory=Counter)

    def _counted(self, primitive: Primitive, value: Levels, times: int = 1) -> Levels:
        self.work[primitive, value[0]] += times * len(value)
        return value

    def aligned(self, values: Sequence[Levels]) -> list[Levels]:
        used = max(map(max, values))
        return [[used] * len(value) for value in values]

    def rotation(self, value: Levels, left: int) -> Levels:
        return self._counted("rotation", value)

    def plain(self, value: Levels, slots: Any, into: int = 0) -> Levels:
        """Count products with plaintexts. into: number of ciphertexts to which they are summed; 0 for no sums."""
        return self._counted("plain_product", value, into or 1)[:1] * (into or len(value))

    def multiplied(self, a: Levels, b: Levels) -> Levels:
        return self._counted("product", a)

    def relinearised(self, value: Levels) -> Levels:
        return self._counted("relinearisation", value)

    def rescaled(self, value: Levels) -> Levels:
        return [used + 1 for used in self._counted("rescale", value)]

    def summed(self, *values: Levels) -> Levels:
        return self.aligned(values)[0]

    def shifted(self, value: Levels, number: Any) -> Levels:
        return value

    def negated(self, value: Levels) -> Levels:
        return value


def eighth_power(m: Any, x: Any) -> Any:
    for _ in range(3):
        x = m.product(x, x)
    return x


def series(m: Any, x: Any, coefficients: Sequence[float], low: float, high: float) -> Any:
    """Return the value at x of a Chebyshev series on [low, high]; the number of coefficients must be a power of two."""
    half, length = (high - low) / 2, len(coefficients)
    baby = 1 << ((length - 1).bit_length() + 1) // 2
    powers = {1: m.combined([x], [1 / half], -(low + half) / half)}
    for degree in (*range(2, baby), *(baby << k for k in range((length - 1).bit_length()) if baby << k < length)):
        a, b = (degree + 1) // 2, degree // 2
        product = m.product(powers[a], powers[b])
        twice = m.summed(product, product)  # T_(a+b) = 2 T_a T_b - T_(a-b)
        powers[degree] = m.shifted(twice, -1.0) if a == b else m.summed(twice, m.negated(powers[1]))
    return _split(m, powers, tuple(coefficients), baby)


def _split(m: Any, powers: dict[int, Any], coefficients: tuple[float, ...], baby: int) -> Any:
    if (length := len(coefficients)) <= baby:
        return m.combined([powers[degree] for degree in range(1, length)], coefficients[1:], coefficients[0])
    giant = length // 2
    low, high = list(coefficients[:giant]), coefficients[giant:]
    for degree in range(1, giant):
        low[giant - degree] -= high[degree]
    quotient = _split(m, powers, (high[0], *(2 * number for number in high[1:])), baby)
    return m.summed(m.product(quotient, powers[giant]), _split(m, powers, tuple(low), baby))


def inverse(m: Any, x: Any, gain: Any = 1.0) -> Any:
    """Return gain / x as gain times the product of 1 + (1 - x)^(2^k), k from 0 to INVERSE_STEPS; x as in `FORMS`."""
    rest = m.shifted(m.negated(x), 1.0)
    result = m.combined([rest], [gain], gain)
    for _ in range(INVERSE_STEPS):
        rest = m.product(rest, rest)
        result = m.product(result, m.shifted(rest, 1.0))
    return result


def inverse_root(m: Any, x: Any, coefficients: Sequence[float]) -> Any:
    """Return 1 / sqrt(x): the value y of a series, refined by Newton steps, each of which makes it y (3 - x y^2) / 2.

    x must be in the range of `FORMS["inverse root"]`. coefficients: the ROOT_DEGREE + 1 of the Chebyshev series of
    1 / sqrt(x) on that range.
    """
    y = series(m, x, coefficients, FORMS["inverse root"].low, FORMS["inverse root"].high)
    half = m.combined([x], [0.5])
    for _ in range(NEWTON_STEPS):
        cubic = m.product(m.product(y, y), m.product(half, y))
        y = m.summed(m.combined([y], [1.5]), m.negated(cubic))
    return y


def sign_part(m: Any, x: Any, odd: Sequence[float]) -> Any:
    """Return x (c1 + c3 x^2 + (c5 + c7 x^2) x^4) with coefficients c1, c3, c5 and c7 in `odd`."""
    square = m.product(x, x)
    low, high = (m.combined([square], [odd[at + 1]], odd[at]) for at in (0, 2))
    return m.product(x, m.summed(low, m.product(high, m.product(square, square))))


def counted(program: Any, *given: Any, sizes: Sequence[int] = (1,)) -> tuple[Work, Levels]:
    """Return the work of `program(machine, *inputs, *given)`, and the levels used up by each ciphertext of its result.

    sizes: number of ciphertexts of each input; inputs have not used up any level.
    """
    tally = Tally()
    result = program(tally, *([0] * size for size in sizes), *given)
    return +tally.work, result
