"""Rewrites of op graphs: attention in blocks of queries, the vocabulary in blocks of entries, the last token alone.

Without blocks, an engine computes the whole square of scores, of which a causal mask uses half; a block of queries only
needs the keys up to the block's end. If the factors of a product exceed `op_programs.TILE_BYTES`, the engine cuts the
product into tiles, and opens a part of a factor again for every tile that needs the part; in blocks that need no tiles,
the vocabulary's entries are opened once.

For the last token alone, ops are followed back from the logits: a row-wise op needs the last row of its inputs;
attention needs the last row of queries, but all keys and values. In phase decode the keys and values of earlier tokens
are cached, so that only the last token is embedded. In phase prefill, a value of which some op needs all rows is
computed for all, and other ops take its last row; all tokens are embedded, since they are the client's input.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from costmodel import ops
from costmodel.errors import UserError
from costmodel.ops import Input, Node, OnRows, OnScores, Op, OpGraph, output_shapes


class Attention(NamedTuple):
    """The nodes of one attention, from scores to mix, and the names of what it reads.

    packed: the queries and keys side by side, perhaps with values. values: the values; `packed` if it has them.
    """

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
        """Number of features of one token's queries; its keys and its values have as many."""
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
    """Yield every attention in which a prompt attends to its own tokens; those that read cached keys are left out."""
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
    """Return an op of an attention, cut to the first `keys` tokens as keys, and the last `queries` of these as queries.

    An element-wise op on scores, such as a cap, takes scores as heads x queries rows of `keys` features.
    """
    if isinstance(op, OnScores):
        return replace(op, queries=queries, keys=keys)
    assert isinstance(op, OnRows)
    assert isinstance(attention.mix.op, ops.AttentionMix)
    return replace(op, rows=attention.mix.op.heads * queries, features=keys)


def keys_and_values(attention: Attention, *, rows: int, past_len: int = 0) -> tuple[list[Node], list[Input]]:
    """Return nodes that append keys and values of `rows` new tokens to `past_len` earlier ones, and graph inputs.

    The first node has the keys and the last one the values; if queries, keys and values are packed, there is only one
    node. Each node reads a graph input with the earlier tokens' keys or values; with `past_len` 0, there are no inputs.
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


def in_query_blocks(graph: OpGraph, size: int) -> OpGraph:
    """Return the graph with every causal attention of more than `size` queries in blocks of `size` or fewer queries.

    The ops of a block are named `NAME@FIRST`, FIRST being its first query; the op that joins blocks has the mix's name.
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
    """Return the graph with its vocabulary projection in at most `num_blocks` blocks, all but the last of one size.

    Blocks are named `NAME@FIRST`, with the number of their first entry, and joined under NAME. A UserError is raised if
    there is no projection, or one with fewer entries than `num_blocks`.
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


def decode_step(graph: OpGraph, num_tokens: int | None = None) -> OpGraph:
    """Return the graph for the last token of a prompt, with the keys and values of earlier tokens as inputs.

    `num_tokens` includes the last token (None: as many as in the graph). A UserError is raised for attention to later
    tokens, or an op other than attention that mixes tokens.
    """
    num_tokens = _prompt_len(graph) if num_tokens is None else num_tokens
    if num_tokens == 1:
        return graph
    in_attention = inside(graph)
    for node in graph:
        attention = in_attention.get(node.name)
        if not (node.op.is_rowwise if attention is None else attention.is_causal):
            kind = f"is {type(node.op).__name__}" if attention is None else "attends to later tokens"
            raise UserError(f"phase decode needs ops that work token by token or look back, but {node.name!r} {kind}.")
    return _last_row(graph, num_tokens, set(), is_cached=True)


def for_last_row(graph: OpGraph, *, through_layers: bool) -> OpGraph:
    """Return the graph for only the logits of the last token; unchanged if it does not give logits for each token.

    With `through_layers`, the layers also omit rows that are not needed; otherwise only the ops after the layers do.
    Raises UserError if the graph embeds no tokens.
    """
    num_tokens = _prompt_len(graph)
    last = graph.nodes[-1].op
    if num_tokens == 1 or not last.is_rowwise or last != last.of_rows(0, num_tokens):
        return graph  # the last op has one row already, as in a classifier
    return _last_row(graph, num_tokens, _whole(graph, through_layers=through_layers), is_cached=False)


def _prompt_len(graph: OpGraph) -> int:
    tokens = next((node.op.tokens for node in graph if isinstance(node.op, ops.TokenEmbedding)), None)
    if tokens is None:
        raise UserError("the logits of the last token need a graph with a token embedding, but this one has none.")
    return tokens


def _last_row(graph: OpGraph, num_rows: int, whole: set[str], *, is_cached: bool) -> OpGraph:
    """Keep the last row of values that are not `whole`; with `is_cached`, earlier keys and values are inputs."""
    shapes, in_attention = output_shapes(graph), inside(graph)
    nodes: list[Node] = []
    inputs = list(graph.inputs)
    values: dict[str, str] = {}  # mix -> node of its cached values
    last = {"tokens": "tokens"} if is_cached else {}  # node -> node with its last row
    rewritten: dict[Op, Op] = {}  # ops outside of attention, which layers repeat

    def last_of(name: str, reader: Node) -> str:
        if name not in last:
            op = ops.TakeRows(rows=num_rows, features=shapes[name][-1], taken=1, first=num_rows - 1)
            last[name] = f"{name}@last"
            nodes.append(Node(name=last[name], layer=reader.layer, op=op, inputs=(name,)))
        return last[name]

    for node in graph:
        if node.name in whole:
            nodes.append(node)
            continue
        if attention := in_attention.get(node.name):
            op, read = of_queries(attention, node.op, 1, num_rows), node.inputs
            if node == attention.scores:
                rows, past_len = (1, num_rows - 1) if is_cached else (num_rows, 0)
                caches, pasts = keys_and_values(attention, rows=rows, past_len=past_len)
                nodes += caches if is_cached else caches[:1]
                inputs += pasts
                values |= {attention.mix.name: caches[-1].name} if is_cached else {}
                read = (last_of(attention.packed, node), caches[0].name)
            elif node.name in values:
                read = (node.inputs[0], values[node.name])
        else:
            if node.op not in rewritten:
                rewritten[node.op] = node.op.of_rows(num_rows - 1, 1)
            op, read = rewritten[node.op], tuple(last_of(name, node) for name in node.inputs)
        nodes.append(replace(node, op=op, inputs=read))
        last[node.name] = node.name
    return OpGraph(nodes=tuple(nodes), inputs=tuple(inputs))


def _whole(graph: OpGraph, *, through_layers: bool) -> set[str]:
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
