"""Which op graphs a session runs: a prompt and then one token at a time, or whole sequences."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from costmodel import ops
from costmodel.deployment.attention import attentions, keys_and_values
from costmodel.deployment.deploy import Deployment
from costmodel.errors import UserError
from costmodel.ops import Node, OpGraph

# The op graph of a model for so many tokens in a deployment. It travels to the parties, so it can be pickled.
GraphOf: TypeAlias = Callable[[int, Deployment], OpGraph]

PROMPT = Deployment(projection="last", rows="needed")  # generation reads the last token's logits alone
NEXT_TOKEN = Deployment(phase="decode")
# Whole sequences go through attention so many queries at a time: less of what the mask hides is computed.
SEQUENCE = Deployment(query_block=32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of a session, which all parties know.

    kind: `tokens`, a prompt and new tokens, each step keeping its keys and values for the next; or `sequences`, each
        by itself, with the logits of every token.
    num_tokens: of the prompt, or of a sequence. num_new: tokens to generate at most; 0 for sequences.

    Raises UserError for a count that cannot be.
    """

    kind: Literal["tokens", "sequences"]
    num_tokens: int
    num_new: int = 0

    def __post_init__(self) -> None:
        least = 1 if self.kind == "tokens" else 0
        if self.num_tokens < 1 or self.num_new < least:
            raise UserError(f"a session of {self.kind} must have tokens to run, but got {self}.")


def graphs(graph_of: GraphOf, plan: Plan) -> tuple[OpGraph, ...]:
    """The graph of every step of a session, in order; sequences all have the one. Raises UserError as `graph_of`."""
    if plan.kind == "sequences":
        return (graph_of(plan.num_tokens, SEQUENCE),)
    prompt = keeping(graph_of(plan.num_tokens, PROMPT), graph_of(plan.num_tokens, Deployment()))
    return (prompt, *(graph_of(plan.num_tokens + index, NEXT_TOKEN) for index in range(1, plan.num_new)))


def keeping(graph: OpGraph, whole: OpGraph) -> OpGraph:
    """A prompt's graph that keeps the keys and values of every attention, as the next token reads them.

    whole: of the same prompt before any rewriting, in which attentions are found.
    """
    present = {node.name for node in graph}
    after: dict[str, list[Node]] = {}
    for attention in attentions(whole):
        for kept in keys_and_values(attention, rows=attention.num_queries)[0]:
            if kept.name not in present:
                after.setdefault(kept.inputs[0], []).append(kept)
    first = [item for read in graph.inputs for item in after.get(read.name, ())]  # of a stream that is the client's
    return replace(graph, nodes=(*first, *(item for node in graph for item in (node, *after.get(node.name, ())))))


def fingerprint(steps: tuple[OpGraph, ...]) -> str:
    """Twelve hexadecimal digits of op graphs: equal for equal graphs, on every machine."""
    return hashlib.sha256("\n".join(map(repr, steps)).encode()).hexdigest()[:12]


def variables(graph: OpGraph) -> dict[str, str]:
    """The variables that hold the inputs of a graph, by name: the past of keys and values is their node's."""
    caches = (node for node in graph if isinstance(node.op, ops.KeyValueCache) and node.op.past_len)
    return {node.inputs[0]: node.name for node in caches}
