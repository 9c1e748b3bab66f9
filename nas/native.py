"""C++ of this package, compiled for the processor at hand when it is first wanted, and kept for the next process."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from nas.cache import default_cache_dir

FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
TIMEOUT_S = 120


class NotCompiledError(RuntimeError):
    """A library could not be had; the message is one line and says why."""


def library(source: Path, **defines: int) -> ctypes.CDLL:
    """The shared library of a C++ source with macros defined, compiled unless a process before did.

    The compiler is g++, or what CXX names. Source, flags, compiler and processor decide which library is taken.

    Raises NotCompiledError if there is no compiler, it fails, or the cache cannot be written.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NotCompiledError(f"no C++ compiler {os.environ.get('CXX', 'g++')!r} is installed")
    command = [compiler, *FLAGS, *(f"-D{name}={value}" for name, value in defines.items()), *_loaded_openmp()]
    # The macros that a compiler predefines tell its version and what -march=native is on this processor.
    key = [*command, source.read_text(), _output([compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])]
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    path = default_cache_dir() / "native" / f"{source.stem}-{digest}.so"
    try:
        if not path.exists():
            _compile([*command, str(source)], path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotCompiledError(f"{path} cannot be written or loaded: {error}") from error


def _compile(command: list[str], path: Path) -> None:
    """Under another name first, so that no process ever loads half a library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _output([*command, "-o", str(made)])
        made.replace(path)


def _output(command: list[str]) -> str:
    """What a compiler prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotCompiledError(f"{command[0]} took more than {TIMEOUT_S} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error: " in line] or [f"status {done.returncode}"]
        raise NotCompiledError(f"{command[0]} failed: {errors[0].strip()}")
    return done.stdout


def _loaded_openmp() -> list[str]:
    """The OpenMP runtime that torch brought along, to be shared: threads of a second one would fight for the cores."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return sorted({line.split()[-1] for line in lines if "/libgomp" in line})[:1]
