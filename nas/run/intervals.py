"""How far a mean loss may be off: over the seeds of training, and over the documents of validation, in nats.

    seeds       s / sqrt(number of seeds), s the larger of the pooled deviation of a trial over seeds and, of a member
                with two seeds or more, its own; pooled:
                s^2 = sum over members and seeds of (loss - mean of the member)^2 / sum over members of (seeds - 1)
    documents   sqrt(D / (D - 1) sum over the D documents of (share (loss - mean))^2), mean = sum of share * loss
    both        sqrt(seeds^2 + documents^2)

A seed stands for all that training might have drawn, a document, as a cluster of tokens, for all text of its kind.
Documents differ in how much they count, so their mean is a ratio, nats by tokens, and its error that of a ratio of sums
over clusters. A difference between two models is paired: its losses are the differences by document, in which what
makes a document hard for both cancels, while seeds are independent of one another: sqrt(seeds^2 + seeds'^2 +
documents^2). Some of what seeds vary is in the differences by document too, so that the sum is rather too large.

The larger deviation over seeds, since two or three seeds are often closer to one another than the next will be, and
members that train unstably spread more than the rest. Two errors hold 95 % of a normal distribution, of few degrees of
freedom less.

Source: Cochran 1977, "Sampling Techniques", 3rd ed., chapters 6 (variance of a ratio estimate) and 9A (clusters of
unequal sizes), without the correction for finite populations. NIST/SEMATECH e-Handbook of Statistical Methods, section
1.3.5.3, https://www.itl.nist.gov/div898/handbook/eda/section3/eda353.htm, for pooling and the error of a difference.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import variance
from typing import TypeAlias

ERRORS_APART = 2.0  # standard errors of a difference beyond which it is said to be one

Documents: TypeAlias = tuple[tuple[float, float], ...]  # of each its share in the loss, and its nats per token


def pooled_deviation(losses: Iterable[Sequence[float]]) -> float | None:
    """Standard deviation of a trial over seeds, nats, from the losses of each member; None if none has two."""
    repeated = [group for group in losses if len(group) >= 2]
    if not repeated:
        return None
    freedom = sum(len(group) - 1 for group in repeated)
    return math.sqrt(sum((len(group) - 1) * variance(group) for group in repeated) / freedom)


def seed_error(losses: Sequence[float], pooled: float | None) -> float | None:
    """Standard error over seeds of the mean of a member's losses, at least one; None if no deviation is known."""
    if pooled is None:
        return None
    deviation = math.sqrt(variance(losses)) if len(losses) >= 2 else 0.0
    return max(pooled, deviation) / math.sqrt(len(losses))


def document_error(documents: Documents) -> float | None:
    """Standard error over documents of the mean of their losses; None of fewer than two."""
    count = sum(share > 0 for share, _ in documents)
    if count < 2:
        return None
    mean = sum(share * loss for share, loss in documents)
    return math.sqrt(count / (count - 1) * sum((share * (loss - mean)) ** 2 for share, loss in documents))


def mean_documents(trials: Sequence[Documents]) -> Documents:
    """Losses by document as means over trials; empty unless all of them have the same documents."""
    if len({tuple(share for share, _ in documents) for documents in trials}) != 1:
        return ()
    return tuple((same[0][0], sum(loss for _, loss in same) / len(same)) for same in zip(*trials, strict=True))


def differences(documents: Documents, others: Documents) -> Documents:
    """What the second loses more than the first by document; empty unless both have the same documents."""
    if not mean_documents([documents, others]):
        return ()
    return tuple((share, theirs - ours) for (share, ours), (_, theirs) in zip(documents, others, strict=True))


def joined(*errors: float | None) -> float | None:
    """The error of what is off by all of these, independently; None if none is known."""
    known = [error for error in errors if error is not None]
    return math.hypot(*known) if known else None
