"""Agreement of private logits with logits in plaintext."""

import math
from dataclasses import dataclass

import numpy as np

from costmodel.execution.interpreter import Array

Z_95 = 1.959963984540054  # 0.975 quantile of the standard normal distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Number of positions with the same most likely token, and the largest absolute error of any logit.

    largest_share: the largest error relative to the largest logit of its step.
    """

    num_positions: int
    num_equal: int
    largest_error: float
    largest_share: float = 0.0

    @property
    def top1(self) -> float:
        """Share of positions with the same most likely token, from 0 to 1."""
        return self.num_equal / self.num_positions

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of `top1`. Source: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953."""
        return wilson(self.num_equal, self.num_positions)


def compared(private: Array, clear: Array) -> Agreement:
    """Return the agreement of two arrays of logits, each positions x vocab."""
    error, largest = float(np.abs(private - clear).max()), float(np.abs(clear).max())
    return Agreement(
        num_positions=len(clear),
        num_equal=int((private.argmax(axis=-1) == clear.argmax(axis=-1)).sum()),
        largest_error=error,
        largest_share=error / largest if largest else error,
    )


def joined(parts: list[Agreement]) -> Agreement:
    """Return the agreement over the positions of all parts."""
    return Agreement(
        num_positions=sum(part.num_positions for part in parts),
        num_equal=sum(part.num_equal for part in parts),
        largest_error=max(part.largest_error for part in parts),
        largest_share=max(part.largest_share for part in parts),
    )


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share (Wilson score interval)."""
    share, spread = successes / trials, Z_95**2 / trials
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)
