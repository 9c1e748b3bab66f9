"""Versions of everything that a result may depend on, and of the file format."""

import platform
from importlib.metadata import PackageNotFoundError, version

SCHEMA_VERSION = 6  # of the files of runs and trainings; readers refuse files of another version
VERSIONED = ("private-inference-nas", "torch", "ray", "tokenizers", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of the packages in VERSIONED (`not installed` if missing) and of `python`, by name."""
    return {name: _version(name) for name in VERSIONED} | {"python": platform.python_version()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # this package, run from a folder without installation
        return "not installed"
