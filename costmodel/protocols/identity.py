"""Which cost model a price is of: a version of the formulas, and the content of what else the price depends on."""

import hashlib

# Raised by hand with every change of a formula, a count, a lowering or a committed testbed that changes a price: two
# prices are comparable if their ids are equal. `tests/costmodel/test_golden_prices.py` fails until it is raised.
COST_MODEL_VERSION = 4

# The engine whose sources the formulas of semi2k, aby3 and cheetah were read in and whose bytes they were held against;
# seconds measured under another one are of other kernels, so they do not go with these formulas.
ENGINE = "SecretFlow-SPU 0.9.5"


def cost_model_id(testbed: bytes, *parts: object) -> str:
    """The version, and twelve hexadecimal digits of a testbed file's bytes and of plain values beside it."""
    content = b"\0".join((testbed, *(str(part).encode() for part in parts)))
    return f"{COST_MODEL_VERSION}-{hashlib.sha256(content).hexdigest()[:12]}"
