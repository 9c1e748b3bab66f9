"""Linears in fp32 by oneDNN, which torch's builds for x86 contain, instead of MKL.

On AMD's processors MKL multiplies in vectors of 256 bits only. With AVX-512, oneDNN takes 0.3 to 0.5 of its time, and
results differ by rounding (one core of an AMD EPYC with Zen 5; 4,096 rows from 96 to 384 and back, 1,024 from 576 to
1,536, and 256 from 576 to 49,152).
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@contextmanager
def onednn_linears() -> Iterator[None]:
    """Compute linears by oneDNN within this context, which is without gradients; by MKL if the CPU lacks AVX-512."""
    has_both = torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_supported()  # type: ignore[no-untyped-call]
    with torch.no_grad(), _Linears() if has_both else nullcontext():
        yield


class _Linears(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear and not kwargs and not torch.is_autocast_enabled("cpu"):
            source, weight, *bias = args
            if source.dtype != torch.float32 or not source.is_cpu:
                return function(*args)
            return torch.ops.mkldnn._linear_pointwise(source, weight, bias[0] if bias else None, "none", [], "")
        return function(*args, **(kwargs or {}))
