"""Cross-entropy of a vocabulary projection; where logits are many, a chunk of rows at a time, so they never all exist.

Of a chunk the loss and both gradients are computed at once, while its logits are in the cache; nothing is computed
twice. What is kept for the backward pass is as large as the inputs.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

CHUNK_SIZE = {"cpu": 1 << 20, "cuda": 1 << 26}  # logits in a chunk: 4 MiB of fp32 (smaller chunks are slower), 256 MiB

LEAST_LEFT = 1e-6  # of a probability of one that single precision adds up to


def projected_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of -ln softmax(hidden @ weight.T)[target] over all rows, in nats; in fp32 but for fp64 inputs.

    hidden: rows x d_model. weight: vocab x d_model. targets: rows, int64. Under autocast the products are in its dtype.
    """
    kind = hidden.device.type
    if len(hidden) * len(weight) <= CHUNK_SIZE[kind]:  # in one piece torch's own is as fast
        return functional.cross_entropy(functional.linear(hidden, weight).float(), targets)
    lowered = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    loss: Tensor = _Projected.apply(hidden.to(lowered), weight, targets)  # type: ignore[no-untyped-call]
    return loss


def token_cross_entropies(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """-ln softmax(hidden @ weight.T)[target] of each row, nats: what `projected_cross_entropy` is the mean of."""
    parts = [
        functional.cross_entropy(functional.linear(hidden[rows], weight).float(), targets[rows], reduction="none")
        for rows in _chunks(hidden, weight)
    ]
    return torch.cat(parts)


def distilled(
    hidden: Tensor, weight: Tensor, targets: Tensor, likely: Tensor, log_probabilities: Tensor
) -> tuple[Tensor, Tensor]:
    """Two means over all rows, in nats: the cross-entropy of the targets, as `projected_cross_entropy`, and the
    divergence KL(p || softmax(hidden @ weight.T)) from predictions p of another model.

    likely, log_probabilities: rows x n, the tokens that p holds most likely; the rest of the vocabulary counts as one.
    Source: Hinton et al. 2015, arXiv 1503.02531, at temperature 1.
    """
    logits = functional.linear(hidden, weight).float()
    total = logits.logsumexp(dim=1, keepdim=True)
    cross_entropy = (total - logits.gather(1, targets[:, None])).mean()
    rest = logits.scatter(1, likely, -math.inf).logsumexp(dim=1, keepdim=True)
    ours = torch.cat((logits.gather(1, likely), rest), dim=1) - total
    left = (1 - log_probabilities.exp().sum(dim=1, keepdim=True)).clamp(min=LEAST_LEFT)
    theirs = torch.cat((log_probabilities, left.log()), dim=1)
    return cross_entropy, functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wanted = any(ctx.needs_input_grad[:2])
        matrix, num_rows = weight.to(hidden.dtype), len(hidden)
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros((), dtype=torch.float64)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(hidden, weight):
                logits = (hidden[rows] @ matrix.T).to(torch.promote_types(hidden.dtype, torch.float32))
                picked = targets[rows].unsqueeze(1)
                lse = logits.logsumexp(dim=1, keepdim=True)
                total += (lse - logits.gather(1, picked)).sum()
                if wanted:
                    logits.sub_(lse).exp_().scatter_add_(1, picked, -torch.ones_like(lse)).div_(num_rows)
                    residual = logits.to(hidden.dtype)
                    torch.mm(residual, matrix, out=hidden_grad[rows])
                    _accumulate(weight_grad, residual, hidden[rows])
        ctx.save_for_backward(hidden_grad, weight_grad)
        return (total / num_rows).to(torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * loss_grad.to(hidden_grad.dtype), weight_grad * loss_grad, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    num_rows = max(1, CHUNK_SIZE[hidden.device.type] // len(weight))
    return [slice(start, start + num_rows) for start in range(0, len(hidden), num_rows)]


def _accumulate(total: Tensor, residual: Tensor, hidden: Tensor) -> None:
    """total += residual.T @ hidden, added up in the precision of `total`."""
    if total.dtype == hidden.dtype:
        total.addmm_(residual.T, hidden)
    else:
        total += residual.T @ hidden
