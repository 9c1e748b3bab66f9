"""Prices under the engine's protocols: bytes and rounds by formula, compute seconds from a testbed, a network's link.

    latency = compute seconds + waited bytes x 8 / bandwidth + rounds x RTT / 2

Nothing overlaps: a party computes, then sends, then waits, as the engine does within an op. All seconds of
preprocessing are in the latency, those of starting (keys, first oblivious transfers) with the embedding, which every
decoder has once.
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from costmodel import ops
from costmodel.cost import Price
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.network import Network, load_network, network_s
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
class ByFormula(Pricer):
    """A protocol whose bytes and rounds are known by formula, on a network. setting: what numbers of a model are."""

    protocol: str
    network: str
    cost_model_id: str
    range_over: str
    has_keys: bool = False
    setting: Any
    link: Network

    @abstractmethod
    def comm(self, op: Op) -> Comm:
        """Rounds, messages and bytes of an op. Raises UserError for one that the protocol has no formula for."""

    @abstractmethod
    def op_s(self, op: Op, cost: Comm) -> float | None:
        """Seconds that an op is computed for; None where nobody knows."""

    def error_s(self, op: Op, cost: Comm) -> float:
        """How far off these may be."""
        return 0.0

    def start_s(self, op: Op) -> float:
        """Seconds of starting, which are with one op of a model."""
        return 0.0

    def price(self, op: Op) -> Price:
        return self._price(op, self.comm(op))

    def _price(self, op: Op, cost: Comm) -> Price:
        own_s = self.op_s(op, cost)
        compute_s = None if own_s is None else on_grid(own_s + self.start_s(op))
        on_wire_s = on_grid(self.wire_s(cost))
        return Price(
            latency_s=(compute_s or 0.0) + on_wire_s,
            sent_bytes=cost.sent_bytes,
            rounds=cost.rounds,
            messages=cost.messages,
            online_bytes=cost.online_bytes,
            setup_bytes=cost.setup_bytes,
            compute_s=compute_s,
            network_s=on_wire_s,
            key_bytes=cost.key_bytes if self.has_keys else None,
        )

    def wire_s(self, cost: Comm) -> float:
        """What a communication takes on the link."""
        pair_bytes = cost.sent_bytes / math.comb(self.trust.num_parties, 2)
        return network_s(self.link, rounds=cost.rounds, waited_bytes=cost.waited_bytes, pair_bytes=pair_bytes)

    def latency_s_range(self, graph: Iterable[Node]) -> tuple[float, float] | None:
        """The latency less and plus the error of every op's compute seconds; the network's part is exact."""
        low_s = high_s = 0.0
        for op, count in Counter(node.op for node in graph).items():
            cost = self.comm(op)
            if (own_s := self.op_s(op, cost)) is None:
                return None
            latency_s, error_s = self._price(op, cost).latency_s, self.error_s(op, cost)
            low_s += count * (latency_s - min(own_s, error_s))  # an error above 100 % leaves no less than nothing
            high_s += count * (latency_s + error_s)
        return max(0.0, low_s), high_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived(ByFormula):
    """A protocol of the engine, on a testbed and a network.

    setting: the ring, and who holds the weights.
    """

    range_over: str = "errors of the compute seconds"
    setting: EngineSetting
    testbed: ComputeTestbed

    @property
    def trust(self) -> Trust:
        return ENGINE_PROTOCOLS[self.protocol].trust

    @property
    def of_first_run(self) -> Pricer:
        return replace(self, setting=self.setting.of_first_run)

    def comm(self, op: Op) -> Comm:
        return ENGINE_PROTOCOLS[self.protocol].comm(op, self.setting)

    def op_s(self, op: Op, cost: Comm) -> float:
        return seconds_of(op, self.setting.weights, self.testbed)

    def error_s(self, op: Op, cost: Comm) -> float:
        return error_s_of(op, self.setting.weights, self.testbed)

    def start_s(self, op: Op) -> float:
        return self.testbed.start_s if isinstance(op, ops.TokenEmbedding) else 0.0

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
    path, link = testbed or TESTBEDS / f"{protocol}.yaml", load_network(network)
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


def on_grid(seconds: float) -> float:
    """Raises UserError for seconds beyond all numbers."""
    if not math.isfinite(steps := seconds / LATENCY_STEP_S):
        raise UserError(f"an op takes {seconds:g} s on this testbed and network; correct their numbers.")
    return round(steps) * LATENCY_STEP_S
