"""The protocol `ckks`: homomorphic encryption; the server computes on what the client has encrypted. Semi-honest.

    latency = seconds of primitives, each at its level, + seconds of bootstraps + bytes x 8 / bandwidth + RTT / 2

`ckks_steps` counts primitives from shapes alone. The client sends one batch of ciphertexts at the highest level, and
waits once, for the answer at the lowest level. Its evaluation keys are sent once and serve every run, so the bytes of a
run exclude them; they are `EVALUATION_KEY_BYTES` in all. Weights are plaintexts of the server; the seconds of a product
with a weight include encoding it.

Any value can be bootstrapped, to the highest level, between any two steps. Dynamic programming over the levels of the
values that later steps read, which are few in a decoder, finds the placement that bootstraps the fewest ciphertexts;
among equal placements, the one that does rotations and relinearisations at the lowest levels. A search needs costs that
add up over layers, so bootstraps are placed in one layer at a time: its input has `BOUNDARY` levels (more in layer 0)
and its output must have at least `BOUNDARY`. This is never better than placing bootstraps in the whole graph at once.

Ring: N = 2^16 with 31 levels, of which a bootstrap takes 14, and 128 bits of security: the parameters of DESILO's
library and of ANT-ACE's cost model. Source of the scheme: Cheon et al. 2017, https://eprint.iacr.org/2016/421.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Literal, TypeAlias

from costmodel.config.files import load_file
from costmodel.cost import Price
from costmodel.errors import UserError
from costmodel.estimate import Pricer, cost_model_id
from costmodel.network import Network, load_network, network_s
from costmodel.ops import Node, Op
from costmodel.protocols.ckks_forms import PRIMITIVES, Primitive, packing_of
from costmodel.protocols.ckks_steps import Step, steps_of
from costmodel.protocols.derived import on_grid
from costmodel.trust import Trust

BOUNDARY = 1  # levels between layers: what a projection without a norm needs
Bootstraps: TypeAlias = tuple[tuple[int, str], ...]  # index of the step to run before, and name of the value


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Steps with the bootstraps between them. levels: the lowest level at which each step can begin."""

    steps: tuple[Step, ...]
    bootstraps: Bootstraps
    levels: tuple[int, ...]

    @property
    def bootstrapped(self) -> list[tuple[Step, Step | None]]:
        """For each bootstrap, the step that reads the value and the step that made it (None: an input of the graph)."""
        known = {step.name: step for step in self.steps}
        return [(self.steps[index], known.get(name)) for index, name in self.bootstraps]

    @property
    def counts(self) -> Counter[str]:
        """How often each primitive runs, and `bootstrap`, once per ciphertext; those that never run are absent."""
        total = Counter(bootstrap=sum(of.ciphertexts if of else 1 for _, of in self.bootstrapped))
        for step in self.steps:
            for (primitive, _), count in step.work.items():
                total[primitive] += count
        return +total


def place(
    steps: Sequence[Step], top: int, start: Mapping[str, int] | None = None, kept: Mapping[str, int] | None = None
) -> Placement:
    """Return the placement of bootstraps between steps that bootstraps the fewest ciphertexts.

    top: levels after a bootstrap. start: levels of inputs, by name; other inputs have `top`. kept: least levels that
    values must have after the last step, by name. A UserError is raised if a step needs more levels than `top`, or no
    placement leaves the values in `kept` their levels.
    """
    given, wanted = start or {}, kept or {}
    size = {step.name: step.ciphertexts for step in steps}
    last_use = {name: index for index, step in enumerate(steps) for name in step.inputs}
    last_use.update(dict.fromkeys(wanted, len(steps)))
    outside = {name for step in steps for name in step.inputs} - size.keys()
    # the levels of values -> the cost so far, in ciphertexts and then in levels of moves, and how it came about
    states: dict[tuple[tuple[str, int], ...], tuple[tuple[int, int], Bootstraps]]
    states = {tuple(sorted((name, given.get(name, top)) for name in outside)): ((0, 0), ())}
    for index, step in enumerate(steps):
        if step.depth > top:
            raise UserError(
                f"op {step.node.name!r} needs {step.depth} levels at once for its {step.kind.replace('_', ' ')}, but "
                f"the parameters of ckks leave {top} after a bootstrap; choose a testbed with more."
            )
        before, states = states, {}
        moves = sum(count for (what, _), count in step.work.items() if what in ("rotation", "relinearisation"))
        for state, (cost, taken) in before.items():
            low = [name for name in dict.fromkeys(step.inputs) if dict(state)[name] < top]
            for chosen in (names for count in range(len(low) + 1) for names in combinations(low, count)):
                levels = dict(state) | dict.fromkeys(chosen, top)
                level = min((levels[name] for name in step.inputs), default=top)
                if level < step.depth:
                    continue
                levels[step.name] = level - step.depth
                live = tuple(sorted((name, at) for name, at in levels.items() if last_use.get(name, -1) > index))
                total = cost[0] + sum(size.get(name, 1) for name in chosen), cost[1] + moves * level
                if live not in states or total < states[live][0]:
                    states[live] = total, (*taken, *((index, name) for name in chosen))
    ended = [found for state, found in states.items() if all(level >= wanted.get(name, 0) for name, level in state)]
    if not ended:
        raise UserError(f"op {steps[-1].node.name!r} must leave {BOUNDARY} levels, but ckks has {top}; choose more.")
    bootstraps = min(ended, key=lambda found: found[0])[1]
    return Placement(steps=tuple(steps), bootstraps=bootstraps, levels=_least_levels(steps, bootstraps, wanted))


def _least_levels(steps: Sequence[Step], bootstraps: Bootstraps, wanted: Mapping[str, int]) -> tuple[int, ...]:
    """Return the levels of steps if every value is lowered, which is free, to what its readers need."""
    needed, levels = dict(wanted), list[int]()
    for index, step in reversed(list(enumerate(steps))):
        levels.append(needed.get(step.name, 0) + step.depth)
        for name in step.inputs:
            needed[name] = 0 if (index, name) in bootstraps else max(needed.get(name, 0), levels[-1])
    return tuple(reversed(levels))


def place_by_layer(steps: Sequence[Step], top: int) -> Placement:
    """Return a placement of bootstraps that `place` found for each layer separately; errors are those of `place`.

    The input of layer 0 has `top` levels minus the embedding's depth (at least `BOUNDARY`), that of other layers
    `BOUNDARY`. Each layer's output has at least `BOUNDARY`. No value is bootstrapped at the end of a layer.
    """
    layer_of = {step.name: step.node.layer for step in steps}
    handed = {name for step in steps for name in step.inputs if layer_of.get(name, step.node.layer) != step.node.layer}
    fresh = max(BOUNDARY, top - sum(step.depth for step in steps if step.node.layer == "embed"))
    bootstraps, levels = list[tuple[int, str]](), list[int]()
    known: dict[str, tuple[Placement, list[str]]] = {}  # layers repeat; with the names in order
    for layer, group in groupby(steps, key=lambda step: step.node.layer):
        part = list(group)
        names = list(dict.fromkeys(name for step in part for name in (*step.inputs, step.name)))
        begins = fresh if layer == 0 else BOUNDARY
        start = {name: begins for name in names if layer_of.get(name, layer) != layer}
        kept = {step.name: fresh if layer == "embed" else BOUNDARY for step in part if step.name in handed}
        shape = [(step.depth, step.ciphertexts, step.work, *map(names.index, step.inputs)) for step in part]
        if (key := repr((shape, [(start.get(name), kept.get(name)) for name in names]))) not in known:
            known[key] = place(part, top, start, kept), names
        placed, its_names = known[key]
        bootstraps += [(len(levels) + index, names[its_names.index(name)]) for index, name in placed.bootstraps]
        levels += placed.levels
    return Placement(steps=tuple(steps), bootstraps=tuple(bootstraps), levels=tuple(levels))


RING_DIMENSION = 2**16
MOST_LEVELS = 17  # of 31: a bootstrap takes the others, and more would need a modulus beyond 128 bits of security
WORD_BYTES = 8
STEP_S = 2.0**-12  # an op's seconds are multiples of this, so that sums over layers have few distinct values
TESTBEDS = Path(__file__).parents[1] / "testbeds"
# published machines, by their names for --testbed
CARDS = {"rtx-pro-6000": "ckks.yaml", "a100": "ckks-a100.yaml", "ant-ace-cpu": "ckks-ant-ace-cpu.yaml"}
DEFAULT_CARD = "rtx-pro-6000"
# The client's keys are for rotations by powers of two in both directions, for products, and for conjugation. A key has
# a part for each of the modulus's four digits: two polynomials, in the modulus and a special one. In DESILO's library a
# key has 256 MB. A bootstrap rotates by other distances as well, each as several powers of two.
EVALUATION_KEY_BYTES = (2 * 15 + 2) * 4 * 2 * RING_DIMENSION * (31 + 1 + 8) * WORD_BYTES
TRUST = Trust(
    num_parties=2,
    randomness=(
        "none; the client alone can decrypt, the server learns shapes and no number, and the client learns the answer "
        f"and nothing else of the weights than it tells. Evaluation keys of {EVALUATION_KEY_BYTES / 1e9:.1f} GB "
        "are sent once; decrypted numbers must stay at the client, as their noise tells of its key"
    ),
    dealer=False,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CkksTestbed:
    """Seconds of primitives and bootstraps on one machine.

    slots, levels: Number of slots of a ciphertext, and of its levels after a bootstrap.
    at_levels, primitives: Levels, ascending, and seconds of each primitive at each of them. Seconds at other levels are
        interpolated, or extrapolated, linearly.
    at_slots, bootstrap_s: Numbers of distinct slots (see `Step`), ascending, and seconds of a bootstrap for each
        number; between them, seconds are interpolated over the number's logarithm.
    error: Relative error to expect of a whole model's seconds.

    Raises UserError for levels or slots that N = 2^16 does not have, numbers that do not ascend, or seconds that are
    missing, negative or infinite.
    """

    protocol: Literal["ckks"]
    machine: str
    source: str
    slots: int
    levels: int
    at_levels: tuple[int, ...]
    primitives: dict[Primitive, tuple[float, ...]]
    at_slots: tuple[int, ...]
    bootstrap_s: tuple[float, ...]
    error: float

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= MOST_LEVELS:
            raise UserError(
                f"`levels` must be from 1 to {MOST_LEVELS}, which N = {RING_DIMENSION} leaves after a bootstrap at "
                f"128 bits of security, but got {self.levels}."
            )
        if self.slots & (self.slots - 1) or not 1 <= self.slots <= RING_DIMENSION // 2:
            raise UserError(f"`slots` must be a power of two up to {RING_DIMENSION // 2}, but got {self.slots}.")
        for name, places, values in (
            *((name, self.at_levels, self.primitives.get(name, ())) for name in PRIMITIVES),
            ("bootstrap", self.at_slots, self.bootstrap_s),
        ):
            is_rising = list(places) == sorted(set(places)) and len(places) == len(values) > 0
            if not is_rising or not all(0 <= value < math.inf for value in values):
                raise UserError(
                    f"seconds of {name} must be finite, at least 0 and one for each of rising places, but got "
                    f"{values} at {places}."
                )

    def seconds(self, placement: Placement, by_node: bool = False) -> dict[str, float]:
        """Return seconds by primitive and `bootstrap` or, if `by_node`, by node, each with its inputs' bootstraps."""
        total: dict[str, float] = defaultdict(float)
        by_level = {
            name: [max(0.0, _on_line(self.at_levels, values, level)) for level in range(self.levels + 1)]
            for name, values in self.primitives.items()
        }
        for step, level in zip(placement.steps, placement.levels, strict=True):
            for (primitive, used), count in step.work.items():
                total[step.node.name if by_node else primitive] += count * by_level[primitive][level - used]
        for reader, of in placement.bootstrapped:
            size, distinct = (of.ciphertexts, of.distinct) if of else (1, self.slots)
            at = min(max(distinct, self.at_slots[0]), self.at_slots[-1])
            a_bootstrap_s = _on_line([math.log2(slots) for slots in self.at_slots], self.bootstrap_s, math.log2(at))
            total[reader.node.name if by_node else "bootstrap"] += size * a_bootstrap_s
        return total


def _on_line(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value at a place, on the line through the two nearest ones on either side or, at an end, on one."""
    if len(places) == 1:
        return values[0]
    right = next((index for index in range(1, len(places)) if places[index] >= at), len(places) - 1)
    slope = (values[right] - values[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + slope * (at - places[right - 1])


def placed_by_layer(nodes: Sequence[Node], slots: int, levels: int) -> Placement:
    """Return an op graph's steps with bootstraps by `place_by_layer`; slots, levels: those of a `CkksTestbed`."""
    return place_by_layer(steps_of(nodes, packing_of(nodes, slots)), levels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ckks(Pricer):
    """The pricer of protocol `ckks`, on a network and a testbed."""

    protocol: str = "ckks"
    network: str
    cost_model_id: str
    range_over: str = "errors of the seconds of its testbed"
    testbed: CkksTestbed
    link: Network

    @property
    def trust(self) -> Trust:
        return TRUST

    def price(self, op: Op) -> Price:
        """Return the cost of computing a single op whose inputs come at the highest level; nothing is sent.

        A token embedding, linear, vocabulary projection, LayerNorm, RmsNorm or addition is packed for as many tokens as
        it has rows. Any other op is packed for one token, so its cost differs from its cost in a graph, which `prices`
        returns. Inputs are lowered for free to the levels that the op needs. Bootstraps between its steps are included;
        in a graph, its inputs may need bootstraps too. A UserError is raised if the op has no steps or packing, or a
        step needs more levels than a bootstrap leaves.
        """
        inputs = tuple(f"input {index}" for index in range(len(op.input_shapes)))
        placed = self.placed([Node(name="op", layer=0, op=op, inputs=inputs)])
        return self._price(sum(self.testbed.seconds(placed).values()), 0, is_answer=False)

    def placed(self, nodes: Sequence[Node]) -> Placement:
        return placed_by_layer(nodes, self.testbed.slots, self.testbed.levels)

    def prices(self, nodes: Sequence[Node], price_node: object = None) -> list[Price]:
        """Return the costs of a graph's nodes, in order, each with the bootstraps of its inputs.

        The first node that reads an input of the graph has the input's bytes, the last node the answer's. `price_node`
        is not used. A UserError is raised as by `price`.
        """
        if not nodes:
            return []
        placed, sent = self.placed(nodes), Counter[str]()
        num, known = packing_of(nodes, self.testbed.slots).num, {step.name for step in placed.steps}
        for step in placed.steps:
            for name, shape in zip(step.node.inputs, step.node.op.input_shapes, strict=False):
                if name in step.inputs and name not in known:
                    sent[step.node.name] += num(shape[-1]) * ciphertext_bytes(self.testbed.levels)
                    known.add(name)
        sent[answer := nodes[-1].name] += placed.steps[-1].ciphertexts * ciphertext_bytes(0)
        seconds = self.testbed.seconds(placed, by_node=True)
        return [self._price(seconds[node.name], sent[node.name], is_answer=node.name == answer) for node in nodes]

    def _price(self, compute_s: float, num_bytes: int, *, is_answer: bool) -> Price:
        on_wire_s = network_s(self.link, rounds=int(is_answer), waited_bytes=num_bytes, pair_bytes=num_bytes)
        computed, waited = round(compute_s / STEP_S) * STEP_S, on_grid(on_wire_s)
        return Price(
            latency_s=computed + waited,
            sent_bytes=num_bytes,
            rounds=int(is_answer),
            messages=int(num_bytes > 0),
            online_bytes=num_bytes,
            setup_bytes=0,
            compute_s=computed,
            network_s=waited,
        )

    def latency_s_range(self, graph: Iterable[Node]) -> tuple[float, float]:
        prices = self.prices(tuple(graph))
        latency_s = sum(price.latency_s for price in prices)
        error_s = self.testbed.error * sum(price.compute_s or 0 for price in prices)
        return max(0.0, latency_s - error_s), latency_s + error_s


def ciphertext_bytes(level: int) -> int:
    """Return the bytes of a ciphertext at a level: two polynomials, each modulo `level` + 1 primes."""
    return 2 * RING_DIMENSION * (level + 1) * WORD_BYTES


def load(network: str | Network | None = None, testbed: Path | None = None, setting: object = None) -> Ckks:
    """Return the protocol's pricer on a network (default: `lan`) and a testbed.

    testbed: the path of a .yaml file, or a key of `CARDS` (default: DEFAULT_CARD). setting: not used. A UserError is
    raised for a network, card or file that is unknown or not valid.
    """
    card = DEFAULT_CARD if testbed is None else str(testbed)
    path, link = TESTBEDS / CARDS[card] if card in CARDS else Path(card), load_network(network)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--testbed of ckks must be a card ({', '.join(CARDS)}) or a .yaml file, but got {card!r}.")
    times = load_file(CkksTestbed, path)
    return Ckks(
        network=link.name,
        cost_model_id=cost_model_id(path.read_bytes(), "ckks", link.bandwidth_bits_per_s, link.rtt_s, link.duplex),
        testbed=times,
        link=link,
    )
