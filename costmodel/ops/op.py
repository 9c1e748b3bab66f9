"""What all ops have in common: shapes, weights, and how an op is rewritten."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Literal, Self, TypeAlias

LayerId: TypeAlias = int | Literal["embed", "head"]
Shape: TypeAlias = tuple[int, ...]
Encoding = Literal["one-hot", "lookup"]
SoftmaxForm = Literal["exact", "2quad", "power8", "relu", "bounded"]
GeluForm = Literal["tanh", "exact", "piecewise"]
RMSNORM_EPSILON = 1e-6  # the default of transformers' Llama; 18 fraction bits cannot tell it from 1e-5
ROTARY_BASE = 10_000.0  # Su et al. 2021, arXiv 2104.09864, and Pythia's configs


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation. Its fields are its dimensions and forms; class attributes are the same for every op of its type.

    label: its name in figures; the class name if empty.
    weights: `hidden` from all parties but their owner; `public`; or `none`. public: whether hidden weights are shown to
        all parties in this deployment.
    transposed: weights that are transposed before a run, because an engine that keeps a weight's mask keeps the mask of
        an array, not of a view. inverted: weights that their owner inverts before a run, because a division costs more
        than a product.
    has_longer_table: whether its weight is learned for the whole context and may be longer than what `read` needs.
    weight_std: standard deviation of a randomly drawn weight matrix; for a transposed one, times the square root of its
        columns.
    output_dims, input_dims: the fields that are the shapes of its output and of each of its `num_inputs` inputs, which
        is the output's unless it is stated.
    batched: the dimensions that a batch multiplies by its number of sequences.
    is_rowwise: whether a row of its output depends only on the same row of its inputs.
    is_product: whether it is a matrix product; all matrix products have one kernel, and so one fit of seconds.
    is_local: whether it only moves or adds up its inputs, so that the parties send nothing.
    works_on_rows: whether it also has work per row, such as an inverse root.
    """

    label: ClassVar[str] = ""
    weights: ClassVar[Literal["none", "hidden", "public"]] = "none"
    transposed: ClassVar[tuple[str, ...]] = ()
    inverted: ClassVar[tuple[str, ...]] = ()
    has_longer_table: ClassVar[bool] = False
    weight_std: ClassVar[float | None] = None
    output_dims: ClassVar[tuple[str, ...]] = ()
    input_dims: ClassVar[tuple[str, ...]] = ()
    num_inputs: ClassVar[int] = 1
    batched: ClassVar[tuple[str, ...]] = ("rows",)
    is_rowwise: ClassVar[bool] = False
    is_product: ClassVar[bool] = False
    is_local: ClassVar[bool] = False
    works_on_rows: ClassVar[bool] = False

    public: bool = False

    @property
    def hides_weights(self) -> bool:
        """Whether it has weights that some party must not see."""
        return self.weights == "hidden" and not self.public

    @property
    def output_shape(self) -> Shape:
        """The shape of its output."""
        return tuple(getattr(self, name) for name in self.output_dims)

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the inputs that other ops produce."""
        stated = tuple(getattr(self, name) for name in self.input_dims)
        return (stated or self.output_shape,) * self.num_inputs

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        """The shapes of its deployed weights, by suffix to the node's name; a longer table has the needed length."""
        return {}

    @property
    def read(self) -> tuple[int, range] | None:
        """The axis along which it reads a part of its weight, and the entries of that part; None if it reads all."""
        return None

    @property
    def work(self) -> dict[str, int]:
        """The amounts of work that its seconds grow with, by unit, except for matrix products.

        Elements are of the output, or of the first input if only a part of it is taken.
        """
        if self.is_product:
            return {}
        rows = {"rows": prod(self.output_shape[:-1])} if self.works_on_rows else {}
        return rows | {"elements": max(prod(self.output_shape), prod(self.input_shapes[0]))}

    def of_rows(self, first: int, taken: int) -> Self:
        """Return a row-wise op for its rows `first` to `first + taken` only; positions are moved on by `first`."""
        values: dict[str, Any] = {self.batched[0]: taken}
        if hasattr(self, "past_len"):
            values["past_len"] = self.past_len + first
        return replace(self, **values)

    def in_batch(self, batch: int) -> Self:
        """Return the op for `batch` sequences at once."""
        names = (*self.batched, *(["sequences"] if hasattr(self, "sequences") else []))
        return replace(self, **{name: getattr(self, name) * batch for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class OnRows(Op):
    """An op on `rows x features` with an output of the same shape and row by row, unless a subclass says otherwise."""

    output_dims = input_dims = ("rows", "features")
    is_rowwise = True

    rows: int
    features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OnScores(Op):
    """An op on `heads x queries x keys` with an output of the same shape."""

    output_dims = ("heads", "queries", "keys")
    batched = ("heads",)

    heads: int
    queries: int
    keys: int
