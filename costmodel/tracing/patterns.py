"""Which typed ops an operation of an exported program stands for, itself or together with those before it.

Each pattern takes the last operation of what it recognises and returns the steps that compute its value, or none.
Linears, norms and tables are recognised by structure; activations, however they are spelled out, by their values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from costmodel import ops
from costmodel.ops import Op
from costmodel.tracing.program import (
    CASTS,
    REARRANGES,
    FxNode,
    Program,
    argument,
    is_node,
    kind,
    numel,
    origin,
    secret_inputs,
    size,
)

VALUE_TOLERANCE = 1e-5  # the tanh form of GELU is off the exact one by 5e-4
LARGEST_ACTIVATION = 12  # operations of which a spelled-out activation may consist; GELU has 8
# Element-wise operations that an activation may be spelled out in.
ELEMENTWISE: frozenset[str] = frozenset(
    {
        "abs", "add", "clamp", "clamp_max", "clamp_min", "div", "erf", "exp", "gelu", "hardswish", "hardtanh",
        "leaky_relu", "mish", "mul", "neg", "pow", "reciprocal", "relu", "rsub", "sigmoid", "silu", "softplus",
        "square", "sub", "tanh",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedOp:
    """One op. part: what it is called beside others of its module. anchor: the operation whose module it is named by.

    inputs: operations, or earlier steps of the same pattern.
    """

    part: str
    op: Op
    inputs: tuple[Any, ...]
    anchor: FxNode


TracedOps: TypeAlias = tuple[TracedOp, ...]
# ATen name -> what its value may be, tried in turn
Patterns: TypeAlias = Mapping[str, tuple[Callable[[Program, FxNode], TracedOps], ...]]


def _embedding(program: Program, node: FxNode) -> TracedOps:
    table, ids = node.args[0], node.args[1]
    if table in program.secret or origin(program, ids) is not program.tokens:
        return ()
    vocab, features = size(table)
    op = ops.TokenEmbedding(tokens=numel(ids), vocab=vocab, features=features)
    return (TracedOp(part="embed", op=op, inputs=(ids,), anchor=node),)


def _scaled_embedding(program: Program, node: FxNode) -> TracedOps:
    """Times a public number, which the owner multiplies into the table before the run if nothing else reads it."""
    source, factor = split_product(program, node)
    if source is None or factor in program.learned or (is_node(factor) and numel(factor) != 1):
        return ()
    lookup = origin(program, source)
    alone = kind(lookup) == "embedding" and len(lookup.users) == 1
    return _embedding(program, lookup) if alone else ()


def _layer_norm(program: Program, node: FxNode) -> TracedOps:
    """Over the last axis."""
    source, normalised, gain = node.args[0], node.args[1], argument(node, 2, "weight")
    if secret_inputs(program, node) != [source] or len(normalised) != 1:
        return ()
    op = ops.LayerNorm(rows=numel(source) // normalised[0], features=normalised[0], affine=gain is not None)
    return (TracedOp(part="norm", op=op, inputs=(source,), anchor=node),)


def _rms_norm(program: Program, node: FxNode) -> TracedOps:
    source, normalised, gain = node.args[0], node.args[1], argument(node, 2, "weight")
    if secret_inputs(program, node) != [source] or len(normalised) != 1 or gain is None:
        return ()
    return _rms_norm_step(source, node)


def _spelled_rms_norm(program: Program, node: FxNode) -> TracedOps:
    """gain * (x * rsqrt(mean(x^2) + epsilon))."""
    product, gain = split_product(program, node)
    if product is None or not is_node(gain) or numel(gain) != size(node)[-1]:
        return ()
    product = origin(program, product)
    if kind(product) != "mul" or len(factors := secret_inputs(program, product)) != 2:
        return ()
    for source, root in (factors, factors[::-1]):
        source = origin(program, source)
        inner = [root]
        for wanted in ("rsqrt", "add", "mean"):
            inner = [] if not inner or kind(inner[0]) != wanted else secret_inputs(program, inner[0])
        if len(inner) == 1 and _square_of(program, inner[0]) is source:
            return _rms_norm_step(source, node)
    return ()


def _square_of(program: Program, node: FxNode) -> FxNode | None:
    """x of x^2 or x * x."""
    inputs = secret_inputs(program, node)
    is_square = (kind(node) == "pow" and node.args[1] == 2) or (kind(node) == "mul" and node.args[0] is node.args[1])
    return origin(program, inputs[0]) if is_square and len(inputs) == 1 else None


def _rms_norm_step(source: FxNode, node: FxNode) -> TracedOps:
    features = size(node)[-1]
    op = ops.RmsNorm(rows=numel(source) // features, features=features)
    return (TracedOp(part="norm", op=op, inputs=(source,), anchor=node),)


def _linear(program: Program, node: FxNode) -> TracedOps:
    """A matrix of weights to the right of the activations: `linear`, `addmm`, or a product of two matrices."""
    name = kind(node)
    source, weight = node.args[1:3] if name == "addmm" else node.args[:2]
    bias = node.args[0] if name == "addmm" else argument(node, 2, "bias") if name == "linear" else None
    if secret_inputs(program, node) != [source] or len(size(weight)) != 2:
        return ()
    dimensions = {"rows": numel(source) // size(source)[-1], "features": size(source)[-1]}
    out_features = size(node)[-1]
    if origin(program, program.output) is node and out_features >= _vocabulary(program):
        rows, features = dimensions["rows"], dimensions["features"]
        projection = ops.VocabProjection(rows=rows, features=features, vocab=out_features)
        head = TracedOp(part="logits", op=projection, inputs=(source,), anchor=node)
        if bias is None:
            return (head,)
        table = ops.PositionEmbedding(rows=dimensions["rows"], features=out_features)
        return (head, TracedOp(part="bias", op=table, inputs=(head,), anchor=node))
    op = ops.Linear(
        rows=dimensions["rows"],
        in_features=dimensions["features"],
        out_features=out_features,
        bias=bias is not None,
    )
    return (TracedOp(part="linear", op=op, inputs=(source,), anchor=node),)


def _vocabulary(program: Program) -> int:
    tables = [node.args[0] for node in program.nodes if kind(node) == "embedding" and node in program.secret]
    return max((size(table)[0] for table in tables), default=1)


def _leaky_relu(program: Program, node: FxNode) -> TracedOps:
    """With one slope, learned or not."""
    source = node.args[0]
    if kind(node) == "prelu" and numel(node.args[1]) != 1:
        return ()
    if secret_inputs(program, node) != [source]:
        return ()
    return (TracedOp(part="activation", op=ops.LeakyRelu(**_rows(node)), inputs=(source,), anchor=node),)


# name in `Program.activations` -> its op
ACTIVATIONS: dict[str, Callable[[dict[str, int]], Op]] = {
    "gelu": lambda rows: ops.Gelu(**rows, form="exact"),
    "gelu-tanh": lambda rows: ops.Gelu(**rows, form="tanh"),
    "relu": lambda rows: ops.Relu(**rows),
    "silu": lambda rows: ops.Silu(**rows),
    "square": lambda rows: ops.Square(**rows),
}


def _activation(program: Program, node: FxNode) -> TracedOps:
    """Element-wise operations on one value: which function they compute together is told by evaluating them."""
    region: list[FxNode] = []
    frontier = {node}
    while len(region) < LARGEST_ACTIVATION:
        latest = max(frontier)  # in the order of execution
        sources = secret_inputs(program, latest)
        if latest is program.tokens or not _is_elementwise(program, latest):
            return ()
        region.insert(0, latest)
        frontier = frontier - {latest} | set(sources)
        if len(frontier) == 1:
            (source,) = frontier
            values = _evaluate(program, region, source)
            for name, known in program.activations.items():
                if float((values - known).abs().max()) < VALUE_TOLERANCE:
                    op = ACTIVATIONS[name](_rows(node))
                    return (TracedOp(part="activation", op=op, inputs=(source,), anchor=node),)
    return ()


def _is_elementwise(program: Program, node: FxNode) -> bool:
    """And of secrets and literal numbers alone."""
    if kind(node) not in ELEMENTWISE and kind(node) not in {"to", "clone", "alias", "contiguous"}:
        return False
    return all(source in program.secret and size(source) == size(node) for source in node.all_input_nodes)


def _evaluate(program: Program, region: list[FxNode], source: FxNode) -> Any:
    values = {source: program.samples}
    for node in region:
        if kind(node) == "to":
            values[node] = values[node.args[0]]
            continue
        arguments = [values[each] if is_node(each) else each for each in node.args]
        values[node] = node.target(*arguments, **node.kwargs)
    return values[region[-1]]


def _sum(program: Program, node: FxNode) -> TracedOps:
    """Two activations, each perhaps times or divided by a learned scalar; or an activation and a table."""
    if argument(node, 2, "alpha", 1) != 1 or not is_node(node.args[1]):
        return ()
    first, second = node.args[:2]
    if len(secrets := secret_inputs(program, node)) == 1 and first is not second:
        return _table(program, node, secrets[0], second if secrets[0] is first else first)
    if not _keeps_size(node, secrets):
        return ()
    unscaled = [_unscaled(program, each) for each in (first, second)]
    op: Op = ops.Add(**_rows(node))
    if unscaled != [first, second]:
        op = ops.ScaledAdd(**_rows(node))
    return (TracedOp(part="add", op=op, inputs=tuple(unscaled), anchor=node),)


def _table(program: Program, node: FxNode, source: FxNode, table: FxNode) -> TracedOps:
    """Numbers that do not depend on the tokens, mostly learned positions, added to every token."""
    if not _keeps_size(node, [source]):
        return ()
    while kind(table) in REARRANGES | CASTS:
        table = table.args[0]
    op = ops.PositionEmbedding(**_rows(node))
    return (TracedOp(part="position", op=op, inputs=(source,), anchor=table if kind(table) == "embedding" else node),)


def _unscaled(program: Program, node: FxNode) -> FxNode:
    """x of x times or divided by one learned scalar; else the node."""
    product = origin(program, node)
    if kind(product) not in {"mul", "div"}:
        return node
    source, scalar = split_product(program, product)
    return source if source is not None and scalar in program.learned and numel(scalar) == 1 else node


def _product(program: Program, node: FxNode) -> TracedOps:
    """Two activations, element by element."""
    secrets = [each for each in node.args[:2] if is_node(each) and each in program.secret]
    if len(secrets) != 2 or not _keeps_size(node, secrets):
        return ()
    return (TracedOp(part="product", op=ops.Multiply(**_rows(node)), inputs=tuple(secrets), anchor=node),)


def _keeps_size(node: FxNode, sources: list[FxNode]) -> bool:
    return all(numel(source) == numel(node) for source in sources)


def _rows(node: FxNode) -> dict[str, int]:
    features = size(node)[-1]
    return {"rows": numel(node) // features, "features": features}


def split_product(program: Program, node: FxNode) -> tuple[FxNode, Any]:
    """The operands of a product of one secret with something else; for a quotient, the secret must be on top."""
    if kind(node) not in {"mul", "div"}:
        return None, None
    first, second = node.args[:2]
    if first in program.secret and second not in program.secret:
        return first, second
    if kind(node) == "mul" and second in program.secret and first not in program.secret:
        return second, first
    return None, None


def first_match(patterns: Patterns, program: Program, node: FxNode) -> TracedOps:
    """What the first pattern that recognises a node makes of it; nothing if none does."""
    return next((steps for pattern in patterns.get(kind(node), ()) if (steps := pattern(program, node))), ())


PATTERNS: Patterns = {
    "embedding": (_embedding,),
    "layer_norm": (_layer_norm,),
    "native_layer_norm": (_layer_norm,),
    "rms_norm": (_rms_norm,),
    "linear": (_linear,),
    "addmm": (_linear,),
    "mm": (_linear,),
    "matmul": (_linear,),
    "leaky_relu": (_leaky_relu,),
    "prelu": (_leaky_relu,),
    "add": (_activation, _sum),
    "mul": (_activation, _spelled_rms_norm, _product, _scaled_embedding),
    **dict.fromkeys(sorted(ELEMENTWISE - {"add", "mul", "leaky_relu"}), (_activation,)),
}
