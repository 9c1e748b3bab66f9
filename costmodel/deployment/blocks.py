"""Computes attention in blocks of queries, and the vocabulary projection in blocks of entries.

Without blocks a secret-shared engine computes the whole square of scores, of which a causal mask uses half; a block of
queries only needs the keys up to its own end. The engine cuts a product whose factors are larger than
`op_programs.TILE_BYTES` along rows and columns, and opens a factor again for every cut of the other one; a block of
entries that fits whole is opened once.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from costmodel import ops
from costmodel.deployment.attention import Attention, attentions, keys_and_values, of_queries
from costmodel.errors import UserError
from costmodel.ops import Node, OpGraph


def in_query_blocks(graph: OpGraph, size: int) -> OpGraph:
    """Return the graph with every causal attention of more than `size` queries in blocks; the last may be smaller.

    The ops of a block are named `NAME@FIRST`, FIRST being its first query; the op that joins them has the mix's name.
    """
    mixes = {
        attention.mix.name: attention
        for attention in attentions(graph)
        if attention.is_causal and attention.num_queries > size
    }
    inside = {node.name for attention in mixes.values() for node in attention.nodes}
    nodes: list[Node] = []
    for node in graph:
        if node.name in mixes:  # here all inputs of the attention's ops exist
            nodes += _query_blocks(mixes[node.name], size)
        elif node.name not in inside:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _query_blocks(attention: Attention, size: int) -> Iterator[Node]:
    layer, num_rows, width = attention.scores.layer, attention.num_queries, attention.width
    kept, _ = keys_and_values(attention, rows=num_rows)
    yield from kept
    features = [node.op.output_shape[1] for node in kept]
    parts = []
    for first in range(0, num_rows, size):
        end = min(first + size, num_rows)
        # queries, packed with keys and possibly values
        query = ops.TakeRows(rows=num_rows, features=width + features[0], taken=end - first, first=first)
        queries = f"{attention.packed}@{first}"
        yield Node(name=queries, layer=layer, op=query, inputs=(attention.packed,))
        for node, num_features in zip(kept, features, strict=True):
            seen = ops.TakeRows(rows=num_rows, features=num_features, taken=end)
            yield Node(name=f"{node.name}@{first}", layer=layer, op=seen, inputs=(node.name,))
        keys, values = f"{kept[0].name}@{first}", f"{kept[-1].name}@{first}"
        for node in attention.nodes:
            read = {attention.scores.name: (queries, keys), attention.mix.name: (f"{node.inputs[0]}@{first}", values)}
            inputs = read.get(node.name, (f"{node.inputs[0]}@{first}",))
            part = of_queries(attention, node.op, end - first, end)
            yield Node(name=f"{node.name}@{first}", layer=layer, op=part, inputs=inputs)
        parts.append(f"{attention.mix.name}@{first}")
    joined = ops.JoinRows(rows=num_rows, features=width, part=size)
    yield Node(name=attention.mix.name, layer=layer, op=joined, inputs=tuple(parts))


def in_vocab_blocks(graph: OpGraph, num_blocks: int) -> OpGraph:
    """Return the graph with its vocabulary projection in at most `num_blocks` blocks of one size, but for the last.

    Blocks are named `NAME@FIRST`, FIRST being the first entry, and joined under NAME. A UserError is raised if there is
    no projection, or one with fewer entries than blocks.
    """
    projections = [node.op for node in graph if isinstance(node.op, ops.VocabProjection)]
    if not projections or min(op.vocab for op in projections) < num_blocks:
        have = f"a vocabulary of {min(op.vocab for op in projections)}" if projections else "no vocabulary projection"
        raise UserError(f"`vocab_blocks` must be of at least an entry each, but got {num_blocks} and {have}.")
    return replace(graph, nodes=tuple(part for node in graph for part in _vocab_blocks(node, num_blocks)))


def _vocab_blocks(node: Node, num_blocks: int) -> Iterator[Node]:
    op = node.op
    if isinstance(op, ops.VocabProjection):
        size, parts = ceil(op.vocab / num_blocks), []
        for first in range(0, op.vocab, size):
            part = replace(op, vocab=min(size, op.vocab - first), first=first, whole=op.vocab)
            parts.append(replace(node, name=f"{node.name}@{first}", op=part))
        yield from parts
        op = ops.JoinColumns(rows=op.rows, features=op.vocab, part=size)
        node = replace(node, op=op, inputs=tuple(block.name for block in parts))
    yield node
