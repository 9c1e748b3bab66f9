"""Attention with what replaces softmax, for training: by the C++ kernel of exact attention where that can be used."""

import torch
from torch import Tensor

from costmodel.execution.op_functions import QUAD_SHIFT
from nas.attention import cpu_native
from nas.attention.causal import is_native
from nas.attention.reference import Attended, bounded, scale_by_temperature, upcast
from nas.model.mpc_friendly import FORMS, ScoreBound, normalised_attention

# form -> the kernel's function, and what it subtracts from the scores
KERNELS: dict[str, tuple[str, float]] = {
    "2quad": ("square", -QUAD_SHIFT),
    "power8": ("eighth power", 0.0),
    "relu": ("relu", 0.0),
}


def fused_normalised_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    form: str,
    bound: ScoreBound | None = None,
    cap: float | None = None,
    temperature: Tensor | None = None,
    with_entropy: bool = True,
) -> Attended:
    """Return the result of `normalised_attention`, to which all arguments belong, without a T x T matrix if possible.

    That is for fp32 and bf16 on the CPU without a cap, if the kernel compiles. Results are then in fp32 arithmetic, and
    can be differentiated once.
    """
    if cap is not None or values.device.type != "cpu" or not is_native(values):
        return normalised_attention(
            queries,
            keys,
            values,
            form=form,
            bound=bound,
            cap=cap,
            temperature=temperature,
            with_entropy=with_entropy,
        )
    dtype, (function, shift) = values.dtype, KERNELS[form]
    if temperature is not None or not queries.dtype == keys.dtype == values.dtype:
        queries, keys, values = upcast(queries, keys, values)
    bounds = queries.new_full(queries.shape[1:2], shift, dtype=torch.float32)
    if bound is not None:
        bounds = bounds + bound.weight
    output, entropy = cpu_native.attend(
        scale_by_temperature(queries, temperature),
        keys,
        values,
        function=function,
        bounds=bounds,
        sum_offset=FORMS[form][1],
    )
    return Attended(output.to(dtype), bounded(entropy) if with_entropy else None)
