"""Causal attention that also returns the Shannon entropy of every row, by the fastest implementation available.

With scores s_ij = q_i . k_j / (t_i sqrt(head_dim)) and weights a = softmax(s) over j <= i, E_i = -sum_j a_ij ln a_ij.

- CPU: `nas.attention.cpu_native`, one fused C++ kernel.
- CPU in fp64, under torch.compile, or if the C++ kernel cannot be compiled: torch's flash kernel, on heads padded to at
  least twice the features.
- CUDA with Triton: `nas.attention.cuda_triton`, one fused kernel.
- CUDA without Triton: `attention_reference` of `nas.attention.reference`, which stores the T x T matrix.

Entropy is computed in fp64 for fp64 values, else in fp32. If no entropy is wanted, torch's own attention is used. Only
for fp32 and bf16 on the CPU is the C++ kernel faster and used, if it can be, although it computes the entropy.
"""

import logging
import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional

from nas.attention import cpu_native
from nas.attention.cpu_native import NotCompiledError
from nas.attention.reference import Attended, attention_reference, bounded, scale_by_temperature, upcast

LANES = 16  # fp32 numbers in an AVX-512 register: torch's flash kernel is as fast with 16 features as with 8

logger = logging.getLogger(__name__)


def causal_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, temperature: Tensor | None = None, with_entropy: bool = True
) -> Attended:
    """Return causal softmax attention, in the type of the values, and, if wanted, the entropy of its rows in nats.

    queries, keys, values: batch x heads x T x head_dim. temperature: heads x T, positive; row i of head h of the scores
        is divided by entry h, i; None for 1. Both results have gradients.

    Raises UserError for operands that the chosen kernel refuses, such as heads of over 128 features under Triton.
    """
    device = queries.device.type
    with torch.autocast(device, enabled=False):
        if not with_entropy:
            queries, keys = scale_by_temperature(queries, temperature).to(values.dtype), keys.to(values.dtype)
            if device == "cpu" and is_native(values):
                return Attended(cpu_native.attend(queries, keys, values)[0], None)
            return Attended(functional.scaled_dot_product_attention(queries, keys, values, is_causal=True), None)
        # compiled code needs Triton on CUDA, and cannot call a cached function
        compiled = _on_cuda if device == "cuda" else _on_cpu
        attend = compiled if torch.compiler.is_compiling() else _attend_on(device)
        output, entropy = attend(queries, keys, values, temperature=temperature)
        return Attended(output.to(values.dtype), entropy)


def _on_cpu(queries: Tensor, keys: Tensor, values: Tensor, *, temperature: Tensor | None) -> Attended:
    if temperature is not None or not queries.dtype == keys.dtype == values.dtype or not is_native(values):
        queries, keys, values = upcast(queries, keys, values)
    attend = cpu_native.attend if is_native(values) else _flash
    output, entropy = attend(scale_by_temperature(queries, temperature), keys, values)
    return Attended(output, bounded(entropy))


def _flash(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and row entropy, not clamped, by one call of torch's flash kernel with [v | k] as the values.

    E_i = lse_i - sum_j a_ij s_ij, and the sum is scale * q_i . (sum_j a_ij k_j). Only the gradient through the weights
    a is needed, since the paths through lse_i and through the factor s cancel; hence the detached operands. The kernel
    needs equal widths of all operands.
    """
    head_dim = queries.shape[-1]
    scale, width = 1 / math.sqrt(head_dim), max(LANES, 2 * head_dim)
    mixed, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        functional.pad(queries, (0, width - head_dim)),
        functional.pad(keys, (0, width - head_dim)),
        functional.pad(torch.cat((values, keys.detach()), dim=-1), (0, width - 2 * head_dim)),
        is_causal=True,
        scale=scale,
    )
    output, mean_keys = mixed[..., :head_dim], mixed[..., head_dim : 2 * head_dim]
    return output, lse.detach() - scale * (queries.detach() * mean_keys).sum(dim=-1)


def is_native(values: Tensor) -> bool:
    """Whether to use C++: not under torch.compile or torch.export, which cannot see its ops, and not under vmap."""
    if torch.compiler.is_compiling() or isinstance(values, FakeTensor):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(values):  # by vmap
        return False
    return values.dtype in cpu_native.DTYPES and has_native(values.shape[-1])


@cache
def has_native(head_dim: int) -> bool:
    """Compile the C++ kernel for a head size unless it is cached; return, and log once per size, whether it works."""
    try:
        cpu_native.compiled(head_dim)
    except NotCompiledError as error:
        logger.warning("attention on the CPU: by torch, slower than compiled; not compiled as %s", error)
        return False
    logger.info("attention on the CPU: one fused C++ kernel")
    return True


def _on_cuda(queries: Tensor, keys: Tensor, values: Tensor, *, temperature: Tensor | None) -> Attended:
    from nas.attention import cuda_triton

    output, entropy = cuda_triton.attend(queries, keys, values, temperature)
    return Attended(output, bounded(entropy))


@cache
def _attend_on(device_type: str) -> Callable[..., Attended]:
    if device_type == "cpu":
        return _on_cpu
    if device_type == "cuda" and find_spec("triton"):
        logger.info("attention with entropy on CUDA: one fused Triton kernel")
        return _on_cuda
    logger.warning(
        "attention with entropy on %s holds a T x T matrix of scores for every head; on CUDA, "
        "pip install 'private-inference-nas[triton]' avoids it.",
        device_type,
    )
    return attention_reference
