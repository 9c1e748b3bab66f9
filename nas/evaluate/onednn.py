"""Linears in fp32 by oneDNN, which torch's builds for x86 contain, instead of MKL.

On AMD's processors MKL multiplies in vectors of 256 bits only. With AVX-512, oneDNN takes 0.45 of its time (an AMD EPYC
with Zen 5, one core: 1,024 rows from 576 to 1,536 and back, and 256 rows from 576 to 49,152), and results differ by
rounding.
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
        if function is functional.linear and not kwargs and args[0].dtype == torch.float32:
            source, weight, *bias = args
            return torch.ops.mkldnn._linear_pointwise(source, weight, bias[0] if bias else None, "none", [], "")
        return function(*args, **(kwargs or {}))
