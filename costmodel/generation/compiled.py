"""The programs of every step of a session: the client compiles them, all parties run them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel import ops
from costmodel.engine.programs import Compiler, Program, mask_keeper
from costmodel.generation.operands import operands, own_variables
from costmodel.generation.plan import variables
from costmodel.ops import OpGraph
from costmodel.protocols.primitives import EngineSetting


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """steps: of each, its programs in order, the logits' last. keepers: run once before, where masks are kept."""

    steps: tuple[tuple[Program, ...], ...]
    keepers: tuple[Program, ...]


def compile_steps(graphs: Sequence[OpGraph], setting: EngineSetting) -> Compiled:
    """Needs shapes alone, not the weights."""
    found = list(operands(graphs))
    compiler = Compiler(shapes={each.variable: each.shape for each in found})
    kept = [each for each in found if each.is_masked] if setting.weight_masks == "kept" else []
    return Compiled(
        steps=tuple(_compile_step(graph, compiler) for graph in graphs),
        keepers=tuple(mask_keeper(each.variable, each.shape) for each in kept),
    )


def _compile_step(graph: OpGraph, compiler: Compiler) -> tuple[Program, ...]:
    pasts = variables(graph)
    programs = []
    for node in graph:
        if isinstance(node.op, ops.TokenEmbedding):
            compiler.shapes["tokens"] = (node.op.tokens, node.op.vocab)
        inputs = tuple(pasts.get(name, name) for name in node.inputs)
        programs.append(compiler.program(node, own_variables(node), inputs))
    return tuple(programs)


def to_blobs(compiled: Compiled) -> list[bytes]:
    """To travel: a table of all programs as JSON, then their codes, each once."""
    codes: dict[bytes, int] = {}

    def row(program: Program) -> list[object]:
        return [program.name, program.inputs, program.output, codes.setdefault(program.code, len(codes))]

    steps, keepers = [[row(each) for each in step] for step in compiled.steps], [row(each) for each in compiled.keepers]
    return [json.dumps({"steps": steps, "keepers": keepers}).encode(), *codes]


def from_blobs(blobs: Sequence[bytes]) -> Compiled:
    """What `to_blobs` gave."""
    table, codes = json.loads(blobs[0]), blobs[1:]

    def program(name: str, inputs: list[str], output: str, code: int) -> Program:
        return Program(name=name, inputs=tuple(inputs), output=output, code=codes[code])

    return Compiled(
        steps=tuple(tuple(program(*row) for row in step) for step in table["steps"]),
        keepers=tuple(program(*row) for row in table["keepers"]),
    )
