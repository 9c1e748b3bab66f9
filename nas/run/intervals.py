"""Standard errors of a mean loss, in nats: over the seeds of training, and over the documents of validation.

    seeds       s / sqrt(number of seeds). s is the pooled standard deviation over seeds or, if it is larger, the
                standard deviation of the member's own seeds (two or more). Pooled:
                s^2 = sum over members and seeds of (loss - mean of the member)^2 / sum over members of (seeds - 1)
    documents   sqrt(D / (D - 1) sum over the D documents of (share (loss - mean))^2), mean = sum of share * loss
    both        sqrt(seeds^2 + documents^2)

Seeds sample the randomness of training; documents, as clusters of tokens, sample text of their kind. Documents have
different weights, so their mean is a ratio of two sums over clusters: of nats and of tokens. A difference between two
models is paired by document, so that what makes a document hard for both cancels. Their seeds are independent, so the
error of a difference is sqrt(seeds^2 + seeds'^2 + documents^2). Differences by document contain some variation over
seeds too, so this error is rather too large.

The larger deviation is used because two or three seeds are often closer to each other than the next one will be, and
members with unstable training vary more than others. Two standard errors on either side cover 95 % of a normal
distribution, and less with few degrees of freedom.

Source: Cochran 1977, "Sampling Techniques", 3rd ed., chapters 6 (variance of a ratio estimate) and 9A (clusters of
unequal sizes), without the correction for finite populations. NIST/SEMATECH e-Handbook of Statistical Methods, section
1.3.5.3, https://www.itl.nist.gov/div898/handbook/eda/section3/eda353.htm, for pooling and the error of a difference.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import variance
from typing import TypeAlias

ERRORS_APART = 2.0  # a difference counts if it is larger than so many standard errors

Documents: TypeAlias = tuple[tuple[float, float], ...]  # weight in the mean loss, and loss in nats per token


def pooled_deviation(losses: Iterable[Sequence[float]]) -> float | None:
    """Return the pooled standard deviation over seeds, nats; None if no member has two. losses: a group per member."""
    repeated = [group for group in losses if len(group) >= 2]
    if not repeated:
        return None
    freedom = sum(len(group) - 1 for group in repeated)
    return math.sqrt(sum((len(group) - 1) * variance(group) for group in repeated) / freedom)


def seed_error(losses: Sequence[float], pooled: float | None) -> float | None:
    """Return the standard error over seeds of a member's mean loss, nats; None if `pooled_deviation` gave None."""
    if pooled is None:
        return None
    deviation = math.sqrt(variance(losses)) if len(losses) >= 2 else 0.0
    return max(pooled, deviation) / math.sqrt(len(losses))


def document_error(documents: Documents) -> float | None:
    """Return the standard error of the mean loss over documents, nats; None without two documents of weight above 0."""
    count = sum(share > 0 for share, _ in documents)
    if count < 2:
        return None
    mean = sum(share * loss for share, loss in documents)
    return math.sqrt(count / (count - 1) * sum((share * (loss - mean)) ** 2 for share, loss in documents))


def mean_documents(trials: Sequence[Documents]) -> Documents:
    """Return the mean over trials of each document's loss; empty unless the weights are the same in all trials."""
    if len({tuple(share for share, _ in documents) for documents in trials}) != 1:
        return ()
    return tuple((same[0][0], sum(loss for _, loss in same) / len(same)) for same in zip(*trials, strict=True))


def differences(documents: Documents, others: Documents) -> Documents:
    """Return each loss of `others` minus that of `documents`; empty unless the weights of both are the same."""
    if not mean_documents([documents, others]):
        return ()
    return tuple((share, theirs - ours) for (share, ours), (_, theirs) in zip(documents, others, strict=True))


def joined(*errors: float | None) -> float | None:
    """Return the root of the sum of squares of the errors that are not None; None if all are None."""
    known = [error for error in errors if error is not None]
    return math.hypot(*known) if known else None
