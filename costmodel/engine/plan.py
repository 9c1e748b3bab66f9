"""Plan a session: what it runs for a prompt or for sequences, what each party has, and what the run should cost.

This module does not import an engine.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal, TypeAlias

from costmodel import ops
from costmodel.deployment.deploy import Deployment
from costmodel.deployment.rewrites import attentions, keys_and_values
from costmodel.engine.keys import Keys
from costmodel.engine.meeting import Address
from costmodel.engine.registry import walk
from costmodel.errors import UserError
from costmodel.execution.interpreter import Weights
from costmodel.network import Network
from costmodel.ops import Node, OpGraph
from costmodel.protocols import TRUST, derived
from costmodel.protocols.derived import seconds_of
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting, total_comm

CLIENT = 0  # the rank that has the prompt, compiles the programs, and sees the logits
SERVER, SHARED = 1, -1  # owners of a secret: the rank that has the weights, or all parties together
CRYPTEN = "crypten"
RUN = tuple(ENGINE_PROTOCOLS)  # protocols that are run here

# Returns a model's op graph for a number of tokens in a deployment. It is pickled and sent to the parties.
GraphOf: TypeAlias = Callable[[int, Deployment], OpGraph]

PROMPT = Deployment(projection="last", rows="needed")  # generation reads only the last token's logits
NEXT_TOKEN = Deployment(phase="decode")
# Attention in blocks of queries computes fewer of the scores that the mask hides.
SEQUENCE = Deployment(query_block=32)

# the most bytes of a frame for:
WORD_BYTES = 32  # an element: two shares of 128 bits each
PROGRAM_BYTES = 1 << 18  # the code of an op, besides constants with the shape of its output
ROW_BYTES = 1 << 12  # an entry in the table of programs: the names of the program and of what it reads
LEAST_BYTES = 1 << 16  # what any graph has: seeds, headers of arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of a session, which all parties know.

    kind: `tokens` for a prompt and new tokens, where each step keeps its keys and values for the next; `sequences` for
        separate sequences, with the logits of every token.
    num_tokens: tokens of the prompt, or of a sequence. num_new: most tokens to generate; 0 for sequences.

    A UserError is raised if `num_tokens` is below 1, or `num_new` below 1 for `tokens` or below 0 for `sequences`.
    """

    kind: Literal["tokens", "sequences"]
    num_tokens: int
    num_new: int = 0

    def __post_init__(self) -> None:
        least = 1 if self.kind == "tokens" else 0
        if self.num_tokens < 1 or self.num_new < least:
            raise UserError(f"a session of {self.kind} must have tokens to run, but got {self}.")


def graphs(graph_of: GraphOf, plan: Plan) -> tuple[OpGraph, ...]:
    """Return the graph of each step: one per new token, or one for all sequences. Raise UserError as `graph_of`."""
    if plan.kind == "sequences":
        return (graph_of(plan.num_tokens, SEQUENCE),)
    prompt = keeping(graph_of(plan.num_tokens, PROMPT), graph_of(plan.num_tokens, Deployment()))
    return (prompt, *(graph_of(plan.num_tokens + index, NEXT_TOKEN) for index in range(1, plan.num_new)))


def keeping(graph: OpGraph, whole: OpGraph) -> OpGraph:
    """Add nodes to a prompt's graph that store the keys and values of every attention, as the next token reads them.

    `whole` is the graph of the same prompt in the default deployment, in which attentions are found.
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
    """Return, by input of cached keys and values, the variable that holds it, named as the node that appends to it."""
    caches = (node for node in graph if isinstance(node.op, ops.KeyValueCache) and node.op.past_len)
    return {node.inputs[0]: node.name for node in caches}


def most_bytes(steps: tuple[OpGraph, ...], protocol: str, setting: EngineSetting) -> int:
    """Return the most bytes that a frame may have: those of a share of an array, all programs, or what an op sends."""
    nodes = [node for graph in steps for node in graph]
    some = {node.op for node in nodes}
    largest = max(  # elements of an array that an op reads or makes
        prod(shape) for op in some for shape in (*op.input_shapes, *op.weight_shapes.values(), op.output_shape)
    )
    if protocol == "crypten":  # opened values and a dealer's masks are frames too; what all send bounds each
        sent = max(ENGINE_PROTOCOLS[protocol].comm(op, setting).sent_bytes for op in some)
        return LEAST_BYTES + WORD_BYTES * largest + sent
    programs = sum(PROGRAM_BYTES + WORD_BYTES * prod(op.output_shape) for op in some) + ROW_BYTES * len(nodes)
    return LEAST_BYTES + WORD_BYTES * largest + programs


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted cost of one step with its preprocessing; bytes and messages are summed over parties.

    seconds: on the committed testbed and a network, with start-up in the first step of a session; None if the testbed
        was measured in another setting.
    """

    sent_bytes: int
    messages: int
    seconds: float | None


def predictions(
    steps: Sequence[OpGraph], protocol: str, setting: EngineSetting, network: str | Network
) -> tuple[Prediction, ...]:
    """Return the prediction of every step, in the order in which one session runs them.

    Raise UserError if the protocol has no engine or not this setting, an op has no formula, or the ring is too small.
    """
    # each preprocessing counts in the step that needs it, and the making of kept masks in the first
    first = total_comm(walk(protocol, [node.op for node in steps[0]], setting.of_first_run))
    by_op = iter(walk(protocol, [node.op for graph in steps for node in graph], setting))
    comms = [first, *[total_comm(next(by_op) for _ in graph) for graph in steps][1:]]
    pricer = derived.load_if_measured(protocol, network, setting)
    predicted = []
    for index, (graph, comm) in enumerate(zip(steps, comms, strict=True)):
        seconds = None
        if pricer is not None:  # as `Derived.price` says, but with this step's preprocessing, and start-up just once
            computing_s = sum(seconds_of(node.op, pricer.setting.weights, pricer.testbed) for node in graph)
            seconds = computing_s + pricer.wire_s(comm) + (0.0 if index else pricer.testbed.start_s)
        predicted.append(Prediction(sent_bytes=comm.sent_bytes, messages=comm.messages, seconds=seconds))
    return tuple(predicted)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assignment:
    """One party's part in a session. Only the client has the plan, and only the server has the weights.

    addresses: where each party waits for the others, by rank; if empty, `session.started` fills in sockets of this
        machine. links: addresses of all ranks on the engine's own link; if empty, the port after each of `addresses`.
    wait_s: how long to wait for another party. idle_s: how long a party may be silent once all have met.
    is_in_range: whether a model must be within the engine's fixed-point range to run; the parties must agree on it.
    certificates: folder of the parties' certificates and this party's key, for links by TLS; None for plain links.

    A UserError is raised if no engine runs the protocol.
    """

    rank: int = CLIENT
    protocol: str
    setting: EngineSetting
    graph_of: GraphOf
    plan: Plan | None = None
    weights: Weights | None = None
    addresses: tuple[Address, ...] = ()
    links: tuple[str, ...] = ()
    wait_s: float = 60.0  # parties of one machine start at once, but it may be busy
    is_in_range: bool = True
    idle_s: float = 60.0  # importing an engine can keep a busy process from saying that it is alive
    certificates: Path | None = None

    def __post_init__(self) -> None:
        if self.protocol not in RUN:
            raise UserError(f"an engine protocol must be one of {', '.join(RUN)}, but got {self.protocol!r}.")

    @property
    def keys(self) -> Keys | None:
        """The keys of this party; None without `certificates`. Raise UserError if the folder does not have them."""
        return None if self.certificates is None else Keys(self.certificates, self.rank, len(ranks(self.protocol)))

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        return self.links or tuple(f"{address[0]}:{int(address[1]) + 1}" for address in self.addresses)


def part_of(client: Assignment, rank: int) -> Assignment:
    """Return one party's assignment, given the client's with the data of all parties."""
    return replace(
        client,
        rank=rank,
        plan=client.plan if rank == CLIENT else None,
        weights=client.weights if rank == SERVER else None,
    )


def ranks(protocol: str) -> range:
    """Return the ranks of all processes: the computing parties, then the dealer if it is a separate process."""
    return range(TRUST[protocol].num_parties + (protocol == CRYPTEN))


def role(rank: int, protocol: str) -> str:
    """Return a party's role: `client`, `server` or, for the third, `dealer` under crypten and `helper` elsewhere."""
    last = "dealer" if protocol == CRYPTEN else "helper"
    return {CLIENT: "client", SERVER: "server"}.get(rank, last)


def holds(rank: int, protocol: str, setting: EngineSetting) -> str:
    """Describe what a party knows, and what it has only shares of."""
    at_server = setting.weights == "server"
    by_role = {
        "client": f"has the prompt and the new tokens, sees the logits; {'nothing' if at_server else 'a share'} of the "
        "weights",
        "server": f"has the weights, and {'keeps' if at_server else 'shares'} them; a share of tokens and logits",
        "helper": "has shares alone; sees neither weights, tokens nor logits",
        "dealer": "makes the masks of every product; sees the shapes of the model, but neither weights, tokens, logits "
        "nor shares of them",
    }
    return by_role[role(rank, protocol)]
