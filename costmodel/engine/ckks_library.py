"""CKKS by a library on the CPU, on one thread; every call is counted and timed by primitive.

The library is DESILO's, by DESILO Inc. (https://desilo.ai): under Python 3.11 the wheels of others do not import. Its
rings with a bootstrap have N = 2^16 and 128 bits of security, with keys of 5 GB. In smaller rings, which it has for
fewer levels, a bootstrap is decrypted and encrypted by the holder of the secret key: for tests of counts and results.
"""

import importlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np

from costmodel.errors import UserError
from costmodel.execution.interpreter import Array

PACKAGE, VERSION = "desilofhe", "2.0.0"
Value: TypeAlias = list[Any]


def load_library() -> Any:
    """Return the library's module; a UserError is raised if it is not installed."""
    try:
        return importlib.import_module(PACKAGE)
    except ImportError:
        raise UserError(
            f"protocol ckks runs under {PACKAGE}, which is not installed; run: python -m pip install "
            f"{PACKAGE}=={VERSION} (free for non-commercial use alone)."
        ) from None


class Library:
    """The machine of steps, under a key pair of its own; `counts` and `seconds` (of CPU) are by primitive.

    A value is a list of ciphertexts; a shorter list is used again for every set. levels: of a fresh or bootstrapped
    ciphertext. is_bootstrapped: whether bootstraps are real. named: what returns the plaintexts of a name.
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
        self.named: Callable[..., Any] = lambda name, *given: None

    def _timed(self, primitive: str, call: Any, *given: Any) -> Any:
        started = time.process_time()
        result = call(*given)
        self.seconds[primitive] += time.process_time() - started
        self.counts[primitive] += 1
        return result

    def encrypted(self, slots: Array, level: int | None = None) -> Any:
        return self.engine.encrypt(_turned(slots), self.public_key, self.levels if level is None else level)

    def decrypted(self, part: Any) -> Array:
        return _turned(np.asarray(self.engine.decrypt(part, self.secret_key)).real)

    def bootstrapped(self, value: Value) -> Value:
        """Return the value at the highest level; its slots must be from -1 to 1."""
        if self.is_bootstrapped:
            lowered = self.lowered(value, 0)
            return [self._timed("bootstrap", self.engine.bootstrap, part, *self.bootstrap_keys) for part in lowered]
        return [self._timed("bootstrap", lambda one: self.encrypted(self.decrypted(one)), part) for part in value]

    def lowered(self, value: Value, level: int) -> Value:
        return [part if part.level == level else self.engine.level_down(part, level) for part in value]

    def _aligned(self, values: Sequence[Value]) -> list[Value]:
        level = min(part.level for value in values for part in value)
        return [self.lowered(value, level) for value in values]

    def rotation(self, value: Value, left: int) -> Value:
        """Rotate by a power of two, to the left or, with a key of its own, to the right."""
        if left > 0:
            return [self._timed("rotation", self.engine.roll, part, self.rotations, left) for part in value]
        if left not in self.right:
            self.right[left] = self.engine.create_fixed_rotation_key(self.secret_key, -left)
        return [self._timed("rotation", self.engine.rotate, part, self.right[left]) for part in value]

    def plain(self, value: Value, slots: Any, into: int = 0) -> Value:
        """Encode and multiply; the result is to be rescaled. into: ciphertexts that all products are added up to."""
        if into:
            of = self.named(*slots)
            rows = [self.plain(value, [of(row, at) for at in range(len(value))]) for row in range(into)]
            return [reduce(self.engine.add, row) for row in rows]
        pairs = zip(value, self._slots(slots, len(value)), strict=True)
        return [self._timed("plain_product", self.engine.multiply, part, _turned(by)) for part, by in pairs]

    def rescaled(self, value: Value) -> Value:
        return [self._timed("rescale", self.engine.rescale, part) for part in value]

    def inner(self, pairs: Sequence[tuple[Value, Value]]) -> Value:
        """Return the sum of products, relinearised and rescaled."""
        terms = []
        for a, b in (self._aligned(pair) for pair in pairs):
            both = zip(a, cycle(b), strict=False)
            terms.append([self._timed("product", self.engine.multiply, one, other) for one, other in both])
        total = self.summed(*terms)
        return self.rescaled(
            [self._timed("relinearisation", self.engine.relinearize, x, self.product_key) for x in total]
        )

    def product(self, a: Value, b: Value) -> Value:
        return self.inner([(a, b)])

    def combined(self, values: Sequence[Value], factors: Sequence[Any], number: Any = 0.0) -> Value:
        terms = [self.plain(value, by) for value, by in zip(self._aligned(values), factors, strict=True)]
        return self.shifted(self.rescaled(self.summed(*terms)), number)

    def summed(self, *values: Value) -> Value:
        return [reduce(self.engine.add, parts) for parts in zip(*self._aligned(values), strict=True)]

    def shifted(self, value: Value, number: Any) -> Value:
        pairs = zip(value, self._slots(number, len(value)), strict=True)
        return [self.engine.add(part, _turned(slots)) for part, slots in pairs]

    def negated(self, value: Value) -> Value:
        return [self.engine.negate(part) for part in value]

    def _slots(self, plaintexts: Any, num: int) -> Sequence[Array]:
        """Return the slots of each ciphertext's plaintext: of a list, a name, or a number in all of them."""
        given = self.named(*plaintexts) if isinstance(plaintexts, tuple) else plaintexts
        return given if isinstance(given, list) else [np.full(self.slots, given)] * num


def _turned(slots: Array) -> Array:
    """Return slots from last to first, as the library has them, whose key turns by any power of two to its right."""
    return np.ascontiguousarray(slots[::-1])
