"""CrypTen's tensors with the interface of numpy's arrays: the functions that compute ops in plaintext run on them.

Some ops have a function of their own here (`OWN_FUNCTIONS`). Only processes of parties import CrypTen.
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
from costmodel.engine import crypten_functions
from costmodel.engine.crypten_cuda import UnwrappedLong
from costmodel.execution.arithmetic import SCALED
from costmodel.execution.op_functions import FUNCTIONS, GELU_FORMS, Array, Library
from costmodel.protocols.crypten import INVERSE_SCALE, MEAN_SCALE, ROOT_SCALE, WEIGHT_SCALE


@functools.cache
def imported_crypten() -> Any:
    """Return CrypTen with some of its parts replaced.

    Its converter of ONNX is not needed, and imports what torch no longer has. Looking up its configuration took half of
    a party's time; here that is plain data. Integers on a GPU are plain tensors. Shares of 0 are 0, because both
    parties know the seeds of theirs.
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


class Secret:
    """A tensor of CrypTen with those parts of numpy's interface that the functions of ops use."""

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
        return Secret(crypten_functions.maximum(self.tensor))

    def masked(self, mask: Tensor) -> "Secret":
        """Return the product with public bits, which is exact."""
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
        """Multiply, but divide by n in place of a public factor 1/n, which has few bits in fixed point."""
        if isinstance(other, Scaled):
            return Secret((self.tensor * other.tensor).div(other.scale))
        if isinstance(other, float) and other and abs((divisor := 1 / other) - round(divisor)) < 1e-9:
            return Secret(self.tensor.div(round(divisor)))
        return Secret(self.tensor * self._raw(other))

    def __rtruediv__(self, numerator: int) -> "Scaled":
        """Divide 1 by a positive secret; the functions of ops have no other quotients."""
        assert numerator == 1
        return Scaled(crypten_functions.reciprocal(self.tensor), INVERSE_SCALE)

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
    """A secret that is stored as `scale` times its value.

    The functions of ops only add public numbers to it, or multiply a secret by it.
    """

    def __init__(self, tensor: Any, scale: int) -> None:
        super().__init__(tensor)
        self.scale = scale

    def __add__(self, other: Any) -> "Scaled":
        return Scaled(self.tensor + other * self.scale, self.scale)

    __radd__ = __add__


class SecretNumpy:
    """The functions of numpy that the functions of ops call, on secrets and public arrays."""

    tile = staticmethod(np.tile)  # of public weights only
    square = staticmethod(lambda source: Secret(source.tensor.square()))
    exp = staticmethod(lambda source: Secret(crypten_functions.exponential(source.tensor)))
    tanh = staticmethod(lambda source: Secret(crypten_functions.logistic(source.tensor * 2) * 2 - 1))

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


def _logistic(op: Any, library: Library, weights: Any, source: Secret) -> Secret:
    return Secret(crypten_functions.logistic(source.tensor))


# op type -> the function that replaces the one of FUNCTIONS
OWN_FUNCTIONS: dict[type, Callable[..., Secret]] = {
    **dict.fromkeys(
        SCALED,
        lambda op, library, weights, source: FUNCTIONS[type(op)](op, library, weights, source * (1 / WEIGHT_SCALE)),
    ),
    ops.Sigmoid: _logistic,
    ops.Gelu: lambda op, library, weights, source: (
        Secret(crypten_functions.gelu(source.tensor)) if op.form == "tanh" else GELU_FORMS[op.form](library, source)
    ),
    ops.Silu: lambda op, library, weights, source: source * _logistic(op, library, weights, source),
}


class SecretLibrary(Library):
    """The functions that ops need, on secrets."""

    def mean_square(self, source: Secret) -> Secret:
        return Scaled(crypten_functions.mean_square(source.tensor), MEAN_SCALE)


LIBRARY = SecretLibrary(
    numpy=SecretNumpy,
    erf=lambda source: Secret(source.tensor.erf()),
    rsqrt=lambda source: Scaled(crypten_functions.inverse_root(source.tensor), ROOT_SCALE),
)
