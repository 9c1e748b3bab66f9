"""A child process of an engine run: one party, or all of them as threads, driven by its parent line by line.

Lines on stdin are JSON lists of a command and its argument; each is answered by a line on a pipe of its own, since the
engine writes its profile to stdout from C++. The process with rank 0 also plays the client: it compiles the ops, shares
the inputs and opens the result. A process whose stdin ends, ends too.

`share`: compile every op and share every array. `connect` ADDRESSES: meet the other parties. `run`: one pass over the
ops, one after the other; answered by when each op started and ended, per rank, by the machine's monotonic clock.
`save`: leave the shares of the result to rank 0. `open`: rebuild it.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.engine import memory
from costmodel.engine.children import commands_of_parent
from costmodel.engine.job import Job
from costmodel.engine.programs import MASKED, Compiler, Program, mask_keeper, operand_visibility
from costmodel.engine.runtimes import dealt, linked_runtime, owner_of_weights, rebuilt, run_program
from costmodel.execution.memory import last_readers

JOB, RESULT = "job.pickle", "result.npy"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packet:
    """What a party gets from the client: programs, and shares by variable.

    spent: by program, outputs of earlier ones that no later one reads.
    """

    programs: list[Program]
    spent: dict[str, list[str]]
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


def _share(process: Process) -> None:
    """The client's part: programs and shares for every rank; those of other processes go to files."""
    job = process.job
    deal, owner = partial(dealt, job.protocol, job.setting), owner_of_weights(job.setting)
    found = {name: deal(value) for name, value in job.inputs.items()}
    for node in job.nodes:
        for suffix, value in job.operands[node.name].items():
            found[f"{node.name}.{suffix}"] = deal(value, operand_visibility(node.op), owner)
    programs, spent = _compile_all(process), last_readers(job.nodes)
    for rank in range(job.num_parties):
        packet = Packet(programs=programs, spent=spent, shares={name: shares[rank] for name, shares in found.items()})
        if rank in process.ranks:
            process.packets[rank] = packet
        else:
            _packet_file(process.folder, rank).write_bytes(pickle.dumps(packet))


def _packet_file(folder: Path, rank: int) -> Path:
    return folder / f"packet.{rank}.pickle"


def _compile_all(process: Process) -> list[Program]:
    """A program per op, on variables by name."""
    job = process.job
    compiler = Compiler(shapes={name: tuple(value.shape) for name, value in job.inputs.items()})
    programs = []
    for node in job.nodes:
        progress_file(process.folder, process.ranks[0]).write_text(node.name)
        own = {suffix: f"{node.name}.{suffix}" for suffix in job.operands[node.name]}
        compiler.shapes |= {name: job.operands[node.name][suffix].shape for suffix, name in own.items()}
        programs.append(compiler.program(node, own, node.inputs))
    return programs


def _connect(process: Process, addresses: list[list[str]]) -> None:
    """A runtime per rank; the parties greet each other, so together. addresses: of each rank, what it knows them by."""
    for rank in process.ranks:
        if rank not in process.packets:
            process.packets[rank] = pickle.loads(_packet_file(process.folder, rank).read_bytes())
    link = partial(linked_runtime, process.job.protocol, process.job.setting)
    process.runtimes = list(process.pool.map(lambda rank: link(rank, addresses[rank]), process.ranks))
    for rank, runtime in zip(process.ranks, process.runtimes, strict=True):
        for name, share in process.packets[rank].shares.items():
            runtime.set_var(name, share)
        process.packets[rank].shares.clear()  # a party holds its shares once
    if process.job.setting.weight_masks == "kept":
        for keeper in _mask_keepers(process.job):
            list(process.pool.map(partial(run_program, keeper), process.runtimes))
    process.job = replace(process.job, inputs={}, operands={})  # what the client knows is no party's to hold


def _mask_keepers(job: Job) -> Iterator[Program]:
    for node in job.nodes:
        if isinstance(node.op, MASKED):
            yield mask_keeper(f"{node.name}.weight", job.operands[node.name]["weight"].shape)


def _run(process: Process) -> tuple[list[list[tuple[float, float]]], list[int | None]]:
    """One pass, and the most bytes that the process held in each op; costs go to stdout.

    Parties in one process wait for each other after every op, for the log's sake.
    """
    progress = progress_file(process.folder, process.ranks[0])
    packet = process.packets[process.ranks[0]]
    times, peaks = [], []
    memory.give_back()
    for program in packet.programs:
        progress.write_text(program.name)
        memory.reset_peak()
        times.append(list(process.pool.map(partial(run_program, program), process.runtimes)))
        peaks.append(memory.peak_bytes())
        for runtime in process.runtimes:
            for each in packet.spent[program.name]:
                runtime.del_var(each)
    return times, peaks


def _save(process: Process) -> None:
    for rank, share in zip(process.ranks, _results(process), strict=True):
        _result_file(process.folder, rank).write_bytes(pickle.dumps(share))


def _open(process: Process) -> None:
    shares = dict(zip(process.ranks, _results(process), strict=True))
    for rank in range(process.job.num_parties):
        if rank not in shares:
            shares[rank] = pickle.loads(_result_file(process.folder, rank).read_bytes())
    job, in_order = process.job, [shares[rank] for rank in sorted(shares)]
    np.save(process.folder / RESULT, rebuilt(job.protocol, job.setting, in_order))


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
    commands = commands_of_parent()
    os.chdir(folder)  # where the engine leaves the masks that it keeps
    import_module("spu.api")  # takes a second: all processes at once, while the first one shares
    with ThreadPoolExecutor(len(ranks)) as pool, os.fdopen(answers, "w") as pipe:
        process = Process(folder=folder, job=pickle.loads((folder / JOB).read_bytes()), ranks=ranks, pool=pool)
        while True:
            command, *arguments = json.loads(commands.get())
            answer = COMMANDS[command](process, *arguments)
            print(json.dumps(answer), file=pipe, flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), tuple(map(int, sys.argv[3:])))
