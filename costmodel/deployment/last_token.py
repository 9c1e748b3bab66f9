"""The op graph of a prompt's last token alone: as it follows a prompt, or within the run of the whole one.

Followed back from the logits: an op that works row by row needs the last row of what it reads, an attention the last
row of its queries, but all keys and values. In phase decode the keys and values of all tokens before it have been
kept. Else what is needed whole anywhere is computed whole, and its last row taken; all tokens are embedded, since they
are the client's input.
"""

from dataclasses import replace

from costmodel import ops
from costmodel.deployment.attention import Attention, inside, keys_and_values, of_queries
from costmodel.errors import UserError
from costmodel.ops import Input, Node, Op, OpGraph, output_shapes


def decode_step(graph: OpGraph, num_tokens: int | None = None) -> OpGraph:
    """A prompt's graph for its last token; one of a single token is that already.

    num_tokens: of the prompt, that token included; by default as many as the graph has.

    Raises UserError for an attention to later tokens, or an op that mixes tokens in another way.
    """
    if num_tokens is None:
        num_tokens = next(node.op.tokens for node in graph if isinstance(node.op, ops.TokenEmbedding))
    if num_tokens == 1:
        return graph
    in_attention = inside(graph)
    kept: dict[str, str] = {}  # a mix, and where its values are
    rewritten: dict[Op, Op] = {}  # outside of attention; layers repeat their ops
    nodes: list[Node] = []
    inputs: list[Input] = []
    for node in graph:
        attention, read = in_attention.get(node.name), node.inputs
        if attention is not None and node.name == attention.scores.name:
            caches, pasts = _caches(attention, num_tokens)
            nodes += caches
            inputs += pasts
            kept[attention.mix.name] = caches[-1].name
            read = (attention.packed, caches[0].name)
        elif node.name in kept:
            read = (node.inputs[0], kept[node.name])
        if attention is None and node.op not in rewritten:
            rewritten[node.op] = _last_token(node, None, num_tokens)
        op = rewritten[node.op] if attention is None else _last_token(node, attention, num_tokens)
        nodes.append(Node(name=node.name, layer=node.layer, op=op, inputs=read))
    return OpGraph(nodes=tuple(nodes), inputs=tuple(inputs))


def _caches(attention: Attention, num_tokens: int) -> tuple[list[Node], list[Input]]:
    """The nodes that put the keys and values of the last token behind the others', the values' last; their inputs."""
    nodes, inputs = [], []
    for name, source, features in keys_and_values(attention):
        past = Input(name=f"{name}.past", shape=(num_tokens - 1, features))
        op = ops.KeyValueCache(past_len=num_tokens - 1, rows=1, features=features)
        nodes.append(Node(name=name, layer=attention.scores.layer, op=op, inputs=(past.name, source)))
        inputs.append(past)
    return nodes, inputs


def _last_token(node: Node, attention: Attention | None, num_tokens: int) -> Op:
    if attention is not None and attention.is_causal:
        return of_queries(attention, node.op, 1, num_tokens)
    if attention is None and node.op.is_rowwise:
        return node.op.of_rows(num_tokens - 1, 1)
    kind = "attends to later tokens" if attention is not None else f"is {type(node.op).__name__}"
    raise UserError(f"phase decode needs ops that work token by token or look back, but {node.name!r} {kind}.")


def for_last_row(graph: OpGraph, *, through_layers: bool) -> OpGraph:
    """The graph with the logits of the last token alone.

    through_layers: whether layers leave out rows too, or only what comes after them.
    """
    num_tokens = next(node.op.tokens for node in graph if isinstance(node.op, ops.TokenEmbedding))
    last = graph.nodes[-1].op
    if num_tokens == 1 or not last.is_rowwise or last != last.of_rows(0, num_tokens):
        return graph  # its last op is of one row already, as that of a classifier
    rewriter = _Rewriter(graph, num_tokens, _whole(graph, through_layers=through_layers))
    for node in graph:
        rewriter.add(node)
    return replace(graph, nodes=tuple(rewriter.nodes))


class _Rewriter:
    """Collects the nodes of the new graph. whole: those that are computed for all rows."""

    def __init__(self, graph: OpGraph, num_rows: int, whole: set[str]) -> None:
        self.num_rows, self.whole, self.shapes = num_rows, whole, output_shapes(graph)
        self.inside = inside(graph)
        self.nodes: list[Node] = []
        self.last: dict[str, str] = {}  # a node, and the one that holds its last row

    def add(self, node: Node) -> None:
        if node.name in self.whole:
            self.nodes.append(node)
            return
        if attention := self.inside.get(node.name):
            op = of_queries(attention, node.op, 1, self.num_rows)
            read = self._query_and_keys(attention) if node == attention.scores else node.inputs
        else:
            op = node.op.of_rows(self.num_rows - 1, 1)
            read = tuple(self._last_of(name, node) for name in node.inputs)
        self.nodes.append(replace(node, op=op, inputs=read))
        self.last[node.name] = node.name

    def _last_of(self, name: str, reader: Node) -> str:
        if name not in self.last:
            op = ops.TakeRows(rows=self.num_rows, features=self.shapes[name][-1], taken=1, first=self.num_rows - 1)
            self.last[name] = f"{name}@last"
            self.nodes.append(Node(name=self.last[name], layer=reader.layer, op=op, inputs=(name,)))
        return self.last[name]

    def _query_and_keys(self, attention: Attention) -> tuple[str, ...]:
        name, source, size = keys_and_values(attention)[0]
        keys = ops.KeyValueCache(past_len=0, rows=self.num_rows, features=size)
        self.nodes.append(Node(name=name, layer=attention.scores.layer, op=keys, inputs=(source,)))
        return self._last_of(attention.packed, attention.scores), name


def _whole(graph: OpGraph, *, through_layers: bool) -> set[str]:
    """The nodes that are needed for all rows, from the logits back."""
    whole, in_attention = {"tokens"}, inside(graph)
    for node in reversed(graph.nodes):
        may_shrink = through_layers or node.layer == "head"
        by_token = node.name in in_attention or node.op.is_rowwise
        if node.name in whole or not (may_shrink and by_token) or isinstance(node.op, ops.TokenEmbedding):
            whole.update((node.name, *node.inputs))
        elif isinstance(node.op, ops.AttentionScores):
            whole.update(node.inputs)  # for its keys
        elif isinstance(node.op, ops.AttentionMix):
            whole.add(node.inputs[1])
    return whole
