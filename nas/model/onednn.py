"""Linears in fp32 by oneDNN, which torch's builds for x86 contain, instead of MKL.

On AMD's processors MKL multiplies in vectors of 256 bits only. On one core of an AMD EPYC with Zen 5, which has
AVX-512, oneDNN took 0.3 to 0.5 of MKL's time for 4,096 rows from 96 to 384 and back, 1,024 from 576 to 1,536, and 256
from 576 to 49,152. The results differ by rounding. Intel's processors were not measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@contextmanager
def onednn_linears() -> Iterator[None]:
    """Turn off gradients and, on a CPU with AVX-512, compute linears by oneDNN, in this context and thread.

    Linears of other types than float32, on other devices, or under autocast on the CPU are computed as usual.
    """
    is_built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    with torch.no_grad(), _Linears() if is_built and torch.cpu._is_avx512_supported() else nullcontext():
        yield


class _Linears(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear and not kwargs and not torch.is_autocast_enabled("cpu"):
            source, weight, bias = (*args, None)[:3]
            if source.is_cpu and source.dtype == torch.float32:
                return torch.ops.mkldnn._linear_pointwise(source, weight, bias, "none", [], "")
        return function(*args, **(kwargs or {}))
