"""Cross-entropy of a vocabulary projection, whose logits are computed in chunks of rows so that few are in memory.

The loss of a chunk and the gradients of its input and of the output table are computed together, while its logits are
in the cache. On CUDA the table is padded to a multiple of 128 rows, since other products miss the fast matrix units;
the logits of the added rows are minus infinity, so losses and gradients are those of the true vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nas.attention.reference import capped
from nas.model.bf16_products import add_product, rounded, wide_product

CHUNK_SIZE = {"cpu": 1 << 20, "cuda": 1 << 28}  # logits in a chunk: 4 MiB of fp32 (smaller chunks are slower), 1 GiB

LEAST_ROWS = 128  # in a chunk: with fewer, adding up the gradient of a large vocabulary's table takes most of the time
ROW_MULTIPLE = {"cpu": 1, "cuda": 128}  # of a table's rows in a product; Hopper's units need bf16 rows of 16 bytes
LEAST_LEFT = 1e-6  # least probability of all less likely tokens together, which rounding may make 0

# Maps the logits of a chunk, and data about its rows, to sums over the rows, and to the gradient of the first sum with
# respect to the logits. It may overwrite the logits.
RowLosses: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
Known: TypeAlias = Callable[[slice], tuple[Tensor, ...]]  # returns the data about a slice of rows
Runner: TypeAlias = Callable[..., tuple[Tensor, Tensor]]  # `losses_of_chunk`, or compiled code of it


class Distilled(NamedTuple):
    """Mean losses over rows, in nats; if they were computed in chunks, only `loss` has gradients.

    loss: weighted sum of cross_entropy and divergence. cross_entropy: of the targets. divergence: KL(p || model), where
        p are the predictions of another model.
    """

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def losses_of_chunk(
    losses: RowLosses,
    logits: Tensor,
    known: tuple[Tensor, ...],
    vocab_size: int,
    cap: float | None,
    num_rows: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the sums of a chunk's losses over its rows, fp64, and the gradient of the first sum / num_rows.

    losses: called with the logits and `known`, the data about the rows. logits: before their cap (None for no cap),
        rows x padded vocabulary, of which the first `vocab_size` columns are the true one; they are overwritten. The
        gradient has their shape and type `dtype`. num_rows: number of rows in all chunks.
    """
    if torch.compiler.is_compiling():
        logits = logits.clone()  # compiled code omits this, together with writing to the argument
    logits = capped(logits, cap)
    slopes = None if cap is None else 1 - (logits / cap).square()
    if logits.shape[1] > vocab_size:
        logits[:, vocab_size:] = -math.inf
    sums, gradient = losses(logits, *known)
    gradient = gradient if slopes is None else gradient.mul_(slopes)
    return sums.double(), gradient.div_(num_rows).to(dtype)


def projected_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None, run: Runner = losses_of_chunk
) -> Tensor:
    """Return the mean of -ln softmax(hidden @ weight.T)[target] over rows, in nats, as a scalar of at least fp32.

    hidden: rows x d_model. weight: vocab x d_model. targets: rows, int64. cap: logits x become cap * tanh(x / cap);
        None for no cap. run: `losses_of_chunk`, or compiled code of it. Autocast rounds the factors of the products.
    """
    if _in_one_piece(hidden, weight):  # torch's own is as fast here
        return functional.cross_entropy(_logits(hidden, padded(weight), len(weight), cap), targets)
    return _projected(hidden, weight, _cross_entropy, lambda rows: (targets[rows],), cap, run)[0]


def token_cross_entropies(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """Return -ln softmax(hidden @ weight.T)[target] of each row in nats. Arguments: see `projected_cross_entropy`."""
    table, size = padded(weight), len(weight)
    losses = partial(functional.cross_entropy, reduction="none")
    chunks = _chunks(hidden, weight)
    return torch.cat([losses(_logits(hidden[rows], table, size, cap), targets[rows]) for rows in chunks])


def distilled(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    likely: Tensor,
    log_probabilities: Tensor,
    share: float,
    cap: float | None = None,
    run: Runner = losses_of_chunk,
) -> Distilled:
    """Return the losses of learning from p, another model's predictions; KL(p || model) has weight `share`.

    likely, log_probabilities: rows x n, the most likely tokens under p and their ln p; all other tokens are counted as
        one. The cross-entropy has weight 1 - share. Other arguments: as in `projected_cross_entropy`.
    Source: Hinton et al. 2015, arXiv 1503.02531, at temperature 1.
    """
    left = (1 - log_probabilities.exp().sum(dim=1, keepdim=True)).clamp(min=LEAST_LEFT)
    theirs = torch.cat((log_probabilities, left.log()), dim=1)
    if not _in_one_piece(hidden, weight):
        losses, known = partial(_divergence, share=share), (targets, likely, theirs)
        return Distilled(
            *_projected(hidden, weight, losses, lambda rows: tuple(part[rows] for part in known), cap, run)
        )
    logits = _logits(hidden, padded(weight), len(weight), cap)
    total = logits.logsumexp(dim=1, keepdim=True)
    cross_entropy = (total - logits.gather(1, targets[:, None])).mean()
    rest = logits.scatter(1, likely, -math.inf).logsumexp(dim=1, keepdim=True)
    ours = torch.cat((logits.gather(1, likely), rest), dim=1) - total
    divergence = functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    return Distilled((1 - share) * cross_entropy + share * divergence, cross_entropy, divergence)


def padded(weight: Tensor) -> Tensor:
    """Return a table, vocab x d_model, with rows of 0 appended up to a multiple of its device's ROW_MULTIPLE."""
    num_more = -len(weight) % ROW_MULTIPLE[weight.device.type]
    return functional.pad(weight, (0, 0, 0, num_more)) if num_more else weight


def _logits(hidden: Tensor, table: Tensor, vocab_size: int, cap: float | None) -> Tensor:
    """Return the capped logits of the true vocabulary in fp32, rows x vocab. table: the weight, padded."""
    logits = functional.linear(hidden, table)
    return capped((logits if len(table) == vocab_size else logits[:, :vocab_size]).float(), cap)


def fully_distilled(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    parent_logits: Callable[[slice], Tensor],
    share: float,
    cap: float | None = None,
    run: Runner = losses_of_chunk,
) -> Distilled:
    """Return the losses of `distilled` over the whole vocabulary; the parent's logits are computed in chunks, too.

    parent_logits: returns the parent's logits for a slice of rows, rows x vocab, in fp32 or fp64.
    """
    losses = partial(_full_divergence, share=share)
    return Distilled(*_projected(hidden, weight, losses, lambda rows: (targets[rows], parent_logits(rows)), cap, run))


def _cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    picked = targets.unsqueeze(1)
    lse = logits.logsumexp(dim=1, keepdim=True)
    total = (lse - logits.gather(1, picked)).sum()
    return total[None], _added(logits.sub_(lse).exp_(), picked, -1.0)


def _added(source: Tensor, picked: Tensor, number: float) -> Tensor:
    """Add a number to one column of each row: in place, or in compiled code by one pass over all columns."""
    if torch.compiler.is_compiling():
        columns = torch.arange(source.shape[1], device=source.device)
        return torch.where(columns == picked, source + number, source)
    return source.scatter_add_(1, picked, source.new_full(picked.shape, number))


def _divergence(
    logits: Tensor, targets: Tensor, likely: Tensor, theirs: Tensor, *, share: float
) -> tuple[Tensor, Tensor]:
    """Return sums and gradient of `distilled`. theirs: ln p of the likely tokens and, last, of all others together.

    With q of the model, q_r and p_r of the other tokens, and P = sum p, d KL / d logit_j is P q_j - p_j for a likely
    token and (P - p_r / q_r) q_j for another.
    """
    picked, log_p = targets.unsqueeze(1), theirs.to(logits.dtype)
    lse = logits.logsumexp(dim=1, keepdim=True)
    cross_entropy = (lse - logits.gather(1, picked)).sum()
    log_q = logits.gather(1, likely) - lse
    logits.sub_(lse).exp_().scatter_(1, likely, 0.0)
    q_rest = logits.sum(dim=1, keepdim=True).clamp(min=torch.finfo(logits.dtype).tiny)
    p = log_p.exp()
    divergence = (p * (log_p - torch.cat((log_q, q_rest.log()), dim=1))).sum()
    whole = p.sum(dim=1, keepdim=True)
    logits.mul_(1 - share + share * (whole - p[:, -1:] / q_rest))
    logits.scatter_(1, likely, log_q.exp() * (1 - share + share * whole) - share * p[:, :-1])
    sums = torch.stack(((1 - share) * cross_entropy + share * divergence, cross_entropy, divergence))
    return sums, _added(logits, picked, share - 1)


def _full_divergence(logits: Tensor, targets: Tensor, parent_logits: Tensor, *, share: float) -> tuple[Tensor, Tensor]:
    """Return sums and gradient of `fully_distilled`; d KL / d logit_j is q_j - p_j. Logits beyond p's are -infinity."""
    picked, log_p = targets.unsqueeze(1), parent_logits.to(logits.dtype).log_softmax(dim=1)
    lse = logits.logsumexp(dim=1, keepdim=True)
    cross_entropy = (lse - logits.gather(1, picked)).sum()
    known = logits.sub_(lse)[:, : log_p.shape[1]]
    divergence = functional.kl_div(known, log_p, reduction="sum", log_target=True)
    logits.exp_()
    known.sub_(log_p.exp_(), alpha=share)
    sums = torch.stack(((1 - share) * cross_entropy + share * divergence, cross_entropy, divergence))
    return sums, _added(logits, picked, share - 1)


def _in_one_piece(hidden: Tensor, weight: Tensor) -> bool:
    """Whether to compute all logits at once. On a GPU chunks are faster, even a single one, as they are compiled."""
    # autocast would round logits, which chunks do not
    is_small = len(hidden) * len(weight) <= CHUNK_SIZE["cpu"]
    return hidden.device.type == "cpu" and is_small and not torch.is_autocast_enabled("cpu")


def _projected(
    hidden: Tensor, weight: Tensor, losses: RowLosses, known: Known, cap: float | None, run: Runner
) -> tuple[Tensor, ...]:
    """Return means over rows; the first carries gradients."""
    kind = hidden.device.type
    lowered = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    means: Tensor = _Projected.apply(hidden.to(lowered), weight, partial(run, losses), known, cap)  # type: ignore[no-untyped-call]
    return means[0], *means[1:].detach()


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, run: Runner, known: Known, cap: float | None) -> Tensor:
        wanted = any(ctx.needs_input_grad[:2])
        # on CUDA a captured graph converts the table in each replay, so that no copy is kept
        is_copied = hidden.dtype == torch.bfloat16 and not weight.is_cuda
        matrix = rounded(weight) if is_copied else weight.to(hidden.dtype)
        matrix, num_rows = padded(matrix), len(hidden)
        hidden_grad = torch.empty_like(hidden)
        weight_grad: Tensor | None = None
        total: Tensor | int = 0
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(hidden, weight):
                logits = wide_product(hidden[rows], matrix.T)
                sums, residual = run(logits, known(rows), len(weight), cap, num_rows, hidden.dtype)
                total = total + sums
                if wanted:
                    torch.mm(residual, matrix, out=hidden_grad[rows])
                    if ctx.needs_input_grad[1] and weight_grad is None:
                        weight_grad = wide_product(residual.T, hidden[rows])
                    elif weight_grad is not None:
                        add_product(weight_grad, residual.T, hidden[rows])
        assert isinstance(total, Tensor)
        ctx.save_for_backward(hidden_grad, weight_grad if weight_grad is None else weight_grad[: len(weight)])
        return (total / num_rows).to(torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        weight_grad = None if weight_grad is None else weight_grad * grads[0]
        return hidden_grad * grads[0].to(hidden_grad.dtype), weight_grad, None, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    num_rows = max(LEAST_ROWS, CHUNK_SIZE[hidden.device.type] // len(weight))
    if hidden.is_cuda:  # a power of two: chunks of a usual batch are equal, so that their losses are compiled once
        num_rows = 1 << (num_rows.bit_length() - 1)
    return [slice(start, start + num_rows) for start in range(0, len(hidden), num_rows)]
