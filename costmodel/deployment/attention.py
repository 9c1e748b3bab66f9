"""Where the keys and values of an attention come from, and which of its ops belong together."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from costmodel import ops
from costmodel.ops import Node, OnRows, OnScores, Op, OpGraph


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
    def is_causal(self) -> bool:
        """Whether no query sees a later key."""
        return all(node.op.causal for node in self.nodes if isinstance(node.op, ops.Softmax))

    @property
    def packs_values(self) -> bool:
        """Whether queries, keys and values are side by side."""
        return self.packed == self.values


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


def beside(name: str, last: str) -> str:
    """A name in the module of another node."""
    module, dot, _ = name.rpartition(".")
    return f"{module}{dot}{last}"


def keys_and_values(attention: Attention) -> list[tuple[str, str, int]]:
    """What is kept of each token: name, the node whose last features it is, and how many."""
    scores = attention.scores.name
    if attention.packs_values:
        return [(beside(scores, "keys_values"), attention.packed, 2 * attention.width)]
    return [
        (beside(scores, "keys"), attention.packed, attention.width),
        (beside(scores, "values"), attention.values, attention.width),
    ]
