"""The op graph of a prompt's last token alone, where the keys and values of all before it have been kept."""

from costmodel import ops
from costmodel.deployment.attention import Attention, inside, keys_and_values, of_queries
from costmodel.errors import UserError
from costmodel.ops import Input, Node, Op, OpGraph


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
