"""The most bytes that one frame of a session may have, from its op graphs; a peer that sends more is not waited for."""

from math import prod

from costmodel.ops import OpGraph
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting

WORD_BYTES = 32  # of an element: two shares of 128 bits each
PROGRAM_BYTES = 1 << 18  # of the code of an op, besides constants with the shape of its output
ROW_BYTES = 1 << 12  # of a program in their table: its name, and the names of what it reads
LEAST_BYTES = 1 << 16  # whatever the graph: seeds, headers of arrays


def most_bytes(steps: tuple[OpGraph, ...], protocol: str, setting: EngineSetting) -> int:
    """Return a limit that no frame exceeds: a share of any array, all programs, or what crypten sends for an op."""
    nodes = [node for graph in steps for node in graph]
    some = {node.op for node in nodes}
    largest = max(  # elements of an array that an op reads or makes
        prod(shape) for op in some for shape in (*op.input_shapes, *op.weight_shapes.values(), op.output_shape)
    )
    if protocol == "crypten":  # opened values and a dealer's masks are frames too; what all send bounds each
        sent = max(ENGINE_PROTOCOLS[protocol].comm(op, setting).sent_bytes for op in some)
        return LEAST_BYTES + WORD_BYTES * largest + sent
    programs = sum(PROGRAM_BYTES + WORD_BYTES * prod(op.output_shape) for op in some) + ROW_BYTES * len(nodes)
    return LEAST_BYTES + WORD_BYTES * largest + programs
