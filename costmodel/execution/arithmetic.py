"""Emulate the engines' fixed point on doubles: what an op computes there, and whether its numbers stay in range.

The functions of ops run on `Number`s. Every product is checked and rounded as the engine does, and the arguments of
exponentials, inverses and roots must be where the engine's results are right. So a new op needs no check of its own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.polynomial.chebyshev import chebval

from costmodel import ops
from costmodel.errors import OutOfRangeError, UserError
from costmodel.execution.op_functions import FUNCTIONS, GELU_TANH_CUBIC, Array, Weights, evaluate, numpy_library
from costmodel.ops import Node
from costmodel.protocols import crypten
from costmodel.protocols.fixed_point import EXPONENTIAL_SQUARINGS as SPU_SQUARINGS
from costmodel.protocols.fixed_point import VERY_SMALL_UNITS
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting

MOST_WRONG = 0.01  # largest expected number of wrong results per sequence

# coefficients of odd Chebyshev polynomials of x / TANH_END. Source: SecretFlow-SPU 0.9.5, fxp_approx.cc, tanh_chebyshev
TANH = (
    1.2514045938932097, -0.3655987797163166, 0.17253141478140663, -0.08943445792774211, 0.047703017901250824,
    -0.025830290571688078, 0.014338801903468182, -0.008541730970059077, 0.0061230685785789475,
)  # fmt: skip
TANH_END, PIECES_END = 5.0, 8.0  # beyond which tanh is constant, and the piecewise GELU is x or 0
SCALED = (ops.Linear, ops.VocabProjection)  # under CrypTen, (x / WEIGHT_SCALE) @ (WEIGHT_SCALE * matrix)


class Number(np.ndarray[Any, Any]):
    """An array of secret values as doubles; the engine stores `scale` times each value. `arithmetic` computes on it."""

    arithmetic: Any = None
    scale = 1

    def __array_finalize__(self, source: Any) -> None:
        self.arithmetic, self.scale = getattr(source, "arithmetic", None), getattr(source, "scale", 1)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **settings: Any) -> Any:
        return self.arithmetic.apply(ufunc, method, inputs, settings)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self.arithmetic.number(super().__array_function__(function, types, args, kwargs))


class Arithmetic:
    """An engine's emulated fixed point: the `library` argument of the functions of ops (`FUNCTIONS`).

    of_ops: own functions of some types of ops, in place of those in `FUNCTIONS`.
    margin: number by which limits are divided, because the numbers of other text may be larger. num_sequences: number
    of sequences in the data. num_extreme: number of sequences, the last ones, made of rare tokens; their imprecise
    inverse roots are not counted in `wrong`.
    wrong: expected number of wrong results so far, by name of the op, since an engine errs at random.
    """

    numpy = np
    exp: Callable[[Array], Array]
    tanh: Callable[[Array], Array]
    logistic: Callable[[Array], Array]
    divide: Callable[[Array, Array], Array]
    is_exact: Callable[[float], bool]

    def __init__(
        self, setting: EngineSetting, *, margin: float = 1.0, num_sequences: int = 1, num_extreme: int = 0
    ) -> None:
        self.setting, self.margin = setting, margin
        self.num_sequences, self.num_extreme = num_sequences, num_extreme
        self.unit = 2.0**-setting.fraction_bits
        self.most = 2.0 ** (setting.ring_bits - 2 - setting.fraction_bits)
        self.op, self.scale = "", 1
        self.wrong: dict[str, float] = {}
        self.digits = np.random.Generator(np.random.SFC64(0))
        self.functions: dict[Any, Callable[..., Array]] = {
            np.multiply: lambda first, second: self.product(np.multiply(first, second)),
            np.matmul: lambda first, second: self.product(np.matmul(first, second)),
            np.square: lambda source: self.product(np.square(source)),
            np.exp: self.exp,
            np.tanh: self.tanh,
            np.true_divide: self.divide,
            **{ufunc: ufunc for ufunc in (np.add, np.subtract, np.negative, np.maximum, np.less, np.equal)},
        }
        self.of_ops: dict[type, Callable[..., Array]] = {
            ops.TokenEmbedding: self.embed,
            ops.Softmax: self.softmax,
            ops.Gelu: self.gelu,
            ops.Sigmoid: lambda op, library, weights, source: self.logistic(source),
            ops.Silu: lambda op, library, weights, source: source * self.logistic(source),
        }

    def evaluate(self, node: Node, operands: Weights, *inputs: Array) -> Array:
        """Return the output of an op as a `Number`, given its weights as doubles, and inputs as doubles or `Number`s.

        Raise OutOfRangeError if numbers leave the engine's range; UserError for an op that has no function, or whose
        function calls one of numpy's that is not emulated.
        """
        self.op, own = node.name, self.of_ops.get(type(node.op), evaluate)
        with np.errstate(all="ignore"):  # what is not finite is out of range
            weights = {suffix: self.encoded(node, value) for suffix, value in operands.items()}
            sources = inputs if isinstance(node.op, ops.TokenEmbedding) else [self.secret(value) for value in inputs]
            output = own(node.op, self, weights, *sources)
        self.require("numbers", output, -self.most, self.most)
        return output

    def holds(self, node: Node, operands: Weights, *inputs: Array) -> bool:
        """Return whether `evaluate` finds that all numbers of an op stay within the engine's range."""
        try:
            self.evaluate(node, operands, *inputs)
        except OutOfRangeError:
            return False
        return True

    def is_right(self, num_sequences: int) -> bool:
        """Return whether the expected number of wrong results per sequence, times `margin`, is at most MOST_WRONG."""
        return sum(self.wrong.values()) / num_sequences * self.margin <= MOST_WRONG

    def check_wrong(self) -> None:
        """Raise OutOfRangeError unless `is_right(num_sequences)`, and name the op with the most wrong results."""
        if not self.is_right(self.num_sequences):
            total = sum(self.wrong.values()) / self.num_sequences
            worst = max(self.wrong, key=lambda name: self.wrong[name])
            why = f"{total:.2g} results of a sequence would be wrong, most in {worst}: numbers are too large or small"
            raise OutOfRangeError(why, with_fewer_bits=True)

    def number(self, value: Array, scale: int = 1) -> Array:
        """Return values, rounded already, as a `Number` with this scale, which shares the memory of `value`."""
        made = np.asarray(value).view(Number)
        made.arithmetic, made.scale = self, scale
        return made

    def secret(self, value: Array) -> Array:
        """Return values as a `Number`: unchanged if they are one, otherwise rounded."""
        return value if isinstance(value, Number) else self.number(self.rounded(value))

    def rounded(self, value: Array, scale: int = 1) -> Array:
        """Return values rounded to multiples of `unit` / `scale`."""
        return np.rint(value * (scale / self.unit)) * (self.unit / scale)

    def truncated(self, value: Array) -> Array:
        """Return products rounded at random to the unit below or above, with the right mean, as engines truncate."""
        drawn = self.digits.random(np.shape(value), dtype=np.float32)
        return np.floor(value * (1 / self.unit) + drawn) * self.unit

    def encoded(self, node: Node, value: Array) -> Array:
        """Return a weight as the engine encodes it for sharing. Raise OutOfRangeError if it is too large."""
        self.require("weights", value, -self.most, self.most)
        return self.number(self.rounded(value))

    def public(self, value: Any, scale: int, *, is_factor: bool) -> Any:
        """Return a public constant as encoded for an operand of this scale. is_factor: whether it is multiplied."""
        value = np.asarray(value)
        if value.dtype.kind != "f" or (is_factor and value.ndim == 0 and self.is_exact(float(value))):
            return value
        return np.trunc(value * (scale / self.unit)) * (self.unit / scale)

    def apply(self, ufunc: Any, method: str, inputs: Any, settings: Any) -> Array:
        """Return the engine's result of a numpy ufunc (see `__array_ufunc__`). Raise UserError for one not emulated."""
        if method == "reduce" and ufunc in (np.add, np.maximum):
            return self.number(ufunc.reduce(inputs[0].view(np.ndarray), **settings))
        if method != "__call__" or ufunc not in self.functions:
            raise UserError(f"no emulated fixed point computes {ufunc.__name__}; add it to Arithmetic.functions.")
        self.scale = max(getattr(value, "scale", 1) for value in inputs)
        arrays = [
            value.view(np.ndarray)
            if isinstance(value, Number)
            else self.public(value, self.scale, is_factor=ufunc is np.multiply)
            for value in inputs
        ]
        result = self.functions[ufunc](*arrays)
        return result if isinstance(result, Number) else self.number(result, self.scale if ufunc is np.add else 1)

    def require(self, what: str, value: Array, least: float, most: float, *, with_fewer_bits: bool = False) -> None:
        """Raise OutOfRangeError unless all numbers are from `least` to `most`.

        Both limits are first divided by `margin`, except for a `least` that is not negative. what: name of the numbers.
        """
        low, high = (float(limit) for limit in (np.min(value.view(np.ndarray)), np.max(value.view(np.ndarray))))
        least, most = least / self.margin if least < 0 else least, most / self.margin
        if not (least <= low and high <= most):
            raise OutOfRangeError(
                f"in {self.op} {what} are from {low:.4g} to {high:.4g}, not within {least:.4g} and {most:.4g}",
                with_fewer_bits=with_fewer_bits,
            )

    def product(self, value: Array) -> Array:
        """Return truncated products; raise OutOfRangeError if one overflows (SPU), or add to `wrong` (CrypTen)."""
        raise NotImplementedError

    def may_fail(self, expected: float) -> None:
        """Add `expected` to the entry of `wrong` for the op that runs."""
        self.wrong[self.op] = self.wrong.get(self.op, 0.0) + expected

    def embed(self, op: ops.TokenEmbedding, library: Any, weights: Weights, tokens: Array) -> Array:
        """Return the rows of the embedding table for tokens (one-hot or ids), as a product with one-hot tokens does."""
        return weights["weight"][tokens.argmax(axis=-1) if tokens.ndim == 2 else tokens.astype(np.int64)]

    def softmax(self, op: ops.Softmax, library: Any, weights: Weights, scores: Array) -> Array:
        """Return attention weights; masked scores, and the eighth power of a row's only score, are not checked."""
        seen = np.tri(op.queries, op.keys, op.keys - op.queries if op.causal else op.keys, dtype=bool)
        scores = np.where(seen, scores, scores[..., :1])
        if op.form == "power8":
            scores = np.where(seen.sum(axis=-1, keepdims=True) == 1, 1.0, scores)
        return FUNCTIONS[ops.Softmax](op, self, weights, scores)

    def gelu(self, op: ops.Gelu, library: Any, weights: Weights, source: Array) -> Array:
        """Return GELU; in the piecewise form, powers of large inputs are not checked, because they cancel."""
        if op.form != "piecewise":
            return FUNCTIONS[ops.Gelu](op, self, weights, source)
        plain = source.view(np.ndarray)
        pieces = FUNCTIONS[ops.Gelu](op, numpy_library(), weights, np.clip(plain, -PIECES_END, PIECES_END))
        return self.number(self.rounded(np.where(plain > PIECES_END, plain, pieces)))


class SpuArithmetic(Arithmetic):
    """The fixed point of SecretFlow-SPU 0.9.5, which is the same under each of its protocols.

    Source of the limits: tests/costmodel/execution/test_arithmetic.py measures them. With f fraction bits, a product is
    wrong from 2^(ring_bits - 2 - 2f) on, and the inverse or inverse root of a number from 2^(f - 1) on is 0.
    """

    LOWEST_EXPONENT = -480.0  # (1 + x / 256)^256 is 0 there, and 0.37 at -511
    LOWEST_LOGIT = -240.0  # at -256 the engine's exp(-x) = 2^256 is 0 in the ring, so the logistic function is 1
    FEWEST_UNITS = 5.0  # an inverse root of fewer units is off by a tenth or more if rounding adds a unit

    def __init__(self, setting: EngineSetting, **of: Any) -> None:
        super().__init__(setting, **of)
        self.most_product, self.most_divisor = self.most * self.unit, 0.5 / self.unit
        self.highest_exponent = float(np.log(self.most_product)) - 0.5
        # times -x: probability that an overflowed exponential, which is random, is nearer to 0 than 16 x, so that x
        # times its inverse is off by more than 1 / 16
        self.overflowed = 8 / self.most_product

    def encoded(self, node: Node, value: Array) -> Array:
        """Return a weight as the engine encodes it, which cuts off the digits after the last bit."""
        cut = np.asarray(value / self.unit)
        np.trunc(cut, out=cut)
        cut *= self.unit
        self.require("weights", cut, -self.most, self.most)
        return self.number(cut)

    def is_exact(self, factor: float) -> bool:
        """Return whether a factor is so small that the engine first enlarges it by a power of two."""
        return abs(factor) < VERY_SMALL_UNITS * self.unit

    def product(self, value: Array) -> Array:
        self.require("products", value, -self.most_product, self.most_product)
        return self.truncated(value)

    def exp(self, source: Array) -> Array:
        self.require("arguments of exponentials", source, self.LOWEST_EXPONENT, self.highest_exponent)
        result = self.rounded(1 + source / 2**SPU_SQUARINGS)
        for _ in range(SPU_SQUARINGS):
            result = self.rounded(np.square(result))
        return result

    def divide(self, numerator: Array, source: Array) -> Array:
        self.require("divisors", source, -self.most_divisor, self.most_divisor)
        return self.inverse(source)

    def inverse(self, source: Array) -> Array:
        """Return inverses; that of 0 is 0, as under the engine."""
        return self.rounded(np.divide(1.0, source, out=np.zeros_like(source), where=source != 0))

    def rsqrt(self, source: Array) -> Array:
        self.require("arguments of inverse roots", source, 0.0, self.most_divisor)
        counts = np.arange(len(source)) % self.num_sequences < self.num_sequences - self.num_extreme
        self.may_fail(float(np.where(source < self.FEWEST_UNITS * self.unit, self.doubt, 0.0)[counts].sum()))
        return self.number(self.inverse(np.sqrt(source.view(np.ndarray))))

    def mean_square(self, source: Array) -> Array:
        """Return mean squares; set `doubt` to the probability that of two random roundings the first is smaller."""
        share = np.square(source.view(np.ndarray)).mean(axis=-1, keepdims=True) / self.unit % 1
        self.doubt = share * (1 - share)
        return np.square(source).sum(axis=-1, keepdims=True) * (1 / source.shape[-1])

    def erf(self, source: Array) -> Array:
        return self.number(self.rounded(numpy_library().erf(source.view(np.ndarray))))

    def tanh(self, source: Array) -> Array:
        odd = [coefficient for term in TANH for coefficient in (0.0, term)]
        return self.rounded(
            chebval(  # type: ignore[no-untyped-call]
                np.clip(source, -TANH_END, TANH_END) / TANH_END, odd
            )
        )

    def logistic(self, source: Array) -> Array:
        """Return 1 / (1 + exp(-x)). An exponential that overflows is random, and its inverse is nearly always 0."""
        source = source.view(np.ndarray)
        self.require("arguments of logistic functions", source, self.LOWEST_LOGIT, -self.LOWEST_EXPONENT)
        overflowed = source < -self.highest_exponent
        self.may_fail(-float(source[overflowed].sum()) * self.overflowed)
        powers = self.rounded(np.exp(-np.maximum(source, -self.highest_exponent)))
        return self.number(np.where(overflowed, 0.0, self.inverse(powers + 1)))


class CryptenArithmetic(Arithmetic):
    """The fixed point of CrypTen 0.4.1 with the functions of `engine.crypten_arrays`.

    Each party truncates its share of a product by itself, so that with f fraction bits a result x is wrong by
    2^(64 - 2f) with probability |x| / 2^(64 - 2f), which ruins the answer. Sums of squares are divided without this
    error, but must be below 2^(63 - 2f).
    Source: Mohassel and Zhang 2017, SecureML, theorem 1, https://eprint.iacr.org/2017/396.
    """

    EXPONENTS = (-240.0, 15.0)  # of (1 + u + u^2 / 2)^128 with u = x / 128, which is 1 again at -256
    LOGITS = 240.0  # largest magnitude of the argument of a logistic function
    INVERTED = (2.0**-12, 2.0**17)  # within the ranges of `crypten_arrays.reciprocal` and `inverse_root`
    MOST_OF_ERF = 1.5  # there, the Taylor series of erf with 8 terms is off by 0.003; at 2, by 0.24

    def evaluate(self, node: Node, operands: Weights, *inputs: Array) -> Array:
        # each token of an answer takes just one row of the logits, so only one row per sequence counts
        rows = node.op.rows if isinstance(node.op, ops.VocabProjection) else self.num_sequences
        self.share = self.num_sequences / rows * 2.0**-self.setting.ring_bits / self.unit**2
        if isinstance(node.op, SCALED):  # whose input is divided by WEIGHT_SCALE
            self.op, divided = node.name, self.secret(inputs[0]).view(np.ndarray) / crypten.WEIGHT_SCALE
            self.truncates(_sum(divided))
            inputs = (self.number(self.truncated(divided) * crypten.WEIGHT_SCALE),)
        return super().evaluate(node, operands, *inputs)

    def encoded(self, node: Node, value: Array) -> Array:
        """Return a weight as the engine encodes it; matrices of `SCALED` ops are times WEIGHT_SCALE, and unchecked."""
        if isinstance(node.op, SCALED) and value.ndim == 2:
            return self.number(self.rounded(value, crypten.WEIGHT_SCALE))
        return super().encoded(node, value)

    def is_exact(self, factor: float) -> bool:
        """Return whether a factor is 1 / an integer, by which the engine divides instead."""
        return bool(factor) and abs((divisor := 1 / factor) - round(divisor)) < 1e-9

    def truncates(self, total: float) -> None:
        """Add to `wrong` the expected number of wrong truncations of numbers whose magnitudes sum to `total`."""
        self.may_fail(total * self.share)

    def product(self, value: Array) -> Array:
        self.truncates(_sum(value) * self.scale)
        return self.truncated(value)

    def exp(self, source: Array) -> Array:
        self.require("arguments of exponentials", source, *self.EXPONENTS)
        self.truncates(_squared_exponentials(source))
        return self.rounded(np.exp(source))

    def divide(self, numerator: Array, source: Array) -> Array:
        self.require("sums of rows", source, *self.INVERTED)
        inverse = self.rounded(1 / source, crypten.INVERSE_SCALE)
        self.truncates(crypten.INVERSE_SCALE * (source.size + _sum(inverse)))
        return self.number(inverse, crypten.INVERSE_SCALE)

    def rsqrt(self, source: Array) -> Array:
        source = source.view(np.ndarray)
        self.require("mean squares", source, *self.INVERTED)
        return self.number(self.rounded(1 / np.sqrt(source), crypten.ROOT_SCALE), crypten.ROOT_SCALE)

    def mean_square(self, source: Array) -> Array:
        sums = np.square(source.view(np.ndarray)).sum(axis=-1, keepdims=True)
        most = 2.0 ** (self.setting.ring_bits - 1) * self.unit**2
        self.require("sums of squares", sums, 0.0, most, with_fewer_bits=True)
        return self.number(sums / source.shape[-1], crypten.MEAN_SCALE)

    def erf(self, source: Array) -> Array:
        source = source.view(np.ndarray)
        self.require("arguments of the error function", source, -self.MOST_OF_ERF, self.MOST_OF_ERF)
        return self.number(self.rounded(numpy_library().erf(source)))

    def tanh(self, source: Array) -> Array:
        return self.logistic(source * 2) * 2 - 1

    def logistic(self, source: Array) -> Array:
        source = np.asarray(source).view(np.ndarray)
        self.require("arguments of logistic functions", source, -self.LOGITS, self.LOGITS)
        self.truncates(_squared_exponentials(-np.abs(source)) + 2 * crypten.LOGISTIC_ITERATIONS * source.size)
        return self.number(self.rounded(1 / (np.exp(-source) + 1)))

    def gelu(self, op: ops.Gelu, library: Any, weights: Weights, source: Array) -> Array:
        """Return GELU. The range of the tanh form is not checked, since this form is right for any input."""
        plain = source.view(np.ndarray)
        if op.form != "tanh":
            self.truncates(sum(_sum(plain**power) for power in (2, 3, 4, 6)))
            return super().gelu(op, library, weights, source)
        inner = (2 / np.pi) ** 0.5 * (plain + GELU_TANH_CUBIC * plain**3)
        steps = _squared_exponentials(-2 * np.abs(inner)) + 2 * crypten.LOGISTIC_ITERATIONS * plain.size
        self.truncates(steps + 2 * _sum(np.square(plain)) + 2 * _sum(inner))
        return self.number(self.product(FUNCTIONS[ops.Gelu](op, numpy_library(), weights, plain)))


def _sum(value: Array) -> float:
    return float(np.abs(value.view(np.ndarray)).sum())


def _squared_exponentials(exponents: Array) -> float:
    """Return the sum of the numbers that `crypten_arrays.exponential` squares, and of the last results."""
    power = np.exp(exponents / 2**crypten.EXPONENTIAL_SQUARINGS)
    total = _sum(power)
    for _ in range(crypten.EXPONENTIAL_SQUARINGS):
        power = np.square(power)
        total += _sum(power)
    return total


ARITHMETICS: dict[str, type[Arithmetic]] = {"spu": SpuArithmetic, "crypten": CryptenArithmetic}  # by engine


def arithmetic_of(protocol: str, setting: EngineSetting, **of: Any) -> Arithmetic:
    """Return the emulated fixed point of the engine of a protocol; `of` are further arguments of `Arithmetic`."""
    return ARITHMETICS[ENGINE_PROTOCOLS[protocol].engine](setting, **of)
