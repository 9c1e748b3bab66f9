"""Plan a session: what it runs for a prompt or for sequences, what each party has, and the predicted cost.

In a session, the parties connect once, share the weights, and then run one op graph (a *step*) after the other. This
module does not import an engine.
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

CLIENT = 0  # the rank that has the prompt, compiles the programs (under SPU), and sees the logits
SERVER, SHARED = 1, -1  # owners of a secret: the rank that has the weights, or all parties (-1)
CRYPTEN = "crypten"
RUN = tuple(ENGINE_PROTOCOLS)  # protocols that an engine can run

# A function that returns a model's op graph, given the number of tokens, the new one included, and a deployment. The
# function is pickled and sent to the processes of the parties on this machine.
GraphOf: TypeAlias = Callable[[int, Deployment], OpGraph]

PROMPT = Deployment(projection="last", rows="needed")  # generation reads only the last token's logits
NEXT_TOKEN = Deployment(phase="decode")
# Attention in blocks of queries computes fewer of the scores that the mask hides.
SEQUENCE = Deployment(query_block=32)

# largest number of bytes in a frame (a message of `engine.channel`) for:
WORD_BYTES = 32  # an element: two shares of 128 bits each
PROGRAM_BYTES = 1 << 18  # the code of an op, except for constants with the shape of its output
ROW_BYTES = 1 << 12  # an entry in the table of programs: the names of the program and of its variables
LEAST_BYTES = 1 << 16  # parts that do not depend on the graph: seeds, headers of arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a session runs. The client has the plan, and sends it to the other parties.

    kind: `tokens` to generate from a prompt, in one step per new token, with cached keys and values; `sequences` to
        compute the logits of every token of separate sequences, by running a single step on each sequence.
    num_tokens: tokens of the prompt, or of a sequence. num_new: largest number of tokens to generate; 0 for sequences.

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
    """Return each step's op graph: one per new token, or a single one for sequences. Errors are those of `graph_of`."""
    if plan.kind == "sequences":
        return (graph_of(plan.num_tokens, SEQUENCE),)
    prompt = keeping(graph_of(plan.num_tokens, PROMPT), graph_of(plan.num_tokens, Deployment()))
    return (prompt, *(graph_of(plan.num_tokens + index, NEXT_TOKEN) for index in range(1, plan.num_new)))


def keeping(graph: OpGraph, whole: OpGraph) -> OpGraph:
    """Return a prompt's graph with nodes that store the keys and values of every attention for the next token.

    The attentions are looked up in `whole`, the graph of the same prompt in the default deployment.
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
    """Return twelve hexadecimal digits of a hash of op graphs, which is the same for equal graphs on every machine."""
    return hashlib.sha256("\n".join(map(repr, steps)).encode()).hexdigest()[:12]


def variables(graph: OpGraph) -> dict[str, str]:
    """Return the variable that holds each graph input of cached keys and values, by name of the input.

    A variable has the name of the `KeyValueCache` that reads the input: its output is the next step's input.
    """
    caches = (node for node in graph if isinstance(node.op, ops.KeyValueCache) and node.op.past_len)
    return {node.inputs[0]: node.name for node in caches}


def most_bytes(steps: tuple[OpGraph, ...], protocol: str, setting: EngineSetting) -> int:
    """Return an upper bound of the bytes in a frame that holds a share, all programs, or (crypten) what an op sends."""
    nodes = [node for graph in steps for node in graph]
    some = {node.op for node in nodes}
    largest = max(  # elements of an array that an op reads or makes
        prod(shape) for op in some for shape in (*op.input_shapes, *op.weight_shapes.values(), op.output_shape)
    )
    if protocol == CRYPTEN:  # frames also hold opened values and dealt masks, each at most what an op sends
        sent = max(ENGINE_PROTOCOLS[protocol].comm(op, setting).sent_bytes for op in some)
        return LEAST_BYTES + WORD_BYTES * largest + sent
    programs = sum(PROGRAM_BYTES + WORD_BYTES * prod(op.output_shape) for op in some) + ROW_BYTES * len(nodes)
    return LEAST_BYTES + WORD_BYTES * largest + programs


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted cost of one step with its preprocessing; bytes and messages are summed over parties.

    seconds: latency by the package's testbed on a network, start-up included in a session's first step; None if the
        testbed was measured in another setting.
    """

    sent_bytes: int
    messages: int
    seconds: float | None


def predictions(
    steps: Sequence[OpGraph], protocol: str, setting: EngineSetting, network: str | Network
) -> tuple[Prediction, ...]:
    """Return the prediction of every step, in the order in which one session runs them.

    Raise UserError if no engine runs the protocol, the protocol does not support the setting, an op has no formula or
    no seconds in the testbed, the ring is too small for an op, or the network is not valid.
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
    """The data with which a party takes part in a session; only the client uses `plan`, only the server `weights`.

    addresses: where each party waits for the others, by rank; if empty, `session.started` fills in sockets of this
        machine. links: addresses, by rank, of the connections that SecretFlow-SPU opens itself; if empty, those of
        `addresses` with each port raised by 1.
    wait_s: longest wait for another party to connect, in seconds. idle_s: longest silence of a connected party, in
        seconds; after it, the party counts as lost.
    is_in_range: whether the caller refuses models outside the engine's fixed-point range; all parties must agree on it.
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
        """This party's keys for TLS; None without `certificates`. Raise UserError as `Keys`."""
        return None if self.certificates is None else Keys(self.certificates, self.rank, len(ranks(self.protocol)))

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        """`links` or, if these are empty, `addresses` with each port raised by 1."""
        return self.links or tuple(f"{address[0]}:{int(address[1]) + 1}" for address in self.addresses)


def part_of(client: Assignment, rank: int) -> Assignment:
    """Return the assignment of party `rank`, given the client's assignment with the plan and the weights."""
    return replace(
        client,
        rank=rank,
        plan=client.plan if rank == CLIENT else None,
        weights=client.weights if rank == SERVER else None,
    )


def ranks(protocol: str) -> range:
    """Return the ranks of all processes: the computing parties, then the dealer of `crypten`, a separate process."""
    return range(TRUST[protocol].num_parties + (protocol == CRYPTEN))


def role(rank: int, protocol: str) -> str:
    """Return a party's role: `client`, `server` or, for the third, `dealer` under crypten and `helper` elsewhere."""
    last = "dealer" if protocol == CRYPTEN else "helper"
    return {CLIENT: "client", SERVER: "server"}.get(rank, last)


def holds(rank: int, protocol: str, setting: EngineSetting) -> str:
    """Return a description, for users, of what a party knows and what it has only shares of."""
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
