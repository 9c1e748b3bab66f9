"""Versions of everything that a result may depend on, and of the form in which results are kept."""

import platform
from importlib.metadata import PackageNotFoundError, version

SCHEMA_VERSION = 6  # of what a run and a training write; what another version wrote is refused
VERSIONED = ("private-inference-nas", "torch", "ray", "tokenizers", "numpy")


def versions() -> dict[str, str]:
    """The version of each package, and of Python."""
    return {name: _version(name) for name in VERSIONED} | {"python": platform.python_version()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # this one, run from a folder that was never installed
        return "not installed"
