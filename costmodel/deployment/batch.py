"""Several sequences of the same length at once: the same ops on more rows, and in attention on more heads."""

from dataclasses import replace
from typing import Any

from costmodel import ops
from costmodel.ops import Input, Op, OpGraph


def in_batch(graph: OpGraph, batch: int) -> OpGraph:
    """The graph of one sequence for so many, whose tokens stand side by side: all first ones, then all second ones."""
    rewritten = {op: _in_batch(op, batch) for op in dict.fromkeys(node.op for node in graph)}
    return OpGraph(
        nodes=tuple(replace(node, op=rewritten[node.op]) for node in graph),
        inputs=tuple(Input(name=each.name, shape=(each.shape[0] * batch, *each.shape[1:])) for each in graph.inputs),
    )


def _in_batch(op: Any, batch: int) -> Op:
    names, knows_sequences = TIMES.get(type(op), (("rows",), False))
    changes = {name: getattr(op, name) * batch for name in names} | ({"sequences": batch} if knows_sequences else {})
    return replace(op, **changes)  # type: ignore[no-any-return]


# op type -> what there is so many times more of, by default rows, and whether the op tells the sequences apart
TIMES: dict[type, tuple[tuple[str, ...], bool]] = {
    ops.TokenEmbedding: (("tokens",), False),
    ops.PositionEmbedding: (("rows",), True),
    ops.Rotary: (("rows",), True),
    ops.KeyValueCache: (("past_len", "rows"), False),
    ops.TakeRows: (("rows", "taken", "first"), False),
    ops.JoinRows: (("rows", "part"), False),
    ops.AttentionScores: (("heads",), True),
    ops.Temperature: (("heads",), True),
    ops.Softmax: (("heads",), False),
    ops.ShapedAttention: (("heads",), True),
    ops.AttentionMix: (("heads",), True),
}
