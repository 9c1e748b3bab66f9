"""What the numbers of a model are under protocol `crypten`."""

from dataclasses import dataclass
from typing import ClassVar

from costmodel.errors import UserError
from costmodel.protocols.primitives import Holder, WeightMasks

RING_BITS = 64  # arithmetic.py: shares are torch.long
MOST_FRACTION_BITS = 24  # of what a party encodes, in single precision


@dataclass(frozen=True, kw_only=True, slots=True)
class CryptenSetting:
    """Numbers modulo 2^64 with so many bits after the point, of a model whose weights are secret-shared.

    fraction_bits: 16, `precision_bits` of its configs/default.yaml.

    Raises UserError for another ring, a fraction that it cannot encode, or weights that one party holds.
    """

    formulas_of: ClassVar[str] = "CrypTen 0.4.1"
    weight_masks: ClassVar[WeightMasks] = "fresh"

    ring_bits: int = RING_BITS
    fraction_bits: int = 16
    weights: Holder = "secret"

    def __post_init__(self) -> None:
        if self.weights != "secret":
            raise UserError(f"`weights` must be secret under protocol crypten, but got {self.weights}; leave it out.")
        if self.ring_bits != RING_BITS:
            raise UserError(f"`ring_bits` must be {RING_BITS} under protocol crypten, but got {self.ring_bits}.")
        if not 1 <= self.fraction_bits <= MOST_FRACTION_BITS:
            raise UserError(
                f"`fraction_bits` must be from 1 to {MOST_FRACTION_BITS} under protocol crypten, which encodes numbers "
                f"of single precision, but got {self.fraction_bits}."
            )
