"""What all ops have in common: shapes, weights, and how an op is rewritten."""

from abc import ABC, abstractmethod
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
class Op(ABC):
    """One operation. Its fields are its dimensions and forms; class attributes hold of every op of its type.

    label: what figures call it; its own name if empty.
    weights: `hidden` from all parties but their owner; `public`; or `none`. public: whether a deployment shows hidden
        ones to all parties.
    transposed: weights that are turned before a run: an engine that keeps a weight's mask keeps that of an array, not
        of a view. inverted: weights that their owner inverts before, as a division is dear where a product is not.
    has_longer_table: whether its weight is learned for the whole context and may be longer than what `read` needs.
    weight_std: of a drawn matrix of weights; of a transposed one, times the square root of its columns.
    num_inputs: how many it reads where each is shaped as its output is.
    batched: the dimensions of which several sequences have so many times more.
    is_rowwise: whether a row of its output is computed from the same row of what it reads.
    is_product: whether it is a matrix product: one kernel, and so one fit of seconds, whatever the op.
    is_local: whether it only moves or adds up what it reads, so that the parties need not talk.
    works_on_rows: whether it also has something to do per row, such as an inverse root.
    """

    label: ClassVar[str] = ""
    weights: ClassVar[Literal["none", "hidden", "public"]] = "none"
    transposed: ClassVar[tuple[str, ...]] = ()
    inverted: ClassVar[tuple[str, ...]] = ()
    has_longer_table: ClassVar[bool] = False
    weight_std: ClassVar[float | None] = None
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
    @abstractmethod
    def output_shape(self) -> Shape:
        """The shape of its output."""

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        """The shapes of what it reads from other ops."""
        return (self.output_shape,) * self.num_inputs

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        """The shapes of its deployed weights by suffix to the node's name; of a longer table, as long as it needs."""
        return {}

    @property
    def read(self) -> tuple[int, range] | None:
        """The axis of its weight of which it reads a part, and which entries; None where it reads all."""
        return None

    @property
    def work(self) -> dict[str, int]:
        """How much of what its seconds grow with, by unit, beside what matrix products do."""
        if self.is_product:
            return {}
        rows = {"rows": prod(self.output_shape[:-1])} if self.works_on_rows else {}
        return rows | {"elements": prod(self.output_shape)}

    def of_rows(self, first: int, taken: int) -> Self:
        """A row-wise op on rows `first` to `first + taken` of its own; if it knows its position, so many tokens on."""
        values: dict[str, Any] = {self.batched[0]: taken}
        if hasattr(self, "past_len"):
            values["past_len"] = self.past_len + first
        return replace(self, **values)

    def in_batch(self, batch: int) -> Self:
        """The op for so many sequences at once, which it tells apart if it has `sequences`."""
        names = (*self.batched, *(["sequences"] if hasattr(self, "sequences") else []))
        return replace(self, **{name: getattr(self, name) * batch for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class OnRows(Op):
    """An op on `rows x features`, of which its output has as many unless it says otherwise; here each row by itself."""

    is_rowwise = True

    rows: int
    features: int

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        return ((self.rows, self.features),) * self.num_inputs

    @property
    def output_shape(self) -> Shape:
        return (self.rows, self.features)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnScores(Op):
    """An op on `heads x queries x keys`, which its output has too."""

    batched = ("heads",)

    heads: int
    queries: int
    keys: int

    @property
    def output_shape(self) -> Shape:
        return (self.heads, self.queries, self.keys)
