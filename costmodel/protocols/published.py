"""The protocol `published`: the papers' own two-party measurements, as linear functions of op shapes.

    cost of an op = sum over terms of coefficient x count, counts from COUNTS, coefficients from a testbed file

The coefficients were fitted on the printed rows by the code of commit d6990533, and include the papers' network, so you
cannot choose a network. The rows do not determine the coefficients of ReLU, which are priors; the testbed states their
source. Rounds, messages and the parts of bytes (online, offline) and of seconds (computing, network) are not known.

Assumptions of the counts:

- A linear costs its input and output elements, which travel as ciphertexts, and a fixed amount per row for handling the
  row's ciphertexts, whatever its width. In the rows, QKV is one packed linear d -> 3d, so its rows count once.
- The two attention products cost their queries, keys, values and mixed outputs, all of `head_dim` features per head;
  costs per query and key are in the softmax.
- Embedding and projection cost tokens x vocabulary each, with one shared coefficient. The rows identify the sum of both
  costs at a vocabulary of 50,000. It is assumed that each is half of the sum, and that both grow with the vocabulary.
- Adding activations or learned positions and rotating by public angles are local, so free. A temperature is free
  because rows with SM(t) print the costs of the rows without a temperature: it merges with 1/sqrt(head_dim).
- Scaled additions and norms with a frozen deviation fold into neighbouring linears, so they are free; in models that
  also have LayerNorms that is an assumption.
- Shaped attention costs its scores: learned scalars times fixed-point numbers need a truncation per element.
- Cached keys and values, the projection of the last token alone and layers with half of the heads use the same counts,
  which no row checks. RMSNorm, square, SiLU, sigmoid, tanh, element-wise products, public factors, tokens that are
  looked up, and softmax and GELU in cheaper forms have no formula.
- A leaky ReLU costs as much as a ReLU, one comparison and one selection, as if its slope were public.

Source: arXiv 2410.13060 table 3 and arXiv 2501.03489 table 2; SecretFlow-SPU with Cheetah, two servers.
"""

import csv
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_type_hints

from costmodel import ops
from costmodel.config.files import load_file
from costmodel.config.units import BYTES, SECONDS
from costmodel.cost import Price
from costmodel.data_range import DataRange
from costmodel.errors import UnpricedOpError
from costmodel.estimate import Pricer, cost_model_id
from costmodel.ops import Node, Op
from costmodel.protocols.primitives import refuse_public
from costmodel.trust import Trust

TESTBEDS = Path(__file__).parents[1] / "testbeds"
ROWS = TESTBEDS / "published_rows.csv"
HELD_OUT = TESTBEDS / "held_out_rows.csv"  # 512 tokens: never fitted, so they check the fit


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRow:
    """One row of the papers' tables, in their units (GFLOP, GB of 1e9 bytes, minutes); Decimal keeps printed digits.

    sent_gigabytes: Total communication. The papers do not say whether it counts one party or both.
    ffn_gflop, attention_gflop: By the papers' own way of counting.
    perplexity: None where training diverged (printed as NaN).
    held_out: Whether the row is kept out of every fit.
    """

    source: str
    notation: str
    dataset: str
    num_layers: int
    num_heads: int
    d_model: int
    vocab_size: int
    seq_len: int
    ffn_gflop: Decimal
    attention_gflop: Decimal
    sent_gigabytes: Decimal
    latency_min: Decimal
    perplexity: float | None
    held_out: bool = False

    @property
    def name(self) -> str:
        return f"{self.notation} L={self.num_layers} T={self.seq_len}"

    @property
    def own_method(self) -> bool:
        """Whether the row is an architecture of the papers, and not their baseline, the block of He and Hofmann."""
        return not self.notation.startswith("HH(")

    @property
    def sent_bytes(self) -> float:
        return float(self.sent_gigabytes * Decimal(BYTES["GB"]))

    @property
    def latency_s(self) -> float:
        return float(self.latency_min * Decimal(SECONDS["min"]))


def published_rows(path: Path = ROWS) -> tuple[PublishedRow, ...]:
    """Return the printed rows in a .csv file, in file order; by default those that the coefficients were fitted on."""
    kinds, rows = get_type_hints(PublishedRow), list[PublishedRow]()
    with path.open(encoding="utf-8", newline="") as file:
        for record in csv.DictReader(file):
            perplexity = record.pop("perplexity")
            values = {name: kinds[name](text) for name, text in record.items()}
            rows.append(PublishedRow(**values, perplexity=None if perplexity == "NaN" else float(perplexity)))
    return tuple(rows)


def held_out_rows() -> tuple[PublishedRow, ...]:
    """Return the printed rows that are not fitted but only check the fit; their `held_out` is True."""
    return tuple(replace(row, held_out=True) for row in published_rows(HELD_OUT))


# arXiv 2410.13060 and 2501.03489: client and server on SecretFlow-SPU under Cheetah.
TRUST = Trust(
    num_parties=2,
    randomness="the two parties themselves, as in the papers (Cheetah)",
    dealer=False,
)
TESTBED = TESTBEDS / "published.yaml"

# term -> what is counted
TERMS: dict[str, str] = {
    "linear_elements": "input and output elements of linears, rows x (in_features + out_features)",
    "linear_rows": "rows of linears, each linear counted on its own",
    "attention_elements": "operand elements of the two attention products, heads x (queries + keys) x head_dim",
    "softmax_scores": "softmax scores, heads x queries x keys",
    "shaped_scores": "scores of shaped attention, heads x queries x keys",
    "layernorm_elements": "elements of LayerNorms, rows x features",
    "gelu_elements": "elements of GELUs, rows x features",
    "relu_elements": "elements of ReLUs and leaky ReLUs, rows x features",
    "vocabulary_elements": "one-hot tokens and logits, tokens x vocab for each of embedding and projection",
}

# op type -> function that returns the count of each term, {} for a free op; other types that are not local are an error
COUNTS: dict[type, Callable[[Any], dict[str, int]]] = {
    ops.TokenEmbedding: lambda op: {"vocabulary_elements": op.tokens * op.vocab},
    ops.PositionEmbedding: lambda op: {},
    ops.LayerNorm: lambda op: {"layernorm_elements": op.rows * op.features},
    ops.FrozenNorm: lambda op: {},  # linear, so it folds into the linears behind it; assumed, as for alpha and beta
    ops.Linear: lambda op: {
        "linear_elements": op.rows * (op.in_features + op.out_features),
        "linear_rows": op.rows,
    },
    ops.Rotary: lambda op: {},
    ops.AttentionScores: lambda op: {"attention_elements": op.heads * (op.queries + op.keys) * op.head_dim},
    ops.Temperature: lambda op: {},
    ops.Softmax: lambda op: {"softmax_scores": op.heads * op.queries * op.keys},
    ops.ShapedAttention: lambda op: {"shaped_scores": op.heads * op.queries * op.keys},
    ops.AttentionMix: lambda op: {"attention_elements": op.heads * (op.queries + op.keys) * op.head_dim},
    ops.Gelu: lambda op: {"gelu_elements": op.rows * op.features},
    ops.Relu: lambda op: {"relu_elements": op.rows * op.features},
    ops.LeakyRelu: lambda op: {"relu_elements": op.rows * op.features},
    ops.ScaledAdd: lambda op: {},
    ops.VocabProjection: lambda op: {"vocabulary_elements": op.rows * op.vocab},
}

# op type -> the field that names its form, and the forms that its coefficient covers
MEASURED_FORMS: dict[type, tuple[str, tuple[str, ...]]] = {
    ops.TokenEmbedding: ("encoding", ("one-hot",)),
    ops.Softmax: ("form", ("exact",)),
    ops.Gelu: ("form", ("tanh", "exact")),
}

# op types in the printed rows, and others that only rearrange or add their inputs
ROW_OPS: frozenset[type] = frozenset(
    {*COUNTS, ops.Add, ops.PackHeads, ops.RepeatHeads} - {ops.FrozenNorm, ops.LeakyRelu, ops.Rotary}
)
D_FF_PER_D_MODEL = 4  # in rows whose FFN is not fused: its column is 16 x T x d_model^2 x L, two linears of 4 d_model

# Coefficients are multiples of these powers of two, so that sums are exact in any order and any grouping:
# exact below 2**53 steps, which is 9 hours and 35 TB.
LATENCY_STEP_S = 2.0**-38
BYTES_STEP = 2.0**-8


def counts(op: Op) -> dict[str, int]:
    """Return the count of each term (a key of `TERMS`) in one op; {} if the op is free.

    An UnpricedOpError is raised for an op without a formula, a form without data, or public weights.
    """
    if op.is_local:
        return {}
    refuse_public(op, "published")
    if type(op) not in COUNTS:
        raise UnpricedOpError(
            f"protocol published has no formula for {type(op).__name__}, which no printed row has; "
            "choose protocol semi2k, aby3 or cheetah."
        )
    name, measured = MEASURED_FORMS.get(type(op), ("", ()))
    if name and (form := getattr(op, name)) not in measured:
        raise UnpricedOpError(
            f"protocol published prices {type(op).__name__} with `{name}` {' or '.join(measured)} only, "
            f"but got {form!r}; choose protocol semi2k, aby3 or cheetah."
        )
    return COUNTS[type(op)](op)


def graph_counts(graph: Iterable[Node]) -> dict[str, int]:
    """Return the count of every term in a whole graph, zeros included."""
    sums = dict.fromkeys(TERMS, 0)
    for node in graph:
        for term, count in counts(node.op).items():
            sums[term] += count
    return sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """The coefficient of one term.

    value: Seconds or bytes per unit of the term.
    identified_by: `data` if the printed rows determine `value`, `prior` if only another source does.
    low, high: Bounds that the prior sets on `value`; None if only the rows bound it.
    source: Where `value` comes from.
    """

    value: float
    identified_by: Literal["data", "prior"]
    source: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedRow:
    """A printed row: its latency in seconds, and the count of each term in its op graph."""

    name: str
    latency_s: float
    counts: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Testbed:
    """Coefficients by term, in seconds and bytes, with the rows that they were fitted on.

    `not_identified` says in words what the rows cannot determine. `latency_tolerance` is the greatest relative error of
    a row's latency with which coefficients count as consistent with the rows.
    """

    __test__ = False  # pytest must not collect it

    not_identified: tuple[str, ...]
    sent_bytes: dict[str, Constant]
    latency_s: dict[str, Constant]
    latency_tolerance: float
    rows: tuple[FittedRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Published(Pricer):
    """The pricer of protocol `published`, with fitted coefficients.

    latency_s, sent_bytes: Seconds and bytes per unit of each term, by term.
    latency_bounds_s: Least and greatest seconds per unit, by term, for terms that only a prior identifies.
    rows, latency_tolerance: Rows whose latency all coefficients in the latency range reproduce, and the relative error
        that is allowed.
    data: The range of the printed rows; costs outside this range are extrapolated.
    """

    protocol: str = "published"
    network: str | None = None
    cost_model_id: str
    range_over: str = "all coefficients consistent with the printed rows"
    latency_s: Mapping[str, float]
    sent_bytes: Mapping[str, float]
    latency_bounds_s: Mapping[str, tuple[float, float]]
    rows: tuple[FittedRow, ...]
    latency_tolerance: float
    data: DataRange

    @property
    def trust(self) -> Trust:
        return TRUST

    def price(self, op: Op) -> Price:
        latency_s = sent_bytes = 0.0
        for term, count in counts(op).items():
            latency_s += self.latency_s[term] * count
            sent_bytes += self.sent_bytes[term] * count
        return Price(latency_s=latency_s, sent_bytes=sent_bytes)

    def latency_s_range(self, graph: Iterable[Node]) -> tuple[float, float]:
        """Return a graph's least and greatest latency, in seconds, over all coefficients that rows and priors allow.

        The fitted coefficients are included; no coefficient is negative. Counts do not vary: how costs grow with
        dimensions that are the same in all rows is taken as given.
        """
        from costmodel.protocols.linear_fit import extremes  # imported here, as costs do not need scipy

        nodes, rows, targets = tuple(graph), [row.counts for row in self.rows], [row.latency_s for row in self.rows]
        low, high = extremes(graph_counts(nodes), rows, targets, self.latency_tolerance, self.latency_bounds_s)
        point = sum(price.latency_s for price in map(self.price, (node.op for node in nodes)))
        return min(low, point), max(high, point)

    def extrapolated(self, graph: Iterable[Node]) -> tuple[str, ...]:
        """Return, in words, the parts of a graph that are outside the range of the printed rows."""
        return self.data.outside(graph)


def load() -> Published:
    """Return the pricer with the coefficients of the package's testbed."""
    testbed = load_file(Testbed, TESTBED)
    priors = {term: constant for term, constant in testbed.latency_s.items() if constant.identified_by == "prior"}
    return Published(
        cost_model_id=cost_model_id(TESTBED.read_bytes()),
        latency_s={term: _on_grid(constant.value, LATENCY_STEP_S) for term, constant in testbed.latency_s.items()},
        sent_bytes={term: _on_grid(constant.value, BYTES_STEP) for term, constant in testbed.sent_bytes.items()},
        latency_bounds_s={term: (constant.low or 0.0, constant.high or math.inf) for term, constant in priors.items()},
        rows=testbed.rows,
        latency_tolerance=testbed.latency_tolerance,
        data=_data_range(),
    )


def _data_range() -> DataRange:
    """Return the range of the printed rows, all of which ran a whole prompt and projected all its tokens."""
    rows = published_rows()
    names = ("d_model", "num_heads", "num_layers", "vocab_size", "seq_len")
    dimensions = {name: tuple(sorted({getattr(row, name) for row in rows})) for name in names}
    d_ff = tuple(D_FF_PER_D_MODEL * d_model for d_model in dimensions["d_model"])
    order = {"d_model": dimensions["d_model"], "d_ff": d_ff}  # in which extrapolations are told
    return DataRange(dimensions=order | dimensions, op_types=ROW_OPS)


def _on_grid(value: float, step: float) -> float:
    return round(value / step) * step
