"""The vocabulary projection in blocks of entries: products that the engine need not cut to tiles.

The engine cuts a product whose factors are larger than `op_programs.TILE_BYTES` along rows and columns, and opens a
factor anew for every cut of the other one; a block that fits whole is opened once.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from costmodel import ops
from costmodel.errors import UserError
from costmodel.ops import Node, OpGraph


def in_vocab_blocks(graph: OpGraph, num_blocks: int) -> OpGraph:
    """The graph with its vocabulary projection in at most so many blocks of one size, the last one smaller if need be.

    A block has the name of the whole one, `@` and its first entry; what joins them has the whole one's name.

    Raises UserError if there is no projection, or one of fewer entries.
    """
    found = [node.op for node in graph if isinstance(node.op, ops.VocabProjection)]
    if not found or min(op.vocab for op in found) < num_blocks:
        have = f"a vocabulary of {min(op.vocab for op in found)}" if found else "no vocabulary projection"
        raise UserError(f"`vocab_blocks` must be of at least an entry each, but got {num_blocks} and {have}.")
    return replace(graph, nodes=tuple(part for node in graph for part in _blocks(node, num_blocks)))


def _blocks(node: Node, num_blocks: int) -> Iterator[Node]:
    op = node.op
    if isinstance(op, ops.VocabProjection):
        size, parts = ceil(op.vocab / num_blocks), []
        for first in range(0, op.vocab, size):
            part = replace(op, vocab=min(size, op.vocab - first), first=first, whole=op.vocab)
            parts.append(replace(node, name=f"{node.name}@{first}", op=part))
        yield from parts
        op = ops.JoinColumns(rows=op.rows, features=op.vocab, part=size)
        node = replace(node, op=op, inputs=tuple(each.name for each in parts))
    yield node
