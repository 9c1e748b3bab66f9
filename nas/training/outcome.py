"""Reports of training, as data without torch: a record at every rung (validation), and an outcome at the end."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from search_spaces.architecture import Architecture


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropySummary:
    """Attention entropies of a model; in records and outcomes, on the validation split.

    head_means: mean entropy over query rows and sequences, nats, by layer and head. num_collapsed: number of heads with
        a mean below 0.02 ln(seq_len). quarter_shares: share of heads in each quarter of the range from 0 to the largest
        mean, lowest first; they sum to 1, or to 0 without heads.
    """

    head_means: tuple[tuple[float, ...], ...]
    num_collapsed: int
    quarter_shares: tuple[float, float, float, float]

    @property
    def flags(self) -> tuple[str, ...]:
        """The names of the conditions that hold. They are recorded, and do not stop the training.

        `entropy-collapse`: at least one head has collapsed. `entropic-overload`: more than a quarter of the heads are
        in the highest quarter of the range, where an even spread would put a quarter of them.
        """
        flags = {"entropy-collapse": self.num_collapsed > 0, "entropic-overload": self.quarter_shares[3] > 0.25}
        return tuple(name for name, raised in flags.items() if raised)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedForm:
    """The folded form of a trained model, and how it compares with the trained model.

    Attributes:
        architecture: the folded architecture, in the dimensions for which costs are computed.
        left: texts, with reasons, on parts that these weights do not allow to fold, and on what they bring out of
            fixed-point range.
        logits_error: largest difference of a logit from the trained model's in single precision, relative to the
            largest logit.
        fixed_point_error, trained_fixed_point_error: the same error of the folded and of the trained model in fixed
            point, against the trained model in double precision.
        top1_agreement: share of positions with the same most likely token as the trained model.
        holds: whether the folded model may replace the trained one (`nas.conversion.verified_fold`).
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

    divergence: mean KL(parent || model), nats per token. top1: share of positions with the same most likely token.
    """

    divergence: float
    top1: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RungRecord:
    """A validation during training, after `share` of the steps of a final training. rung: index, from 0.

    val_loss: nats per token; perplexity = exp(val_loss). seconds: wall time of the trial so far, in all its processes.
    documents: weight in the loss, and nats per token, of each validation document; empty before the last rung.
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
    """The end of a training that was not stopped early. If diverged, it has no loss, perplexity, entropy and documents.

    reason, layer: why and where step `steps` diverged, e.g. `non-finite gradient at step 312, first in
        layers.3.attention.qkv`; None if completed.
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
