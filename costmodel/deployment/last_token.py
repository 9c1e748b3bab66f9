"""The op graph of a prompt's last token, run after the prompt or as part of it.

Followed back from the logits, a row-wise op needs the last row of its inputs; attention needs the last row of queries,
but all keys and values. In phase decode the keys and values of earlier tokens are cached. Otherwise a value that some
op needs whole is computed whole, and its last row taken. All tokens are embedded, since they are the client's input.
"""

from dataclasses import replace

from costmodel import ops
from costmodel.deployment.attention import inside, keys_and_values, of_queries
from costmodel.errors import UserError
from costmodel.ops import Node, Op, OpGraph, output_shapes


def decode_step(graph: OpGraph, num_tokens: int | None = None) -> OpGraph:
    """Return the graph for the last token of a prompt, given cached keys and values of the others.

    `num_tokens` includes that token (default: those of the graph). A UserError is raised for attention to later tokens,
    or an op that mixes tokens in another way.
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
    """Return the graph with the logits of the last token alone.

    With `through_layers`, layers omit unneeded rows too; otherwise only the ops after them.
    """
    num_tokens = _prompt_len(graph)
    last = graph.nodes[-1].op
    if num_tokens == 1 or not last.is_rowwise or last != last.of_rows(0, num_tokens):
        return graph  # the last op has one row already, as in a classifier
    return _last_row(graph, num_tokens, _whole(graph, through_layers=through_layers), is_cached=False)


def _prompt_len(graph: OpGraph) -> int:
    return next(node.op.tokens for node in graph if isinstance(node.op, ops.TokenEmbedding))


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
