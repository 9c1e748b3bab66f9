"""The progress of a training, which its checkpoints store besides tensors."""

import math
from dataclasses import dataclass, replace

from nas.training.divergence import WINDOW
from nas.training.outcome import Outcome, RungRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProgress:
    """Progress of a run; plain data.

    initial_loss: that of the first step or, if larger, of the best model without context, since given weights start
        low. losses: of the last steps. Both in nats per token, for the divergence rule.
    """

    step: int = 0
    seconds: float = 0.0
    initial_loss: float | None = None
    losses: tuple[float, ...] = ()
    rungs: tuple[RungRecord, ...] = ()
    outcome: Outcome | None = None

    def counted(self, loss: float, unigram_loss: float) -> "TrainingProgress":
        """Count a step, and its loss if JSON can represent it. unigram_loss: of the best model without context."""
        if not math.isfinite(loss):
            return replace(self, step=self.step + 1)
        initial_loss = max(loss, unigram_loss) if self.initial_loss is None else self.initial_loss
        return replace(self, step=self.step + 1, losses=(*self.losses, loss)[-WINDOW:], initial_loss=initial_loss)
