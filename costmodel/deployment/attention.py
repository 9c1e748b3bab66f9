"""Finds the ops of each attention, and the sources of its keys and values."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from costmodel import ops
from costmodel.ops import Input, Node, OnRows, OnScores, Op, OpGraph


class Attention(NamedTuple):
    """One attention: its ops from scores to mix, the nodes with its queries and keys, and the node with its values."""

    nodes: tuple[Node, ...]
    packed: str
    values: str

    @property
    def scores(self) -> Node:
        return self.nodes[0]

    @property
    def mix(self) -> Node:
        return self.nodes[-1]

    @property
    def width(self) -> int:
        """Features of the queries of one token; keys and values have as many."""
        assert isinstance(self.mix.op, ops.AttentionMix)
        return self.mix.op.heads * self.mix.op.head_dim

    @property
    def num_queries(self) -> int:
        assert isinstance(self.scores.op, ops.AttentionScores)
        return self.scores.op.queries

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key."""
        return all(node.op.causal for node in self.nodes if isinstance(node.op, ops.Softmax))


def attentions(graph: OpGraph) -> Iterator[Attention]:
    """Yield every attention of a prompt to its own tokens, but none against a cache."""
    by_name = {node.name: node for node in graph}
    for node in graph:
        if isinstance(node.op, ops.AttentionMix):
            chain = [node]
            while not isinstance(chain[0].op, ops.AttentionScores):
                chain.insert(0, by_name[chain[0].inputs[0]])
            if len(chain[0].inputs) == 1:
                yield Attention(nodes=tuple(chain), packed=chain[0].inputs[0], values=node.inputs[1])


def inside(graph: OpGraph) -> dict[str, Attention]:
    """Return the attention of each node that belongs to one, by the node's name."""
    return {node.name: attention for attention in attentions(graph) for node in attention.nodes}


def of_queries(attention: Attention, op: Op, queries: int, keys: int) -> Op:
    """Return an op of an attention for the first `keys` keys and the last `queries` of their queries.

    An element-wise op on scores, such as a cap, has heads x queries rows of `keys` features.
    """
    if isinstance(op, OnScores):
        return replace(op, queries=queries, keys=keys)
    assert isinstance(op, OnRows)
    assert isinstance(attention.mix.op, ops.AttentionMix)
    return replace(op, rows=attention.mix.op.heads * queries, features=keys)


def keys_and_values(attention: Attention, *, rows: int, past_len: int = 0) -> tuple[list[Node], list[Input]]:
    """Return nodes that append keys and values of new tokens to earlier ones, values last, and their inputs.

    If queries, keys and values are packed, one node holds both keys and values.
    """
    scores, width = attention.scores, attention.width
    kept = [("keys", attention.packed, width), ("values", attention.values, width)]
    if attention.packed == attention.values:
        kept = [("keys_values", attention.packed, 2 * width)]
    nodes, inputs = [], []
    for last, source, features in kept:
        module, dot, _ = scores.name.rpartition(".")
        name = f"{module}{dot}{last}"
        past = [Input(name=f"{name}.past", shape=(past_len, features))] if past_len else []
        op = ops.KeyValueCache(past_len=past_len, rows=rows, features=features)
        nodes.append(Node(name=name, layer=scores.layer, op=op, inputs=(*(entry.name for entry in past), source)))
        inputs += past
    return nodes, inputs
