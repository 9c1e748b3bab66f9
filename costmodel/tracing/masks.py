"""Recognises masks of attention scores: public numbers that are added to the scores or replace them."""

from typing import Any

from costmodel.tracing.program import FxNode, Program, is_node, kind, numel

HIDING = -1e3  # hidden scores get a smaller number added: -1e4 in OpenAI GPT, elsewhere the least number


def seen_by(mask: Any) -> Any:
    """Return where a mask lets scores be seen: where it is true, or adds more than `HIDING`."""
    return mask > HIDING if mask.dtype.is_floating_point else mask.bool()


def unmasked(program: Program, node: FxNode, seen: list[Any]) -> tuple[FxNode, Any] | None:
    """Return the scores before a mask, and where it lets them be seen; None if the operation applies no mask.

    `seen` holds the masks that are applied later; without them, a product with a mask is not recognised.
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
