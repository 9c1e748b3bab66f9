"""`Positions`: how a layer's attention uses positions."""

from dataclasses import dataclass

from costmodel.ops.rotary import RotaryScaling


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """The rotation of a layer's queries and keys, and its window of attention.

    rotates: whether queries and keys are rotated, if the block has rotary positions.
    base: base of the rotary angles; None for the architecture's `rotary_base`.
    scaling: scaling of the rotary angles; None if they are not scaled.
    window: number of tokens that a query attends to, its own included; None for all. Sequences must not be longer
        than the shortest window of a model.
    """

    rotates: bool = True
    base: float | None = None
    scaling: RotaryScaling | None = None
    window: int | None = None
