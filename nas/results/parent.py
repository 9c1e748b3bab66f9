"""What the parent of a run's candidates reaches, as it was given."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ParentResult:
    """The unmodified parent, validated and priced as candidates are.

    name: as the user gave it. notation: of its placement. val_loss: nats per token. latency_s: seconds per token.
    """

    name: str
    notation: str
    val_loss: float
    latency_s: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.val_loss)
