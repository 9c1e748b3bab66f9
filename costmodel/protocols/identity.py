"""The identity of a cost model: a version of the formulas and a hash of the other inputs of a cost."""

import hashlib

# Raise this by hand with every change of a formula, count, lowering or committed testbed that changes a cost: two costs
# are comparable if their ids are equal. `tests/costmodel/test_golden_prices.py` fails until it is raised.
COST_MODEL_VERSION = 6

# The engine whose source the formulas of semi2k, aby3 and cheetah follow and whose bytes they were compared with.
# Another version has other kernels, so its seconds do not go with these formulas.
ENGINE = "SecretFlow-SPU 0.9.5"


def cost_model_id(testbed: bytes, *parts: object) -> str:
    """Return the version and twelve hexadecimal digits of a hash of a testbed file's bytes and of further values."""
    content = b"\0".join((testbed, *(str(part).encode() for part in parts)))
    return f"{COST_MODEL_VERSION}-{hashlib.sha256(content).hexdigest()[:12]}"
