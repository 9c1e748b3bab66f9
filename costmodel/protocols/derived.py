"""Costs under the engines' protocols: bytes and rounds by formula, compute seconds from a testbed, and a network's
link.

    latency = compute seconds + waited bytes x 8 / bandwidth + rounds x RTT / 2

Nothing overlaps: within an op a party computes, then sends, then waits, as the engine does. The latency includes all
seconds of preprocessing. The start-up seconds (keys, first oblivious transfers) are added to the embedding, which every
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
from costmodel.config.files import MOST_YAML, load_file, read_bytes
from costmodel.cost import Price
from costmodel.errors import UserError
from costmodel.estimate import Pricer, cost_model_id
from costmodel.network import Network, load_network, network_s
from costmodel.ops import Node, Op
from costmodel.protocols.compute_testbed import (
    ComputeTestbed,
    error_s_of,
    extrapolation_of,
    seconds_of,
)
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import Comm, EngineSetting
from costmodel.trust import Trust

TESTBEDS = Path(__file__).parents[1] / "testbeds"
LATENCY_STEP_S = 2.0**-26  # seconds are multiples of this, so sums below 4 years are exact in any order


@dataclass(frozen=True, kw_only=True, slots=True)
class ByFormula(Pricer):
    """A protocol on a network, with bytes and rounds by formula; `setting` states how numbers are represented.

    `--protocol module:Class` takes a subclass with `trust`, `comm` and `op_s`. A field `testbed`, with a default, is
    the file of `--testbed`.
    """

    protocol: str
    network: str
    cost_model_id: str
    range_over: str = "errors that the protocol states"
    has_keys: bool = False
    setting: Any = None
    link: Network

    @abstractmethod
    def comm(self, op: Op) -> Comm:
        """Return the rounds, messages and bytes of an op; a UserError is raised if there is no formula for it."""

    @abstractmethod
    def op_s(self, op: Op, cost: Comm) -> float:
        """Return the compute seconds of an op."""

    def error_s(self, op: Op, cost: Comm) -> float:
        """Return the absolute error to expect of `op_s`, in seconds."""
        return 0.0

    def start_s(self, op: Op) -> float:
        """Return the start-up seconds that are added to this op; one op of a model carries them."""
        return 0.0

    def price(self, op: Op) -> Price:
        return self._price(op, self.comm(op))

    def _price(self, op: Op, cost: Comm) -> Price:
        compute_s, on_wire_s = on_grid(self.op_s(op, cost) + self.start_s(op)), on_grid(self.wire_s(cost))
        return Price(
            latency_s=compute_s + on_wire_s,
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
        """Return the seconds that a communication takes on the link."""
        pair_bytes = cost.sent_bytes / math.comb(self.trust.num_parties, 2)
        return network_s(self.link, rounds=cost.rounds, waited_bytes=cost.waited_bytes, pair_bytes=pair_bytes)

    def latency_s_range(self, graph: Iterable[Node]) -> tuple[float, float]:
        """Return the latency minus and plus the errors of compute seconds."""
        low_s = high_s = 0.0
        for op, count in Counter(node.op for node in graph).items():
            cost = self.comm(op)
            latency_s, error_s = self._price(op, cost).latency_s, self.error_s(op, cost)
            low_s += count * (latency_s - min(self.op_s(op, cost), error_s))  # compute seconds cannot fall below 0
            high_s += count * (latency_s + error_s)
        return max(0.0, low_s), high_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived(ByFormula):
    """A protocol of an engine, on a testbed and a network; `setting` states the ring and who holds the weights."""

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
    """Return a protocol on a network (default `lan`) and a testbed (default: the one committed for it).

    Raises:
        UserError: If the network or testbed file is not valid, or the testbed is for another protocol, engine, ring or
            number of threads.
    """
    path, link = testbed or TESTBEDS / f"{protocol}.yaml", load_network(network)
    measured, setting = load_file(ComputeTestbed, path), setting or ENGINE_PROTOCOLS[protocol].setting()
    check_setting(protocol, setting)
    wanted = {"engine": setting.formulas_of, "protocol": protocol, **setting.of_testbed}
    for name, value in wanted.items():
        if (actual := getattr(measured, name)) != value:
            why = ", as the formulas are," if name == "engine" else ","
            raise UserError(f"`{name}` of testbed {path} must be {value}{why} but got {actual}; calibrate one for it.")
    return Derived(
        protocol=protocol,
        network=link.name,
        cost_model_id=cost_model_id(
            read_bytes(path, MOST_YAML),
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
    """Return a protocol on a network and its committed testbed; None if that was measured in another setting."""
    is_usual = setting.of_testbed == type(setting)().of_testbed and setting.device == "cpu"
    return load(protocol, network, setting=setting) if is_usual else None


def check_setting(protocol: str, setting: EngineSetting) -> None:
    """Check that a protocol supports a setting; a UserError is raised if it does not."""
    if setting.weight_masks == "kept" and not ENGINE_PROTOCOLS[protocol].keeps_masks:
        keeping = " or ".join(name for name, known in ENGINE_PROTOCOLS.items() if known.keeps_masks)
        raise UserError(f"`weight_masks` kept is of protocol {keeping}, but got protocol {protocol}; leave it out.")


def on_grid(seconds: float) -> float:
    """Round seconds to a multiple of `LATENCY_STEP_S`; a UserError is raised if they are not finite."""
    if not math.isfinite(steps := seconds / LATENCY_STEP_S):
        raise UserError(f"an op takes {seconds:g} s on this testbed and network; correct their numbers.")
    return round(steps) * LATENCY_STEP_S
