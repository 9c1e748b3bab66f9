"""Emulate the engines' fixed point on doubles: what an op computes there, and whether its numbers stay in range.

The functions of ops run on `Number`s. Products are rounded as under the engine, and checked. The arguments of
exponentials, inverses and roots must be where the engine's results are right. So a new op needs no check of its own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from costmodel import ops
from costmodel.errors import OutOfRangeError, UserError
from costmodel.execution.op_functions import (
    FUNCTIONS,
    Array,
    Weights,
    evaluate,
    numpy_library,
)
from costmodel.ops import Node
from costmodel.protocols.primitives import EngineSetting

MOST_WRONG = 0.01  # largest expected number of wrong results per sequence

PIECES_END = 8.0  # beyond which the piecewise GELU is x or 0


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

    of_ops: functions of some types of ops, which replace those in `FUNCTIONS`. margin: number by which limits are
    divided, because the numbers of other text may be larger. num_sequences: number of sequences in the data.
    num_extreme: how many of them, the last ones, are of rare tokens, whose imprecise inverse roots are not in `wrong`.
    wrong: expected number of wrong results so far, by name of the op; an engine errs at random.
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
        function calls a ufunc of numpy that is not emulated.
        """
        self.op, own = node.name, self.of_ops.get(type(node.op), evaluate)
        with np.errstate(all="ignore"):  # what is not finite is out of range
            weights = {suffix: self.encoded(node, value) for suffix, value in operands.items()}
            sources = inputs if isinstance(node.op, ops.TokenEmbedding) else [self.secret(value) for value in inputs]
            output = own(node.op, self, weights, *sources)
        self.require("numbers", output, -self.most, self.most)
        return output

    def why_outside(self, node: Node, operands: Weights, *inputs: Array) -> str | None:
        """Return which numbers of an op leave the engine's range, as `evaluate` finds; None if all stay within it."""
        try:
            self.evaluate(node, operands, *inputs)
        except OutOfRangeError as error:
            return str(error)
        return None

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
        """Return values that are rounded already as a `Number` with this scale; it shares the memory of `value`."""
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
        """Return products rounded at random to a multiple of `unit` near them, with the right mean, as engines do."""
        drawn = self.digits.random(np.shape(value), dtype=np.float32)
        return np.floor(value * (1 / self.unit) + drawn) * self.unit

    def encoded(self, node: Node, value: Array) -> Array:
        """Return a weight as the engine encodes it for sharing. Raise OutOfRangeError if it is too large."""
        self.require("weights", value, -self.most, self.most)
        return self.number(self.rounded(value))

    def public(self, value: Any, scale: int, *, is_factor: bool) -> Any:
        """Return a public constant as encoded beside numbers of this scale. is_factor: whether it multiplies them."""
        value = np.asarray(value)
        if value.dtype.kind != "f" or (is_factor and value.ndim == 0 and self.is_exact(float(value))):
            return value
        return np.trunc(value * (scale / self.unit)) * (self.unit / scale)

    def apply(self, ufunc: Any, method: str, inputs: Any, settings: Any) -> Array:
        """Return the engine's result of a ufunc (see `__array_ufunc__`). Raise UserError if it is not emulated."""
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
        """Raise OutOfRangeError, which names the values `what`, unless they are from `least` to `most`.

        `most`, and a negative `least`, are first divided by `margin`. with_fewer_bits: see `OutOfRangeError`.
        """
        low, high = (float(limit) for limit in (np.min(value.view(np.ndarray)), np.max(value.view(np.ndarray))))
        least, most = least / self.margin if least < 0 else least, most / self.margin
        if not (least <= low and high <= most):
            raise OutOfRangeError(
                f"in {self.op} {what} are from {low:.4g} to {high:.4g}, not within {least:.4g} and {most:.4g}",
                with_fewer_bits=with_fewer_bits,
            )

    def product(self, value: Array) -> Array:
        """Return truncated products. Raise OutOfRangeError if one overflows (SPU), or add to `wrong` (CrypTen)."""
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
