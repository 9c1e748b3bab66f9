"""Assignments, which tell each party its part in a session. This module does not import the engine."""

from dataclasses import dataclass, replace
from pathlib import Path

from costmodel.engine.keys import Keys
from costmodel.engine.meeting import Address
from costmodel.engine.plan import GraphOf, Plan
from costmodel.errors import UserError
from costmodel.execution.interpreter import Weights
from costmodel.protocols import TRUST
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting

CLIENT = 0  # the rank that has the prompt, compiles the programs, and sees the logits
SERVER, SHARED = 1, -1  # owners of a secret: the rank that has the weights, or all parties together
CRYPTEN = "crypten"
RUN = tuple(ENGINE_PROTOCOLS)  # protocols that are run here


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assignment:
    """One party's part in a session. Only the client has the plan, and only the server has the weights.

    addresses: where each party waits for the others, by rank; set at the start if all parties run on one machine.
    links: addresses of all ranks on the engine's own link; if empty, the port after each of `addresses`.
    wait_s: how long to wait for another party. idle_s: how long a party may be silent once all have met.
    is_in_range: whether only a model that the engine's fixed point holds may run, on which the parties agree.
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
    def num_processes(self) -> int:
        return len(ranks(self.protocol))

    @property
    def keys(self) -> Keys | None:
        """Return the keys of this party. Raise UserError if the folder does not have them."""
        return None if self.certificates is None else Keys(self.certificates, self.rank, self.num_processes)

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        return self.links or tuple(f"{address[0]}:{int(address[1]) + 1}" for address in self.addresses)


def part_of(client: Assignment, rank: int) -> Assignment:
    """Return one party's assignment, given the client's with all data.

    Only the server gets the weights, and only the client the plan.
    """
    return replace(
        client,
        rank=rank,
        plan=client.plan if rank == CLIENT else None,
        weights=client.weights if rank == SERVER else None,
    )


def ranks(protocol: str) -> range:
    """Return the ranks of all processes: the parties, then the dealer if it is a separate process."""
    return range(TRUST[protocol].num_parties + (protocol == CRYPTEN))


def role(rank: int, protocol: str) -> str:
    """Return the name of a party's role."""
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
