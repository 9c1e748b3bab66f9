"""Nonlinear functions under `ckks`: polynomials with their degree, range and error, as programs over a machine.

A machine multiplies and adds. `Tally` counts what a program asks of it, level by level; `costmodel.engine.ckks_library`
asks a library; tests ask numpy, which is how the errors below were found.

Sources: Chebyshev series by baby and giant steps, Chen et al. 2018, https://eprint.iacr.org/2018/1043; inverse by
Goldschmidt's products, Cheon et al. 2019, https://eprint.iacr.org/2019/417; sign by f3 and g3, Cheon et al. 2019,
https://eprint.iacr.org/2019/1234; inverse root by a series and Newton steps.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

Primitive = Literal["rotation", "plain_product", "product", "relinearisation", "rescale"]
PRIMITIVES: tuple[Primitive, ...] = get_args(Primitive)
# how often each primitive runs, by it and the levels that are already used up since the step began
Work: TypeAlias = Counter[tuple[Primitive, int]]
Value: TypeAlias = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A polynomial in place of a function: its degree, its range, and its greatest error on that range.

    The error is relative for inverse and inverse root, and absolute for others.
    """

    degree: int
    low: float
    high: float
    error: float


INVERSE_STEPS = 10  # products with 1 + a^(2^k), so 2^11 terms of a geometric series
ROOT_DEGREE, NEWTON_STEPS = 31, 2
SIGN_G, SIGN_F = 2, 2  # how often each of g3 and f3 is composed
G3 = tuple(number / 2**10 for number in (4589, -16577, 25614, -12860))  # of x, x^3, x^5 and x^7
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


class Machine:
    """Operations that programs compose of the primitives, which `Tally` has; a value is a list of ciphertexts."""

    def product(self: Any, a: Any, b: Any) -> Any:
        return self.inner([(a, b)])

    def inner(self: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
        """Return the sum of products."""
        terms = [self.multiplied(*self.aligned(pair)) for pair in pairs]
        return self.rescaled(self.relinearised(self.summed(*terms)))

    def combined(self: Any, values: Sequence[Any], factors: Sequence[Any], number: Any = 0.0) -> Any:
        """Return values times numbers, added up, plus a number."""
        terms = [self.plain(value, by) for value, by in zip(self.aligned(values), factors, strict=True)]
        return self.shifted(self.rescaled(self.summed(*terms)), number)

    def folded(self: Any, value: Any, slots: int, times: int) -> Any:
        """Add a value to itself rotated by `slots`, the sum to itself rotated by 2 `slots`, and so on for `times`."""
        for fold in range(times):
            value = self.summed(value, self.rotation(value, slots << fold))
        return value


@dataclass
class Tally(Machine):
    """Counts primitives instead of running them; a ciphertext is the number of levels that it has used up.

    Plaintexts are not read.
    """

    work: Work = field(default_factory=Counter)

    def _counted(self, primitive: Primitive, value: Value, times: int = 1) -> Value:
        self.work[primitive, value[0]] += times * len(value)
        return value

    def aligned(self, values: Sequence[Value]) -> list[Value]:
        used = max(map(max, values))
        return [[used] * len(value) for value in values]

    def rotation(self, value: Value, left: int) -> Value:
        return self._counted("rotation", value)

    def plain(self, value: Value, slots: Any, into: int = 0) -> Value:
        """Count products with plaintexts. into: number of ciphertexts that they are added up to; 0 for no sums."""
        return self._counted("plain_product", value, into or 1)[:1] * (into or len(value))

    def multiplied(self, a: Value, b: Value) -> Value:
        return self._counted("product", a)

    def relinearised(self, value: Value) -> Value:
        return self._counted("relinearisation", value)

    def rescaled(self, value: Value) -> Value:
        return [used + 1 for used in self._counted("rescale", value)]

    def summed(self, *values: Value) -> Value:
        return self.aligned(values)[0]

    def shifted(self, value: Value, number: Any) -> Value:
        return value

    def negated(self, value: Value) -> Value:
        return value


def eighth_power(m: Any, x: Any) -> Any:
    for _ in range(3):
        x = m.product(x, x)
    return x


def series(m: Any, x: Any, coefficients: Sequence[float], low: float, high: float) -> Any:
    """Return a Chebyshev series of x on a range, whose number of coefficients is a power of two."""
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
    """Return gain / x for x up to 1; with a = 1 - x it is the product of all 1 + a^(2^k)."""
    rest = m.shifted(m.negated(x), 1.0)
    result = m.combined([rest], [gain], gain)
    for _ in range(INVERSE_STEPS):
        rest = m.product(rest, rest)
        result = m.product(result, m.shifted(rest, 1.0))
    return result


def inverse_root(m: Any, x: Any, coefficients: Sequence[float]) -> Any:
    """Return 1 / sqrt(x): a series, refined by Newton steps, in which y becomes y (3 - x y^2) / 2."""
    y = series(m, x, coefficients, FORMS["inverse root"].low, FORMS["inverse root"].high)
    half = m.combined([x], [0.5])
    for _ in range(NEWTON_STEPS):
        cubic = m.product(m.product(y, y), m.product(half, y))
        y = m.summed(m.combined([y], [1.5]), m.negated(cubic))
    return y


def sign_part(m: Any, x: Any, odd: Sequence[float]) -> Any:
    """Return an odd polynomial of degree 7: x (c1 + c3 x^2 + (c5 + c7 x^2) x^4)."""
    square = m.product(x, x)
    low, high = (m.combined([square], [odd[at + 1]], odd[at]) for at in (0, 2))
    return m.product(x, m.summed(low, m.product(high, m.product(square, square))))


def counted(program: Any, *given: Any, sizes: Sequence[int] = (1,)) -> tuple[Work, Value]:
    """Return the work of a program, and the levels used up by each result; `sizes` are the inputs' ciphertexts."""
    tally = Tally()
    result = program(tally, *([0] * size for size in sizes), *given)
    return +tally.work, result
