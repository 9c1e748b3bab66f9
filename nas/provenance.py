"""Versions of everything that a result may depend on, and of the form in which results are kept."""

import platform
from importlib.metadata import version

SCHEMA_VERSION = 6  # of what a run and a training write; what another version wrote is refused
VERSIONED = ("private-inference-nas", "torch", "ray", "tokenizers", "numpy")


def versions() -> dict[str, str]:
    """The version of each package, and of Python."""
    return {name: version(name) for name in VERSIONED} | {"python": platform.python_version()}
