"""Versions of everything that a result may depend on."""

import platform
from importlib.metadata import version

VERSIONED = ("private-inference-nas", "torch", "ray", "tokenizers", "numpy")


def versions() -> dict[str, str]:
    """The version of each package, and of Python."""
    return {name: version(name) for name in VERSIONED} | {"python": platform.python_version()}
