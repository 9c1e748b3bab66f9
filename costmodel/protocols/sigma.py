"""The protocol `sigma`: function secret sharing on two GPUs, with keys from a dealer; semi-honest.

    latency = compute seconds + waited bytes x 8 / bandwidth + rounds x RTT / 2

Bytes and rounds are of the two parties, online: there is no set-up between them. What the dealer sends each of them
ahead of a run is `key_bytes`, in no other number; a key is good for one run. Seconds are fitted on published GPUs
(`sigma_testbed`), which compute and send in turn, as here. No engine runs it here.

Source: Gupta et al. 2024, SIGMA, https://eprint.iacr.org/2023/1269.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from costmodel.cost import Price
from costmodel.estimate import Pricer
from costmodel.network import Network, named_network
from costmodel.ops import KeyValueCache, Node, Op
from costmodel.protocols.derived import price_of, wire_s
from costmodel.protocols.identity import cost_model_id
from costmodel.protocols.sigma_primitives import NUM_PARTIES
from costmodel.protocols.sigma_programs import comm
from costmodel.protocols.sigma_setting import SigmaSetting
from costmodel.protocols.sigma_testbed import (
    SigmaTestbed,
    error_s_of,
    extrapolation_of,
    load_sigma,
    seconds_of,
)
from costmodel.trust import Trust

CACHED = "phase decode (SIGMA's code runs whole prompts)"
TESTBED = Path(__file__).parents[1] / "testbeds" / "sigma.yaml"
# Gupta et al. 2024, section 2: a trusted dealer, two parties of whom one may be corrupted, semi-honest.
TRUST = Trust(
    num_parties=NUM_PARTIES,
    adversary="semi-honest",
    max_corrupted=1,
    randomness="a trusted dealer, who sends both parties keys before every run and could unmask everything",
    dealer=True,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sigma(Pricer):
    """Formulas of the protocol, on a testbed of published seconds and a network."""

    protocol: str = "sigma"
    network: str
    cost_model_id: str
    range_over: str = "errors of seconds fitted on published GPUs, not yours"
    has_keys: bool = True
    setting: SigmaSetting
    testbed: SigmaTestbed
    link: Network

    @property
    def trust(self) -> Trust:
        return TRUST

    def price(self, op: Op) -> Price:
        cost = comm(op, self.setting)
        on_wire_s, compute_s = wire_s(cost, self.link, NUM_PARTIES), seconds_of(op, cost, self.testbed)
        return price_of(cost, on_wire_s, compute_s, cost.key_bytes)

    def latency_s_range(self, graph: Iterable[Node]) -> tuple[float, float]:
        """The latency less and plus the error of every op's compute seconds; the network's part is exact."""
        low_s = high_s = 0.0
        for op, count in Counter(node.op for node in graph).items():
            price, error_s = self.price(op), error_s_of(op, comm(op, self.setting), self.testbed)
            low_s += count * (price.latency_s - min(price.compute_s or 0.0, error_s))
            high_s += count * (price.latency_s + error_s)
        return max(0.0, low_s), high_s

    def extrapolated(self, graph: Iterable[Node]) -> tuple[str, ...]:
        """And that keys and values of earlier tokens, which the code does not keep, are priced as if it did."""
        nodes = tuple(graph)
        is_cached = any(isinstance(node.op, KeyValueCache) and node.op.past_len for node in nodes)
        return (*Pricer.extrapolated(self, nodes), *([CACHED] if is_cached else []))

    def extrapolation(self, op: Op) -> float:
        return extrapolation_of(op, comm(op, self.setting), self.testbed)


def load(
    network: str | Network | None = None,
    testbed: Path | None = None,
    setting: SigmaSetting | None = None,
) -> Sigma:
    """On a network (default `lan`) and a testbed (default: the committed one), in the ring that GPT-2 is run in.

    Raises UserError for a network or testbed file that is not valid, or a setting that the protocol does not have.
    """
    path, link, chosen = testbed or TESTBED, named_network(network), setting or SigmaSetting()
    return Sigma(
        network=link.name,
        cost_model_id=cost_model_id(
            path.read_bytes(),
            *("sigma", link.bandwidth_bits_per_s, link.rtt_s, link.duplex),
            *(chosen.ring_bits, chosen.fraction_bits),
        ),
        setting=chosen,
        testbed=load_sigma(path),
        link=link,
    )
