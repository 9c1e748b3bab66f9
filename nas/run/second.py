"""Whether what a front says holds on a second corpus: its order there, and who is dominated there."""

import math
from collections.abc import Sequence
from statistics import correlation

from nas.run.intervals import ERRORS_APART, Documents, differences, document_error, joined, mean_documents
from nas.run.members import TrainedMember


def second_documents(member: TrainedMember) -> Documents:
    """Share and mean loss over seeds of each document of the second corpus; empty where it was not validated there."""
    return mean_documents([trial.second_documents for trial in member.trials])


def second_loss(member: TrainedMember) -> float | None:
    """Nats per token on the second corpus, the mean over seeds; None where it was not validated there."""
    documents = second_documents(member)
    return sum(share * loss for share, loss in documents) if documents else None


def second_error(member: TrainedMember) -> float | None:
    """Standard error of that over seeds and documents, nats; seeds are taken to vary as on the first corpus."""
    return joined(member.seed_error, document_error(second_documents(member)))


def rank_correlation(trained: Sequence[TrainedMember]) -> float | None:
    """Spearman's, of mean losses on both corpora; None of fewer than three members that were validated on both.

    Source: Spearman 1904, "The proof and measurement of association between two things".
    """
    losses = [(member.mean_loss, loss) for member in trained if (loss := second_loss(member)) is not None]
    if len(losses) < 3:
        return None
    first, second = ([sorted(side).index(loss) for loss in side] for side in zip(*losses, strict=True))
    return correlation(first, second)


def holds_on_first_alone(member: TrainedMember, front: Sequence[TrainedMember]) -> bool:
    """Whether a member of a front is, on the second corpus, dominated by another beyond the error of the difference."""
    return any(other.latency_s <= member.latency_s and _below(other, member) for other in front)


def _below(other: TrainedMember, member: TrainedMember) -> bool:
    theirs, ours = second_loss(other), second_loss(member)
    if theirs is None or ours is None:
        return False
    by_document = document_error(differences(second_documents(other), second_documents(member)))
    error = joined(other.seed_error, member.seed_error, by_document)
    return error is not None and ours - theirs > ERRORS_APART * error


def second_perplexity(member: TrainedMember) -> float | None:
    """The exponential of `second_loss`."""
    loss = second_loss(member)
    return None if loss is None else math.exp(loss)
