"""Programs of SecretFlow-SPU for the ops of a session, compiled from their functions in `execution.op_functions`.

The client compiles the programs of every step of a session, and all parties run them. Weights are variables, each
shared once for all steps that read it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from costmodel import ops
from costmodel.engine.channel import Blob
from costmodel.engine.plan import variables
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Weights
from costmodel.execution.op_functions import Array, Library, evaluate
from costmodel.ops import Node, Op, OpGraph
from costmodel.protocols.primitives import EngineSetting

Shape: TypeAlias = tuple[int, ...]
MASKED = (ops.TokenEmbedding, ops.Linear, ops.VocabProjection)  # ops with weights that are factors of matrix products


class Operand(NamedTuple):
    """A weight, or the part of it that ops read, which an engine stores as a variable.

    variable: name of the variable. node, suffix: the first node that reads the variable, and the weight's suffix there.
    """

    variable: str
    node: Node
    suffix: str

    def of(self, weights: Weights) -> Array:
        """Return the values, as the node's function takes them. Raise UserError if they are missing or misshapen."""
        return interpreter.operands(self.node, weights)[self.suffix]

    @property
    def shape(self) -> Shape:
        """The shape of the operand, as the node's function takes it."""
        return operand_shapes(self.node)[self.suffix]

    @property
    def is_masked(self) -> bool:
        """Whether it is a hidden factor of matrix products, whose mask semi2k can keep for later runs."""
        return isinstance(self.node.op, MASKED) and self.node.op.hides_weights and self.suffix == "weight"


def operand_shapes(node: Node) -> dict[str, Shape]:
    """Return the shapes of a node's weights by suffix, as the function of its op takes them (sliced, transposed)."""
    shapes = node.op.weight_shapes
    blank = {f"{node.model_name}.{suffix}": np.broadcast_to(1.0, shape) for suffix, shape in shapes.items()}
    return {suffix: value.shape for suffix, value in interpreter.operands(node, blank).items()}


def weight_variables(node: Node) -> dict[str, str]:
    """Return the names of the variables for a node's weights, by suffix; each part of a table has its own variable."""
    _, entries = node.op.read or (0, None)
    read = "" if entries is None else f"@{entries.start}-{entries.stop}"
    return {suffix: f"{node.model_name}.{suffix}{read}" for suffix in node.op.weight_shapes}


def operands(graphs: Sequence[OpGraph]) -> Iterator[Operand]:
    """Yield every operand of the graphs once, even if several nodes read it."""
    known = set()
    for graph in graphs:
        for node in graph:
            for suffix, variable in weight_variables(node).items():
                if variable not in known:
                    known.add(variable)
                    yield Operand(variable, node, suffix)


class Program(NamedTuple):
    """A program that every party runs for a node: `code` reads the variables `inputs` and writes variable `output`."""

    name: str
    inputs: tuple[str, ...]
    output: str
    code: bytes


# First the programs that run once, to make weight masks that are reused; then those of each step, in order.
Compiled: TypeAlias = list[list[Program]]


def compile_steps(graphs: Sequence[OpGraph], setting: EngineSetting, on_node: Callable[[str], object]) -> Compiled:
    """Return the compiled programs of all steps, for which only shapes are needed.

    In the first step, the client supplies all inputs of the graph. A later step reads cached keys and values from the
    variables that the step before it has written. `on_node` is called with the name of each node before it is compiled.
    """
    weights = list(operands(graphs))
    shapes = {operand.variable: operand.shape for operand in weights}  # of every variable so far
    keepers = [
        _mask_keeper(operand.variable, operand.shape)
        for operand in weights
        if setting.weight_masks == "kept" and operand.is_masked
    ]
    compiled = [keepers]
    for index, graph in enumerate(graphs):
        pasts = variables(graph) if index else {}
        shapes |= {read.name: read.shape for read in graph.inputs if read.name not in pasts}
        programs = []
        for node in graph:
            on_node(node.name)
            if isinstance(node.op, ops.TokenEmbedding):
                shapes["tokens"] = node.op.input_shapes[0]
            node_weights = weight_variables(node)
            names = (*node_weights.values(), *(pasts.get(name, name) for name in node.inputs))
            code, shapes[node.name] = _compiled(node.op, tuple(node_weights), tuple(shapes[name] for name in names))
            programs.append(Program(node.name, names, node.name, code))
        compiled.append(programs)
    return compiled


@lru_cache(maxsize=4096)
def _compiled(op: Op, suffixes: tuple[str, ...], sources: tuple[Shape, ...]) -> tuple[bytes, Shape]:
    """Return the compiled code and the output shape of an op with these weights.

    sources: shapes of the weights, then of the inputs. Cached also for later jobs of this process.
    """
    import jax
    from spu import libspu

    library = Library(numpy=jax.numpy, erf=jax.scipy.special.erf, rsqrt=jax.lax.rsqrt)

    def function(*arrays: Array) -> Array:
        return evaluate(op, library, dict(zip(suffixes, arrays, strict=False)), *arrays[len(suffixes) :])

    arguments = [np.zeros(shape, dtype=np.float32) for shape in sources]
    secret = libspu.Visibility.VIS_SECRET
    visibilities = [operand_visibility(op)] * len(suffixes) + [secret] * (len(sources) - len(suffixes))
    return _code(function, arguments, [f"input{index}" for index in range(len(sources))], visibilities)


def _mask_keeper(name: str, shape: Shape) -> Program:
    """Return a program that tells a runtime to keep the mask under which a weight matrix is first opened."""
    from spu import experimental, libspu

    arguments = [np.zeros(shape, dtype=np.float32)]
    code, _ = _code(experimental.make_cached_var, arguments, [name], [libspu.Visibility.VIS_SECRET])
    return Program(f"keep {name}", (name,), name, code)


def _code(
    function: Callable[..., Array], arguments: list[Array], names: list[str], visibilities: list[Any]
) -> tuple[bytes, Shape]:
    """Return the compiled code of a function and the shape of its output."""
    from spu import libspu
    from spu.utils import frontend

    options = libspu.CompilerOptions()
    executable, output = frontend.compile(
        frontend.Kind.JAX, function, arguments, {}, names, visibilities, lambda _: ["output"], copts=options
    )
    return executable.code, output.shape


def operand_visibility(op: Op) -> Any:
    """Return SPU's visibility of an op's weights: secret if the op hides them, otherwise public."""
    from spu import libspu

    return libspu.Visibility.VIS_SECRET if op.hides_weights else libspu.Visibility.VIS_PUBLIC


def to_blobs(compiled: Compiled) -> list[bytes]:
    """Return programs as bytes that can be sent: a table of all programs as JSON, then each distinct code once."""
    codes: dict[bytes, int] = {}
    table = [[[*program[:-1], codes.setdefault(program.code, len(codes))] for program in step] for step in compiled]
    return [json.dumps(table).encode(), *codes]


def from_blobs(blobs: Sequence[Blob]) -> Compiled:
    """Return the programs that `to_blobs` turned into bytes."""
    table, codes = json.loads(bytes(blobs[0])), list(map(bytes, blobs[1:]))
    return [
        [Program(name, tuple(inputs), output, codes[code]) for name, inputs, output, code in step] for step in table
    ]
