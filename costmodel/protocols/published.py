"""The protocol `published`: the papers' own 2PC measurements, as linear functions of op shapes.

    cost of an op = sum over terms of coefficient x count, counts from COUNTS, coefficients from a testbed file

The coefficients are fitted on the printed rows (`python -m costmodel calibrate`), network included, so there is no
network to choose and rounds, messages and the splits of bytes and seconds are not known.

What the counts assume:
- A linear costs its input and output elements, which travel as ciphertexts, and a fixed amount per row, the handling
  of a row's ciphertexts whatever its width; QKV is one packed linear d -> 3d, so it pays its rows once.
- The two attention products cost their operands of `head_dim` features; what is `queries x keys` is in the softmax.
- Embedding and projection cost tokens x vocabulary each, at one shared coefficient. The rows identify their sum at a
  vocabulary of 50,000; that each is half of it, and that both follow the vocabulary, is assumed.
- Adding activations, learned positions and rotary angles are local, so free. A temperature is free because the rows
  with SM(t) print the costs of the rows without it: it merges with 1/sqrt(head_dim).
- A scaled addition is free: in a norm-free net, as all printed ones with scaled additions are but for one LayerNorm
  in layer 0 of He and Hofmann's, alpha and beta fold into neighbouring weights. With LayerNorms there is no row to
  tell; it is free there by assumption (LayerNorm ignores the scale of its input, up to its epsilon).
- Shaped attention costs its scores: learned scalars times a matrix of fixed-point numbers need a truncation per
  element, which is not local. Only He and Hofmann's rows have it.
- Every printed row runs a whole prompt and projects all its tokens. One token against cached keys and values, and the
  projection of the last token alone, are priced by the same counts: an extrapolation that no row checks.
- Half of the heads are priced by the same counts, of narrower linears and fewer scores. All printed rows have every
  head, so this is an extrapolation that no row checks.
- A norm with a frozen deviation is free: it is linear and folds into the linears behind it, an assumption as for alpha
  and beta. RMSNorm, the square, logistic functions and tangents by themselves, and public factors have no printed row,
  so no formula; a factor of the scores is in the attention product.
- A leaky ReLU costs what a ReLU costs: one comparison and one selection; its slope is taken as public.

Source: arXiv 2410.13060 table 3 and arXiv 2501.03489 table 2; SecretFlow-SPU with Cheetah, two servers.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from costmodel import ops
from costmodel.config.schema import decode
from costmodel.config.strict_yaml import load_mapping
from costmodel.cost import Price
from costmodel.data_range import DataRange
from costmodel.errors import UnpricedOpError, UserError
from costmodel.estimate import Pricer
from costmodel.ops import Node, Op
from costmodel.protocols.identity import cost_model_id
from costmodel.protocols.primitives import refuse_public
from costmodel.protocols.published_rows import PublishedRow, published_rows
from costmodel.trust import Trust

# arXiv 2410.13060 and 2501.03489: client and server on SecretFlow-SPU under Cheetah.
TRUST = Trust(
    num_parties=2,
    randomness="the two parties themselves, as in the papers (Cheetah)",
    dealer=False,
)
TESTBED = Path(__file__).parents[1] / "testbeds" / "published.yaml"

# term -> what one unit of it is
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

# op type -> how many of which terms an op of that type has; {} is free, an absent type that is not local an error
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

# op type -> the field that names its form, and the forms that its coefficient is taken for
MEASURED_FORMS: dict[type, tuple[str, tuple[str, ...]]] = {
    ops.TokenEmbedding: ("encoding", ("one-hot",)),
    ops.Softmax: ("form", ("exact",)),
    ops.Gelu: ("form", ("tanh", "exact")),
}

# op types that a printed row has, and those that lay out or sum what they read
ROW_OPS: frozenset[type] = frozenset(
    {*COUNTS, ops.Add, ops.PackHeads, ops.RepeatHeads} - {ops.FrozenNorm, ops.LeakyRelu, ops.Rotary}
)
D_FF_PER_D_MODEL = 4  # of every row: its FFN column is 16 x T x d_model^2 x L, two linears of 4 d_model

# Coefficients are multiples of these powers of two, so that sums are exact in any order and any grouping:
# exact below 2**53 steps, which is 9 hours and 35 TB.
LATENCY_STEP_S = 2.0**-38
BYTES_STEP = 2.0**-8


def counts(op: Op) -> dict[str, int]:
    """The terms of one op. Raises UserError for an op the protocol has no formula for, or a form without data."""
    if op.is_local:
        return {}
    refuse_public(op, "published")
    if type(op) not in COUNTS:
        raise UnpricedOpError(
            f"protocol published has no formula for {type(op).__name__}, which no printed row has; "
            "choose protocol semi2k, aby3 or cheetah."
        )
    if type(op) in MEASURED_FORMS:
        name, measured = MEASURED_FORMS[type(op)]
        if (form := getattr(op, name)) not in measured:
            raise UnpricedOpError(
                f"protocol published prices {type(op).__name__} with `{name}` {' or '.join(measured)} only, "
                f"but got {form!r}; choose protocol semi2k, aby3 or cheetah."
            )
    return COUNTS[type(op)](op)


def graph_counts(graph: Iterable[Node]) -> dict[str, int]:
    """How many of each term a whole graph has, every term present."""
    sums = dict.fromkeys(TERMS, 0)
    for node in graph:
        for term, count in counts(node.op).items():
            sums[term] += count
    return sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One coefficient.

    value: seconds or bytes per unit of its term, at least 0.
    identified_by: `data` if the rows determine it, `prior` if they cannot and another source does.
    low, high: bounds that a prior sets; None if the rows alone bound it.
    source: where the value comes from.

    Raises UserError unless 0 <= low <= value <= high, with bounds exactly where a prior identifies the value.
    """

    value: float
    identified_by: Literal["data", "prior"]
    source: str
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf:
            raise UserError(f"`value` must be finite and at least 0, but got {self.value}.")
        if (self.identified_by == "prior") != (self.low is not None) or (self.low is None) != (self.high is None):
            raise UserError("a constant needs `low` and `high` if a prior identifies it, and neither if data do.")
        if self.low is not None and self.high is not None and not 0 <= self.low <= self.value <= self.high:
            raise UserError(
                f"`value` must lie between `low` and `high`, but got {self.low}, {self.value}, {self.high}."
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """The values that are allowed, before any row is looked at."""
        return (self.low or 0.0, math.inf if self.high is None else self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedRow:
    """A measurement: its latency in seconds, and how many of each term its op graph has."""

    name: str
    latency_s: float
    counts: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Testbed:
    """Coefficients per term, in seconds and bytes.

    not_identified: what the measurements cannot tell, in words.
    latency_tolerance: greatest relative error on a row of coefficients that count as consistent with the rows.
    """

    __test__ = False  # not a test class, whatever pytest makes of the name

    not_identified: tuple[str, ...]
    sent_bytes: dict[str, Constant]
    latency_s: dict[str, Constant]
    latency_tolerance: float
    rows: tuple[FittedRow, ...]


def load_testbed(path: Path) -> Testbed:
    """The testbed in a YAML file. Raises UserError, naming the file."""
    return decode(Testbed, load_mapping(path), str(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Published(Pricer):
    """Fitted coefficients, ready to price.

    latency_s, sent_bytes: seconds and bytes per unit of each term.
    latency_bounds_s: least and greatest seconds per unit that a prior allows, for terms only a prior identifies.
    rows, latency_tolerance: what a coefficient vector must reproduce, to that relative error, to be consistent.
    data: the range of the printed rows; what lies outside it is extrapolated.
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
        """Least and greatest latency over all coefficients >= 0 that reproduce every row and keep to the priors.

        Coefficients vary, counts do not: how cost grows with dimensions that no row varies is taken as given.
        """
        from costmodel.protocols.linear_fit import extremes  # scipy is for fits and ranges, not for prices

        targets = [row.latency_s for row in self.rows]
        low, high = extremes(
            graph_counts(graph), [row.counts for row in self.rows], targets, self.latency_tolerance,
            self.latency_bounds_s,
        )  # fmt: skip
        point = sum(price.latency_s for price in map(self.price, (node.op for node in graph)))
        return min(low, point), max(high, point)

    def extrapolated(self, graph: Iterable[Node]) -> tuple[str, ...]:
        """What of a graph no printed row has."""
        return self.data.outside(graph)

    def prior_share(self, graph: Iterable[Node]) -> float:
        """Share of the latency in terms whose coefficient only a prior identifies.

        Not in it, though assumed: how embedding and projection split their sum, which is data at a vocabulary of
        50,000 (so `by_layer` for the embedding and the head), and how counts grow with dimensions that no row varies.
        """
        seconds = {term: self.latency_s[term] * count for term, count in graph_counts(graph).items()}
        whole = sum(seconds.values())
        return sum(seconds[term] for term in self.latency_bounds_s) / whole if whole else 0.0


def load() -> Published:
    """The committed testbed."""
    return pricer(load_testbed(TESTBED), cost_model_id(TESTBED.read_bytes()))


def pricer(testbed: Testbed, cost_model_id: str) -> Published:
    """A testbed, ready to price. Raises UserError if it lacks the coefficient of a term or has one too many."""
    for quantity, constants in (("latency_s", testbed.latency_s), ("sent_bytes", testbed.sent_bytes)):
        _check_terms(f"`{quantity}` of the testbed", constants)
    for row in testbed.rows:
        _check_terms(f"row {row.name!r} of the testbed", row.counts)
    priors = {term: constant for term, constant in testbed.latency_s.items() if constant.identified_by == "prior"}
    return Published(
        cost_model_id=cost_model_id,
        latency_s={term: _on_grid(constant.value, LATENCY_STEP_S) for term, constant in testbed.latency_s.items()},
        sent_bytes={term: _on_grid(constant.value, BYTES_STEP) for term, constant in testbed.sent_bytes.items()},
        latency_bounds_s={term: constant.bounds for term, constant in priors.items()},
        rows=testbed.rows,
        latency_tolerance=testbed.latency_tolerance,
        data=data_range(published_rows()),
    )


def data_range(rows: Iterable[PublishedRow]) -> DataRange:
    """The range of printed rows, every one of which ran a whole prompt and projected all its tokens."""
    known = list(rows)
    d_models = sorted({row.d_model for row in known})
    return DataRange(
        dimensions={
            "d_model": tuple(d_models),
            "d_ff": tuple(D_FF_PER_D_MODEL * d_model for d_model in d_models),
            "num_heads": tuple(sorted({row.num_heads for row in known})),
            "num_layers": tuple(sorted({row.num_layers for row in known})),
            "vocab_size": tuple(sorted({row.vocab_size for row in known})),
            "seq_len": tuple(sorted({row.seq_len for row in known})),
        },
        op_types=ROW_OPS,
    )


def _check_terms(subject: str, terms: Iterable[str]) -> None:
    if set(terms) != set(TERMS):
        raise UserError(f"{subject} must have exactly the terms {', '.join(TERMS)}, but has {', '.join(terms)}.")


def _on_grid(value: float, step: float) -> float:
    return round(value / step) * step
