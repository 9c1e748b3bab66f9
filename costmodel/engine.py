"""Runs an op graph under a real MPC engine, SecretFlow-SPU, and measures what it sends.

Every op is compiled by itself from its function in `costmodel.execute`, run by all parties, and its result kept secret
for the next op, so that the engine's counters can be read per op and what is priced is what is run. All operands are
secret-shared before the run but those that `costmodel.execute` calls public; the client one-hot encodes its tokens.
What is not counted: sharing inputs and weights, opening the logits, and what the parties exchange before the first op.

The engine is a C++ library that writes its profile to stdout, so it runs in a child process with captured output; one
thread per party, linked in memory, with all of the engine's own parallelism off.
"""

import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from costmodel import execute
from costmodel.execute import PUBLIC, Array, Library, Weights
from costmodel.ops import Node, Op, OpGraph
from costmodel.protocols.calls import Setting

# protocol -> parties
NUM_PARTIES: dict[str, int] = {"semi2k": 2, "aby3": 3, "cheetah": 2}
INSTALL = "python3.11 -m pip install 'spu==0.9.5' 'numpy<2'"
NEWEST_PYTHON = (3, 11)  # the engine has wheels for 3.10 and 3.11

_JOB, _LOG, _PROGRESS, _RESULT = "job.pickle", "engine.log", "progress", "result.npy"
_EXECUTION = re.compile(r"SPU execution (?P<name>\S+) completed.*total time (?P<seconds>[0-9.e+-]+)s")
_LINK = re.compile(r"Link details: total send bytes (?P<sent_bytes>\d+),.* send actions (?P<messages>\d+),")


class EngineError(RuntimeError):
    """The engine started and could not finish; the text says in which op."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one op, or a whole graph, cost: bytes and messages (send actions) summed over parties.

    seconds: of the slowest party, all parties sharing this machine; set-up in the first op that needs it.
    """

    sent_bytes: int
    messages: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """by_op: in the graph's order. logits: tokens x vocab, opened after the run."""

    logits: Array
    by_op: tuple[tuple[Node, Measured], ...]

    @property
    def total(self) -> Measured:
        return total(cost for _, cost in self.by_op)


def total(costs: Iterable[Measured]) -> Measured:
    """What ops that follow one another cost together."""
    parts = list(costs)
    return Measured(
        sent_bytes=sum(cost.sent_bytes for cost in parts),
        messages=sum(cost.messages for cost in parts),
        seconds=sum(cost.seconds for cost in parts),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Job:
    """What the child process needs: nodes, what they read by name, and their operands by name and suffix."""

    protocol: str
    setting: Setting
    nodes: tuple[Node, ...]
    inputs: Mapping[str, Array]
    operands: Mapping[str, Mapping[str, Array]]


def run(
    graph: OpGraph, weights: Weights, tokens: Array, *, protocol: str, setting: Setting, timeout_s: float | None = None
) -> Run:
    """One forward pass of a sequence under the engine.

    weights, tokens: as `costmodel.execute.execute` takes them.

    Raises ValueError for an unknown protocol, inputs that do not fit the graph, or an engine that is not installed;
    EngineError if the engine fails or takes longer than `timeout_s`.
    """
    operands = {node.name: execute.operands(node, weights) for node in graph}
    job = _Job(
        protocol=protocol,
        setting=setting,
        nodes=graph.nodes,
        inputs={"tokens": execute.one_hot(graph, tokens)},
        operands=operands,
    )
    costs, logits = _measure(job, timeout_s)
    return Run(logits=logits, by_op=tuple(zip(graph.nodes, costs, strict=True)))


def measure(
    ops: Sequence[Op], *, protocol: str, setting: Setting, seed: int = 0, timeout_s: float | None = None
) -> tuple[Measured, ...]:
    """What each op costs by itself, on random numbers: for calibration, and to check formulas.

    Set-up that the engine does once, at the first op that needs it, is in that op's cost.

    Raises ValueError for an unknown protocol or an engine that is not installed; EngineError as `run`.
    """
    generator = np.random.default_rng(seed)
    nodes: list[Node] = []
    inputs: dict[str, Array] = {}
    operands: dict[str, dict[str, Array]] = {}
    for index, op in enumerate(ops):
        name = f"{index}.{type(op).__name__}"
        shapes = {f"{name}.input.{position}": shape for position, shape in enumerate(execute.INPUTS[type(op)](op))}
        inputs |= {key: generator.standard_normal(shape) for key, shape in shapes.items()}
        # far from 0, since some are divisors
        operands[name] = {key: generator.uniform(0.5, 1.5, shape) for key, shape in execute.shapes(op).items()}
        nodes.append(Node(name=name, layer=0, op=op, inputs=tuple(shapes)))
    job = _Job(protocol=protocol, setting=setting, nodes=tuple(nodes), inputs=inputs, operands=operands)
    costs, _ = _measure(job, timeout_s)
    return costs


def _measure(job: _Job, timeout_s: float | None) -> tuple[tuple[Measured, ...], Array]:
    if job.protocol not in NUM_PARTIES:
        raise ValueError(f"an engine protocol must be one of {', '.join(NUM_PARTIES)}, but got {job.protocol!r}.")
    check_installed()
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        _spawn(job, Path(folder), timeout_s)
        by_name = _measured((Path(folder) / _LOG).read_text(errors="replace"))
        return tuple(by_name[node.name] for node in job.nodes), np.load(Path(folder) / _RESULT)


def check_installed() -> None:
    """Raises ValueError, with the command to run, if the engine cannot be imported here."""
    if find_spec("spu") is None:
        have = ".".join(map(str, sys.version_info[:2]))
        old = (
            "" if sys.version_info[:2] <= NEWEST_PYTHON else f", and has no wheel for this Python {have}, but for 3.11"
        )
        needs = "it needs Python < 3.12 and numpy < 2"
        raise ValueError(f"the MPC engine SecretFlow-SPU is not installed{old}; {needs}; run: {INSTALL}")


def _spawn(job: _Job, folder: Path, timeout_s: float | None) -> None:
    (folder / _JOB).write_bytes(pickle.dumps(job))
    with (folder / _LOG).open("wb") as log:
        command = [sys.executable, "-m", "costmodel.engine", str(folder)]
        try:
            status = subprocess.run(command, stdout=log, stderr=log, timeout=timeout_s, check=False).returncode
        except subprocess.TimeoutExpired:
            raise EngineError(f"the engine did not finish op {_op_under_way(folder)} in {timeout_s} s.") from None
    if status != 0 or not (folder / _RESULT).exists():
        raise EngineError(
            f"the engine failed (status {status}) in op {_op_under_way(folder)}: "
            f"{_last_words((folder / _LOG).read_text(errors='replace'))}"
        )


def _op_under_way(folder: Path) -> str:
    progress = folder / _PROGRESS
    return repr(progress.read_text()) if progress.exists() else "none (it did not start)"


def _last_words(log: str) -> str:
    """The line of an error, else the last line of the log that is not the profile's."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and "[info]" not in line]
    errors = [line for line in lines if re.search(r"Enforce fail|Error\b|error:", line)]
    return f"{(errors or lines or ['no output'])[-1]:.300}"


def _measured(log: str) -> dict[str, Measured]:
    """Costs by op name: parties run each op together, so that the lines of an op are neighbours in the log."""
    costs: dict[str, Measured] = {}
    name, seconds = "", 0.0
    for line in log.splitlines():
        if match := _EXECUTION.search(line):
            name, seconds = match["name"], float(match["seconds"])
        elif match := _LINK.search(line):
            known = costs.get(name, Measured(sent_bytes=0, messages=0, seconds=0.0))
            costs[name] = Measured(
                sent_bytes=known.sent_bytes + int(match["sent_bytes"]),
                messages=known.messages + int(match["messages"]),
                seconds=max(known.seconds, seconds),
            )
    return costs


def _child(folder: Path) -> None:
    """The child process: runs the job op by op and saves the logits; costs go to stdout."""
    job: _Job = pickle.loads((folder / _JOB).read_bytes())
    num_parties = NUM_PARTIES[job.protocol]
    compiled: dict[Op, bytes] = {}
    with ThreadPoolExecutor(num_parties) as pool:
        runtimes = list(pool.map(partial(_runtime, job), range(num_parties)))  # parties greet each other: together
        shapes = _share_inputs(job, runtimes)
        for node in job.nodes:
            (folder / _PROGRESS).write_text(node.name)
            executable = _compile(node, job.operands[node.name], shapes, compiled)
            list(pool.map(_run_one, runtimes, [executable] * num_parties))
    last = job.nodes[-1].name
    np.save(folder / _RESULT, _io(job).reconstruct([runtime.get_var(last) for runtime in runtimes]))


def _runtime(job: _Job, rank: int) -> Any:
    from spu import api, libspu

    description = libspu.link.Desc()
    for party in range(NUM_PARTIES[job.protocol]):
        description.add_party(f"party_{party}", f"memory_{party}")
    return api.Runtime(libspu.link.create_mem(description, rank), _configuration(job))


def _run_one(runtime: Any, executable: Any) -> None:
    runtime.run(executable)


def _configuration(job: _Job) -> Any:
    """Defaults of the engine but for the profile, and for one thread: cheetah has set-up costs per thread."""
    from spu import libspu

    configuration = libspu.RuntimeConfig(
        protocol=getattr(libspu.ProtocolKind, job.protocol.upper()),
        field=getattr(libspu.FieldType, f"FM{job.setting.ring_bits}"),
        fxp_fraction_bits=job.setting.fraction_bits,
    )
    configuration.enable_pphlo_profile = True  # without it, nothing is reported
    configuration.max_concurrency = 1
    return configuration


def _io(job: _Job) -> Any:
    from spu import api

    return api.Io(NUM_PARTIES[job.protocol], _configuration(job))


def _share_inputs(job: _Job, runtimes: list[Any]) -> dict[str, tuple[int, ...]]:
    """Gives every party its shares of inputs and operands; returns the shape of every input of an op."""
    from spu import libspu

    io = _io(job)
    inputs = {name: (value, libspu.Visibility.VIS_SECRET) for name, value in job.inputs.items()}
    for node in job.nodes:
        public = type(node.op) in PUBLIC
        visibility = libspu.Visibility.VIS_PUBLIC if public else libspu.Visibility.VIS_SECRET
        for suffix, value in job.operands[node.name].items():
            inputs[f"{node.name}.{suffix}"] = (value, visibility)
    for name, (value, visibility) in inputs.items():
        shares = io.make_shares(np.asarray(value, dtype=np.float32), visibility)
        for runtime, share in zip(runtimes, shares, strict=True):
            runtime.set_var(name, share)
    return {name: value.shape for name, value in job.inputs.items()}


def _compile(node: Node, own: Weights, shapes: dict[str, tuple[int, ...]], compiled: dict[Op, bytes]) -> Any:
    """The program of one op, on variables by name; equal ops are compiled once. Adds its output's shape to `shapes`."""
    import jax
    from spu import libspu
    from spu.utils import frontend

    def function(*arrays: Array) -> Array:
        return execute.evaluate(node.op, _jax_library(), dict(zip(own, arrays, strict=False)), *arrays[len(own) :])

    sources = [*(value.shape for value in own.values()), *(shapes[name] for name in node.inputs)]
    arguments = [np.zeros(shape, dtype=np.float32) for shape in sources]
    names = [*(f"{node.name}.{suffix}" for suffix in own), *node.inputs]
    operand = libspu.Visibility.VIS_PUBLIC if type(node.op) in PUBLIC else libspu.Visibility.VIS_SECRET
    visibilities = [operand] * len(own) + [libspu.Visibility.VIS_SECRET] * len(node.inputs)
    if node.op not in compiled:
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
        compiled[node.op] = executable.code
    shapes[node.name] = jax.eval_shape(function, *arguments).shape
    return libspu.Executable(name=node.name, input_names=names, output_names=[node.name], code=compiled[node.op])


def _jax_library() -> Library:
    import jax

    return Library(numpy=jax.numpy, erf=jax.scipy.special.erf, rsqrt=jax.lax.rsqrt)


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
