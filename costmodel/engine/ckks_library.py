"""CKKS by a library on the CPU, on one thread; every call is counted and timed by primitive.

The library is DESILO's, by DESILO Inc. (https://desilo.ai): under Python 3.11 the wheels of others do not import. Its
rings with a bootstrap have N = 2^16 and 128 bits of security, with keys of 5 GB. In smaller rings, which it has for
fewer levels, a bootstrap is decrypted and encrypted by the holder of the secret key: for tests of counts and results.
"""

import importlib
import time
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from costmodel.errors import UserError
from costmodel.execution.interpreter import Array

PACKAGE, VERSION = "desilofhe", "2.0.0"


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
    """Ciphertexts of a key pair of its own; `counts` and `seconds` (of CPU) are by primitive.

    levels: of a fresh or bootstrapped ciphertext. is_bootstrapped: whether bootstraps are real.
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

    def _timed(self, primitive: str, call: Any, *given: Any) -> Any:
        started = time.process_time()
        result = call(*given)
        self.seconds[primitive] += time.process_time() - started
        self.counts[primitive] += 1
        return result

    def encrypted(self, slots: Array, level: int | None = None) -> Any:
        return self.engine.encrypt(_turned(slots), self.public_key, self.levels if level is None else level)

    def decrypted(self, value: Any) -> Array:
        return _turned(np.asarray(self.engine.decrypt(value, self.secret_key)).real)

    def rotation(self, value: Any, left: int) -> Any:
        """Rotate by a power of two, to the left or, with a key of its own, to the right."""
        if left > 0:
            return self._timed("rotation", self.engine.roll, value, self.rotations, left)
        if left not in self.right:
            self.right[left] = self.engine.create_fixed_rotation_key(self.secret_key, -left)
        return self._timed("rotation", self.engine.rotate, value, self.right[left])

    def plain_product(self, value: Any, slots: Array) -> Any:
        """Encode and multiply; the result is to be rescaled."""
        return self._timed("plain_product", self.engine.multiply, value, _turned(slots))

    def product(self, a: Any, b: Any) -> Any:
        """Multiply; the result is to be relinearised and rescaled."""
        level = min(a.level, b.level)
        return self._timed("product", self.engine.multiply, self.lowered(a, level), self.lowered(b, level))

    def relinearised(self, value: Any) -> Any:
        return self._timed("relinearisation", self.engine.relinearize, value, self.product_key)

    def rescaled(self, value: Any) -> Any:
        return self._timed("rescale", self.engine.rescale, value)

    def bootstrapped(self, value: Any) -> Any:
        """Return the value at the highest level; its slots must be from -1 to 1."""
        if self.is_bootstrapped:
            return self._timed("bootstrap", self.engine.bootstrap, self.lowered(value, 0), *self.bootstrap_keys)
        return self._timed("bootstrap", lambda: self.encrypted(self.decrypted(value)))

    def lowered(self, value: Any, level: int) -> Any:
        return value if value.level == level else self.engine.level_down(value, level)

    def summed(self, a: Any, b: Any) -> Any:
        return self.engine.add(a, b)

    def shifted(self, value: Any, slots: Array) -> Any:
        return self.engine.add(value, _turned(slots))

    def negated(self, value: Any) -> Any:
        return self.engine.negate(value)


def _turned(slots: Array) -> Array:
    """Return slots from last to first, as the library has them, whose key turns by any power of two to its right."""
    return np.ascontiguousarray(slots[::-1])
