"""Rotary positions: the angle by which each pair of a head's features turns from one position to the next."""

import math
from dataclasses import dataclass

from costmodel.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryScaling:
    """Slower rotation, so that positions of a longer context look like those of a shorter one.

    factor: divisor of the rates of slow pairs. context: tokens of the shorter context; 0 makes every pair slow
        (linear scaling).
    low, high: a pair is slow if it makes fewer than `low` turns within that context; from `high` turns on, its rate is
        not changed; between the two its rate is interpolated.

    Raises UserError unless 1 <= factor < inf, 0 <= low < high < inf and context >= 0.

    Source: Chen et al. 2023, arXiv 2306.15595, for linear scaling; transformers, modeling_rope_utils.py,
    `_compute_llama3_parameters`, for the rest.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    context: int = 0

    def __post_init__(self) -> None:
        if not (1 <= self.factor < math.inf and 0 <= self.low < self.high < math.inf and self.context >= 0):
            raise UserError(
                f"rotary scaling needs a finite factor of at least 1, 0 <= low < high, a context of at least 0, but "
                f"got factor={self.factor}, low={self.low}, high={self.high}, context={self.context}."
            )


def rotary_rates(rotary_dim: int, base: float, scaling: RotaryScaling | None = None) -> list[float]:
    """Return the radians by which each pair f turns per position: base^(-2 f / rotary_dim), slowed down by `scaling`.

    Pair f, from 0 to rotary_dim / 2 - 1, has features f and f + rotary_dim / 2 of a head.

    Source: Su et al. 2021, arXiv 2104.09864, equation 15.
    """
    rates = [base ** -(feature / rotary_dim) for feature in range(0, rotary_dim, 2)]
    if scaling is None:
        return rates
    turns = (scaling.context * rate / (2 * math.pi) for rate in rates)
    kept = [min(1.0, max(0.0, (turn - scaling.low) / (scaling.high - scaling.low))) for turn in turns]
    return [rate * (share + (1 - share) / scaling.factor) for rate, share in zip(rates, kept, strict=True)]
