"""Compiles this package's C++ for the present processor when first needed, and caches the result."""

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from costmodel.config.bugs import default_cache_dir
from costmodel.errors import UserError

FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
TIMEOUT_S = 120
MAPS = Path("/proc/self/maps")  # of Linux: lists the files that this process has loaded


class NotCompiledError(RuntimeError):
    """A library could not be compiled; the message is one line that says why."""


def library(source: Path, **defines: int) -> ctypes.CDLL:
    """Return the shared library of a C++ source with macros defined, compiled unless it is in the cache.

    The compiler is g++, or that of CXX. The cache key covers source, flags, compiler and processor.

    Raises NotCompiledError if there is no compiler, it fails, or the cache cannot be written or is writable by others.
    """
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    flags = [*FLAGS, *(f"-D{name}={value}" for name, value in defines.items())]
    runtime = _openmp(MAPS.read_text() if MAPS.exists() else "")
    try:
        # The predefined macros identify the compiler's version and what -march=native means here.
        known = _output([*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
        key = "\0".join((*compiler, *flags, *runtime, source.read_text(), known))
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        path = own_folder("native") / f"{source.stem}-{digest}.so"
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError:  # damaged
                path.unlink()
        _compile([*compiler, *flags, str(source), *runtime], path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, UserError) as error:  # UserError: there is no home
        raise NotCompiledError(" ".join(str(error).split())) from error


def own_folder(name: str) -> Path:
    """Make a folder of compiled code in the cache. It must not be writable by others, whose code would be loaded."""
    folder = default_cache_dir() / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NotCompiledError(f"{folder} must be writable by its user alone (chmod go-w)")
    return folder


def _compile(command: list[str], path: Path) -> None:
    """Compile under a temporary name first, so that no process loads an incomplete library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _output([*command, "-o", str(made)])
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(path)


def _output(command: list[str]) -> str:
    """Run a compiler and return its output."""
    env = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=env, timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise NotCompiledError(f"no C++ compiler {command[0]!r} is installed (apt install g++)") from None
    except subprocess.TimeoutExpired:
        raise NotCompiledError(f"{command[0]} took more than {TIMEOUT_S} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error: " in line] or [f"status {done.returncode}"]
        raise NotCompiledError(f"{command[0]} failed: {errors[0].strip()}")
    return done.stdout


def _openmp(maps: str) -> list[str]:
    """Return torch's OpenMP runtime, to link against: threads of a second one would compete for the cores.

    maps: lines of address, permissions, offset, device, inode and path, as in proc_pid_maps(5).
    """
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libgomp" in line}
    return sorted(paths, key=lambda path: ("/torch" not in path, path))[:1]
