"""Agreement of private logits with those in the clear."""

import math
from dataclasses import dataclass

import numpy as np

from costmodel.execution.interpreter import Array

Z_95 = 1.959963984540054  # quantile of the normal distribution that leaves 2.5 % above


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """num_equal of num_positions have the same most likely token; largest_error: of any logit."""

    num_positions: int
    num_equal: int
    largest_error: float

    @property
    def top1(self) -> float:
        """The share, 0 to 1."""
        return self.num_equal / self.num_positions

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the share at 95 %. Source: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953."""
        return wilson(self.num_equal, self.num_positions)


def compared(private: Array, clear: Array) -> Agreement:
    """Both positions x vocab."""
    return Agreement(
        num_positions=len(clear),
        num_equal=int((private.argmax(axis=-1) == clear.argmax(axis=-1)).sum()),
        largest_error=float(np.abs(private - clear).max()),
    )


def joined(parts: list[Agreement]) -> Agreement:
    """The agreement over all positions together."""
    return Agreement(
        num_positions=sum(part.num_positions for part in parts),
        num_equal=sum(part.num_equal for part in parts),
        largest_error=max(part.largest_error for part in parts),
    )


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The interval of a share at 95 %."""
    share, spread = successes / trials, Z_95**2 / trials
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)
