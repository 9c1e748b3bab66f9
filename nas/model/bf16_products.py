"""Matrix products with factors in bf16, which some processors multiply several times as fast as fp32.

Activations and their gradients are rounded to bf16; parameters, their gradients, logits, sums and losses are in fp32.
CPUs multiply bf16 in tiles (Intel's AMX) or in vectors (AVX512-BF16). torch itself offers bf16 products with fp32
results on CUDA only. On a CPU with tiles, the products are computed by MKL, which torch's builds for x86 contain. On a
CPU with vectors only, which MKL may not use, they are computed by code that is compiled from bf16_products.cpp.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nas.attention.cpu_native import NotCompiledError, library

ROW_MAJOR, NOT_TRANSPOSED, TRANSPOSED = 101, 111, 112  # of CBLAS
_ROUNDED = "_rounded"  # the attribute of a weight with its version and copy
_INT, _SIZE, _FLOAT = ctypes.c_int, ctypes.c_int64, ctypes.c_float
_MATRIX = ctypes.c_void_p, ctypes.c_int  # address, and the step between rows

Product: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, float], None
]  # of total, left, right and kept: sets total to kept * total + left @ right


def has_bf16_units() -> bool:
    """Whether this CPU has tiles or vectors for bf16 (by torch's check) that `wide_product` can use."""
    has_tiles = torch.cpu._is_amx_tile_supported()
    return _mkl() is not None if has_tiles else _by_vectors() is not None


@contextmanager
def bf16_products(device_type: str, *, enabled: bool = True) -> Iterator[None]:
    """Round the factors of products within this context to bf16, by autocast; `enabled=False` turns autocast off.

    On a CPU, a linear's weight is rounded again only after it has changed.
    """
    with (
        torch.autocast(device_type, dtype=torch.bfloat16, enabled=enabled),
        _RoundedWeights() if enabled and device_type == "cpu" else nullcontext(),
    ):
        yield


def rounded(weight: Tensor) -> Tensor:
    """Return a weight in bf16; a parameter's copy is cached until the parameter changes. Gradients are in fp32."""
    if not isinstance(weight, nn.Parameter) or isinstance(weight, FakeTensor):
        return weight.bfloat16()
    version = weight.data_ptr(), weight._version
    known, copy = getattr(weight, _ROUNDED, (None, None))
    if copy is None or known != version:
        copy = weight.detach().bfloat16()
        setattr(weight, _ROUNDED, (version, copy))
    result: Tensor = _Rounded.apply(weight, copy) if weight.requires_grad else copy  # type: ignore[no-untyped-call]
    return result


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None


class _RoundedWeights(TorchFunctionMode):
    """Makes linears under autocast use the cached bf16 copies of their weights, which autocast converts repeatedly."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear and not kwargs and torch.is_autocast_enabled("cpu"):
            source, weight, *rest = args
            args = source, rounded(weight), *rest
        return function(*args, **(kwargs or {}))


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in the factors' type, or for bf16 in fp32 (bf16 sums make gradients wrong by percents)."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    total = left.new_empty(len(left), right.shape[1], dtype=torch.float32)
    return _multiply(total, left, right, 0.0)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total` in place. total: of the type of the factors, or fp32 if the factors are bf16."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        _multiply(total, left, right, 1.0)


def _multiply(total: Tensor, left: Tensor, right: Tensor, kept: float) -> Tensor:
    """Set total to kept * total + left @ right, and return it. left, right: bf16 on the CPU; total: fp32, row-major."""
    multiply = None if isinstance(total, FakeTensor) else _by_vectors() or _mkl()
    if multiply is None:  # a product of two bf16 numbers is exact in fp32, so that only the order of the sums differs
        return total.addmm_(left.float(), right.float(), beta=kept)
    left, right = (part if 1 in part.stride() else part.contiguous() for part in (left, right))
    multiply(total, left, right, kept)
    return total


def wide_linear(source: Tensor, weight: Tensor) -> Tensor:
    """Return source @ weight.T in fp32, of factors rounded to bf16. It has no gradients. source: ... x features."""
    rows = wide_product(source.flatten(0, -2).bfloat16(), rounded(weight).T)
    return rows.view(*source.shape[:-1], len(weight))


class _Operand(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("lane_step", ctypes.c_int64), ("depth_step", ctypes.c_int64)]


@cache
def _by_vectors() -> Product | None:
    """Return the product of bf16_products.cpp; None if the CPU has no such vectors, has tiles, or nothing compiles."""
    if torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_bf16_supported():
        return None
    try:
        multiply = library(Path(__file__).with_suffix(".cpp")).multiply
    except NotCompiledError:
        return None
    multiply.argtypes = [_Operand, _Operand, *[_SIZE] * 3, _FLOAT, ctypes.c_void_p, _SIZE, _INT]
    multiply.restype = None

    def product(total: Tensor, left: Tensor, right: Tensor, kept: float) -> None:
        of_left, of_right = _Operand(left.data_ptr(), *left.stride()), _Operand(right.data_ptr(), *right.stride()[::-1])
        shape = *total.shape, left.shape[1]
        multiply(of_left, of_right, *shape, kept, total.data_ptr(), total.stride(0), torch.get_num_threads())

    return product


@cache
def _mkl() -> Product | None:
    """Return MKL's product; None if torch is built without it."""
    try:
        multiply = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    multiply.argtypes, multiply.restype = [*[_INT] * 6, _FLOAT, *_MATRIX, *_MATRIX, _FLOAT, *_MATRIX], None

    def product(total: Tensor, left: Tensor, right: Tensor, kept: float) -> None:
        (left, *of_left), (right, *of_right) = _laid_out(left), _laid_out(right)
        shape = *total.shape, left.shape[1]
        factors = 1.0, left.data_ptr(), of_left[1], right.data_ptr(), of_right[1], kept
        multiply(ROW_MAJOR, of_left[0], of_right[0], *shape, *factors, total.data_ptr(), total.stride(0))

    return product


def _laid_out(matrix: Tensor) -> tuple[Tensor, int, int]:
    """Return a matrix, its order in CBLAS's terms, and the step between its rows or, if transposed, its columns."""
    for axis, order in ((0, NOT_TRANSPOSED), (1, TRANSPOSED)):
        if matrix.stride(1 - axis) == 1 and matrix.stride(axis) >= matrix.shape[1 - axis]:
            return matrix, order, matrix.stride(axis)
    return matrix.contiguous(), NOT_TRANSPOSED, matrix.shape[1]
