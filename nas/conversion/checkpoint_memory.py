"""Whether a checkpoint fits into memory, which its configuration tells before a weight is read."""

import math

from costmodel.config.units import format_bytes
from costmodel.errors import UserError
from nas.malloc import free_bytes
from search_spaces.architecture import Architecture
from search_spaces.lower import lower

COPIES = 2  # of every weight in single precision: as it is read, and by our names


def require_memory(architecture: Architecture, path: str) -> None:
    """Raises UserError if so many weights cannot be loaded on this machine."""
    needed, free = COPIES * 4 * num_weights(architecture), free_bytes()
    if free is not None and needed > free:
        raise UserError(
            f"{path!r} has {num_weights(architecture):,} weights, which take {format_bytes(needed)} to load ({COPIES} "
            f"copies in single precision), but {format_bytes(free)} of memory are free; use a machine with more."
        )


def num_weights(architecture: Architecture) -> int:
    """The weights of all nodes of the op graph; a tied table counts twice, as it is written out."""
    graph = lower(architecture, 1)
    return sum(math.prod(shape) for node in graph for shape in node.op.weight_shapes.values())
