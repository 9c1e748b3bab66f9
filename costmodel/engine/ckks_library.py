"""CKKS by a library on the CPU, on one thread; every call is counted and timed by primitive and level.

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


def check_library() -> None:
    """Raise UserError if the library is not installed."""
    _library()


def _library() -> Any:
    try:
        return importlib.import_module(PACKAGE)
    except ImportError:
        raise UserError(
            f"protocol ckks runs under {PACKAGE} {VERSION}, which is not installed; install the extra: "
            "pip install 'private-inference-nas[fhe]'."
        ) from None


class Library:
    """Ciphertexts of a key pair of its own; `counts` and `seconds` (of CPU) are by primitive.

    levels: of a fresh or bootstrapped ciphertext. is_bootstrapped: whether bootstraps are real.
    """

    def __init__(self, levels: int, *, is_bootstrapped: bool) -> None:
        kind = {"bootstrap": True} if is_bootstrapped else {"max_level": levels}
        self.engine = _library().Engine(thread_count=1, **kind)
        self.is_bootstrapped, self.levels, self.slots = is_bootstrapped, self.engine.max_level, self.engine.slot_count
        self.secret_key = self.engine.create_secret_key()
        self.public_key = self.engine.create_public_key(self.secret_key)
        self.product_key = self.engine.create_relinearization_key(self.secret_key)
        self.rotations = (self.engine.create_roll_key if is_bootstrapped else self.engine.create_rotation_key)(
            self.secret_key
        )  # of 1, 2, 4, ... slots to the left
        if is_bootstrapped:
            self.conjugation_key = self.engine.create_conjugation_key(self.secret_key)
            self.bootstrap_key = self.engine.create_small_bootstrap_key(self.secret_key)
        self.right: dict[int, Any] = {}
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def _timed(self, primitive: str, call: Any, *operands: Any) -> Any:
        started = time.process_time()
        result = call(*operands)
        self.seconds[primitive] += time.process_time() - started
        self.counts[primitive] += 1
        return result

    def encrypted(self, slots: Array, level: int | None = None) -> Any:
        return self.engine.encrypt(slots, self.public_key, self.levels if level is None else level)

    def decrypted(self, value: Any) -> Array:
        return np.asarray(self.engine.decrypt(value, self.secret_key)).real

    def rotation(self, value: Any, left: int) -> Any:
        """Rotate by a power of two, to the left or, with a key of its own, to the right."""
        if left < 0 and left not in self.right:
            self.right[left] = self.engine.create_fixed_rotation_key(self.secret_key, left)
        if left < 0:
            return self._timed("rotation", self.engine.rotate, value, self.right[left])
        rotate = self.engine.roll if self.is_bootstrapped else self.engine.rotate
        return self._timed("rotation", rotate, value, self.rotations, left)

    def plain_product(self, value: Any, slots: Array) -> Any:
        """Encode and multiply; the result is to be rescaled."""
        return self._timed("plain_product", self.engine.multiply, value, slots)

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
        if not self.is_bootstrapped:
            self.counts["bootstrap"] += 1
            return self.encrypted(self.decrypted(value))
        keys = self.product_key, self.conjugation_key, self.rotations, self.bootstrap_key
        return self._timed("bootstrap", self.engine.bootstrap, self.lowered(value, 0), *keys)

    def lowered(self, value: Any, level: int) -> Any:
        return value if value.level == level else self.engine.level_down(value, level)

    def summed(self, a: Any, b: Any) -> Any:
        return self.engine.add(a, b)

    def shifted(self, value: Any, slots: Array) -> Any:
        return self.engine.add(value, slots)

    def negated(self, value: Any) -> Any:
        return self.engine.negate(value)
