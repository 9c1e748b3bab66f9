"""Give CrypTen's tensors the interface of numpy's arrays, so that the functions of ops in plaintext run on them.

Some ops have another function on secrets (`SECRET_FUNCTIONS`). Some of CrypTen's functions are replaced, because they
are less accurate on the values of models or cost more. Ranges and errors of the replacements are for 16 fraction bits.
A function may be wrong by any amount for arguments outside its range; `costmodel.execution.engine_arithmetic` can check
a model before it runs. Only processes of parties import CrypTen. An argument `x` is a tensor of CrypTen.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from costmodel import ops
from costmodel.engine.crypten_cuda import UnwrappedLong
from costmodel.engine.plan import CLIENT
from costmodel.execution.engine_arithmetic import SCALED
from costmodel.execution.op_functions import FUNCTIONS, GELU_FORMS, GELU_TANH_CUBIC, Array, Library
from costmodel.protocols.crypten import (
    EXPONENTIAL_SQUARINGS,
    INVERSE_SCALE,
    LOGISTIC_ITERATIONS,
    MEAN_SCALE,
    RECIPROCAL_ITERATIONS,
    RECIPROCAL_POWERS,
    ROOT_ITERATIONS,
    ROOT_POWERS,
    ROOT_SCALE,
    WEIGHT_SCALE,
)

RECIPROCAL_SLOPE = 128 / 41  # of the best line for 1 / y from 1/4 to 1, which is off by 9 / 41 of 1 / y at most
ROOT_SLOPE = 2 / (3 / 4 + (7 / 6) * (7 / 12) ** 0.5)  # likewise for 1 / sqrt(y), by 9 % of it
MOST_SIGNED = 2**63 - 1
GELU_BOUND = 14.0  # at x = 14, twice the argument of tanh is 218; beyond, the exponential is out of range and set to 0


@functools.cache
def imported_crypten() -> Any:
    """Return the module of CrypTen with some of its parts replaced.

    Its ONNX converter, which is not needed, imports names that torch no longer has. Its configuration becomes plain
    data, since looking it up took half of a party's time. Integers on a GPU are plain tensors. Shares of 0 are 0,
    because both parties would know the seeds of random shares.
    """
    found = find_spec("crypten")
    assert found is not None
    assert found.origin is not None
    configuration = yaml.safe_load((Path(found.origin).parents[1] / "configs" / "default.yaml").read_text())
    parts: dict[str, dict[str, Any]] = {
        "nn.onnx_converter": dict.fromkeys(("from_onnx", "from_pytorch", "from_tensorflow", "TF_AND_TF2ONNX")),
        "config": {"cfg": _plain(configuration)},
        "cuda": {"CUDALongTensor": UnwrappedLong},
    }
    for name, content in parts.items():
        vars(part := ModuleType(f"crypten.{name}")).update(content)
        sys.modules.setdefault(part.__name__, part)
    import crypten
    from crypten.mpc.primitives import ArithmeticSharedTensor, BinarySharedTensor

    for kind in (ArithmeticSharedTensor, BinarySharedTensor):
        kind.PRZS = functools.partial(_shares_of_zero, kind)
    return crypten


def _plain(value: Any) -> Any:
    """Return nested mappings as objects whose attributes are their entries."""
    return SimpleNamespace(**{key: _plain(part) for key, part in value.items()}) if isinstance(value, dict) else value


def _shares_of_zero(kind: Any, size: Sequence[int], device: torch.device | None = None) -> Any:
    return kind.from_shares(torch.zeros(tuple(size), dtype=torch.int64, device=device))


def exponential(x: Any, within: Any = 1) -> Any:
    """Return exp(x) for x from -240 to 1, mostly off by less than 0.002 exp(x) or 2^-15, since squares are rounded.

    CrypTen's (1 + x / 256)^256 is off by twice that, and by a further 0.001. At -256, the result is 1 again. The result
    is 0 where `within`, if it is a tensor of secret bits, is 0.
    """
    u = x.div(2**EXPONENTIAL_SQUARINGS)
    result = (u.square().div(2) + u + 1) * within
    for _ in range(EXPONENTIAL_SQUARINGS):
        result = result.square()
    return result


def logistic(x: Any) -> Any:
    """Return the logistic function for x from -240 to 240, off by at most 0.001; CrypTen's is off by 0.004 around 0."""
    return _logistic(x, x._ltz())


def gelu(x: Any) -> Any:
    """Return GELU in its tanh form, off by at most 0.001 for |x| up to 60, and by 2^-16 |x| beyond."""
    squares = x.square()
    bits = type(x).stack([x, squares - GELU_BOUND**2])._ltz()
    slope = (2 / np.pi) ** 0.5
    inner = x * (squares * (GELU_TANH_CUBIC * slope) + slope)
    return x * _logistic(inner * 2, bits[0], bits[1])


def _logistic(x: Any, negative: Any, within: Any = 1) -> Any:
    """Return the logistic function by Newton-Raphson from the best line for 1 / d on [1, 2], off by 1 / 17 of it."""
    sign = 1 - 2 * negative
    denominator = exponential(-(x * sign), within) + 1
    inverse = denominator * (-8 / 17) + 24 / 17
    for _ in range(LOGISTIC_ITERATIONS):
        inverse = inverse * 2 - inverse.square() * denominator
    return inverse * sign + negative


def reciprocal(x: Any) -> Any:
    """Return INVERSE_SCALE / x for x from 2^-14 to 2^18; CrypTen's own 1 / x is right only from 1 to 600.

    x is scaled to y from 1/4 to 1. Newton-Raphson finds 1 / y, starting from the best line for it on that range.
    """
    (scale,) = _by_interval(x, RECIPROCAL_POWERS, [lambda power: INVERSE_SCALE * 4.0**-power])
    y = (x * scale).div(INVERSE_SCALE)
    inverse = y * -RECIPROCAL_SLOPE + 1.25 * RECIPROCAL_SLOPE
    for _ in range(RECIPROCAL_ITERATIONS):
        inverse = inverse * (2 - y * inverse)
    return inverse * scale


def inverse_root(x: Any) -> Any:
    """Return ROOT_SCALE / sqrt(m) for x = MEAN_SCALE * m and m from 2^-12 to 2^18; CrypTen's is right from 0.1 to 170.

    m is scaled to y from 1/4 to 1. Newton-Raphson finds 1 / sqrt(y), starting from the best line on that range.
    """
    from crypten.mpc.primitives import beaver

    top = ROOT_POWERS[-1] + 1
    guesses = [lambda power: 4.0 ** (top - power) / x.encoder.scale, lambda power: ROOT_SCALE * 2.0**-power]
    factor, scale = _by_interval(x, ROOT_POWERS, guesses, MEAN_SCALE)
    y = _quotient(x, beaver.mul(x._tensor, factor._tensor).share, 4**top * MEAN_SCALE)
    root = y * -ROOT_SLOPE + 1.75 * ROOT_SLOPE
    for _ in range(ROOT_ITERATIONS):
        root = (root * (3 - y * root * root)).div(2)
    return root * scale


def _by_interval(x: Any, powers: range, guesses: Sequence[Callable[[int], float]], unit: int = 1) -> list[Any]:
    """Return guess(k) for each of `guesses`, for the k at which x / unit is from 4^(k-1) to 4^k, by comparisons."""
    device, chosen = x.share.device, []
    ends = torch.tensor([4.0**power * unit for power in powers], device=device).reshape(-1, *[1] * x.dim())
    below = (type(x).stack([x] * len(powers)) - ends)._ltz()
    for guess in guesses:
        values = np.array([guess(power) for power in (*powers, powers[-1] + 1)])
        steps = torch.tensor(np.rint((values[:-1] - values[1:]) * x.encoder.scale), dtype=torch.int64, device=device)
        chosen.append(type(x).from_shares((below.share * steps.reshape(ends.shape)).sum(0)) + float(values[-1]))
    return chosen


def mean_square(x: Any) -> Any:
    """Return MEAN_SCALE times the mean square over the last dimension, then of length 1, off by at most 2^-15."""
    from crypten.mpc.primitives import beaver

    sums = beaver.square(x._tensor).sum(-1, keepdim=True).share
    return _quotient(x, sums, x.size(-1) * x.encoder.scale // MEAN_SCALE)


def _quotient(x: Any, numbers: Tensor, divisor: int) -> Any:
    """Return a tensor like x, of quotients of integers from 0 to 2^63, off by at most 2.

    A number s is opened plus a mask r, of which the dealer shares the quotient and the top bit: s + r wraps around 2^64
    exactly if r has that bit and s + r has not.
    Source: Dalskov, Escudero and Keller 2019, https://arxiv.org/abs/1910.12435, section 3.2.2.
    """
    import crypten

    link, provider = crypten.communicator.get(), crypten.mpc.get_default_provider()
    mask, dealt = provider.shares("quotients", numbers.shape, arguments=(divisor,))
    opened = link.all_reduce(numbers + mask)
    share = dealt[1] * (opened >= 0) * round(2**64 / divisor) - dealt[0]
    if link.get_rank() == CLIENT:
        share += unsigned_quotient(opened, divisor)
    return type(x).from_shares(share)


def unsigned_quotient(numbers: Tensor, divisor: int) -> Tensor:
    """Divide 64-bit integers, read as unsigned, by a divisor, and return the quotients, rounded down."""
    halves = (numbers >> 1) & MOST_SIGNED
    return halves // divisor * 2 + (halves % divisor * 2 + (numbers & 1)) // divisor


def maximum(x: Any) -> Any:
    """Return the maximum over the last dimension, then of length 1; CrypTen's own sends 3 times the bytes."""
    while (length := x.size(-1)) > 1:
        half = length // 2
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        larger = first + (second - first).relu()
        x = type(x).cat([larger, rest], dim=-1) if length % 2 else larger
    return x


class Secret:
    """A tensor of CrypTen with the part of numpy's interface that the functions of ops use."""

    __array_ufunc__ = None  # so that arrays of numpy leave operators to it
    __hash__ = None  # type: ignore[assignment]
    dtype = np.float64

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.size())

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> "Secret":
        return Secret(self.tensor[key])

    def reshape(self, *shape: Any) -> "Secret":
        return Secret(self.tensor.reshape(*shape))

    def transpose(self, *axes: int) -> "Secret":
        return Secret(self.tensor.permute(*axes))

    def sum(self, axis: int, keepdims: bool) -> "Secret":
        return Secret(self.tensor.sum(axis, keepdim=keepdims))

    def max(self, axis: int, keepdims: bool) -> "Secret":
        assert (axis, keepdims) == (-1, True)
        return Secret(maximum(self.tensor))

    def masked(self, mask: Tensor) -> "Secret":
        """Return the exact product with a tensor of public bits."""
        masked = self.tensor.clone()
        masked.share = masked.share * mask.to(masked.share.device)
        return Secret(masked)

    def __neg__(self) -> "Secret":
        return Secret(-self.tensor)

    def __add__(self, other: Any) -> "Secret":
        return Secret(self.tensor + self._raw(other))

    def __sub__(self, other: Any) -> "Secret":
        return Secret(self.tensor - self._raw(other))

    def __mul__(self, other: Any) -> "Secret":
        """Multiply; a public factor 1/n, which has few bits in fixed point, becomes a division by n."""
        if isinstance(other, Scaled):
            return Secret((self.tensor * other.tensor).div(other.scale))
        if isinstance(other, float) and other and abs((divisor := 1 / other) - round(divisor)) < 1e-9:
            return Secret(self.tensor.div(round(divisor)))
        return Secret(self.tensor * self._raw(other))

    def __rtruediv__(self, numerator: int) -> "Scaled":
        """Divide 1 by a positive secret; the functions of ops have no other quotients."""
        assert numerator == 1
        return Scaled(reciprocal(self.tensor), INVERSE_SCALE)

    def __lt__(self, other: Any) -> "Secret":
        return Secret(self.tensor < self._raw(other))

    def __eq__(self, other: Any) -> "Secret":  # type: ignore[override]
        return Secret(self.tensor.eq(self._raw(other)))

    __radd__, __rmul__ = __add__, __mul__

    def matmul(self, right: Any) -> "Secret":
        return Secret(self.tensor.matmul(self._raw(right)))

    def _raw(self, value: Any) -> Any:
        """Return an operand as CrypTen takes it, on the device of this tensor."""
        if isinstance(value, np.ndarray):
            return torch.tensor(value, dtype=torch.float64, device=self.tensor.share.device)
        return value.tensor if isinstance(value, Secret) else value


class Scaled(Secret):
    """A secret stored as `scale` times its value; ops add a public number, take the inverse root or multiply by it."""

    def __init__(self, tensor: Any, scale: int) -> None:
        super().__init__(tensor)
        self.scale = scale

    def __add__(self, other: Any) -> "Scaled":
        return Scaled(self.tensor + other * self.scale, self.scale)

    __radd__ = __add__


class SecretNumpy:
    """The part of the module `numpy` that the functions of ops call, on secrets and public arrays."""

    tile = staticmethod(np.tile)  # of public weights only
    square = staticmethod(lambda source: Secret(source.tensor.square()))
    exp = staticmethod(lambda source: Secret(exponential(source.tensor)))
    tanh = staticmethod(lambda source: Secret(logistic(source.tensor * 2) * 2 - 1))

    @staticmethod
    def matmul(left: Array, right: Array) -> Array:
        if isinstance(left, Secret):
            return left.matmul(right)
        return right.transpose(1, 0).matmul(left.T).transpose(1, 0)

    @staticmethod
    def maximum(source: Secret, least: float) -> Secret:
        assert least == 0
        return Secret(source.tensor.relu())

    @staticmethod
    def where(condition: Array, chosen: Any, other: Any) -> Secret:
        """Select by a public mask, or by secret bits if `other` is 0."""
        if isinstance(condition, Secret):
            assert other == 0
            return condition.__mul__(chosen)
        mask = torch.from_numpy(condition.astype(np.int64))
        parts = [part for part in ((chosen, mask), (other, 1 - mask)) if isinstance(part[0], Secret) or part[0] != 0]
        kept = [value.masked(bits) if isinstance(value, Secret) else value * bits.numpy() for value, bits in parts]
        secret, *others = sorted(kept, key=lambda part: not isinstance(part, Secret))
        total: Secret = functools.reduce(Secret.__add__, others, secret)
        return total

    @staticmethod
    def concatenate(parts: Sequence[Secret], axis: int) -> Secret:
        return Secret(imported_crypten().cat([part.tensor for part in parts], dim=axis))

    @staticmethod
    def stack(parts: Sequence[Secret]) -> Secret:
        return Secret(imported_crypten().stack([part.tensor for part in parts]))

    @staticmethod
    def repeat(source: Secret, times: int, axis: int) -> Secret:
        every = torch.arange(source.shape[axis], device=source.tensor.share.device)
        return Secret(source.tensor.index_select(axis, every.repeat_interleave(times)))


# op type -> its function on secrets: that of FUNCTIONS, unless another is given here
SECRET_FUNCTIONS: dict[type, Callable[..., Secret]] = FUNCTIONS | {
    **dict.fromkeys(
        SCALED,
        lambda op, library, weights, source: FUNCTIONS[type(op)](op, library, weights, source * (1 / WEIGHT_SCALE)),
    ),
    ops.Sigmoid: lambda op, library, weights, source: Secret(logistic(source.tensor)),
    ops.Gelu: lambda op, library, weights, source: (
        Secret(gelu(source.tensor)) if op.form == "tanh" else GELU_FORMS[op.form](library, source)
    ),
    ops.Silu: lambda op, library, weights, source: source * Secret(logistic(source.tensor)),
}


class SecretLibrary(Library):
    """The array functions that ops need, on secrets."""

    def mean_square(self, source: Secret) -> Secret:
        return Scaled(mean_square(source.tensor), MEAN_SCALE)


LIBRARY = SecretLibrary(
    numpy=SecretNumpy,
    erf=lambda source: Secret(source.tensor.erf()),
    rsqrt=lambda source: Scaled(inverse_root(source.tensor), ROOT_SCALE),
)
