"""What the numbers of a model are under protocol `sigma`."""

from dataclasses import dataclass
from typing import ClassVar

from costmodel.errors import UserError
from costmodel.protocols.primitives import Holder, WeightMasks

MOST_RING_BITS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SigmaSetting:
    """Numbers modulo 2^ring_bits with so many bits after the point, of a model whose weights are secret-shared.

    ring_bits: 50 as the code runs GPT-2 and BERT; 51 for GPT-Neo, 48 for Llama 2, 37 for BERT-tiny (sigma.cu).
    fraction_bits: 12 as the code has for every model, and must for softmax.

    Raises UserError for a ring too small for products of such fractions, or too large, or weights that one party holds.
    """

    formulas_of: ClassVar[str] = "SIGMA, mpc-msri/EzPC f24bf3e"
    weight_masks: ClassVar[WeightMasks] = "fresh"  # a key is good for one run

    ring_bits: int = 50
    fraction_bits: int = 12
    weights: Holder = "secret"

    def __post_init__(self) -> None:
        if self.weights != "secret":
            raise UserError(f"`weights` must be secret under protocol sigma, but got {self.weights}; leave it out.")
        if not 7 <= self.fraction_bits <= 16:
            raise UserError(f"`fraction_bits` must be from 7 to 16 under protocol sigma, but got {self.fraction_bits}.")
        # a product has twice the fraction bits; truncations leave a bit free, and GELU's, of 6 fraction bits, has 10
        if not (least := 2 * self.fraction_bits + 3) <= self.ring_bits <= MOST_RING_BITS:
            raise UserError(
                f"`ring_bits` must be from {least} to {MOST_RING_BITS} under protocol sigma with {self.fraction_bits} "
                f"fraction bits, since products carry twice as many, but got {self.ring_bits}."
            )
