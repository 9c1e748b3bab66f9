"""Checks from its configuration whether a checkpoint fits into memory, before any weight is read."""

import math

from costmodel.config.units import format_bytes
from costmodel.errors import UserError
from nas.malloc import free_bytes
from search_spaces.architecture import Architecture
from search_spaces.lower import lower

COPIES = 2  # of every weight in single precision: as it is read, and under our name


def require_memory(architecture: Architecture, path: str) -> None:
    """Raise UserError if the weights of an architecture do not fit into the free memory."""
    needed, free = COPIES * 4 * num_weights(architecture), free_bytes()
    if free is not None and needed > free:
        raise UserError(
            f"{path!r} has {num_weights(architecture):,} weights, which take {format_bytes(needed)} to load ({COPIES} "
            f"copies in single precision), but {format_bytes(free)} of memory are free; use a machine with more."
        )


def num_weights(architecture: Architecture) -> int:
    """Return the number of weights of all nodes of the op graph; a tied table is stored, and counted, twice."""
    graph = lower(architecture, 1)
    return sum(math.prod(shape) for node in graph for shape in node.op.weight_shapes.values())
