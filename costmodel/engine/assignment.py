"""Assignments, by which whoever starts a session tells each party its part. Free of the engine itself."""

from dataclasses import dataclass, replace

from costmodel.engine.meeting import Address
from costmodel.engine.plan import GraphOf, Plan
from costmodel.engine.runtimes import SERVER
from costmodel.errors import UserError
from costmodel.execution.interpreter import Weights
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting

CLIENT = 0  # the rank that has the prompt, compiles, and sees the logits
ROLES = {CLIENT: "client", SERVER: "server"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assignment:
    """plan: the client's alone; weights: the server's alone.

    addresses: where each party waits for the others, by rank; of parties of one machine, given when they are started.
    links: what it knows every rank by on the engine's own link; of parties of several machines, ports after addresses.
    wait_s: how long to wait for a party to come.

    Raises UserError for a protocol that no engine runs.
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

    def __post_init__(self) -> None:
        if self.protocol not in ENGINE_PROTOCOLS:
            raise UserError(
                f"an engine protocol must be one of {', '.join(ENGINE_PROTOCOLS)}, but got {self.protocol!r}."
            )

    @property
    def num_parties(self) -> int:
        return ENGINE_PROTOCOLS[self.protocol].trust.num_parties

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        return self.links or tuple(f"{address[0]}:{int(address[1]) + 1}" for address in self.addresses)


def part_of(client: Assignment, rank: int) -> Assignment:
    """One party's assignment. client: who knows everything: the plan stays the client's alone, weights the server's."""
    return replace(
        client,
        rank=rank,
        plan=client.plan if rank == CLIENT else None,
        weights=client.weights if rank == SERVER else None,
    )


def role(rank: int) -> str:
    """The role of a party besides computing."""
    return ROLES.get(rank, "helper")


def holds(rank: int, setting: EngineSetting) -> str:
    """Describes what a party knows and what it sees only shares of."""
    at_server = setting.weights == "server"
    by_role = {
        "client": f"has the prompt and the new tokens, sees the logits; {'nothing' if at_server else 'a share'} of the "
        "weights",
        "server": f"has the weights, and {'keeps' if at_server else 'shares'} them; a share of tokens and logits",
        "helper": "has shares alone; sees neither weights, tokens nor logits",
    }
    return by_role[role(rank)]
