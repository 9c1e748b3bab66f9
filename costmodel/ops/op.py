"""What all ops have in common (shapes, weights, rewriting), and the op graph of a model."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, ClassVar, Literal, Self, TypeAlias

from costmodel.errors import UserError

LayerId: TypeAlias = int | Literal["embed", "head"]
Shape: TypeAlias = tuple[int, ...]
Encoding = Literal["one-hot", "lookup"]
SoftmaxForm = Literal["exact", "2quad", "power8", "relu", "bounded"]
GeluForm = Literal["tanh", "exact", "piecewise"]
RMSNORM_EPSILON = 1e-6  # the default of transformers' Llama; 18 fraction bits cannot tell it from 1e-5
ROTARY_BASE = 10_000.0  # Su et al. 2021, arXiv 2104.09864, and Pythia's configs


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation. Its fields are dimensions and forms. Its class attributes are the same for every op of its type.

    label: its name in figures; the class name if empty.
    weights: `none`; `public`; or `hidden` from all parties but their owner. public: whether the deployment nevertheless
        shows hidden weights to all parties.
    transposed: weights that are transposed before a run, because an engine that keeps a weight's mask keeps the mask of
        an array, not of a view. inverted: weights that their owner inverts before a run, because a division costs more
        than a product.
    has_longer_table: whether the model's weight, for its whole context, may be longer than `weight_shapes` states.
    weight_std: standard deviation of the weight matrix in random models, times the square root of its number of columns
        if it is `transposed`; None without a hidden weight matrix.
    output_dims, input_dims: names of the fields that give the shape of its output and of each of its `num_inputs`
        inputs; without `input_dims`, inputs have the output's shape. keeps_shape: whether its output has the shape of
        its first input, which `output_shape` need not state.
    batched: names of the fields that a batch multiplies by its number of sequences.
    is_rowwise: whether `of_rows` applies; each row of its output then depends only on the same row of its inputs.
    is_product: whether it is a matrix product; one kernel computes all products, so their seconds are fitted together.
    is_local: whether the parties never send anything for it, because it only moves or adds numbers.
    works_on_rows: whether it has work per row, such as an inverse root, beside its work per element.
    """

    label: ClassVar[str] = ""
    weights: ClassVar[Literal["none", "hidden", "public"]] = "none"
    transposed: ClassVar[tuple[str, ...]] = ()
    inverted: ClassVar[tuple[str, ...]] = ()
    has_longer_table: ClassVar[bool] = False
    weight_std: ClassVar[float | None] = None
    output_dims: ClassVar[tuple[str, ...]] = ()
    input_dims: ClassVar[tuple[str, ...]] = ()
    keeps_shape: ClassVar[bool] = False
    num_inputs: ClassVar[int] = 1
    batched: ClassVar[tuple[str, ...]] = ("rows",)
    is_rowwise: ClassVar[bool] = False
    is_product: ClassVar[bool] = False
    is_local: ClassVar[bool] = False
    works_on_rows: ClassVar[bool] = False

    public: bool = False

    @property
    def hides_weights(self) -> bool:
        """Whether its weights, if it has any, must not be seen by some party."""
        return self.weights == "hidden" and not self.public

    @property
    def output_shape(self) -> Shape:
        """The shape of its output, unless it `keeps_shape` (see `output_shapes`)."""
        return tuple(getattr(self, name) for name in self.output_dims)

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        """The shapes of its inputs, weights excluded. Some ops also take inputs with more columns."""
        stated = tuple(getattr(self, name) for name in self.input_dims)
        return (stated or self.output_shape,) * self.num_inputs

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        """The shapes of its weights, by suffix to the node's name; if `has_longer_table`, as long as the op needs."""
        return {}

    @property
    def read(self) -> tuple[int, range] | None:
        """An axis of its weight, and the indices along it that the op reads; None for the whole weight."""
        return None

    @property
    def work(self) -> dict[str, int]:
        """The amounts of work, by unit, that determine its seconds: `elements`, and `rows` if `works_on_rows`.

        `elements` is the number of elements of the output or, if larger, of the first input; some ops count otherwise.
        The work of a matrix product is not included, since it depends on the protocol.
        """
        if self.is_product:
            return {}
        rows = {"rows": prod(self.output_shape[:-1])} if self.works_on_rows else {}
        return rows | {"elements": max(prod(self.output_shape), prod(self.input_shapes[0]))}

    def of_rows(self, first: int, taken: int) -> Self:
        """Return this row-wise op of one sequence for `taken` rows from `first` on; a `past_len` grows by `first`."""
        values: dict[str, Any] = {self.batched[0]: taken}
        if hasattr(self, "past_len"):
            values["past_len"] = self.past_len + first
        return replace(self, **values)

    def in_batch(self, batch: int) -> Self:
        """Return the op for `batch` times as many sequences at once."""
        names = (*self.batched, *(["sequences"] if hasattr(self, "sequences") else []))
        return replace(self, **{name: getattr(self, name) * batch for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class OnRows(Op):
    """An op on `rows x features` that keeps the shape and works row by row, unless a subclass says otherwise."""

    output_dims = input_dims = ("rows", "features")
    is_rowwise = True

    rows: int
    features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OnScores(Op):
    """An op on scores (`heads x queries x keys`) with an output of this shape, unless a subclass says otherwise."""

    output_dims = ("heads", "queries", "keys")
    batched = ("heads",)

    heads: int
    queries: int
    keys: int


USUAL = {"past_len": 0, "first": 0, "sequences": 1, "groups": 1}  # fields that `shape` omits at these values


def shape(op: Op) -> dict[str, int]:
    """Return the integer fields of an op by name, except fields at the usual value that `USUAL` states."""
    values = {field.name: getattr(op, field.name) for field in fields(op)}
    return {name: value for name, value in values.items() if type(value) is int and USUAL.get(name) != value}


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One op of a graph.

    name: unique in its graph, such as `layers.3.ffn.up`; `NAME@PART` is one part of an op that a deployment splits.
    layer: number of its layer, from 0, or `embed` or `head` for what comes before or after the layers.
    inputs: names of the nodes or graph inputs that it reads, in the order of the op's inputs; `tokens` are the model's.
    """

    name: str
    layer: LayerId
    op: Op
    inputs: tuple[str, ...]

    @property
    def model_name(self) -> str:
        """The name without `@PART`; the op's weights are `<model_name>.<suffix>` in a state dict."""
        return self.name.partition("@")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A secret array that a graph reads beside its tokens, such as the keys and values of earlier tokens."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpGraph:
    """Nodes in execution order, the last of which usually gives the logits. inputs: secret inputs beside `tokens`.

    Raises UserError for a repeated name, a node that reads what no earlier node or input gives, or a dimension below 1.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Input, ...] = ()

    def __post_init__(self) -> None:
        names = ["tokens", *(graph_input.name for graph_input in self.inputs)]
        if len(known := set(names)) < len(names):
            raise UserError(f"names of inputs must be unique, and none `tokens`, but got {names[1:]}.")
        checked: set[Op] = set()  # layers repeat their ops
        for node in self.nodes:
            if node.name in known:
                raise UserError(f"node names must be unique, but {node.name!r} appears twice.")
            if missing := [name for name in node.inputs if name not in known]:
                raise UserError(f"node {node.name!r} reads {missing}, which no earlier node produces.")
            known.add(node.name)
            if node.op in checked:
                continue
            for name, value in shape(node.op).items():
                if value < 1:
                    raise UserError(f"`{name}` of node {node.name!r} must be at least 1, but got {value}.")
            checked.add(node.op)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)


def output_shapes(graph: OpGraph) -> dict[str, Shape]:
    """Return the shape of every node's output, by the node's name."""
    shapes: dict[str, Shape] = {}
    for node in graph:
        shapes[node.name] = shapes[node.inputs[0]] if node.op.keeps_shape else node.op.output_shape
    return shapes
