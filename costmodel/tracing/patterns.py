"""Recognise the typed op that one operation of an exported program, or several in a row, stand for.

A pattern is a function that takes the last of these operations, and returns the ops that compute its value, or an empty
tuple. Linears and tables are recognised by structure, activations by the values of the function that they compute.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from costmodel import ops
from costmodel.ops import Op
from costmodel.tracing.program import (
    CASTS,
    FACTORS,
    REARRANGES,
    FxNode,
    Program,
    argument,
    is_node,
    kind,
    numel,
    readers,
    size,
)

VALUE_TOLERANCE = 1e-5  # the tanh form of GELU differs from the exact one by 5e-4
LARGEST_ACTIVATION = 12  # largest number of operations of a written-out activation; GELU has 8
CAPS: frozenset[str] = FACTORS | {"tanh"}  # cap * tanh(x / cap) keeps logits and scores within a cap
# Element-wise operations of which a written-out activation may consist.
ELEMENTWISE: frozenset[str] = frozenset(
    {
        "abs", "add", "clamp", "clamp_max", "clamp_min", "div", "erf", "exp", "gelu", "hardswish", "hardtanh",
        "leaky_relu", "mish", "mul", "neg", "pow", "reciprocal", "relu", "rsub", "sigmoid", "silu", "softplus",
        "square", "sub", "tanh",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedOp:
    """One op of a traced model.

    anchor: operation of the program, after whose module the op is named. part: name of the op within this module.
    inputs: operations of the program, or ops that the same pattern returned before this one.
    """

    part: str
    op: Op
    inputs: tuple[Any, ...]
    anchor: FxNode


TracedOps: TypeAlias = tuple[TracedOp, ...]


def step(part: str, op: Op, anchor: FxNode, *inputs: Any) -> TracedOps:
    """Return a tuple of one `TracedOp` with these fields, to which a pattern can add others."""
    return (TracedOp(part=part, op=op, inputs=inputs, anchor=anchor),)


# ATen name -> patterns, tried in this order
Patterns: TypeAlias = Mapping[str, tuple[Callable[[Program, FxNode], TracedOps], ...]]


def _embedding(program: Program, node: FxNode) -> TracedOps:
    table, ids = node.args[0], node.args[1]
    if table in program.secret or program.origin(ids) is not program.tokens:
        return ()
    vocab, features = size(table)
    return step("embed", ops.TokenEmbedding(tokens=numel(ids), vocab=vocab, features=features), node, ids)


def _scaled_embedding(program: Program, node: FxNode) -> TracedOps:
    """Match an embedding times a public number, which the owner multiplies into the table if nothing else reads it."""
    source, factor = program.split_product(node)
    if source is None or factor in program.learned or (is_node(factor) and numel(factor) != 1):
        return ()
    while len(readers(source)) == 1 and len(sources := program.moved(source)) == 1:
        (source,) = sources
    alone = kind(source) == "embedding" and len(readers(source)) == 1
    return _embedding(program, source) if alone else ()


def _scaled(program: Program, node: FxNode) -> TracedOps:
    source, factor = program.public_factor(node)
    if factor is None or any(operand in program.learned for operand in node.all_input_nodes):
        return ()
    return step("scale", ops.Scale(**rows_and_features(node), factor=factor), node, source)


def _one_row(program: Program, node: FxNode) -> TracedOps:
    """Match one token of 1 x T x features, such as the last, or the first, which a classifier reads."""
    source, axis = node.args[0], argument(node, 1, "dim", 0)
    if len(size(source)) != 3 or size(source)[0] != 1 or size(source)[1] == 1 or axis not in (1, -2):
        return ()
    rows: Any = {"rows": size(source)[1], "features": size(source)[2]}
    if numel(node) != rows["features"]:
        return ()
    position = (argument(node, 2, "index" if kind(node) == "select" else "start") or 0) % rows["rows"]
    return step("row", ops.TakeRows(**rows, taken=1, first=position), node, source)


def _linear(program: Program, node: FxNode) -> TracedOps:
    """Match a product with a weight matrix on the right: `linear`, `addmm`, or a product of two matrices."""
    name = kind(node)
    source, weight = node.args[1:3] if name == "addmm" else node.args[:2]
    bias = node.args[0] if name == "addmm" else argument(node, 2, "bias") if name == "linear" else None
    if program.secret_inputs(node) != [source] or len(size(weight)) != 2:
        return ()
    rows, features, out_features = numel(source) // size(source)[-1], size(source)[-1], size(node)[-1]
    if _is_head(program, node):
        head = step("logits", ops.VocabProjection(rows=rows, features=features, vocab=out_features), node, source)
        if bias is None:
            return head
        return head + step("bias", ops.PositionEmbedding(rows=rows, features=out_features), node, *head)
    linear = ops.Linear(rows=rows, in_features=features, out_features=out_features, bias=bias is not None)
    return step("linear", linear, node, source)


def _is_head(program: Program, node: FxNode) -> bool:
    """Return whether an operation makes the logits, before factors and caps, one for each token of the vocabulary."""
    last = program.origin(program.output)
    while kind(last) in CAPS and len(program.secret_inputs(last)) == 1:
        last = program.origin(program.secret_inputs(last)[0])
    tables = [other.args[0] for other in program.nodes if kind(other) == "embedding" and other in program.secret]
    return last is node and size(node)[-1] >= max((size(table)[0] for table in tables), default=1)


def _leaky_relu(program: Program, node: FxNode) -> TracedOps:
    source = node.args[0]
    if (kind(node) == "prelu" and numel(node.args[1]) != 1) or program.secret_inputs(node) != [source]:
        return ()
    return step("activation", ops.LeakyRelu(**rows_and_features(node)), node, source)


# name in `Program.activations` -> op
ACTIVATIONS: dict[str, Callable[..., Op]] = {
    "gelu": partial(ops.Gelu, form="exact"),
    "gelu-tanh": partial(ops.Gelu, form="tanh"),
    "relu": ops.Relu,
    "silu": ops.Silu,
    "sigmoid": ops.Sigmoid,
    "square": ops.Square,
    "square-less-1": partial(ops.Square, shift=-1.0),
    "tanh": ops.Tanh,
}


def _activation(program: Program, node: FxNode) -> TracedOps:
    """Match element-wise operations on one value; evaluating them tells which function they compute together."""
    region: list[FxNode] = []
    frontier = {node}
    while len(region) < LARGEST_ACTIVATION:
        latest = max(frontier)  # in the order of execution
        operands = latest.all_input_nodes
        is_elementwise = kind(latest) in ELEMENTWISE | {"to", "clone", "alias", "contiguous"} and all(
            operand in program.secret and size(operand) == size(latest) for operand in operands
        )
        if latest is program.tokens or not is_elementwise:
            return ()
        region.insert(0, latest)
        frontier = frontier - {latest} | set(operands)
        if len(frontier) == 1:
            (source,) = frontier
            values = _evaluate(program, region, source)
            for name, known in program.activations.items():
                if float((values - known).abs().max()) < VALUE_TOLERANCE:
                    return step("activation", ACTIVATIONS[name](**rows_and_features(node)), node, source)
    return ()


def _evaluate(program: Program, region: list[FxNode], source: FxNode) -> Any:
    values = {source: program.samples}
    for node in region:
        arguments = [values[value] if is_node(value) else value for value in node.args]
        values[node] = arguments[0] if kind(node) == "to" else node.target(*arguments, **node.kwargs)
    return values[region[-1]]


def _sum(program: Program, node: FxNode) -> TracedOps:
    """Match a sum of two activations, each possibly scaled by a learned scalar, or of an activation and a table."""
    if argument(node, 2, "alpha", 1) != 1 or not is_node(node.args[1]):
        return ()
    first, second = node.args[:2]
    if len(secrets := program.secret_inputs(node)) == 1 and first is not second:
        return _table(program, node, secrets[0], second if secrets[0] is first else first)
    if not _keeps_size(node, secrets):
        return ()
    unscaled = [_unscaled(program, operand) for operand in (first, second)]
    op_type = ops.Add if unscaled == [first, second] else ops.ScaledAdd
    return step("add", op_type(**rows_and_features(node)), node, *unscaled)


def _table(program: Program, node: FxNode, source: FxNode, table: FxNode) -> TracedOps:
    """Match a sum with numbers that do not depend on the tokens, mostly learned positions."""
    if not _keeps_size(node, [source]):
        return ()
    while kind(table) in REARRANGES | CASTS:
        table = table.args[0]
    anchor = table if kind(table) == "embedding" else node
    return step("position", ops.PositionEmbedding(**rows_and_features(node)), anchor, source)


def _unscaled(program: Program, node: FxNode) -> FxNode:
    """Return x of x times or divided by one learned scalar; otherwise the node itself."""
    product = program.origin(node)
    if kind(product) not in {"mul", "div"}:
        return node
    source, scalar = program.split_product(product)
    return source if source is not None and scalar in program.learned and numel(scalar) == 1 else node


def _product(program: Program, node: FxNode) -> TracedOps:
    secrets = [operand for operand in node.args[:2] if is_node(operand) and operand in program.secret]
    if len(secrets) != 2 or not _keeps_size(node, secrets):
        return ()
    return step("product", ops.Multiply(**rows_and_features(node)), node, *secrets)


def _keeps_size(node: FxNode, sources: list[FxNode]) -> bool:
    return all(numel(source) == numel(node) for source in sources)


def rows_and_features(node: FxNode) -> dict[str, Any]:
    """Return a node's shape as an op's `rows`, the product of all dimensions but the last, and `features`, the last."""
    features = size(node)[-1]
    return {"rows": numel(node) // features, "features": features}


def first_match(patterns: Patterns, program: Program, node: FxNode) -> TracedOps:
    """Return the ops of the first pattern that recognises a node; an empty tuple if none does."""
    return next((steps for pattern in patterns.get(kind(node), ()) if (steps := pattern(program, node))), ())


def _fused_norm(program: Program, node: FxNode) -> TracedOps:
    source, normalised = node.args[:2]
    if program.secret_inputs(node) != [source] or len(normalised) != 1:
        return ()
    gain, bias = (argument(node, position, name) is not None for position, name in ((2, "weight"), (3, "bias")))
    op_type = ops.RmsNorm if kind(node) == "rms_norm" else ops.LayerNorm  # which alone has a bias
    return _norm(program, op_type, source, node, gain=gain, bias=bias)


def _with_bias(program: Program, node: FxNode) -> TracedOps:
    """Match a written-out LayerNorm plus a bias."""
    sources = program.secret_inputs(node)
    others = [operand for operand in node.args[:2] if is_node(operand) and operand not in program.secret]
    if len(sources) != 1 or len(others) != 1 or numel(others[0]) != size(node)[-1]:
        return ()
    (norm,) = _with_gain(program, program.origin(sources[0])) or (None,)
    if norm is None or not isinstance(norm.op, ops.LayerNorm):
        return ()
    return _norm(program, ops.LayerNorm, norm.inputs[0], node, gain=True, bias=True)


def _with_gain(program: Program, node: FxNode) -> TracedOps:
    """Match gain * (x * rsqrt(mean(x^2) + epsilon)); a LayerNorm has x - mean(x) in place of x."""
    normed, gain = program.split_product(node)
    if kind(node) != "mul" or normed is None or not is_node(gain) or numel(gain) != size(node)[-1]:
        return ()
    op_type, source = _normed(program, program.origin(normed))
    return () if op_type is None else _norm(program, op_type, source, node, gain=True)


def _without_gain(program: Program, node: FxNode) -> TracedOps:
    op_type, source = _normed(program, node)
    return () if op_type is None else _norm(program, op_type, source, node, gain=False)


def _normed(program: Program, node: FxNode) -> tuple[type | None, FxNode]:
    """Return the type of a norm without gain and bias and its input; None if the node is not a norm."""
    for numerator, spread in _by_inverse_roots(program, node):
        centred, mean_of = _centred(program, numerator), _squared_mean(program, spread)
        # the variance over the last axis, divided by the number of elements
        by_all = argument(spread, 2, "unbiased", spread.kwargs.get("correction", 1)) in (False, 0)
        variance_of = program.origin(spread.args[0]) if _is_over_last_axis(spread, "var") and by_all else None
        if centred is not None and centred in (_centred(program, mean_of), variance_of):
            return ops.LayerNorm, centred
        if mean_of is numerator:
            return ops.RmsNorm, numerator
    return None, None


def _by_inverse_roots(program: Program, node: FxNode) -> Iterator[tuple[FxNode, FxNode]]:
    """Yield x and v of x * rsqrt(v + epsilon), in either order, or of x / sqrt(v + epsilon)."""
    if len(factors := program.secret_inputs(node)) != 2:
        return
    orders = {"mul": ((factors, "rsqrt"), (factors[::-1], "rsqrt")), "div": ((factors, "sqrt"),)}
    for (numerator, root), wanted in orders.get(kind(node), ()):
        root = program.origin(root)
        inner = program.secret_inputs(root) if kind(root) == wanted else []
        if len(inner) == 1 and kind(inner[0]) == "add" and len(spread := program.secret_inputs(inner[0])) == 1:
            yield program.origin(numerator), program.origin(spread[0])


def _centred(program: Program, node: FxNode | None) -> FxNode | None:
    """Return x of x - mean(x) over the last axis."""
    if node is None or kind(node) != "sub" or len(program.secret_inputs(node)) != 2:
        return None
    source, mean = (program.origin(operand) for operand in node.args[:2])
    return source if _is_over_last_axis(mean, "mean") and program.origin(mean.args[0]) is source else None


def _squared_mean(program: Program, node: FxNode) -> FxNode | None:
    """Return x of the mean over the last axis of x^2 or x * x."""
    if not _is_over_last_axis(node, "mean"):
        return None
    square = program.origin(node.args[0])
    inputs = program.secret_inputs(square)
    raised = kind(square) == "pow" and square.args[1] == 2
    by_itself = kind(square) == "mul" and square.args[0] is square.args[1]
    return program.origin(inputs[0]) if (raised or by_itself or kind(square) == "square") and len(inputs) == 1 else None


def _is_over_last_axis(node: FxNode, name: str) -> bool:
    if kind(node) != name or len(size(node)) != len(size(node.args[0])):
        return False
    return tuple(argument(node, 1, "dim") or ()) in {(-1,), (len(size(node)) - 1,)}


def _norm(
    program: Program, op_type: type, source: FxNode, node: FxNode, *, gain: bool, bias: bool = False
) -> TracedOps:
    """Return a norm op; without gain it has no bias. In an RMSNorm, rows of one token (heads) become groups."""
    shape, forms = rows_and_features(node), dict[str, Any](affine=gain)
    if op_type is ops.LayerNorm and gain:
        forms["bias"] = bias
    groups, left = divmod(shape["rows"], numel(program.tokens))
    if op_type is ops.RmsNorm and groups > 1 and not left:
        shape = {"rows": numel(program.tokens), "features": groups * shape["features"]}
        forms["groups"] = groups
    op = op_type(**shape, **forms)
    return step("norm", op, node, source)


PATTERNS: Patterns = {
    **dict.fromkeys(sorted(ELEMENTWISE - {"add", "div", "mul", "leaky_relu"}), (_activation,)),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm"), (_fused_norm,)),
    **dict.fromkeys(("linear", "addmm", "mm", "matmul"), (_linear,)),
    **dict.fromkeys(("leaky_relu", "prelu"), (_leaky_relu,)),
    **dict.fromkeys(("select", "slice"), (_one_row,)),
    "embedding": (_embedding,),
    "add": (_with_bias, _activation, _sum),
    "mul": (_with_gain, _without_gain, _activation, _product, _scaled_embedding, _scaled),
    "div": (_without_gain, _activation, _scaled_embedding, _scaled),
}
