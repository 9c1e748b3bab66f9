"""What a party of a session is told by whoever starts it. Free of the engine itself."""

from dataclasses import dataclass, replace

from costmodel.engine.runtimes import SERVER
from costmodel.errors import UserError
from costmodel.execution.interpreter import Weights
from costmodel.generation.plan import GraphOf, Plan
from costmodel.protocols.derived import NUM_PARTIES
from costmodel.protocols.primitives import EngineSetting

CLIENT = 0  # the rank that has the prompt, compiles, and sees the logits
ASSIGNMENT, LOGITS = "assignment.pickle", "logits.npy"  # files of a party's folder
ROLES = {CLIENT: "client", SERVER: "server"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assignment:
    """addresses: where each rank listens, by rank. plan: the client's alone; weights: the server's alone.

    wait_s: how long to wait for a party to come.

    Raises UserError for a protocol that no engine runs, a rank it does not have, or addresses of more or fewer.
    """

    rank: int
    addresses: tuple[tuple[str, int], ...]
    protocol: str
    setting: EngineSetting
    graph_of: GraphOf
    plan: Plan | None = None
    weights: Weights | None = None
    wait_s: float = 60.0  # parties of one machine start at once, but it may be busy

    def __post_init__(self) -> None:
        if self.protocol not in NUM_PARTIES:
            raise UserError(f"an engine protocol must be one of {', '.join(NUM_PARTIES)}, but got {self.protocol!r}.")
        if (num_parties := NUM_PARTIES[self.protocol]) != len(self.addresses):
            raise UserError(f"{self.protocol} must have {num_parties} addresses, but got {len(self.addresses)}.")
        if not 0 <= self.rank < num_parties:
            raise UserError(f"a party of {self.protocol} must be from 0 to {num_parties - 1}, but got {self.rank}.")


def part_of(client: Assignment, rank: int) -> Assignment:
    """What one party is told. client: who knows everything: the plan stays the client's alone, weights the server's."""
    return replace(
        client,
        rank=rank,
        plan=client.plan if rank == CLIENT else None,
        weights=client.weights if rank == SERVER else None,
    )


def role(rank: int) -> str:
    """What a party does besides computing."""
    return ROLES.get(rank, "helper")


def holds(rank: int, setting: EngineSetting) -> str:
    """What a party knows and what it sees only shares of, in words."""
    at_server = setting.weights == "server"
    by_role = {
        "client": f"has the prompt and the new tokens, sees the logits; {'nothing' if at_server else 'a share'} of the "
        "weights",
        "server": f"has the weights, and {'keeps' if at_server else 'shares'} them; a share of tokens and logits",
        "helper": "has shares alone; sees neither weights, tokens nor logits",
    }
    return by_role[role(rank)]
