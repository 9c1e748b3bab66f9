"""Where the keys and values of an attention come from, and which of its ops belong together."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from costmodel import ops
from costmodel.ops import Input, Node, OnRows, OnScores, Op, OpGraph


class Attention(NamedTuple):
    """One attention: its ops in order, from scores to mix, and the nodes that hold its queries and keys, and values."""

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
        """Features of the queries of a token, as of its keys and its values."""
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
    """Every attention of a prompt, whose keys are those of its own tokens; one against a cache is left out."""
    by_name = {node.name: node for node in graph}
    for node in graph:
        if isinstance(node.op, ops.AttentionMix):
            chain = [node]
            while not isinstance(chain[0].op, ops.AttentionScores):
                chain.insert(0, by_name[chain[0].inputs[0]])
            if len(chain[0].inputs) == 1:
                yield Attention(nodes=tuple(chain), packed=chain[0].inputs[0], values=node.inputs[1])


def inside(graph: OpGraph) -> dict[str, Attention]:
    """The attention that a node belongs to, by the node's name."""
    return {node.name: attention for attention in attentions(graph) for node in attention.nodes}


def of_queries(attention: Attention, op: Op, queries: int, keys: int) -> Op:
    """An op of an attention for the first so many keys and the last so many queries of those.

    What treats scores alike, such as a cap, has heads x queries rows of so many features as there are keys.
    """
    if isinstance(op, OnScores):
        return replace(op, queries=queries, keys=keys)
    assert isinstance(op, OnRows)
    assert isinstance(attention.mix.op, ops.AttentionMix)
    return replace(op, rows=attention.mix.op.heads * queries, features=keys)


def keys_and_values(attention: Attention, *, rows: int, past_len: int = 0) -> tuple[list[Node], list[Input]]:
    """Nodes that put keys and values of new tokens behind those of earlier ones, the values' last; and their inputs.

    Where queries, keys and values are side by side, there is one node for keys and values.
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
