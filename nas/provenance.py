"""Versions of everything that a result may depend on, and of the file format."""

import platform
from importlib.metadata import PackageNotFoundError, version

SCHEMA_VERSION = 6  # of runs and trainings on disk; other versions are refused
VERSIONED = ("private-inference-nas", "torch", "ray", "tokenizers", "numpy")


def versions() -> dict[str, str]:
    """Return the version of every package in VERSIONED, or `not installed`, and of Python, by name."""
    return {name: _version(name) for name in VERSIONED} | {"python": platform.python_version()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # this package, run from a folder without installation
        return "not installed"
