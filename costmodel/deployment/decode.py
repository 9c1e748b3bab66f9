"""The op graph of a prompt's last token alone, where the keys and values of all before it have been kept."""

from dataclasses import replace

from costmodel import ops
from costmodel.deployment.attention import Attention, attentions, keys_and_values, last_token
from costmodel.ops import Input, Node, OpGraph


def decode_step(graph: OpGraph) -> OpGraph:
    """A prompt's graph for its last token; one of a single token is that already.

    Raises UserError for an op that mixes tokens in another way than attention does.
    """
    num_tokens = next(node.op.tokens for node in graph if isinstance(node.op, ops.TokenEmbedding))
    if num_tokens == 1:
        return graph
    by_scores = {each.scores.name: each for each in attentions(graph)}
    kept: dict[str, str] = {}  # a mix, and where its values are
    nodes: list[Node] = []
    inputs: list[Input] = []
    for node in graph:
        if (attention := by_scores.get(node.name)) is not None:
            caches, pasts = _caches(attention, num_tokens)
            nodes += caches
            inputs += pasts
            kept[attention.mix.name] = caches[-1].name
            node = replace(node, inputs=(attention.packed, caches[0].name))
        elif node.name in kept:
            node = replace(node, inputs=(node.inputs[0], kept[node.name]))
        nodes.append(replace(node, op=last_token(node.op, num_tokens)))
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
