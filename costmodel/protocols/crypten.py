"""The protocol `crypten`: additive shares of two parties, whose first one makes all correlated randomness; semi-honest.

    latency = waited bytes x 8 / bandwidth + rounds x RTT / 2

Bytes and rounds are exact. Seconds of computing were not measured and are in no number, so a latency is the least that
it can be, and has no range; every estimate says so where others say what is extrapolated.

Source: Knott et al. 2021, CrypTen, https://arxiv.org/abs/2109.00984.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from costmodel.cost import Price
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.network import Network, named_network
from costmodel.ops import Node, Op
from costmodel.protocols.crypten_primitives import NUM_PARTIES
from costmodel.protocols.crypten_programs import comm
from costmodel.protocols.crypten_setting import CryptenSetting
from costmodel.protocols.derived import price_of, wire_s
from costmodel.protocols.identity import cost_model_id
from costmodel.protocols.primitives import Comm
from costmodel.trust import Trust

UNMEASURED = "latency, from the network's part alone, since computing was not measured"
# Knott et al. 2021, section 3; provider TFP of its configs/default.yaml, as measured. TTP asks a server that takes no
# part, whose bytes are not priced. More than two parties truncate together, which no formula here has.
TRUST = Trust(
    num_parties=NUM_PARTIES,
    adversary="semi-honest",
    max_corrupted=1,
    randomness="a trusted dealer; as measured, the first party, which could unmask everything",
    dealer=True,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Crypten(Pricer):
    """Formulas of the protocol, on a network."""

    protocol: str = "crypten"
    network: str
    cost_model_id: str
    range_over: str = "nothing"
    setting: CryptenSetting
    link: Network

    @property
    def trust(self) -> Trust:
        return TRUST

    def price(self, op: Op) -> Price:
        cost = comm(op, self.setting)
        return price_of(cost, wire_s(cost, self.link, NUM_PARTIES))

    def extrapolated(self, graph: Iterable[Node]) -> tuple[str, ...]:
        return (UNMEASURED,)


def walk(some: Sequence[Op], setting: CryptenSetting) -> tuple[Comm, ...]:
    """The cost of each op in a run of all of them, in order."""
    costs = {op: comm(op, setting) for op in dict.fromkeys(some)}
    return tuple(costs[op] for op in some)


def load(
    network: str | Network | None = None,
    testbed: Path | None = None,
    setting: CryptenSetting | None = None,
) -> Crypten:
    """On a network (default `lan`).

    Raises UserError for a network file that is not valid, a testbed, or a setting that the protocol does not have.
    """
    if testbed is not None:
        raise UserError(f"protocol crypten predicts no seconds of computing, but got testbed {testbed}; leave it out.")
    link, chosen = named_network(network), setting or CryptenSetting()
    return Crypten(
        network=link.name,
        cost_model_id=cost_model_id(
            b"", "crypten", link.bandwidth_bits_per_s, link.rtt_s, link.duplex, chosen.fraction_bits
        ),
        setting=chosen,
        link=link,
    )
