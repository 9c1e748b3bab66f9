"""Causal attention with entropy on the CPU in C++ (cpu_native.cpp), the fastest implementation there.

With scores s_ij = q_i . k_j / sqrt(head_dim) and weights a = softmax(s) over j <= i,

    lse_i = m_i + ln l_i    with m_i = max_j s_ij and l_i = sum_j e^(s_ij - m_i),
    E_i = ln l_i - sum_j e^(s_ij - m_i) (s_ij - m_i) / l_i,
    ds_ij = a_ij (dO_i . v_j - dO_i . O_i - dE_i (ln a_ij + E_i))    with ln a_ij = s_ij - lse_i.

With another function p_ij = f(s_ij - b) >= 0 in place of the exponential and l_i = sum_j p_ij, the output is that of
weights p_ij / (l_i + c), and the entropy that of p_ij / l_i; b is a constant of the head, and c of the function:

    E_i = ln l_i - sum_j p_ij ln p_ij / l_i,
    ds_ij = f'(s_ij - b) ((dO_i . v_j - dO_i . O_i) / (l_i + c) - dE_i (ln p_ij - ln l_i + E_i) / l_i),
    db = -sum_ij ds_ij.

Neither pass stores a T x T matrix; the backward pass computes the weights again, as flash attention does (Dao et al.
2022, arXiv 2205.14135, algorithm 4). The kernel is compiled for the present processor when first needed, and cached.
"""

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from costmodel.config.bugs import default_cache_dir
from costmodel.errors import UserError

SOURCE = Path(__file__).with_suffix(".cpp")
FUNCTIONS = "softmax", "square", "eighth power", "relu"  # in the order of the enum in cpu_native.cpp
DTYPES = torch.float32, torch.bfloat16
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
TIMEOUT_S = 120
MAPS = Path("/proc/self/maps")  # of Linux: lists the files that this process has loaded


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    function: str = "softmax",
    bounds: Tensor | None = None,
    sum_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the output of causal attention with scores q . k / sqrt(head_dim), and the entropy of its rows in nats.

    Entropies are not clamped to their range. Both can be differentiated once, but not by torch.func.

    Args:
        queries, keys, values: batch x heads x T x head_dim, all fp32 or all bf16, on the CPU; output and gradients have
            the same shape and type. Entropy, batch x heads x T, and arithmetic are in fp32.
        function: of `FUNCTIONS`; for `eighth power`, the weight of the first token's only key is 1.
        bounds: subtracted from the scores, a number per head, fp32; None for 0. Softmax ignores it.
        sum_offset: added to the row sum that divides the output; 0 for softmax.

    Raises UserError for other operands and NotCompiledError if the kernel cannot be compiled.
    """
    for part in (queries, keys, values):
        is_known = part.dtype in DTYPES and part.dtype == queries.dtype and part.device.type == "cpu"
        if part.shape != queries.shape or part.ndim != 4 or not is_known:
            raise UserError(
                f"operands of attention must all be fp32 or bf16 on the CPU, and batch x heads x T x head_dim, "
                f"but got {tuple(part.shape)} {part.dtype} on {part.device} beside {tuple(queries.shape)}."
            )
    if bounds is None:
        bounds = queries.new_zeros(queries.shape[1], dtype=torch.float32)
    if bounds.shape != queries.shape[1:2] or bounds.dtype != torch.float32 or bounds.device != queries.device:
        raise UserError(
            f"bounds of attention must be fp32 on the CPU, one for each of {queries.shape[1]} heads, but got "
            f"{tuple(bounds.shape)} {bounds.dtype} on {bounds.device}."
        )
    output, entropy = _Attention.apply(  # type: ignore[no-untyped-call]
        queries, keys, values, bounds, FUNCTIONS.index(function), sum_offset
    )
    return output, entropy


@cache
def compiled(head_dim: int) -> ctypes.CDLL:
    """Return the library with the kernel's forward and backward pass for a head size. Raises NotCompiledError."""
    passes = library(SOURCE, HEAD_DIM=head_dim)
    passes.room_of.argtypes, passes.room_of.restype = [ctypes.c_int, ctypes.c_int64], ctypes.c_int64
    return passes


class _Operand(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((f"{axis}_step", ctypes.c_int64) for axis in ("batch", "head", "row"))]


OPERANDS = ("queries", "keys", "values", "output", "output_grad", "query_grads", "key_grads", "value_grads")
ROWS = ("bounds", "row_sum", "entropy", "entropy_grad", "score_grad_sums", "room")  # fp32 without gaps


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "num_heads", "length")),
        *((name, _Operand) for name in OPERANDS),
        *((name, ctypes.c_void_p) for name in ROWS),
        ("sum_offset", ctypes.c_float),
        ("num_threads", ctypes.c_int),
    ]


def _run(tensors: Mapping[str, Tensor], function: int, sum_offset: float, *, is_backward: bool) -> None:
    """Run a pass. tensors: its inputs and results, by their names in OPERANDS and ROWS."""
    queries, num_threads = tensors["queries"], torch.get_num_threads()
    passes = compiled(queries.shape[-1])
    size = passes.room_of(is_backward, queries.shape[2])
    room = queries.new_zeros(num_threads, size, dtype=torch.float32)  # torch reports too little memory
    operands = {
        name: _Operand(tensors[name].data_ptr(), *tensors[name].stride()[:3]) for name in OPERANDS if name in tensors
    }
    rows = {name: rows.data_ptr() for name, rows in {**tensors, "room": room}.items() if name in ROWS}
    given = _Pass(*queries.shape[:3], **operands, **rows, sum_offset=sum_offset, num_threads=num_threads)
    passes.run(is_backward, queries.dtype == torch.bfloat16, function, ctypes.byref(given))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, bounds: Tensor, function: int, sum_offset: float
    ) -> tuple[Tensor, Tensor]:
        queries, keys, values, bounds = (*map(_adjacent, (queries, keys, values)), bounds.contiguous())
        output = _empty_like(queries)
        row_sum, entropy = (queries.new_empty(queries.shape[:3], dtype=torch.float32) for _ in range(2))
        known = {"queries": queries, "keys": keys, "values": values, "bounds": bounds, "output": output}
        known |= {"row_sum": row_sum, "entropy": entropy}
        _run(known, function, sum_offset, is_backward=False)
        ctx.save_for_backward(*known.values())
        ctx.known, ctx.function, ctx.sum_offset = tuple(known), function, sum_offset
        return output, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        known = dict(zip(ctx.known, ctx.saved_tensors, strict=True))
        query_grads, key_grads, value_grads = (_empty_like(known[name]) for name in ("queries", "keys", "values"))
        score_grad_sums = entropy_grad.new_empty(entropy_grad.shape[:2])
        known |= {"output_grad": _adjacent(output_grad), "entropy_grad": entropy_grad.contiguous()}
        known |= {"query_grads": query_grads, "key_grads": key_grads, "value_grads": value_grads}
        _run({**known, "score_grad_sums": score_grad_sums}, ctx.function, ctx.sum_offset, is_backward=True)
        return query_grads, key_grads, value_grads, -score_grad_sums.sum(dim=0), None, None


def _adjacent(operand: Tensor) -> Tensor:
    """Make the features of a row contiguous, without copying if they are."""
    operand = operand.resolve_neg()
    return operand if operand.stride(-1) == 1 else operand.contiguous()


def _empty_like(operand: Tensor) -> Tensor:
    """Allocate a tensor of the same shape; all heads of a token are adjacent, as in the linears around attention."""
    batch, num_heads, length, head_dim = operand.shape
    return operand.new_empty(batch, length, num_heads, head_dim).transpose(1, 2)


class NotCompiledError(RuntimeError):
    """A library could not be compiled; the message is one line that says why."""


def library(source: Path, **defines: int) -> ctypes.CDLL:
    """Return the shared library of a C++ source, compiled with the macros `defines` unless it is in the cache.

    The compiler is g++, or that of the environment variable CXX. The cache key covers source, flags, compiler and
    processor. Raises NotCompiledError if compilation fails, or the cache cannot be written or is writable by others.
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
    """Return the folder `name` of compiled code in the cache, which is made if needed.

    Raises NotCompiledError if another user owns it or others can write to it, since their code would be loaded; OSError
    or UserError if it cannot be made.
    """
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
    """Run a compiler and return its output. Raises NotCompiledError."""
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
    """Return the path of torch's OpenMP runtime to link against, as a list; empty if this process has loaded none.

    Threads of a second runtime would compete for the cores. maps: text as in proc_pid_maps(5).
    """
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libgomp" in line}
    return sorted(paths, key=lambda path: ("/torch" not in path, path))[:1]
