"""Costs under the engines' protocols: bytes and rounds by formula, compute seconds from a testbed, on a network.

    latency = compute seconds + waited bytes x 8 / bandwidth + rounds x RTT / 2

    compute seconds of an op = fixed_s of its kind + sum over units of work of per_unit_s x count

Nothing overlaps: within an op a party computes, then sends, then waits, as in the engine. The latency includes all
seconds of preprocessing. The start-up seconds (keys, first oblivious transfers) are added to the token embedding, of
which a decoder usually has one.

Compute seconds are fitted on measured runs. Each party was a process on the same machine, so seconds include handing
messages to TCP and back. Coefficients are at least 0, so that seconds never fall as work grows. The work of a matrix
product depends on how the engine cuts it into tiles, and under cheetah into blocks. A kind is a type of op in one of
its forms, with its weights secret-shared or held by the server; most matrix products share a kind, since one kernel
computes them. A testbed file states the fit and the machine. An op that was measured at its full size takes the
measured seconds instead.
"""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from costmodel import ops
from costmodel.config.files import MOST_YAML, dump, load_file, read_bytes
from costmodel.cost import Price
from costmodel.errors import UnpricedOpError, UserError
from costmodel.estimate import Pricer, cost_model_id
from costmodel.network import Network, load_network, network_s
from costmodel.ops import Node, Op
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.op_programs import calls_of
from costmodel.protocols.primitives import Comm, EngineSetting
from costmodel.trust import Trust

SCHEMA_VERSION = 2
POOL = "Matmul"  # first part of the kinds that matrix products share, since one kernel computes them
UNMEASURED = {"TakeColumns": "TakeRows"}  # kind that a testbed may lack -> a similar kind, whose fit is used instead


@dataclass(frozen=True, kw_only=True, slots=True)
class KindSeconds:
    """The compute seconds of one kind of op, as fitted.

    fixed_s, per_unit_s: Seconds per op, and seconds per unit of work, by the unit's name.
    greatest: Largest amount of each unit among the fitted ops; larger ops are extrapolated.
    num_points: Number of fitted ops.
    worst_error: Greatest relative error on the fitted ops.
    held_out_error: Greatest relative error on an op that was left out of the fit; the error to expect for sizes
        between the measured ones.

    Raises UserError for negative or infinite seconds or errors, or if `per_unit_s` and `greatest` differ in units.
    """

    fixed_s: float
    per_unit_s: dict[str, float]
    greatest: dict[str, int]
    num_points: int
    worst_error: float
    held_out_error: float

    def __post_init__(self) -> None:
        _check(fixed_s=self.fixed_s, **self.per_unit_s)
        _check(worst_error=self.worst_error, held_out_error=self.held_out_error)
        if set(self.greatest) != set(self.per_unit_s):
            raise UserError(
                f"`greatest` must have the units of `per_unit_s`, {', '.join(self.per_unit_s)}, but has "
                f"{', '.join(self.greatest) or 'none'}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSeconds:
    """The measurement of one op at its full size.

    seconds: Seconds of the op's fastest run (`crypten`: the median over runs) without batches of oblivious transfers
        (OTs), plus `setup_s`.
    setup_s: Seconds of the op's share of OT batches; 0 if batches are not measured separately, but included in runs.
    spread: Greatest deviation of a run from `seconds` - `setup_s`, relative to `seconds`. If several runs made the
        fewest OT batches, only these runs count.
    num_runs: Number of runs.

    Raises UserError for seconds or a spread that are negative or not finite.
    """

    seconds: float
    setup_s: float
    spread: float
    num_runs: int

    def __post_init__(self) -> None:
        _check(seconds=self.seconds, setup_s=self.setup_s, spread=self.spread)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeTestbed:
    """The compute seconds of kinds of op and of single ops under one protocol, with all parties on one machine.

    engine, machine, measured_on: Engine with its version, description of the machine, and date of the measurement.
    threads: Threads of each party.
    start_s: Seconds of start-up once a run, such as for keys. Raises UserError if negative or not finite.
    kinds, ops: Fits by name of a kind (`fitted_kind`), and measurements of single ops by name (`op_name`).
    notes: Further facts about the measurement, in words.
    """

    protocol: str
    engine: str
    threads: int
    machine: str
    measured_on: str
    ring_bits: int
    fraction_bits: int
    start_s: float
    kinds: dict[str, KindSeconds]
    ops: dict[str, OpSeconds] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        _check(start_s=self.start_s)


def _check(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise UserError(f"`{name}` must be finite and at least 0, but got {value}.")


def work(op: Op, protocol: str, setting: EngineSetting) -> dict[str, int]:
    """Return an op's amounts of work by unit, such as `elements` or `products`, by which `per_unit_s` is multiplied.

    A matrix product counts its tiles separately, so an operand that several tiles read counts several times.
    """
    if not op.is_product:
        return op.work
    engine = ENGINE_PROTOCOLS[protocol]
    calls = calls_of(op, setting, share_bytes=engine.num_shares * setting.ring_bits // 8)
    made = [call for call in calls if call.primitive in ("matmul", "truncate")]
    units = {"calls": len(made), "elements": sum(call.elements for call in made)}
    return op.work | units | engine.matrix_work(calls)


def kind(op: Op, weights: str) -> str:
    """Return the name of an op's kind: its type, its forms and, for hidden weights, who holds them.

    An example is `TokenEmbedding.lookup.secret`. weights: `secret` or `server`, here and in the functions below.
    """
    forms = [value for field in fields(op) if isinstance(value := getattr(op, field.name), str)]
    return ".".join([type(op).__name__, *forms, *([weights] if op.weights == "hidden" else [])])


def fitted_kind(op: Op, weights: str) -> str:
    """Return the kind whose fit gives an op's seconds: `Matmul.secret` or `Matmul.server` for products, else `kind`.

    A token embedding that looks tokens up is a product too, but has the fit of its `kind`.
    """
    if not op.is_product or op.work:
        return kind(op, weights)
    return f"{POOL}.{weights if op.weights == 'hidden' else 'secret'}"


def op_name(op: Op, weights: str) -> str:
    """Return an op's kind and its non-default fields other than forms, such as `Relu(rows=8, features=16)`."""
    values = {field.name: getattr(op, field.name) for field in fields(op) if getattr(op, field.name) != field.default}
    shape = ", ".join(f"{name}={value}" for name, value in values.items() if not isinstance(value, str))
    return f"{kind(op, weights)}({shape})"


def seconds_of(op: Op, weights: str, testbed: ComputeTestbed) -> float:
    """Return an op's compute seconds, without start-up. Raise UnpricedOpError if the testbed lacks its kind or unit."""
    if known := testbed.ops.get(op_name(op, weights)):
        return known.seconds
    measured = _measured(op, weights, testbed)
    try:
        return measured.fixed_s + sum(measured.per_unit_s[unit] * count for unit, count in _work(op, testbed).items())
    except KeyError as error:
        raise UnpricedOpError(
            f"{fitted_kind(op, weights)} of the testbed has seconds per {', '.join(measured.per_unit_s)}, but none per "
            f"{error.args[0]}; {_remedy(testbed)}"
        ) from None


def extrapolation_of(op: Op, weights: str, testbed: ComputeTestbed) -> float:
    """Return an op's work / the largest work that was fitted, in the unit where this is most; at least 1."""
    if op_name(op, weights) in testbed.ops:
        return 1.0
    greatest = _measured(op, weights, testbed).greatest
    counts = _work(op, testbed)
    return max(1.0, *(count / max(1, greatest[unit]) for unit, count in counts.items()))


def error_s_of(op: Op, weights: str, testbed: ComputeTestbed) -> float:
    """Return the absolute error to expect of an op's seconds, in seconds.

    For an op that was measured at its full size, this is the spread; for others, the held-out error of their kind, plus
    as much again for every doubling beyond the fitted sizes.
    """
    seconds = seconds_of(op, weights, testbed)
    if known := testbed.ops.get(op_name(op, weights)):
        return seconds * known.spread
    doublings = math.log2(extrapolation_of(op, weights, testbed))
    return seconds * _measured(op, weights, testbed).held_out_error * (1 + doublings)


def dump_compute(testbed: ComputeTestbed) -> str:
    """Return the text of a testbed's .yaml file, with four significant digits of each number that is not an integer."""
    data = _rounded(asdict(testbed))
    data["notes"] = list(testbed.notes)
    return dump({"schema_version": data.pop("schema_version"), **data})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _work(op: Op, testbed: ComputeTestbed) -> dict[str, int]:
    setting = EngineSetting(ring_bits=testbed.ring_bits, fraction_bits=testbed.fraction_bits)
    return work(op, testbed.protocol, setting)


def _measured(op: Op, weights: str, testbed: ComputeTestbed) -> KindSeconds:
    name = fitted_kind(op, weights)
    name = name if name in testbed.kinds else UNMEASURED.get(name, name)
    if name not in testbed.kinds:
        missing = op_name(op, weights) if testbed.ops else name  # a testbed of single ops lacks an op
        line = f"the testbed of protocol {testbed.protocol} has no seconds for {missing}; {_remedy(testbed)}"
        raise UnpricedOpError(line)
    return testbed.kinds[name]


def _remedy(testbed: ComputeTestbed) -> str:
    engine = ENGINE_PROTOCOLS[testbed.protocol].engine
    again = " with --for and the model it is in" if testbed.ops else ""
    return f"measure it with `python -m costmodel calibrate --engine {engine} --protocol {testbed.protocol}`{again}."


TESTBEDS = Path(__file__).parents[1] / "testbeds"
LATENCY_STEP_S = 2.0**-26  # seconds are multiples of this, so sums below 4 years are exact in any order


@dataclass(frozen=True, kw_only=True, slots=True)
class ByFormula(Pricer):
    """The pricer of a protocol on the network `link`: `comm` gives bytes and rounds by formula, `op_s` compute seconds.

    `setting` states how numbers are represented. To price by a protocol of your own with `--protocol module:Class`,
    write a subclass with `trust`, `comm` and `op_s`. To take `--testbed`, the subclass needs a field `testbed`, a path
    with a default.
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
        """Return the rounds, messages, bytes and keys of an op; a UserError is raised if there is no formula for it."""

    @abstractmethod
    def op_s(self, op: Op, cost: Comm) -> float:
        """Return the compute seconds of an op, without start-up. `cost` is what `comm` returned for it."""

    def error_s(self, op: Op, cost: Comm) -> float:
        """Return the absolute error to expect of `op_s`, in seconds; 0 unless a subclass says otherwise."""
        return 0.0

    def start_s(self, op: Op) -> float:
        """Return the seconds of a run's start-up that are charged to this op; 0 unless a subclass says otherwise."""
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
        """Return the seconds that the communication of an op takes on the link."""
        pair_bytes = cost.sent_bytes / math.comb(self.trust.num_parties, 2)
        return network_s(self.link, rounds=cost.rounds, waited_bytes=cost.waited_bytes, pair_bytes=pair_bytes)

    def latency_s_range(self, graph: Iterable[Node]) -> tuple[float, float]:
        """Return a graph's least and greatest latency, in seconds, if all ops' compute seconds are off by `error_s`."""
        low_s = high_s = 0.0
        for op, count in Counter(node.op for node in graph).items():
            cost = self.comm(op)
            latency_s, error_s = self._price(op, cost).latency_s, self.error_s(op, cost)
            low_s += count * (latency_s - min(self.op_s(op, cost), error_s))  # compute seconds cannot fall below 0
            high_s += count * (latency_s + error_s)
        return max(0.0, low_s), high_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived(ByFormula):
    """A protocol of an MPC engine, on a testbed and a network; `setting` states the ring and who holds the weights."""

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
    """Return a protocol's pricer, by default on network `lan`, with the package's testbed and the default setting.

    Raises:
        UserError: If the network or testbed file is not valid, the protocol does not support the setting, or the
            testbed is for another protocol, engine, ring, number of threads or, except under `crypten`, another number
            of fraction bits.
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
    """Return a protocol's pricer with the package's testbed; None if this was not measured in `setting`."""
    is_usual = setting.of_testbed == type(setting)().of_testbed and setting.device == "cpu"
    return load(protocol, network, setting=setting) if is_usual else None


def check_setting(protocol: str, setting: EngineSetting) -> None:
    """Raise UserError if a setting reuses masks of weights, but the protocol cannot."""
    if setting.weight_masks == "kept" and not ENGINE_PROTOCOLS[protocol].keeps_masks:
        keeping = " or ".join(name for name, known in ENGINE_PROTOCOLS.items() if known.keeps_masks)
        raise UserError(f"`weight_masks` kept is of protocol {keeping}, but got protocol {protocol}; leave it out.")


def on_grid(seconds: float) -> float:
    """Return seconds rounded to a multiple of `LATENCY_STEP_S`; a UserError is raised if they are not finite."""
    if not math.isfinite(steps := seconds / LATENCY_STEP_S):
        raise UserError(f"an op takes {seconds:g} s on this testbed and network; correct their numbers.")
    return round(steps) * LATENCY_STEP_S
