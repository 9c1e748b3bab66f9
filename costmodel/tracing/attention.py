"""Recognise attention in an exported program: a fused kernel, or two products around a softmax.

An attention includes all operations that rotate queries and keys, arrange heads, scale scores, cap them by a tanh or
divide them by temperatures. Masks are public, and the full square of scores is counted. The factor of `AttentionScores`
is the product of all public factors of queries and keys, or if there are none, the first one of scores before any tanh.
"""

from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import isclose, prod
from typing import Any

from costmodel import ops
from costmodel.ops import Op
from costmodel.tracing.patterns import Patterns, TracedOps, first_match, step
from costmodel.tracing.program import FxNode, Program, argument, is_node, kind, numel, size

SDPA = "scaled_dot_product_attention"
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
PADS: frozenset[str] = frozenset({"constant_pad_nd", "pad"})
SAME_FACTOR = 1e-6  # relative; single precision holds 6e-8
COPIES: frozenset[str] = frozenset({"alias", "clone", "contiguous", "detach", "to", "_to_copy"})


@dataclass(kw_only=True, slots=True)
class _Operand:
    """Queries, keys or scores with local operations, rotation, factors, caps and masks removed.

    least: Fewest elements of the operand after its rotation, which are those before its heads are repeated.
    turned: Number of rotated elements.
    steps: Removed steps other than rotations, last one first: a public factor, or the node of a temperature or
        tanh.
    seen: Public values that say where a mask lets scores be seen.
    """

    node: FxNode
    least: int = 0
    turned: int = 0
    rotation: FxNode = None
    steps: list[Any] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)


def fused(program: Program, node: FxNode) -> TracedOps:
    """Return the ops of `node`, a fused attention kernel; an empty tuple if it is not recognised."""
    return _fused(program, node, node, argument(node, 2, "value"))


def narrowed(program: Program, node: FxNode) -> TracedOps:
    """Return the ops of a fused attention kernel of which `node` slices the first columns; empty if not recognised."""
    source, last = node.args[0], len(size(node)) - 1
    kernel = source.args[0] if kind(source) == "getitem" and source.args[1] == 0 else source
    if (
        kind(kernel) not in {SDPA, FLASH}
        or argument(node, 1, "dim", 0) not in (-1, last)
        or argument(node, 2, "start") != 0
    ):
        return ()
    values = _columns(argument(kernel, 2, "value"), size(node)[-1])
    return () if values is None else _fused(program, node, kernel, values)


def _columns(node: FxNode, width: int) -> FxNode | None:
    """Return the part of a padded or joined value that is exactly its first `width` columns; None if none is."""
    while size(node := _unpadded(node))[-1] > width:
        if kind(node) == "cat" and argument(node, 1, "dim", 0) in (-1, len(size(node)) - 1):
            node = node.args[0][0]
        else:
            return None
    return node if size(node)[-1] == width else None


def _fused(program: Program, node: FxNode, kernel: FxNode, values: FxNode) -> TracedOps:
    operands = [argument(kernel, position, name) for position, name in enumerate(("query", "key", "value"))]
    dropout = argument(kernel, 4 if kind(kernel) == SDPA else 3, "dropout_p", 0)
    if dropout or not set(program.secret_inputs(kernel)) <= set(operands):
        return ()
    queries, keys = (_unpadded(operand) for operand in operands[:2])
    scores = _Operand(node=None)
    factor = kernel.kwargs.get("scale")
    factor = size(operands[0])[-1] ** -0.5 if factor is None else float(factor)
    scores.steps = [] if factor == 1 else [factor]
    mask = argument(kernel, 3, "attn_mask") if kind(kernel) == SDPA else kernel.kwargs.get("attn_mask")
    if mask is not None:
        scores.seen = [seen_by(program.value(mask))]
    causal = bool(argument(kernel, 5 if kind(kernel) == SDPA else 4, "is_causal", False))
    return _attention(program, node, queries, keys, values, scores, num_keys=size(keys)[-2], causal=causal)


def spelled(program: Program, node: FxNode) -> TracedOps:
    """Return the ops of softmax(queries @ keys^T) @ values, whose last product is `node`; empty if not recognised."""
    if len(program.secret_inputs(node)) != 2:
        return ()
    weights, values = node.args[:2]
    softmax = program.origin(weights)
    if kind(softmax) not in {"softmax", "_softmax"} or softmax.args[1] not in (-1, len(size(softmax)) - 1):
        return ()
    scores = _peeled(program, softmax.args[0], scores=True)
    product = scores.node
    if kind(product) not in {"matmul", "bmm", "baddbmm"} or scores.turned:
        return ()
    queries, keys = product.args[1:3] if kind(product) == "baddbmm" else product.args[:2]
    if set(program.secret_inputs(product)) != {queries, keys}:
        return ()
    if kind(product) == "baddbmm":
        if (alpha := float(product.kwargs.get("alpha", 1))) != 1:
            scores.steps.append(alpha)
        if product.kwargs.get("beta", 1) != 0:
            scores.seen.append(seen_by(program.value(product.args[0])))
    return _attention(program, node, queries, keys, values, scores, num_keys=size(keys)[-1])


def shaped(program: Program, node: FxNode) -> TracedOps:
    """Return the ops of a * values + b * (softmax @ values) - c * (running mean of values); empty if not recognised.

    `node` is the difference. The factors a, b and c are learned, one of each per head.
    """
    if len(program.secret_inputs(node)) != 2:
        return ()
    plus, minus = (program.origin(term) for term in program.secret_inputs(node))
    terms = [program.split_product(term) for term in (*plus.args[:2], minus)] if kind(plus) == "add" else []
    *summands, mean = [source for source, gain in terms if gain in program.learned] or [None]
    total, _ = (None, None) if mean is None else program.split_product(mean)
    if len(summands) != 2 or total is None or kind(total) != "cumsum" or total.args[0] not in summands:
        return ()
    if argument(total, 1, "dim") not in (-2, len(size(total)) - 2):
        return ()
    summands.remove(total.args[0])
    (mixed,) = summands
    while kind(mixed) in COPIES:
        mixed = mixed.args[0]
    *before, mix = first_match(PATTERNS, program, mixed) or (None,)
    if mix is None or not isinstance(mix.op, ops.AttentionMix):
        return ()
    op = ops.ShapedAttention(heads=mix.op.heads, queries=mix.op.queries, keys=mix.op.keys)
    (gains,) = step("shaped", op, node, before[-1])
    return (*before, gains, replace(mix, inputs=(gains, *mix.inputs[1:])))


def _attention(
    program: Program,
    node: FxNode,
    queries: FxNode,
    keys: FxNode,
    values: FxNode,
    scores: _Operand,
    *,
    num_keys: int,
    causal: bool = False,
) -> TracedOps:
    """Return the ops of one attention, none if it is not recognised; queries are (1 x) heads x T x head_dim.

    `scores` holds what is done to the scores besides the softmax. `causal` says whether the kernel masks them itself.
    """
    heads, num_queries, head_dim = (1, *size(queries))[-3:]
    peeled_queries, peeled_keys, peeled_values = (_peeled(program, operand) for operand in (queries, keys, values))
    key_heads = peeled_keys.least // (num_keys * head_dim)
    factor, rest = _factored([*peeled_queries.steps, *peeled_keys.steps], scores.steps[::-1])
    if (
        numel(queries) != heads * num_queries * head_dim  # more than one sequence
        or sum(is_node(score_step) and not _is_tanh(score_step) for score_step in rest) > 1
        or peeled_values.steps
        or peeled_values.turned
        or peeled_queries.turned * key_heads != peeled_keys.turned * heads
    ):
        return ()
    layout = {"heads": heads, "key_heads": key_heads, "head_dim": head_dim}
    sources = tuple(dict.fromkeys((peeled_queries.node, peeled_keys.node, peeled_values.node)))
    values_apart = peeled_queries.node is peeled_keys.node and not peeled_queries.turned and key_heads == heads
    steps = _laid_out(sources[: 1 if values_apart else None], peeled_queries, node, **layout)
    packed = steps[-1] if steps else sources[0]
    square: dict[str, Any] = {"heads": heads, "queries": num_queries, "keys": num_keys}
    if factor is not None and isclose(factor, head_dim**-0.5, rel_tol=SAME_FACTOR):
        factor, scaled = None, True
    else:
        scaled = factor is not None
    causal = causal or any(mask.is_meta or not mask.all() for mask in scores.seen) or num_keys == 1
    scored = ops.AttentionScores(**square, head_dim=head_dim, scaled=scaled, factor=factor, causal=causal)
    chain: list[tuple[str, Op, FxNode]] = [
        ("scores", scored, node),
        *(_score_step(score_step, square, node) for score_step in rest),
        ("softmax", ops.Softmax(**square, causal=causal), node),
    ]
    steps = _chained(steps, packed, chain)
    mix = ops.AttentionMix(**square, head_dim=size(values)[-1])
    mixed = peeled_values.node if values_apart else packed
    return steps + step("mix", mix, node, steps[-1], mixed)


def _factored(early: list[Any], late: list[Any]) -> tuple[float | None, list[Any]]:
    """Return the public factor of queries @ keys, None if it is 1, and the remaining steps.

    `early` are steps of queries and keys, whose factors are multiplied. `late` are steps of the scores in order; their
    first factor is used if there is no early one and no tanh precedes it.
    """
    factors = [step for step in early if not is_node(step)]
    rest = [*(step for step in early if is_node(step)), *late]
    if not factors:
        factors = [step for step in takewhile(lambda step: not _is_tanh(step), rest) if not is_node(step)][:1]
        rest = [step for step in rest if not factors or step is not factors[0]]
    factor = prod(factors)
    return (None if factor == 1 else factor), rest


def _score_step(step: Any, square: dict[str, Any], node: FxNode) -> tuple[str, Op, FxNode]:
    rows = {"rows": square["heads"] * square["queries"], "features": square["keys"]}
    if not is_node(step):
        return "scale", ops.Scale(**rows, factor=step), node
    return ("cap", ops.Tanh(**rows), step) if _is_tanh(step) else ("temperature", ops.Temperature(**square), step)


def _is_tanh(step: Any) -> bool:
    return is_node(step) and kind(step) == "tanh"


def _laid_out(
    sources: tuple[FxNode, ...], queries: _Operand, node: FxNode, *, heads: int, key_heads: int, head_dim: int
) -> TracedOps:
    """Place queries, keys and values side by side, rotate them, and repeat key and value heads as needed."""
    rows = size(node)[-2]
    stored, odd = divmod(sum(map(numel, sources)) // (rows * head_dim) - heads, 2)  # key heads before all steps
    if early := bool(queries.turned) and not odd and 0 < stored < key_heads and heads % stored == 0:
        key_heads = stored  # repeated before the rotation, as in Falcon
    steps: TracedOps = ()
    if len(sources) > 1:
        pack = ops.PackHeads(rows=rows, query_features=heads * head_dim, key_features=key_heads * head_dim)
        steps = step("packed", pack, node, *sources)
    chain: list[tuple[str, Op, FxNode]] = []
    fewer = key_heads if key_heads < heads else None
    if queries.turned:
        rotary_dim = queries.turned // (rows * heads)
        rotary = ops.Rotary(rows=rows, heads=heads, rotary_dim=rotary_dim, key_heads=None if early else fewer)
        chain.append(("rotary", rotary, queries.rotation))
    if fewer is not None:
        repeat = ops.RepeatHeads(rows=rows, heads=heads, key_heads=fewer, head_dim=head_dim)
        chain.insert(0 if early else len(chain), ("repeat", repeat, node))
    return _chained(steps, sources[0], chain)


def _chained(steps: TracedOps, source: FxNode, chain: list[tuple[str, Op, FxNode]]) -> TracedOps:
    for part, op, anchor in chain:
        steps += step(part, op, anchor, steps[-1] if steps else source)
    return steps


def _peeled(program: Program, node: FxNode, *, scores: bool = False) -> _Operand:
    """Remove from an operand what `_Operand` names; tanh and public masks, added or filled in, only for `scores`."""
    operand = _Operand(node=node, least=numel(node))
    while True:
        node, sources = operand.node, program.moved(operand.node)
        source, other = program.split_product(node)
        masked = None if not scores or any(map(_is_tanh, operand.steps)) else unmasked(program, node, operand.seen)
        if masked is not None:
            operand.node, mask = masked
            operand.seen += [] if mask is None else [mask]
        elif rotation := _rotation(program, node):
            operand.turned, operand.rotation, operand.node = numel(node) - rotation[1], node, rotation[0]
        elif len(sources) == 1:
            operand.node = sources[0]
        elif other in program.learned and size(other)[-1:] in ((), (1,)) and not any(map(is_node, operand.steps)):
            operand.node, operand.steps = source, [*operand.steps, node]
        elif other not in program.learned and (factor := program.public_factor(node)[1]) is not None:
            operand.node, operand.steps = source, [*operand.steps, factor]
        elif scores and kind(node) == "tanh":
            operand.node, operand.steps = node.args[0], [*operand.steps, node]
        else:
            return operand
        if not operand.turned:
            operand.least = min(operand.least, numel(operand.node))


def _rotation(program: Program, node: FxNode) -> tuple[FxNode, int] | None:
    """Return what a node rotates and how many elements it leaves as they are; None if it is no rotation.

    A rotation is a sum or difference of two rearrangements of one value, each times public numbers, or several joined
    with each other or with parts of that value.
    """
    if kind(node) in {"add", "sub"} and len(program.secret_inputs(node)) == 2:
        factors = [program.split_product(program.origin(term)) for term in program.secret_inputs(node)]
        if any(source is None or not is_node(other) or other in program.learned for source, other in factors):
            return None
        first, second = (program.origin(source) for source, _ in factors)
        return (first, 0) if first is second else None
    if kind(node) in {"cat", "stack"} and len(parts := program.secret_inputs(node)) > 1:
        turned = [_rotation(program, program.origin(part)) for part in parts]
        each = [rotation or (program.origin(part), numel(part)) for part, rotation in zip(parts, turned, strict=True)]
        if len({source for source, _ in each}) > 1 or not any(turned):
            return None
        return each[0][0], sum(kept for _, kept in each)
    return None


def _unpadded(node: FxNode) -> FxNode:
    """Return the value before padding, with zeros that a kernel needs for its layout, and before copies."""
    while kind(node) in PADS | COPIES:
        node = node.args[0]
    return node


PATTERNS: Patterns = {
    SDPA: (fused,),
    FLASH: (fused,),
    "slice": (narrowed,),
    "matmul": (spelled,),
    "bmm": (spelled,),
    "sub": (shaped,),
}


HIDING = -1e3  # a mask adds a number below this to hide a score: -1e4 in OpenAI GPT, elsewhere the least number


def seen_by(mask: Any) -> Any:
    """Return as a bool tensor where a mask leaves scores visible: where it is true, or adds more than `HIDING`."""
    return mask > HIDING if mask.dtype.is_floating_point else mask.bool()


def unmasked(program: Program, node: FxNode, seen: list[Any]) -> tuple[FxNode, Any] | None:
    """Return the scores before `node` masks them, and where they stay visible (None: everywhere).

    Return None if `node` is not a mask. seen: where masks that are applied later leave scores visible. Factors of 0 and
        1 are a mask only if later masks hide the scores that they set to 0; values on `meta` are not checked.
    """
    inputs = program.secret_inputs(node)
    if len(inputs) != 1:
        return None
    mask = MASKS[kind(node)](program, node, seen) if kind(node) in MASKS else None
    return None if mask is None else (inputs[0], mask[0])


def _added(program: Program, node: FxNode, seen: list[Any]) -> tuple[Any] | None:
    """Match an added mask; a single number that is added to all scores does not change the softmax."""
    others = [operand for operand in node.args[:2] if is_node(operand) and operand not in program.secret]
    return (seen_by(program.value(others[0])) if others and numel(others[0]) > 1 else None,)


def _filled(program: Program, node: FxNode, seen: list[Any]) -> tuple[Any] | None:
    scores, hidden, filling = node.args
    if scores not in program.secret or not _hides(program, filling):
        return None
    return (~program.value(hidden).bool(),)


def _chosen(program: Program, node: FxNode, seen: list[Any]) -> tuple[Any] | None:
    condition, first, second = node.args
    if condition in program.secret or not _hides(program, second if first in program.secret else first):
        return None
    shown = program.value(condition).bool()
    return (shown if first in program.secret else ~shown,)


def _zeroed(program: Program, node: FxNode, seen: list[Any]) -> tuple[Any] | None:
    """Match scores times 0 or 1, if those times 0 are hidden later."""
    _, other = program.split_product(node)
    if not is_node(other) or numel(other) == 1 or other in program.learned:
        return None
    factors = program.value(other)
    if factors.is_meta:
        return (factors,)
    zeroed = factors == 0
    if not bool((zeroed | (factors == 1)).all()):
        return None
    for shown in seen:
        zeroed = zeroed & shown
    return None if bool(zeroed.any()) else (factors.bool(),)


def _hides(program: Program, filling: Any) -> bool:
    number = program.public_number(filling)
    return number is None or number < HIDING


MASKS = {"add": _added, "masked_fill": _filled, "where": _chosen, "mul": _zeroed}
