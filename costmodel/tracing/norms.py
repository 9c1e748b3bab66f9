"""Recognises norms in an exported program: fused, or written out as a product with an inverse root mean square."""

from collections.abc import Iterator
from typing import Any

from costmodel import ops
from costmodel.tracing.patterns import Patterns, TracedOps, rows_and_features, step
from costmodel.tracing.program import FxNode, Program, argument, is_node, kind, numel, size


def _layer_norm(program: Program, node: FxNode) -> TracedOps:
    source, normalised = node.args[0], node.args[1]
    if program.secret_inputs(node) != [source] or len(normalised) != 1:
        return ()
    gain, bias = (argument(node, position, name) is not None for position, name in ((2, "weight"), (3, "bias")))
    return _norm(program, ops.LayerNorm, source, node, gain=gain, bias=bias)


def _rms_norm(program: Program, node: FxNode) -> TracedOps:
    source, normalised, gain = node.args[0], node.args[1], argument(node, 2, "weight")
    if program.secret_inputs(node) != [source] or len(normalised) != 1:
        return ()
    return _norm(program, ops.RmsNorm, source, node, gain=gain is not None)


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
        centred = _centred(program, numerator)
        if centred is not None and centred in (
            _centred(program, _squared_mean(program, spread)),
            _variance_of(program, spread),
        ):
            return ops.LayerNorm, centred
        if _squared_mean(program, spread) is numerator:
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


def _variance_of(program: Program, node: FxNode) -> FxNode | None:
    """Return x of its variance over the last axis, divided by the number of elements."""
    if not _is_over_last_axis(node, "var"):
        return None
    by_all = argument(node, 2, "unbiased", node.kwargs.get("correction", 1)) in (False, 0)
    return program.origin(node.args[0]) if by_all else None


def _is_over_last_axis(node: FxNode, name: str) -> bool:
    if kind(node) != name or len(size(node)) != len(size(node.args[0])):
        return False
    return tuple(argument(node, 1, "dim") or ()) in {(-1,), (len(size(node)) - 1,)}


def _norm(
    program: Program, op_type: type, source: FxNode, node: FxNode, *, gain: bool, bias: bool = False
) -> TracedOps:
    """Return a norm op; without gain it has no bias. Rows of one token, such as its heads, become groups."""
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
    "layer_norm": (_layer_norm,),
    "native_layer_norm": (_layer_norm,),
    "rms_norm": (_rms_norm,),
    "add": (_with_bias,),
    "mul": (_with_gain, _without_gain),
    "div": (_without_gain,),
}
