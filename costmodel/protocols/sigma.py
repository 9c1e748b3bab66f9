"""The protocol `sigma`: function secret sharing on two GPUs, with keys from a dealer; semi-honest.

    latency = compute seconds + waited bytes x 8 / bandwidth + rounds x RTT / 2
    compute seconds of an op = sum over units of per_unit_s of its class x count

Bytes and rounds are those of the two parties online; there is no preprocessing between them. `key_bytes` is what the
dealer sends each party before a run; no other number includes it, and a key serves one run. The code of commit d6990533
fitted the seconds on published GPU runs, which compute and send in turn. No engine here runs the protocol.

The units of compute seconds are key bytes, rounds and elements of weight matrices. A key is moved to the GPU and its
step reads all of it, which takes most of the seconds. Each round starts kernels or, for norms on the CPU, threads.
Weight matrices are moved to the GPU too; multiplying them is too fast to show. Coefficients are at least 0, so seconds
never fall as work grows.

Source: Gupta et al. 2024, SIGMA, https://eprint.iacr.org/2023/1269.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from costmodel import ops
from costmodel.config.files import MOST_YAML, load_file, read_bytes
from costmodel.errors import UserError
from costmodel.estimate import cost_model_id
from costmodel.network import Network, load_network
from costmodel.ops import KeyValueCache, Node, Op
from costmodel.protocols.derived import ByFormula
from costmodel.protocols.primitives import Comm
from costmodel.protocols.sigma_primitives import NUM_PARTIES, SigmaSetting
from costmodel.protocols.sigma_programs import comm
from costmodel.trust import Trust

CACHED = "phase decode (SIGMA's code runs whole prompts)"
TESTBED = Path(__file__).parents[1] / "testbeds" / "sigma.yaml"
# Gupta et al. 2024, section 2: a trusted dealer, two parties of whom one may be corrupted, semi-honest.
TRUST = Trust(
    num_parties=NUM_PARTIES,
    randomness="a trusted dealer, who sends both parties keys before every run and could unmask everything",
    dealer=True,
)

Class = Literal["activation", "softmax", "norm", "linear"]
CLASSES: tuple[Class, ...] = get_args(Class)
Unit = Literal["rounds", "key_bytes", "weights"]
UNITS: tuple[Unit, ...] = get_args(Unit)

# op types that the logs time separately -> their class; all other ops of a run are of class `linear`
CLASS_OF: dict[type, Class] = {
    **dict.fromkeys((ops.Gelu, ops.Silu, ops.Relu, ops.LeakyRelu), "activation"),
    ops.Softmax: "softmax",
    **dict.fromkeys((ops.LayerNorm, ops.RmsNorm, ops.FrozenNorm), "norm"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassSeconds:
    """The compute seconds of one class of ops, as fitted.

    per_unit_s: Seconds per unit of work, by the unit's name.
    least, greatest: Least and greatest amount of each unit that varies among the fitted ops; outside this range,
        seconds are extrapolated.
    worst_error: Greatest relative error on a fitted run.
    held_out_error: Greatest relative error on a run that was left out of the fit.

    Raises UserError unless `per_unit_s` has exactly the units UNITS, with finite seconds of at least 0, and every
    number in `greatest` is at least 1.
    """

    per_unit_s: dict[Unit, float]
    least: dict[Unit, int]
    greatest: dict[Unit, int]
    worst_error: float
    held_out_error: float

    def __post_init__(self) -> None:
        if set(self.per_unit_s) != set(UNITS):
            units, has = ", ".join(UNITS), ", ".join(self.per_unit_s)
            raise UserError(f"`per_unit_s` must have the units {units}, but has {has}.")
        for name, value in self.per_unit_s.items():
            if not 0 <= value < math.inf:
                raise UserError(f"seconds per {name} must be finite and at least 0, but got {value}.")
        for name, most in self.greatest.items():
            if most < 1:
                raise UserError(f"`greatest` of {name} must be at least 1, but got {most}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SigmaTestbed:
    """Fitted seconds by class of op. machine, source: those of the logs. rows: names of the fitted runs.

    Raises UserError unless `classes` has exactly the names in CLASSES.
    """

    protocol: Literal["sigma"]
    machine: str
    source: str
    rows: tuple[str, ...]
    classes: dict[str, ClassSeconds]

    def __post_init__(self) -> None:
        if set(self.classes) != set(CLASSES):
            raise UserError(f"`classes` must be {', '.join(CLASSES)}, but got {', '.join(self.classes)}.")


def class_of(op: Op) -> Class:
    return CLASS_OF.get(type(op), "linear")


def work(op: Op, cost: Comm) -> dict[Unit, int]:
    """Return an op's work by unit: `rounds` and `key_bytes` of `cost`, and `weights`, a product weight's elements."""
    weights = math.prod(op.weight_shapes["weight"]) if op.is_product and op.weight_shapes else 0
    return {"rounds": cost.rounds, "key_bytes": cost.key_bytes, "weights": weights}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sigma(ByFormula):
    """The pricer of protocol `sigma`, on a network and a testbed of seconds that were fitted on published runs."""

    protocol: str = "sigma"
    range_over: str = "errors of seconds fitted on published GPUs, not yours"
    has_keys: bool = True
    setting: SigmaSetting
    testbed: SigmaTestbed

    @property
    def trust(self) -> Trust:
        return TRUST

    def comm(self, op: Op) -> Comm:
        return comm(op, self.setting)

    def op_s(self, op: Op, cost: Comm) -> float:
        per_unit_s = self.testbed.classes[class_of(op)].per_unit_s
        return sum(per_unit_s[unit] * count for unit, count in work(op, cost).items())

    def error_s(self, op: Op, cost: Comm) -> float:
        """Return the held-out error, in seconds, plus as much per doubling above, or halving below, the fitted work."""
        fitted, counts = self.testbed.classes[class_of(op)], work(op, cost)
        below = [least / counts[unit] for unit, least in fitted.least.items() if counts[unit]]
        doublings = math.log2(max(self.extrapolation(op), *below, 1.0))
        return self.op_s(op, cost) * fitted.held_out_error * (1 + doublings)

    def extrapolated(self, graph: Iterable[Node]) -> tuple[str, ...]:
        """Return, in words, a graph's types of op that are larger than the fitted ops, and a KV cache if it has one."""
        nodes = tuple(graph)
        is_cached = any(isinstance(node.op, KeyValueCache) and node.op.past_len for node in nodes)
        return (*ByFormula.extrapolated(self, nodes), *([CACHED] if is_cached else []))

    def extrapolation(self, op: Op) -> float:
        counts = work(op, self.comm(op))
        greatest = self.testbed.classes[class_of(op)].greatest
        return max([1.0, *(counts[unit] / most for unit, most in greatest.items())])


def load(
    network: str | Network | None = None,
    testbed: Path | None = None,
    setting: SigmaSetting | None = None,
) -> Sigma:
    """Return the protocol's pricer, by default on network `lan`, with the package's testbed and the setting of GPT-2.

    A UserError is raised for an unknown network or a file that is not valid.
    """
    path, link, chosen = testbed or TESTBED, load_network(network), setting or SigmaSetting()
    return Sigma(
        network=link.name,
        cost_model_id=cost_model_id(
            read_bytes(path, MOST_YAML),
            *("sigma", link.bandwidth_bits_per_s, link.rtt_s, link.duplex),
            *(chosen.ring_bits, chosen.fraction_bits),
        ),
        setting=chosen,
        testbed=load_file(SigmaTestbed, path),
        link=link,
    )
