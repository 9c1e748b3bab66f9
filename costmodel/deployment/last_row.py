"""Keeps of a prompt's graph what the logits of its last token need.

Followed back from the logits: an op that works row by row needs the last row of what it reads, an attention the last
row of its queries, but all keys and values. What is needed whole anywhere is computed whole, and its last row taken.
All tokens are embedded, since they are the client's input.
"""

from dataclasses import replace

from costmodel import ops
from costmodel.deployment.attention import (
    BY_QUERY,
    ROWWISE,
    Attention,
    attentions,
    features,
    keys_and_values,
    last_token,
)
from costmodel.ops import Node, OpGraph


def for_last_row(graph: OpGraph, *, through_layers: bool) -> OpGraph:
    """The graph with the logits of the last token alone.

    through_layers: whether layers leave out rows too, or only what comes after them.
    """
    logits = graph.nodes[-1].op
    if not isinstance(logits, ops.VocabProjection) or logits.rows == 1:
        return graph
    rewriter = _Rewriter(graph, logits.rows, _whole(graph, through_layers=through_layers))
    for node in graph:
        rewriter.add(node)
    return replace(graph, nodes=tuple(rewriter.nodes))


class _Rewriter:
    """Collects the nodes of the new graph. whole: those that are computed for all rows."""

    def __init__(self, graph: OpGraph, num_rows: int, whole: set[str]) -> None:
        self.num_rows, self.whole, self.sizes = num_rows, whole, features(graph)
        self.attentions = {each.scores.name: each for each in attentions(graph)}
        self.nodes: list[Node] = []
        self.last: dict[str, str] = {}  # a node, and the one that holds its last row

    def add(self, node: Node) -> None:
        if node.name in self.whole:
            self.nodes.append(node)
            return
        if node.name in self.attentions:
            read: tuple[str, ...] = self._query_and_keys(self.attentions[node.name])
        elif isinstance(node.op, ops.AttentionMix):
            read = node.inputs
        else:
            read = tuple(self._last_of(name, node) for name in node.inputs)
        self.nodes.append(replace(node, op=last_token(node.op, self.num_rows), inputs=read))
        self.last[node.name] = node.name

    def _last_of(self, name: str, reader: Node) -> str:
        if name not in self.last:
            op = ops.TakeRows(rows=self.num_rows, features=self.sizes[name], taken=1, first=self.num_rows - 1)
            self.last[name] = f"{name}@last"
            self.nodes.append(Node(name=self.last[name], layer=reader.layer, op=op, inputs=(name,)))
        return self.last[name]

    def _query_and_keys(self, attention: Attention) -> tuple[str, str]:
        name, source, size = keys_and_values(attention)[0]
        keys = ops.KeyValueCache(past_len=0, rows=self.num_rows, features=size)
        self.nodes.append(Node(name=name, layer=attention.scores.layer, op=keys, inputs=(source,)))
        return self._last_of(attention.packed, attention.scores), name


def _whole(graph: OpGraph, *, through_layers: bool) -> set[str]:
    """The nodes that are needed for all rows, from the logits back."""
    whole: set[str] = {"tokens"}
    for node in reversed(graph.nodes):
        inside = through_layers or node.layer == "head"
        may_shrink = isinstance(node.op, ROWWISE + BY_QUERY) and not isinstance(node.op, ops.TokenEmbedding)
        if node.name in whole or not (inside and may_shrink):
            whole.update((node.name, *node.inputs))
        elif isinstance(node.op, ops.AttentionScores):
            whole.update(node.inputs)  # for its keys
        elif isinstance(node.op, ops.AttentionMix):
            whole.add(node.inputs[1])
    return whole
