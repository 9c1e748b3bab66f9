"""A child process of an engine run: one party, or all of them as threads, driven by its parent line by line.

The only module that imports the engine. Lines on stdin are JSON lists of a command and its argument; each is answered
by a line on a pipe of its own, since the engine writes its profile to stdout from C++. The process with rank 0 also
plays the client: it compiles the ops, shares the inputs and opens the result. A process whose stdin ends, ends too.

`share`: compile every op and share every array. `connect` ADDRESSES: meet the other parties. `run`: one pass over the
ops, one after the other; answered by when each op started and ended, per rank, by the machine's monotonic clock.
`save`: leave the shares of the result to rank 0. `open`: rebuild it.
"""

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from costmodel import ops
from costmodel.engine import memory
from costmodel.engine.job import Job
from costmodel.execution.interpreter import PUBLIC
from costmodel.execution.memory import last_readers
from costmodel.execution.op_functions import Array, Library, evaluate
from costmodel.ops import Node, Op

JOB, RESULT = "job.pickle", "result.npy"
MEMORY = "memory_"  # what the addresses of parties in one process begin with
SERVER, SHARED = 1, -1  # owners of a secret: the rank that holds the weights, or all together
MASKED = (ops.TokenEmbedding, ops.Linear, ops.VocabProjection)  # their weights are factors of matrix products
WAIT_MS = 600_000  # for a message of a peer that computes
CONNECT_RETRIES, CONNECT_INTERVAL_MS = 240, 250  # parties start apart, and some machines are busy


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packet:
    """What a party gets from the client: programs as (name, inputs, code, spent), and shares by variable.

    spent: outputs of earlier programs that no later one reads.
    """

    programs: list[tuple[str, list[str], bytes, list[str]]]
    shares: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Process:
    """The ranks that this process runs, and what they hold."""

    folder: Path
    job: Job
    ranks: tuple[int, ...]
    packets: dict[int, Packet] = field(default_factory=dict)
    runtimes: list[Any] = field(default_factory=list)
    pool: ThreadPoolExecutor


def progress_file(folder: Path, rank: int) -> Path:
    """Where the process whose first rank this is says which op it is in."""
    return folder / f"progress.{rank}"


def log_file(folder: Path, rank: int) -> Path:
    """Where the output of that process goes."""
    return folder / f"log.{rank}"


def _share(process: Process) -> None:
    """The client's part: programs and shares for every rank; those of other processes go to files."""
    from spu import libspu

    job = process.job
    owner = SERVER if job.setting.weights == "server" else SHARED
    shares: list[dict[str, Any]] = [{} for _ in range(job.num_parties)]
    for name, value in job.inputs.items():
        _share_array(process, name, value, libspu.Visibility.VIS_SECRET, SHARED, shares)
    for node in job.nodes:
        for suffix, value in job.operands[node.name].items():
            _share_array(process, f"{node.name}.{suffix}", value, _operand_visibility(node.op), owner, shares)
    programs = _compile_all(process)
    for rank in range(job.num_parties):
        packet = Packet(programs=programs, shares=shares[rank])
        if rank in process.ranks:
            process.packets[rank] = packet
        else:
            _packet_file(process.folder, rank).write_bytes(pickle.dumps(packet))


def _share_array(
    process: Process, name: str, value: Array, visibility: Any, owner: int, shares: list[dict[str, Any]]
) -> None:
    """Adds every party's share of an array; of a secret with an owner, the others hold nothing."""
    dealt = _io(process.job).make_shares(np.asarray(value, dtype=np.float32), visibility, owner)
    for own, share in zip(shares, dealt, strict=True):
        own[name] = share


def _packet_file(folder: Path, rank: int) -> Path:
    return folder / f"packet.{rank}.pickle"


def _operand_visibility(op: Op) -> Any:
    from spu import libspu

    return libspu.Visibility.VIS_PUBLIC if type(op) in PUBLIC else libspu.Visibility.VIS_SECRET


def _compile_all(process: Process) -> list[tuple[str, list[str], bytes, list[str]]]:
    """A program per op, on variables by name; equal ops on equal shapes are compiled once."""
    job = process.job
    shapes = {name: tuple(value.shape) for name, value in job.inputs.items()}
    compiled: dict[tuple[object, ...], bytes] = {}
    programs, spent = [], last_readers(job.nodes)
    for node in job.nodes:
        progress_file(process.folder, process.ranks[0]).write_text(node.name)
        own = job.operands[node.name]
        names = [*(f"{node.name}.{suffix}" for suffix in own), *node.inputs]
        code = _compile(node, job, names, shapes, compiled)
        programs.append((node.name, names, code, spent[node.name]))
    return programs


def _compile(
    node: Node,
    job: Job,
    names: list[str],
    shapes: dict[str, tuple[int, ...]],
    compiled: dict[tuple[object, ...], bytes],
) -> bytes:
    """The code of one op. Adds its output's shape to `shapes`."""
    import jax
    from spu import libspu
    from spu.utils import frontend

    own = job.operands[node.name]

    def function(*arrays: Array) -> Array:
        return evaluate(node.op, _jax_library(), dict(zip(own, arrays, strict=False)), *arrays[len(own) :])

    sources = [*(value.shape for value in own.values()), *(shapes[name] for name in node.inputs)]
    arguments = [np.zeros(shape, dtype=np.float32) for shape in sources]
    visibilities = [_operand_visibility(node.op)] * len(own) + [libspu.Visibility.VIS_SECRET] * len(node.inputs)
    shapes[node.name] = jax.eval_shape(function, *arguments).shape
    if (program := (node.op, *sources)) not in compiled:
        executable, _ = frontend.compile(
            frontend.Kind.JAX,
            function,
            arguments,
            {},
            names,
            visibilities,
            lambda _: [node.name],
            copts=libspu.CompilerOptions(),
        )
        compiled[program] = executable.code
    return compiled[program]


def _jax_library() -> Library:
    import jax

    return Library(numpy=jax.numpy, erf=jax.scipy.special.erf, rsqrt=jax.lax.rsqrt)


def _connect(process: Process, addresses: list[list[str]]) -> None:
    """A runtime per rank; the parties greet each other, so together. addresses: of each rank, what it knows them by."""
    for rank in process.ranks:
        if rank not in process.packets:
            process.packets[rank] = pickle.loads(_packet_file(process.folder, rank).read_bytes())
    starts = [partial(_runtime, process.job, rank, addresses[rank]) for rank in process.ranks]
    process.runtimes = list(process.pool.map(lambda start: start(), starts))
    for rank, runtime in zip(process.ranks, process.runtimes, strict=True):
        for name, share in process.packets[rank].shares.items():
            runtime.set_var(name, share)
        process.packets[rank].shares.clear()  # a party holds its shares once
    if process.job.setting.weight_masks == "kept":
        for keeper in _mask_keepers(process.job):
            list(process.pool.map(partial(_run_one, keeper), process.runtimes))
    process.job = replace(process.job, inputs={}, operands={})  # what the client knows is no party's to hold


def _mask_keepers(job: Job) -> Iterator[Any]:
    """What tells a runtime, for each matrix of weights, to keep the mask that it is first opened with."""
    from spu import experimental, libspu
    from spu.utils import frontend

    for node in job.nodes:
        if isinstance(node.op, MASKED):
            name = f"{node.name}.weight"
            executable, _ = frontend.compile(
                frontend.Kind.JAX,
                experimental.make_cached_var,
                [np.zeros(job.operands[node.name]["weight"].shape, dtype=np.float32)],
                {},
                [name],
                [libspu.Visibility.VIS_SECRET],
                lambda _, name=name: [name],
                copts=libspu.CompilerOptions(),
            )
            code = executable.code
            yield libspu.Executable(name=f"keep {name}", input_names=[name], output_names=[name], code=code)


def _runtime(job: Job, rank: int, addresses: list[str]) -> Any:
    from spu import api, libspu

    description = libspu.link.Desc()
    description.recv_timeout_ms = WAIT_MS
    description.connect_retry_times, description.connect_retry_interval_ms = CONNECT_RETRIES, CONNECT_INTERVAL_MS
    description.throttle_window_size = 0  # never wait for receipts, as in memory
    for party, address in enumerate(addresses):
        description.add_party(f"party_{party}", address)
    create = libspu.link.create_mem if addresses[rank].startswith(MEMORY) else libspu.link.create_brpc
    return api.Runtime(create(description, rank), _configuration(job))


def _configuration(job: Job) -> Any:
    """Defaults of the engine but for the profile, and for the threads: cheetah has set-up costs per thread."""
    from spu import libspu

    configuration = libspu.RuntimeConfig(
        protocol=getattr(libspu.ProtocolKind, job.protocol.upper()),
        field=getattr(libspu.FieldType, f"FM{job.setting.ring_bits}"),
        fxp_fraction_bits=job.setting.fraction_bits,
    )
    configuration.enable_pphlo_profile = True  # without it, nothing is reported
    configuration.max_concurrency = job.setting.threads
    configuration.experimental_enable_colocated_optimization = (
        job.setting.weights == "server"
    )  # else owners are ignored
    return configuration


def _io(job: Job) -> Any:
    from spu import api

    return api.Io(job.num_parties, _configuration(job))


def _run(process: Process) -> tuple[list[list[tuple[float, float]]], list[int | None]]:
    """One pass, and the most bytes that the process held in each op; costs go to stdout.

    Parties in one process wait for each other after every op, for the log's sake.
    """
    from spu import libspu

    progress = progress_file(process.folder, process.ranks[0])
    times, peaks = [], []
    memory.give_back()
    for name, inputs, code, spent in process.packets[process.ranks[0]].programs:
        progress.write_text(name)
        executable = libspu.Executable(name=name, input_names=inputs, output_names=[name], code=code)
        memory.reset_peak()
        times.append(list(process.pool.map(partial(_run_one, executable), process.runtimes)))
        peaks.append(memory.peak_bytes())
        for runtime in process.runtimes:
            for each in spent:
                runtime.del_var(each)
    return times, peaks


def _run_one(executable: Any, runtime: Any) -> tuple[float, float]:
    start = time.monotonic()
    runtime.run(executable)
    return start, time.monotonic()


def _save(process: Process) -> None:
    for rank, share in zip(process.ranks, _results(process), strict=True):
        _result_file(process.folder, rank).write_bytes(pickle.dumps(share))


def _open(process: Process) -> None:
    shares = dict(zip(process.ranks, _results(process), strict=True))
    for rank in range(process.job.num_parties):
        if rank not in shares:
            shares[rank] = pickle.loads(_result_file(process.folder, rank).read_bytes())
    np.save(process.folder / RESULT, _io(process.job).reconstruct([shares[rank] for rank in sorted(shares)]))


def _results(process: Process) -> list[Any]:
    return [runtime.get_var(process.job.nodes[-1].name) for runtime in process.runtimes]


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"result.{rank}.pickle"


COMMANDS: dict[str, Callable[..., Any]] = {
    "share": _share,
    "connect": _connect,
    "run": _run,
    "save": _save,
    "open": _open,
}


def _main(folder: Path, answers: int, ranks: tuple[int, ...]) -> None:
    commands: SimpleQueue[str] = SimpleQueue()
    Thread(target=_read, args=(commands,), daemon=True).start()
    os.chdir(folder)  # where the engine leaves the masks that it keeps
    import_module("spu.api")  # takes a second: all processes at once, while the first one shares
    with ThreadPoolExecutor(len(ranks)) as pool, os.fdopen(answers, "w") as pipe:
        process = Process(folder=folder, job=pickle.loads((folder / JOB).read_bytes()), ranks=ranks, pool=pool)
        while True:
            command, *arguments = json.loads(commands.get())
            answer = COMMANDS[command](process, *arguments)
            print(json.dumps(answer), file=pipe, flush=True)


def _read(commands: SimpleQueue[str]) -> None:
    """Ends the process with its stdin, whatever it is doing: its parent is done, or dead."""
    for line in sys.stdin:
        commands.put(line)
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), tuple(map(int, sys.argv[3:])))
