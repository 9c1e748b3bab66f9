"""Reports of training: a record at every rung and one outcome at the end. Plain data, no torch."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from search_spaces.architecture import Architecture


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropySummary:
    """Attention entropy on the validation split.

    head_means: of each layer its heads', nats, mean over query rows and sequences.
    num_collapsed: heads whose mean is below 0.02 ln(seq_len).
    quarter_shares: shares of heads in the four quarters of the largest mean, lowest first; they sum to 1, to 0
        if there is no head.
    """

    head_means: tuple[tuple[float, ...], ...]
    num_collapsed: int
    quarter_shares: tuple[float, float, float, float]

    @property
    def flags(self) -> tuple[str, ...]:
        """Observations that stop nothing.

        `entropy-collapse`: some head has collapsed. `entropic-overload`: more heads are overloaded than the quarter
        that an even spread over the four quarters would give (one always is: that with the largest mean).
        """
        flags = {"entropy-collapse": self.num_collapsed > 0, "entropic-overload": self.quarter_shares[3] > 0.25}
        return tuple(name for name, raised in flags.items() if raised)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedForm:
    """The form of a trained model that is run, as folding verified it.

    architecture: at the dimensions that are priced. left: what the rule promises to fold and these weights do not
        allow, with the reason.
    logits_error: largest difference of a logit to the trained model's, relative to the largest logit; single precision.
    fixed_point_error, trained_fixed_point_error: the same of the folded and of the trained model in fixed point.
    top1_agreement: share of positions whose likeliest token is the trained model's.
    holds: whether all of that is within the bars of `nas.conversion.verified_fold`.
    """

    architecture: Architecture
    left: tuple[str, ...]
    logits_error: float
    fixed_point_error: float
    trained_fixed_point_error: float
    top1_agreement: float
    holds: bool


class Agreement(NamedTuple):
    """How a model's predictions differ from its parent's on validation text.

    divergence: mean KL(parent || model), nats per token. top1: share of positions at which the most likely token of
    both is the same.
    """

    divergence: float
    top1: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RungRecord:
    """A validation in mid-training, after `share` of the tokens of full fidelity.

    val_loss: nats per token; perplexity = exp(val_loss).
    seconds: wall time spent on the trial so far, in all its processes.
    documents: of the last rung, the share of each validation document in the loss, and its nats per token.
    """

    rung: int
    share: float
    steps: int
    tokens: int
    val_loss: float
    perplexity: float
    entropy: EntropySummary
    seconds: float
    documents: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of a trial that nobody stopped. Only a `completed` one has losses.

    reason, layer: of a divergence, e.g. `non-finite gradient at step 312, first in layers.3.attention.qkv`; steps is
        then the step it happened in.
    """

    status: Literal["completed", "diverged"]
    steps: int
    tokens: int
    seconds: float
    val_loss: float | None = None
    perplexity: float | None = None
    entropy: EntropySummary | None = None
    reason: str | None = None
    layer: str | None = None
    documents: tuple[tuple[float, float], ...] = ()


def completed(record: RungRecord) -> Outcome:
    """The outcome of a run whose last rung this is."""
    return Outcome(
        status="completed",
        steps=record.steps,
        tokens=record.tokens,
        seconds=record.seconds,
        val_loss=record.val_loss,
        perplexity=record.perplexity,
        entropy=record.entropy,
        documents=record.documents,
    )
