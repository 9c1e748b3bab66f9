"""Programs of the engine: an op, compiled by itself from its function in `execution.op_functions`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from costmodel import ops
from costmodel.execution.op_functions import Array, Library, evaluate
from costmodel.ops import Node, Op

Shape: TypeAlias = tuple[int, ...]

MASKED = (ops.TokenEmbedding, ops.Linear, ops.VocabProjection)  # their weights are factors of matrix products


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What every party runs for a node: code that reads variables and writes one."""

    name: str
    inputs: tuple[str, ...]
    output: str
    code: bytes


@dataclass(kw_only=True, slots=True)
class Compiler:
    """Compiles nodes one after the other; equal ops on equal shapes once.

    shapes: of every variable that is known: those that nothing computes are put in, the others as nodes are compiled.
    """

    shapes: dict[str, Shape]
    compiled: dict[tuple[object, ...], tuple[bytes, Shape]] = field(default_factory=dict)

    def program(self, node: Node, own: dict[str, str], inputs: tuple[str, ...]) -> Program:
        """own: the variables of the node's own operands by suffix. inputs: those of what it reads from others."""
        names = (*own.values(), *inputs)
        sources = tuple(self.shapes[name] for name in names)
        if (key := (node.op, tuple(own), *sources)) not in self.compiled:
            self.compiled[key] = _compiled(node.op, tuple(own), sources)
        code, self.shapes[node.name] = self.compiled[key]
        return Program(name=node.name, inputs=names, output=node.name, code=code)


def _compiled(op: Op, suffixes: tuple[str, ...], sources: tuple[Shape, ...]) -> tuple[bytes, Shape]:
    """The code of an op on operands, by suffix, and inputs of these shapes; the shape of its output."""
    import jax
    from spu import libspu

    library = Library(numpy=jax.numpy, erf=jax.scipy.special.erf, rsqrt=jax.lax.rsqrt)

    def function(*arrays: Array) -> Array:
        return evaluate(op, library, dict(zip(suffixes, arrays, strict=False)), *arrays[len(suffixes) :])

    arguments = [np.zeros(shape, dtype=np.float32) for shape in sources]
    secret = libspu.Visibility.VIS_SECRET
    visibilities = [operand_visibility(op)] * len(suffixes) + [secret] * (len(sources) - len(suffixes))
    code = _code(function, arguments, [f"input{index}" for index in range(len(sources))], visibilities)
    return code, jax.eval_shape(function, *arguments).shape


def mask_keeper(name: str, shape: Shape) -> Program:
    """What tells a runtime to keep the mask that a matrix of weights is first opened with."""
    from spu import experimental, libspu

    arguments = [np.zeros(shape, dtype=np.float32)]
    code = _code(experimental.make_cached_var, arguments, [name], [libspu.Visibility.VIS_SECRET])
    return Program(name=f"keep {name}", inputs=(name,), output=name, code=code)


def _code(function: Callable[..., Array], arguments: list[Array], names: list[str], visibilities: list[Any]) -> bytes:
    from spu import libspu
    from spu.utils import frontend

    options = libspu.CompilerOptions()
    executable, _ = frontend.compile(
        frontend.Kind.JAX, function, arguments, {}, names, visibilities, lambda _: ["output"], copts=options
    )
    code: bytes = executable.code
    return code


def operand_visibility(op: Op) -> Any:
    """Of the weights of an op: whether all parties see them."""
    from spu import libspu

    return libspu.Visibility.VIS_PUBLIC if op.weights == "public" else libspu.Visibility.VIS_SECRET
