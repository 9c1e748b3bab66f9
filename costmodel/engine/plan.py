"""The op graphs that a session runs: for a prompt and then one token at a time, or for whole sequences."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from costmodel import ops
from costmodel.deployment.attention import attentions, keys_and_values
from costmodel.deployment.deploy import Deployment
from costmodel.errors import UserError
from costmodel.ops import Node, OpGraph

# Returns a model's op graph for a number of tokens in a deployment. It is pickled and sent to the parties.
GraphOf: TypeAlias = Callable[[int, Deployment], OpGraph]

PROMPT = Deployment(projection="last", rows="needed")  # generation reads only the last token's logits
NEXT_TOKEN = Deployment(phase="decode")
# Attention in blocks of queries computes fewer of the scores that the mask hides.
SEQUENCE = Deployment(query_block=32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of a session, which all parties know.

    kind: `tokens` for a prompt and new tokens, where each step keeps its keys and values for the next; `sequences` for
        separate sequences, with the logits of every token.
    num_tokens: tokens of the prompt, or of a sequence. num_new: most tokens to generate; 0 for sequences.

    A UserError is raised if a count is too small.
    """

    kind: Literal["tokens", "sequences"]
    num_tokens: int
    num_new: int = 0

    def __post_init__(self) -> None:
        least = 1 if self.kind == "tokens" else 0
        if self.num_tokens < 1 or self.num_new < least:
            raise UserError(f"a session of {self.kind} must have tokens to run, but got {self}.")


def graphs(graph_of: GraphOf, plan: Plan) -> tuple[OpGraph, ...]:
    """Return the graph of every step in order; all sequences have the same one. Raise UserError as `graph_of`."""
    if plan.kind == "sequences":
        return (graph_of(plan.num_tokens, SEQUENCE),)
    prompt = keeping(graph_of(plan.num_tokens, PROMPT), graph_of(plan.num_tokens, Deployment()))
    return (prompt, *(graph_of(plan.num_tokens + index, NEXT_TOKEN) for index in range(1, plan.num_new)))


def keeping(graph: OpGraph, whole: OpGraph) -> OpGraph:
    """Return a prompt's graph that keeps the keys and values of every attention in the form that the next token reads.

    `whole` is the graph of the same prompt before any rewriting, in which attentions are found.
    """
    present = {node.name for node in graph}
    after: dict[str, list[Node]] = {}
    for attention in attentions(whole):
        for kept in keys_and_values(attention, rows=attention.num_queries)[0]:
            if kept.name not in present:
                after.setdefault(kept.inputs[0], []).append(kept)
    first = [item for read in graph.inputs for item in after.get(read.name, ())]  # of hidden states from the client
    return replace(graph, nodes=(*first, *(item for node in graph for item in (node, *after.get(node.name, ())))))


def fingerprint(steps: tuple[OpGraph, ...]) -> str:
    """Return twelve hexadecimal digits that identify op graphs: equal graphs have equal ones on every machine."""
    return hashlib.sha256("\n".join(map(repr, steps)).encode()).hexdigest()[:12]


def variables(graph: OpGraph) -> dict[str, str]:
    """Return, by name of a graph's input, the variable of cached keys and values: the node that appends to them."""
    caches = (node for node in graph if isinstance(node.op, ops.KeyValueCache) and node.op.past_len)
    return {node.inputs[0]: node.name for node in caches}
