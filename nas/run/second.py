"""Whether the results of a front hold on a second corpus: its order there, and members dominated there."""

import math
from collections.abc import Sequence
from statistics import correlation

from nas.run.intervals import ERRORS_APART, Documents, differences, document_error, joined, mean_documents
from nas.run.members import TrainedMember


def second_documents(member: TrainedMember) -> Documents:
    """Share and mean loss over seeds of each document of the second corpus; empty if not validated on it."""
    return mean_documents([trial.second_documents for trial in member.trials])


def second_loss(member: TrainedMember) -> float | None:
    """Mean loss over seeds on the second corpus, nats per token; None if not validated there."""
    documents = second_documents(member)
    return sum(share * loss for share, loss in documents) if documents else None


def second_error(member: TrainedMember) -> float | None:
    """Standard error of `second_loss` over seeds and documents, nats, with the seed error of the first corpus."""
    return joined(member.seed_error, document_error(second_documents(member)))


def rank_correlation(trained: Sequence[TrainedMember]) -> float | None:
    """Spearman correlation of mean losses on both corpora; None for fewer than three members validated on both.

    Source: Spearman 1904, "The proof and measurement of association between two things".
    """
    losses = [(member.mean_loss, loss) for member in trained if (loss := second_loss(member)) is not None]
    if len(losses) < 3:
        return None
    first, second = ([sorted(side).index(loss) for loss in side] for side in zip(*losses, strict=True))
    return correlation(first, second)


def holds_on_first_alone(member: TrainedMember, front: Sequence[TrainedMember]) -> bool:
    """Whether another member dominates this one on the second corpus by more than the error of the difference."""
    return any(other.latency_s <= member.latency_s and _below(other, member) for other in front)


def _below(other: TrainedMember, member: TrainedMember) -> bool:
    theirs, ours = second_loss(other), second_loss(member)
    if theirs is None or ours is None:
        return False
    by_document = document_error(differences(second_documents(other), second_documents(member)))
    error = joined(other.seed_error, member.seed_error, by_document)
    return error is not None and ours - theirs > ERRORS_APART * error


def second_perplexity(member: TrainedMember) -> float | None:
    """Exponential of `second_loss`."""
    loss = second_loss(member)
    return None if loss is None else math.exp(loss)
