"""Cross-entropy of a vocabulary projection; where logits are many, a chunk of rows at a time, so they never all exist.

Of a chunk the loss and both gradients are computed at once, while its logits are in the cache; nothing is computed
twice. What is kept for the backward pass is as large as the inputs.

On CUDA the products have a multiple of 128 rows of the table, without which they miss the fast matrix units. The added
rows exist only here: their logits are minus infinity, so that losses and gradients are those of the true vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

CHUNK_SIZE = {"cpu": 1 << 20, "cuda": 1 << 26}  # logits in a chunk: 4 MiB of fp32 (smaller chunks are slower), 256 MiB

LEAST_ROWS = 128  # in a chunk: with fewer, adding up the gradient of a large vocabulary's table takes most of the time
ROW_MULTIPLE = {"cpu": 1, "cuda": 128}  # of a table's rows in a product; Hopper's units need bf16 rows of 16 bytes
LEAST_LEFT = 1e-6  # of a probability of one that single precision adds up to

# Of a chunk's logits and rows: sums over the rows, of which the first is differentiated; leaves its gradient in logits.
RowLosses: TypeAlias = Callable[[Tensor, slice], Tensor]


class Distilled(NamedTuple):
    """Means over rows, in nats. loss: of the other two by their shares; where logits come in chunks it alone carries
    gradients. cross_entropy: of the targets. divergence: KL(p || model) from the predictions p of another model.
    """

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), or the same numbers."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def projected_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """Mean of -ln softmax(hidden @ weight.T)[target] over all rows, in nats; in fp32 but for fp64 inputs.

    hidden: rows x d_model. weight: vocab x d_model. targets: rows, int64. cap: of the logits.
    Under autocast the products are in its dtype.
    """
    if _in_one_piece(hidden, weight):  # where torch's own is as fast
        return functional.cross_entropy(_logits(hidden, padded(weight), len(weight), cap), targets)
    return _projected(hidden, weight, partial(_cross_entropy, targets), cap)[0]


def token_cross_entropies(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """-ln softmax(hidden @ weight.T)[target] of each row, nats: what `projected_cross_entropy` is the mean of."""
    table, size = padded(weight), len(weight)
    parts = [
        functional.cross_entropy(_logits(hidden[rows], table, size, cap), targets[rows], reduction="none")
        for rows in _chunks(hidden, weight)
    ]
    return torch.cat(parts)


def distilled(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    likely: Tensor,
    log_probabilities: Tensor,
    share: float,
    cap: float | None = None,
) -> Distilled:
    """Cross-entropy, as `projected_cross_entropy`, and divergence from p, which has `share` in the loss.

    likely, log_probabilities: rows x n, the tokens that p holds most likely; the rest of the vocabulary counts as one.
    Source: Hinton et al. 2015, arXiv 1503.02531, at temperature 1.
    """
    left = (1 - log_probabilities.exp().sum(dim=1, keepdim=True)).clamp(min=LEAST_LEFT)
    theirs = torch.cat((log_probabilities, left.log()), dim=1)
    if not _in_one_piece(hidden, weight):
        return Distilled(*_projected(hidden, weight, partial(_divergence, targets, likely, theirs, share), cap))
    logits = _logits(hidden, padded(weight), len(weight), cap)
    total = logits.logsumexp(dim=1, keepdim=True)
    cross_entropy = (total - logits.gather(1, targets[:, None])).mean()
    rest = logits.scatter(1, likely, -math.inf).logsumexp(dim=1, keepdim=True)
    ours = torch.cat((logits.gather(1, likely), rest), dim=1) - total
    divergence = functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    return Distilled((1 - share) * cross_entropy + share * divergence, cross_entropy, divergence)


def padded(weight: Tensor) -> Tensor:
    """Append rows of 0 to a table, vocab x d_model, up to the multiple that suits its device."""
    num_more = -len(weight) % ROW_MULTIPLE[weight.device.type]
    return functional.pad(weight, (0, 0, 0, num_more)) if num_more else weight


def _logits(hidden: Tensor, table: Tensor, vocab_size: int, cap: float | None) -> Tensor:
    """Logits of the true vocabulary in fp32, rows x vocab. table: a padded one."""
    return capped(functional.linear(hidden, table)[:, :vocab_size].float(), cap)


def fully_distilled(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    parent_logits: Callable[[slice], Tensor],
    share: float,
    cap: float | None = None,
) -> Distilled:
    """As `distilled`, with the divergence over the whole vocabulary; the parent's logits exist a chunk at a time too.

    parent_logits: of some of the rows, rows x vocab, in fp32 or fp64.
    """
    return Distilled(*_projected(hidden, weight, partial(_full_divergence, targets, parent_logits, share), cap))


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product in fp32 (fp64 for fp64), also where the factors are in half precision: sums are never rounded to
    that, which would make the gradients of a softmax wrong by several percent.
    """
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    # a product of two bf16 numbers is exact in fp32, so both ways differ by the order of sums alone
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


def _cross_entropy(targets: Tensor, logits: Tensor, rows: slice) -> Tensor:
    picked = targets[rows].unsqueeze(1)
    lse = logits.logsumexp(dim=1, keepdim=True)
    total = (lse - logits.gather(1, picked)).sum()
    logits.sub_(lse).exp_().scatter_add_(1, picked, -torch.ones_like(lse))
    return total[None]


def _divergence(targets: Tensor, likely: Tensor, theirs: Tensor, share: float, logits: Tensor, rows: slice) -> Tensor:
    """theirs: ln p of the likely tokens and, last, of all others together.

    With q of the model, q_r and p_r of the others, and P = sum p, d KL / d logit_j is P q_j - p_j of a likely token and
    (P - p_r / q_r) q_j of another.
    """
    picked, known, log_p = targets[rows].unsqueeze(1), likely[rows], theirs[rows].to(logits.dtype)
    lse = logits.logsumexp(dim=1, keepdim=True)
    cross_entropy = (lse - logits.gather(1, picked)).sum()
    log_q = logits.gather(1, known) - lse
    logits.sub_(lse).exp_().scatter_(1, known, 0.0)
    q_rest = logits.sum(dim=1, keepdim=True).clamp(min=torch.finfo(logits.dtype).tiny)
    p = log_p.exp()
    divergence = (p * (log_p - torch.cat((log_q, q_rest.log()), dim=1))).sum()
    whole = p.sum(dim=1, keepdim=True)
    logits.mul_(1 - share + share * (whole - p[:, -1:] / q_rest))
    logits.scatter_(1, known, log_q.exp() * (1 - share + share * whole) - share * p[:, :-1])
    logits.scatter_add_(1, picked, torch.full_like(lse, share - 1))
    return torch.stack(((1 - share) * cross_entropy + share * divergence, cross_entropy, divergence))


def _full_divergence(
    targets: Tensor, parent_logits: Callable[[slice], Tensor], share: float, logits: Tensor, rows: slice
) -> Tensor:
    """With q of the model, d KL / d logit_j is q_j - p_j. Columns of `logits` beyond p's are minus infinity."""
    picked, log_p = targets[rows].unsqueeze(1), parent_logits(rows).to(logits.dtype).log_softmax(dim=1)
    lse = logits.logsumexp(dim=1, keepdim=True)
    cross_entropy = (lse - logits.gather(1, picked)).sum()
    known = logits.sub_(lse)[:, : log_p.shape[1]]
    divergence = functional.kl_div(known, log_p, reduction="sum", log_target=True)
    logits.exp_()
    known.sub_(log_p.exp_(), alpha=share)
    logits.scatter_add_(1, picked, torch.full_like(lse, share - 1))
    return torch.stack(((1 - share) * cross_entropy + share * divergence, cross_entropy, divergence))


def _in_one_piece(hidden: Tensor, weight: Tensor) -> bool:
    return len(hidden) * len(weight) <= CHUNK_SIZE[hidden.device.type]


def _projected(hidden: Tensor, weight: Tensor, losses: RowLosses, cap: float | None) -> tuple[Tensor, ...]:
    """Means over rows; the first carries gradients."""
    kind = hidden.device.type
    lowered = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    means: Tensor = _Projected.apply(hidden.to(lowered), weight, losses, cap)  # type: ignore[no-untyped-call]
    return means[0], *means[1:].detach()


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, losses: RowLosses, cap: float | None) -> Tensor:
        wanted = any(ctx.needs_input_grad[:2])
        matrix, num_rows = padded(weight.to(hidden.dtype)), len(hidden)
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(matrix, dtype=weight.dtype) if ctx.needs_input_grad[1] else None
        total: Tensor | int = 0
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(hidden, weight):
                logits = capped(wide_product(hidden[rows], matrix.T), cap)
                slopes = None if cap is None or not wanted else 1 - (logits / cap).square()
                logits[:, len(weight) :] = -math.inf
                total = total + losses(logits, rows).double()
                if wanted:
                    residual = (logits if slopes is None else logits.mul_(slopes)).div_(num_rows).to(hidden.dtype)
                    torch.mm(residual, matrix, out=hidden_grad[rows])
                    if weight_grad is not None and weight_grad.dtype == hidden.dtype:
                        weight_grad.addmm_(residual.T, hidden[rows])
                    elif weight_grad is not None:  # added up in its own precision
                        weight_grad += wide_product(residual.T, hidden[rows])
        assert isinstance(total, Tensor)
        ctx.save_for_backward(hidden_grad, weight_grad if weight_grad is None else weight_grad[: len(weight)])
        return (total / num_rows).to(torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return (
            hidden_grad * grads[0].to(hidden_grad.dtype),
            weight_grad if weight_grad is None else weight_grad * grads[0],
            None,
            None,
        )


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    num_rows = max(LEAST_ROWS, CHUNK_SIZE[hidden.device.type] // len(weight))
    return [slice(start, start + num_rows) for start in range(0, len(hidden), num_rows)]
