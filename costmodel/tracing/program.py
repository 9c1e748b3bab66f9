"""An exported ATen program for the tracer: which values depend on the tokens, and which operations are local.

A value is *secret* if it depends on the values of the tokens. All others, here called *public*, are computed by their
owner before the run: weights, positions, masks, rotary angles. A prompt has no padding, so position ids that count
tokens without padding are public. A *local* operation moves, copies, drops or negates numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any, TypeAlias

FxNode: TypeAlias = Any  # torch.fx.Node; this module needs no torch

# Local operations, by ATen name without overload: they rearrange, copy, drop or negate elements.
REARRANGES: frozenset[str] = frozenset(
    {
        "alias", "cat", "chunk", "clone", "concat", "constant_pad_nd", "contiguous", "detach", "expand", "flatten",
        "flip", "getitem", "index", "index_select", "movedim", "narrow", "neg", "pad", "permute", "repeat",
        "repeat_interleave", "reshape", "roll", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "t",
        "transpose", "unbind", "unflatten", "unsqueeze", "_unsafe_view", "view", "expand_as", "reshape_as", "view_as",
    }
)  # fmt: skip
# Operations that return several parts of their operand; and those that take a range of an axis.
SPLITS: frozenset[str] = frozenset({"chunk", "split", "split_with_sizes", "unbind"})
CUTS: frozenset[str] = SPLITS - {"unbind"} | {"slice", "narrow"}
CASTS: frozenset[str] = frozenset({"_to_copy", "to", "type_as"})
DROPOUTS: frozenset[str] = frozenset({"dropout", "dropout_", "feature_dropout"})
# operation -> its neutral number
NEUTRAL: dict[str, float] = {"mul": 1, "div": 1, "add": 0, "sub": 0}
FACTORS: frozenset[str] = frozenset({"mul", "div"})
# Operations whose result depends on the shape of their operand and not on its values.
SHAPE_ONLY: frozenset[str] = frozenset(
    {"empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "sym_size", "zeros_like"}
)
# Operations that read values from their first operand, and only a shape or type from the others.
LIKE_OTHERS: frozenset[str] = frozenset({"expand_as", "reshape_as", "type_as", "view_as"})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """An exported program.

    nodes: Operations in execution order.
    tokens, output: The token ids, and the logits.
    secret, learned: Nodes that depend on the tokens; nodes that depend on parameters and not on the tokens.
    value: Function that computes the value of a public node; raises UserError if it cannot.
    samples: Numbers at which activations are compared. activations: The known ones: name -> values at `samples`.
    """

    nodes: tuple[FxNode, ...]
    tokens: FxNode
    output: FxNode
    secret: frozenset[FxNode]
    learned: frozenset[FxNode]
    value: Callable[[FxNode], Any]
    samples: Any
    activations: dict[str, Any]

    def secret_inputs(self, node: FxNode) -> list[FxNode]:
        """Return the secret nodes whose values a node reads, each once, in the order of its arguments."""
        return [source for source in value_inputs(node) if source in self.secret]

    def moved(self, node: FxNode) -> list[FxNode]:
        """Return the secret values that a local operation passes on; an empty list if the operation is not local."""
        name, sources = kind(node), self.secret_inputs(node)
        first = node.args[0] if node.args else None
        handed = first if isinstance(first, (list, tuple)) else [first]
        if not sources or any(source not in handed for source in sources):
            return []
        if name == "getitem" and kind(first) not in SPLITS and node.args[1] != 0:
            return []
        if name in CASTS:
            return sources if all(_is_floating(source) == _is_floating(node) for source in sources) else []
        if name in DROPOUTS:
            return [] if argument(node, 2, "train", True) else sources
        return sources if name in REARRANGES or self.is_neutral(node) else []

    def is_neutral(self, node: FxNode) -> bool:
        """Return whether an operation is x * 1, x / 1, x + 0 or x - 0; a learned 1 or a computed 0 does not count."""
        name = kind(node)
        if name in FACTORS:
            source, other = self.split_product(node)
            return source is not None and other not in self.learned and self.public_number(other) == 1
        return name in NEUTRAL and self.secret_inputs(node) == [node.args[0]] and node.args[1] == NEUTRAL[name]

    def split_product(self, node: FxNode) -> tuple[FxNode, Any]:
        """Return the secret and the public operand of a product, or of secret / public; (None, None) otherwise."""
        if kind(node) not in FACTORS or node.kwargs.get("rounding_mode"):
            return None, None
        first, second = node.args[:2]
        if first in self.secret and second not in self.secret:
            return first, second
        if kind(node) == "mul" and second in self.secret and first not in self.secret:
            return second, first
        return None, None

    def public_number(self, value: Any) -> float | None:
        """Return a number, or the only number in a public node's value; None for others, or if it is on `meta`."""
        if not is_node(value):
            return float(value) if isinstance(value, (int, float)) else None
        if value in self.secret or numel(value) != 1:
            return None
        computed = self.value(value)
        return None if computed.is_meta else float(computed.detach())

    def public_factor(self, node: FxNode) -> tuple[FxNode, float | None]:
        """Return the secret operand of a product with one public number, and this number; (None, None) for other nodes.

        For a quotient the number is inverted. A number that is 0 or not finite does not count.
        """
        source, other = self.split_product(node)
        number = None if source is None or numel(source) != numel(node) else self.public_number(other)
        if not number or not isfinite(number):
            return None, None
        return source, number if kind(node) == "mul" else 1 / number

    def origin(self, node: FxNode) -> FxNode:
        """Follow local operations (see `moved`) back from a node, and return the value that they start from.

        The node may have only some elements of that value, or repeat or negate them. A node that is not local, or that
        joins different values, is its own origin.
        """
        while sources := self.moved(node):
            origins = {self.origin(source) for source in sources}
            if len(origins) > 1:
                return node
            node = origins.pop()
        return node


def dependent(
    nodes: Iterator[FxNode] | tuple[FxNode, ...], roots: set[FxNode], known: frozenset[FxNode] = frozenset()
) -> frozenset[FxNode]:
    """Return the roots and all `nodes`, in execution order, that depend on them other than through `known` nodes."""
    reached = set(roots)
    for node in nodes:
        if node not in known and any(source in reached for source in value_inputs(node)):
            reached.add(node)
    return frozenset(reached)


def unpadded(nodes: tuple[FxNode, ...], tokens: FxNode) -> frozenset[FxNode]:
    """Return the nodes that compare tokens with a padding id to count positions; without padding, all are true."""
    comparisons = set()
    for node in nodes:
        if kind(node) == "cumsum":
            source = node.args[0]
            while kind(source) in CASTS:
                source = source.args[0]
            if kind(source) == "ne" and source.args[0] is tokens and not is_node(source.args[1]):
                comparisons.add(source)
    return frozenset(comparisons)


def kind(node: FxNode) -> str:
    """Return a call's ATen name without namespace and overload, such as `linear`; for other nodes, `node.op`."""
    if node.op != "call_function":
        return str(node.op)
    target = str(node.target)
    return target.split(".")[1] if "." in target else str(node.target.__name__)


def size(node: FxNode) -> tuple[int, ...]:
    """Return the shape of a node's value, or of the first value if there are several."""
    value = node.meta["val"]
    return tuple(value[0].shape if isinstance(value, (tuple, list)) else value.shape)


def numel(node: FxNode) -> int:
    return prod(size(node))


def first_column(node: FxNode, rows: int) -> int | None:
    """Return the index of the first column that `node`, a slice or a part of a split, takes of `rows` x features.

    Return None if the node takes no range of adjacent columns, or if its source does not have that many rows.
    """
    is_piece, last = kind(node) == "getitem", len(size(node)) - 1
    cut = node.args[0] if is_piece else node
    whole, dim = cut.args[0], argument(cut, 2 if is_piece else 1, "dim", 0)
    if kind(cut) not in CUTS or dim not in (-1, last) or numel(whole) != rows * size(whole)[-1]:
        return None
    if is_piece:
        return sum(int(part.shape[-1]) for part in cut.meta["val"][: node.args[1]])
    return int(argument(node, 2, "start") or 0) % size(whole)[-1] if argument(node, 4, "step", 1) == 1 else None


def argument(node: FxNode, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, positional or by keyword, or `default` if it is not given."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def value_inputs(node: FxNode) -> list[FxNode]:
    """Return the nodes whose values a node reads, without those of which it reads only the shape or type."""
    if kind(node) in SHAPE_ONLY:
        return []
    return node.all_input_nodes[:1] if kind(node) in LIKE_OTHERS else list(node.all_input_nodes)


def readers(node: FxNode) -> list[FxNode]:
    """Return the operations that read a node's value, other than assertions."""
    return [user for user in node.users if not kind(user).startswith("_assert")]


def writes(node: FxNode) -> bool:
    """Return whether an operation changes an operand in place, which data flow does not show."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def is_node(value: Any) -> bool:
    return hasattr(value, "all_input_nodes")


def _is_floating(node: FxNode) -> bool:
    value = node.meta["val"]
    return bool((value[0] if isinstance(value, (tuple, list)) else value).dtype.is_floating_point)
