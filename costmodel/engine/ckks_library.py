"""Run a model under CKKS with a library, on one CPU thread, and measure the library's primitives for a testbed.

The library is by DESILO Inc. (https://desilo.ai). Its ring with bootstraps has N = 2^16, 128 bits of security and keys
of 5 GB. Its smaller rings have no bootstraps: instead, the holder of the secret key decrypts and encrypts again, which
is for tests of counts and results.

A run in plaintext gives the ranges of scores and of their sums over a row, by which the server scales its plaintexts.
Primitives are counted, and timed in seconds of the CPU, so that other programs hardly disturb them. Each primitive is
also measured by itself, before and (except for bootstraps) after a run; the smaller time predicts the run.
"""

import importlib
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np

from costmodel.engine.ckks_plaintexts import Plaintexts, packed
from costmodel.engine.compare import SEED, drawn_tokens, drawn_weights
from costmodel.errors import UserError
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array, Weights
from costmodel.ops import OpGraph
from costmodel.protocols.ckks import CkksTestbed, Placement, place, placed_by_layer
from costmodel.protocols.ckks_forms import PRIMITIVES, Machine, Primitive, packing_of

PACKAGE, VERSION = "desilofhe", "2.0.0"
Value: TypeAlias = list[Any]  # ciphertexts
# kinds of steps of `ckks_steps` that the library can run; the others are only counted
KINDS = {"linear", "moved", "rotary", "scores", "eighth_power", "row_sum", "inverse", "product", "mix", "square"}
NUM_LEVELS, NUM_RUNS = 5, 2  # number of levels at which primitives are measured, and of runs at each
SMALLER = 0.4  # factor of drawn embeddings, since a bootstrap takes only numbers from -1 to 1
STATED_ERROR = 1e-2  # of logits: a bootstrap of the library has an error of 5e-5, which later products enlarge
SECONDS_BAR = 0.25  # stated relative error of a whole run's predicted seconds


def load_library() -> Any:
    """Return the library's module; a UserError is raised if it is not installed."""
    try:
        return importlib.import_module(PACKAGE)
    except ImportError:
        raise UserError(
            f"protocol ckks runs under {PACKAGE}, which is not installed; run: python -m pip install "
            f"{PACKAGE}=={VERSION} (free for non-commercial use alone)."
        ) from None


class Library(Machine):
    """A `Machine` that runs programs of `ckks_steps` with a key pair of its own; a value is a list of ciphertexts.

    levels: levels of a ciphertext after encryption or a bootstrap. With real bootstraps (`is_bootstrapped`), the
        library sets them, and the argument is not used.
    counts, seconds: number of calls and CPU seconds so far, by primitive. plaintexts: the server's plaintexts for the
        step that runs.
    """

    def __init__(self, levels: int, *, is_bootstrapped: bool) -> None:
        kind = {"bootstrap": True} if is_bootstrapped else {"max_level": levels}
        self.engine = engine = load_library().Engine(thread_count=1, **kind)
        self.is_bootstrapped, self.levels, self.slots = is_bootstrapped, engine.max_level, engine.slot_count
        self.secret_key = key = engine.create_secret_key()
        self.public_key = engine.create_public_key(key)
        self.product_key = engine.create_relinearization_key(key)
        self.rotations = engine.create_roll_key(key)  # a bootstrap needs it, and it turns by 1, 2, 4, ... at once
        self.right: dict[int, Any] = {}
        if is_bootstrapped:
            small = engine.create_small_bootstrap_key(key)
            self.bootstrap_keys = self.product_key, engine.create_conjugation_key(key), self.rotations, small
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.plaintexts: Plaintexts | None = None

    def _timed(self, primitive: str, call: Any, value: Value, *given: Any) -> Value:
        """Return the results of a call for every ciphertext of a value."""
        results = []
        for part in value:
            started = time.process_time()
            results.append(call(part, *given))
            self.seconds[primitive] += time.process_time() - started
        self.counts[primitive] += len(value)
        return results

    def encrypted(self, slots: Array, level: int | None = None) -> Any:
        return self.engine.encrypt(_turned(slots), self.public_key, self.levels if level is None else level)

    def decrypted(self, part: Any) -> Array:
        return _turned(np.asarray(self.engine.decrypt(part, self.secret_key)).real)

    def bootstrapped(self, value: Value) -> Value:
        """Return the value at the highest level; the numbers in its slots must be from -1 to 1."""
        if self.is_bootstrapped:
            return self._timed("bootstrap", self.engine.bootstrap, self.lowered(value, 0), *self.bootstrap_keys)
        return self._timed("bootstrap", lambda part: self.encrypted(self.decrypted(part)), value)

    def lowered(self, value: Value, level: int) -> Value:
        return [part if part.level == level else self.engine.level_down(part, level) for part in value]

    def aligned(self, values: Sequence[Value]) -> list[Value]:
        level = min(part.level for value in values for part in value)
        return [self.lowered(value, level) for value in values]

    def rotation(self, value: Value, left: int) -> Value:
        """Return a value with slots rotated to the left by a power of two; a negative `left` rotates to the right."""
        if left > 0:
            return self._timed("rotation", self.engine.roll, value, self.rotations, left)
        if left not in self.right:
            self.right[left] = self.engine.create_fixed_rotation_key(self.secret_key, -left)
        return self._timed("rotation", self.engine.rotate, value, self.right[left])

    def plain(self, value: Value, slots: Any, into: int = 0) -> Value:
        """Return products of ciphertexts with plaintexts, not rescaled.

        slots: a list of plaintexts, one number for all slots, or a tuple of the name of a method of `Plaintexts` and
            its arguments. into: number of sums of products to return, if `slots` is a tuple; 0 for one product per
            ciphertext.
        """
        if into:
            of = getattr(self.plaintexts, slots[0])(*slots[1:])
            rows = [self.plain(value, [of(row, at) for at in range(len(value))]) for row in range(into)]
            return [reduce(self.engine.add, row) for row in rows]
        pairs = list(zip(value, map(_turned, self._slots(slots, len(value))), strict=True))
        return self._timed("plain_product", lambda pair: self.engine.multiply(*pair), pairs)

    def rescaled(self, value: Value) -> Value:
        return self._timed("rescale", self.engine.rescale, value)

    def multiplied(self, a: Value, b: Value) -> Value:
        return self._timed("product", lambda pair: self.engine.multiply(*pair), list(zip(a, cycle(b), strict=False)))

    def relinearised(self, value: Value) -> Value:
        return self._timed("relinearisation", self.engine.relinearize, value, self.product_key)

    def summed(self, *values: Value) -> Value:
        return [reduce(self.engine.add, parts) for parts in zip(*self.aligned(values), strict=True)]

    def shifted(self, value: Value, number: Any) -> Value:
        pairs = zip(value, self._slots(number, len(value)), strict=True)
        return [self.engine.add(part, _turned(slots)) for part, slots in pairs]

    def negated(self, value: Value) -> Value:
        return [self.engine.negate(part) for part in value]

    def _slots(self, plaintexts: Any, num: int) -> Sequence[Array]:
        """Return the slots of each ciphertext's plaintext: of a list, a name, or a number in all of them."""
        if isinstance(plaintexts, tuple):
            plaintexts = getattr(self.plaintexts, plaintexts[0])(*plaintexts[1:])
        return plaintexts if isinstance(plaintexts, list) else [np.full(self.slots, plaintexts)] * num


def _turned(slots: Array) -> Array:
    """Return slots from last to first, as the library has them, whose key turns by any power of two to its right."""
    return np.ascontiguousarray(slots[::-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class CkksComparison:
    """Predicted and measured counts and CPU seconds of a run, by primitive.

    saved: number of bootstraps that would be saved if they were placed in all layers at once, not layer by layer.
    logits_max_abs_error: largest absolute error of a logit against plaintext.
    """

    predicted: Mapping[str, int]
    measured: Mapping[str, int]
    predicted_s: Mapping[str, float]
    measured_s: Mapping[str, float]
    saved: int
    logits_max_abs_error: float

    @property
    def seconds_error(self) -> float:
        """Relative error of the predicted total seconds, such as 0.1 if they are 10 % too long."""
        return sum(self.predicted_s.values()) / sum(self.measured_s.values()) - 1


def compare(graph: OpGraph, library: Library, weights: Weights | None = None) -> CkksComparison:
    """Run a graph under the library on random tokens, and compare the run with its prediction and with plaintext.

    weights: as for `interpreter.execute`; drawn if None. Raise UserError for weights that do not fit the graph, an op
    without steps or packing, a step that the library cannot run, or numbers that do not fit a bootstrap or the inverse.
    """
    placed = placed_by_layer(graph.nodes, library.slots, library.levels)
    generator = np.random.default_rng(SEED)
    drawn, tokens = drawn_weights(graph, generator), drawn_tokens(graph, generator)
    for name in drawn:
        drawn[name] *= SMALLER if name.partition(".")[0] in ("embed", "position") else 1.0
    used = drawn if weights is None else weights
    clear = interpreter.values(graph, used, tokens)
    _check(placed, clear)
    first = measured_times(library)
    library.counts.clear()
    library.seconds.clear()
    packing = packing_of(graph.nodes, library.slots)
    server = Plaintexts(graph=graph, weights=used, clear=clear, packing=packing, step=placed.steps[0])
    result = _run(placed, library, server, interpreter.inputs(graph, tokens))
    counts, seconds = +library.counts, dict(library.seconds)
    again = measured_times(library, first.bootstrap_s[0]).primitives
    least = {name: tuple(map(min, values, again[name])) for name, values in first.primitives.items()}
    return CkksComparison(
        predicted=placed.counts,
        measured=counts,
        predicted_s=replace(first, primitives=least).seconds(placed),
        measured_s=seconds,
        saved=placed.counts["bootstrap"] - place(placed.steps, library.levels).counts["bootstrap"],
        logits_max_abs_error=float(np.abs(result - clear[graph.nodes[-1].name]).max()),
    )


def measured_times(library: Library, bootstrap_s: float | None = None) -> CkksTestbed:
    """Return a testbed: seconds of each primitive (the faster of two runs) at up to five levels, from 1 to the highest.

    bootstrap_s: seconds of a bootstrap; None to measure one, which takes minutes.
    """
    slots = np.random.default_rng(SEED).uniform(-1, 1, library.slots)
    levels = sorted({round(level) for level in np.linspace(1, library.levels, NUM_LEVELS)})
    least: dict[Primitive, list[float]] = {name: [] for name in PRIMITIVES}
    for level in levels:
        runs = []
        for _ in range(NUM_RUNS):
            before = library.seconds.copy()
            value = library.rotation([library.encrypted(slots, level)], 1)
            library.rescaled(library.plain(value, [slots]))
            library.relinearised(library.multiplied(value, value))
            runs.append({name: library.seconds[name] - before[name] for name in PRIMITIVES})
        for name, seconds in least.items():
            seconds.append(float(f"{min(run[name] for run in runs):.4g}"))
    if bootstrap_s is None:
        before_s = library.seconds["bootstrap"]
        library.bootstrapped([library.encrypted(slots, 0)])
        bootstrap_s = float(f"{library.seconds['bootstrap'] - before_s:.4g}")
    return CkksTestbed(
        protocol="ckks",
        machine=f"{platform.machine()}, one thread; seconds of the CPU",
        source=f"measured under {PACKAGE} {VERSION}",
        slots=library.slots,
        levels=library.levels,
        at_levels=tuple(levels),
        primitives={name: tuple(seconds) for name, seconds in least.items()},
        at_slots=(library.slots,),
        bootstrap_s=(bootstrap_s,),
        error=SECONDS_BAR,
    )


def _check(placement: Placement, clear: Mapping[str, Array]) -> None:
    """Check that a library runs every step, and holds what is bootstrapped; `clear` are the outputs of all nodes."""
    lasts = {step.node.name: step for step in placement.steps}
    for step in placement.steps:
        if step.kind not in KINDS:
            raise UserError(
                "a library runs attention by eighth powers alone, gates of squares, rotary positions and linears, but "
                f"{step.node.name!r} has the step {step.kind.replace('_', ' ')}; only `estimate` it."
            )
    for _, of in placement.bootstrapped:
        if of and lasts[of.node.name] is of and (size := float(np.abs(clear[of.node.name]).max())) > 1:
            raise UserError(f"a bootstrap holds from -1 to 1, but {of.node.name!r} has {size:.3g}; scale its weights.")


def _run(placement: Placement, library: Library, server: Plaintexts, inputs: Mapping[str, Array]) -> Array:
    """Return the last step's output; `inputs` are matrices that the client encrypts. Values are dropped after use."""
    steps, packing = placement.steps, server.packing
    values = {name: [library.encrypted(slots) for slots in packed(matrix, packing)] for name, matrix in inputs.items()}
    last_use = {name: index for index, step in enumerate(steps) for name in step.inputs}
    for index, step in enumerate(steps):
        for name in (name for at, name in placement.bootstraps if at == index):
            values[name] = library.bootstrapped(values[name])
        read = [values[name] for name in step.inputs]
        if step.depth:
            read = [library.lowered(value, placement.levels[index]) for value in read]
        library.plaintexts = replace(server, step=step)
        values[step.name] = step.program(library, *read)
        for name in set(step.inputs):
            if last_use[name] == index:
                del values[name]
    columns = [library.decrypted(part).reshape(-1, packing.tokens) for part in values[steps[-1].name]]
    num_tokens, width = steps[-1].node.op.output_shape
    return np.concatenate(columns).T[:num_tokens, :width]
