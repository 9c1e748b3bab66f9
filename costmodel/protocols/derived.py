"""Prices under the engine's protocols: bytes and rounds by formula, compute seconds from a testbed, a network's link.

    latency = compute seconds + waited bytes x 8 / bandwidth + rounds x RTT / 2

Nothing overlaps: a party computes, then sends, then waits, as the engine does within an op. All seconds of
preprocessing are in the latency, those of starting (keys, first oblivious transfers) with the embedding, which every
decoder has once.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from costmodel import ops
from costmodel.cost import Price
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.network import Network, named_network, network_s
from costmodel.ops import Node, Op
from costmodel.protocols.compute_testbed import (
    ComputeTestbed,
    error_s_of,
    extrapolation_of,
    load_compute,
    seconds_of,
)
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.identity import ENGINE, cost_model_id
from costmodel.protocols.primitives import Comm, EngineSetting
from costmodel.trust import Trust

TESTBEDS = Path(__file__).parents[1] / "testbeds"
LATENCY_STEP_S = 2.0**-26  # seconds are multiples of it, so that sums are exact in any order below 4 years


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived(Pricer):
    """A protocol whose formulas are known, on a testbed and a network.

    setting: the ring, and who holds the weights.
    """

    protocol: str
    network: str
    cost_model_id: str
    range_over: str = "errors of the compute seconds"
    setting: EngineSetting
    testbed: ComputeTestbed
    link: Network

    @property
    def trust(self) -> Trust:
        return ENGINE_PROTOCOLS[self.protocol].trust

    @property
    def of_first_run(self) -> Pricer:
        return replace(self, setting=self.setting.of_first_run)

    def price(self, op: Op) -> Price:
        cost = ENGINE_PROTOCOLS[self.protocol].comm(op, self.setting)
        compute_s = seconds_of(op, self.setting.weights, self.testbed)
        if isinstance(op, ops.TokenEmbedding):
            compute_s += self.testbed.start_s
        return price_of(cost, self.wire_s(cost), compute_s)

    def wire_s(self, cost: Comm) -> float:
        """What a communication takes on the link."""
        return wire_s(cost, self.link, self.trust.num_parties)

    def latency_s_range(self, graph: Iterable[Node]) -> tuple[float, float]:
        """The latency less and plus the error of every op's compute seconds; the network's part is exact."""
        low_s = high_s = 0.0
        for op, count in Counter(node.op for node in graph).items():
            latency_s = self.price(op).latency_s
            op_s, error_s = (of(op, self.setting.weights, self.testbed) for of in (seconds_of, error_s_of))
            low_s += count * (latency_s - min(op_s, error_s))  # an error above 100 % leaves no less than nothing
            high_s += count * (latency_s + error_s)
        return max(0.0, low_s), high_s

    def extrapolation(self, op: Op) -> float:
        return extrapolation_of(op, self.setting.weights, self.testbed)


def load(
    protocol: str,
    network: str | Network | None = None,
    testbed: Path | None = None,
    setting: EngineSetting | None = None,
) -> Derived:
    """A protocol on a network (default `lan`) and a testbed (default: the one committed for it).

    Raises UserError for a network or testbed file that is not valid, or a testbed of another protocol, engine, ring or
    number of threads.
    """
    path, link = testbed or TESTBEDS / f"{protocol}.yaml", named_network(network)
    measured, setting = load_compute(path), setting or EngineSetting()
    check_setting(protocol, setting)
    wanted = {
        "engine": ENGINE,
        "protocol": protocol,
        "threads": setting.threads,
        "ring_bits": setting.ring_bits,
        "fraction_bits": setting.fraction_bits,
    }
    for name, value in wanted.items():
        if (actual := getattr(measured, name)) != value:
            why = ", as the formulas are," if name == "engine" else ","
            raise UserError(f"`{name}` of testbed {path} must be {value}{why} but got {actual}; calibrate one for it.")
    return Derived(
        protocol=protocol,
        network=link.name,
        cost_model_id=cost_model_id(
            path.read_bytes(),
            protocol,
            *(link.bandwidth_bits_per_s, link.rtt_s),
            *(setting.ring_bits, setting.fraction_bits, setting.weights),
            *(["kept"] if setting.weight_masks == "kept" else []),
            *(["half"] if link.duplex == "half" else []),
        ),
        setting=setting,
        testbed=measured,
        link=link,
    )


def load_if_measured(protocol: str, network: str | Network, setting: EngineSetting) -> Derived | None:
    """A protocol on a network and the committed testbed; None in another setting than was measured for that."""
    usual = EngineSetting(weights=setting.weights, weight_masks=setting.weight_masks)
    return load(protocol, network, setting=setting) if setting == usual else None


def check_setting(protocol: str, setting: EngineSetting) -> None:
    """Raises UserError for a setting that a protocol does not have."""
    if setting.weight_masks == "kept" and not ENGINE_PROTOCOLS[protocol].keeps_masks:
        keeping = " or ".join(name for name, known in ENGINE_PROTOCOLS.items() if known.keeps_masks)
        raise UserError(f"`weight_masks` kept is of protocol {keeping}, but got protocol {protocol}; leave it out.")


def wire_s(cost: Comm, link: Network, num_parties: int) -> float:
    """What a communication of so many parties takes on a link."""
    pair_bytes = (cost.online_bytes + cost.setup_bytes) / math.comb(num_parties, 2)
    return network_s(link, rounds=cost.rounds, waited_bytes=cost.waited_bytes, pair_bytes=pair_bytes)


def price_of(cost: Comm, wire_s: float, compute_s: float | None = None, key_bytes: int | None = None) -> Price:
    """What an op is priced at that communicates and computes for so long. compute_s: None where nobody knows it."""
    compute_s, wire_s = None if compute_s is None else on_grid(compute_s), on_grid(wire_s)
    return Price(
        latency_s=(compute_s or 0.0) + wire_s,
        sent_bytes=cost.online_bytes + cost.setup_bytes,
        rounds=cost.rounds,
        messages=cost.messages,
        online_bytes=cost.online_bytes,
        setup_bytes=cost.setup_bytes,
        compute_s=compute_s,
        network_s=wire_s,
        key_bytes=key_bytes,
    )


def on_grid(seconds: float) -> float:
    """Raises UserError for seconds beyond all numbers."""
    if not math.isfinite(steps := seconds / LATENCY_STEP_S):
        raise UserError(f"an op takes {seconds:g} s on this testbed and network; correct their numbers.")
    return round(steps) * LATENCY_STEP_S
