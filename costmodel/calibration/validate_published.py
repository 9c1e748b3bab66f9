"""Checks how well `published` reproduces the printed rows: errors of the fit, of fits without some rows, and FLOPs.

Held-out rows, which no fit has seen, have no bounds, and neither have fits without a depth or prompt length.
"""

from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from statistics import fmean
from typing import NamedTuple

from costmodel import ops
from costmodel.calibration.fit_published import QUANTITIES, coefficients
from costmodel.config.units import BYTES, SECONDS
from costmodel.cost import Price
from costmodel.ops import Op, OpGraph
from costmodel.protocols import cheetah, published
from costmodel.protocols.primitives import EngineSetting
from costmodel.protocols.published_rows import PublishedRow

RowCounts = Mapping[str, Mapping[str, int]]  # row name -> term -> count

TITLES = {"sent_bytes": "communication", "latency_s": "latency"}

NOTES = (
    "fused FFNs of 12 layers at T=512 have 7.248 GFLOP; the papers print 7.3, an eighth of the rounded 58.0",
    "depths tell layers from embedding and head, lengths tell scores from what grows with tokens: a fit that has seen "
    "one depth or one length cannot, which is what those errors show; the 27 rows have two of each",
)

# group that is left out together -> its value for a row
GROUPS: dict[str, Callable[[PublishedRow], int]] = {
    "layers": lambda row: row.num_layers,
    "tokens": lambda row: row.seq_len,
}

# printed column -> field of `PublishedRow`
PRINTED = {
    "FFN GFLOP": "ffn_gflop",
    "attention GFLOP": "attention_gflop",
    "communication GB": "sent_gigabytes",
    "latency min": "latency_min",
}

# Terms that were added because the rows need them; `validate` shows how much each improves the fit.
EXAMINED_TERMS = ("linear_rows", "shaped_scores")


# Terms of `published` with formulas in cheetah -> such ops of GPT-2 small at T=128, in each of their forms
NONLINEAR: dict[str, tuple[Op, ...]] = {
    "layernorm_elements": (ops.LayerNorm(rows=128, features=768),),
    "relu_elements": (ops.Relu(rows=128, features=3072),),
    "gelu_elements": (
        ops.Gelu(rows=128, features=3072, form="tanh"),
        ops.Gelu(rows=128, features=3072, form="exact"),
    ),
    "softmax_scores": (ops.Softmax(heads=12, queries=128, keys=128),),
}


class Derived(NamedTuple):
    """The bytes of a unit of a fitted term, by the formulas of protocol cheetah.

    `title` is the term, with the form of its op if there are several; `by_primitive` is the share of the bytes, from 0
    to 1, that each primitive sends.
    """

    term: str
    title: str
    sent_bytes: float
    by_primitive: dict[str, float]


def derived_terms() -> list[Derived]:
    """Return the bytes of every term of `NONLINEAR` by formula, to compare with a fit."""
    terms = []
    for term, op in ((term, op) for term, forms in NONLINEAR.items() for op in forms):
        num_bytes = cheetah.by_primitive(op, EngineSetting())
        whole = sum(num_bytes.values())
        title = f"{term} ({op.form})" if isinstance(op, ops.Gelu) else term
        shares = {name: part / whole for name, part in num_bytes.items()}
        terms.append(Derived(term, title, whole / published.counts(op)[term], shares))
    return terms


class Check(NamedTuple):
    """A relative error or share of rows, with the greatest value that passes; no bound if that is None."""

    name: str
    value: float
    bar: float | None = None

    @property
    def passed(self) -> bool:
        return self.bar is None or self.value <= self.bar


class PaperFlops(NamedTuple):
    """FLOPs of all blocks in the papers' convention; `products` are the two products of attention scores."""

    ffn: int
    linears: int
    products: int

    @property
    def attention(self) -> int:
        return self.linears + self.products


def paper_flops(graph: OpGraph) -> PaperFlops:
    """Return the FLOPs of the blocks, without embedding and projection; a multiplication and its addition are 2.

    The two T x T products of attention count by 3/4; in He and Hofmann's block by 2/4, where the value projection of
    the first layer is not counted. Source: derived from every printed digit of arXiv 2410.13060 table 3.
    """
    is_shaped = any(isinstance(node.op, ops.ShapedAttention) for node in graph)
    ffn = linears = products = 0
    for node in graph:
        if isinstance(node.op, ops.Linear):
            flops = 2 * node.op.rows * node.op.in_features * node.op.out_features
            if ".ffn." in node.name:
                ffn += flops
            elif not (is_shaped and node.name.endswith("attention.v")):
                linears += flops
        elif isinstance(node.op, ops.AttentionMix):
            products += (2 if is_shaped else 3) * node.op.heads * node.op.queries * node.op.keys * node.op.head_dim
    return PaperFlops(ffn, linears, products)


def row_costs(graph: OpGraph, price: Price) -> dict[str, float]:
    """Return our values of the columns in PRINTED; `price` is the cost of the whole graph."""
    flops = paper_flops(graph)
    ours = (flops.ffn / 1e9, flops.attention / 1e9, price.sent_bytes / BYTES["GB"], price.latency_s / SECONDS["min"])
    return dict(zip(PRINTED, ours, strict=True))


def flops_as_printed(row: PublishedRow, costs: Mapping[str, float]) -> tuple[Decimal, Decimal]:
    """Return the FFN and attention GFLOP of `row_costs`, rounded to the digits that the row prints."""
    printed = {what: getattr(row, PRINTED[what]) for what in ("FFN GFLOP", "attention GFLOP")}
    ffn, attention = (Decimal(costs[what]).quantize(like, rounding=ROUND_HALF_UP) for what, like in printed.items())
    return ffn, attention


def fit_errors(
    quantity: str, rows: Sequence[PublishedRow], counts: RowCounts, values: Mapping[str, float]
) -> list[float]:
    """Return the relative error of every row, predicted / printed - 1, from seconds or bytes per unit (`values`)."""
    predicted = [sum(values[term] * count for term, count in counts[row.name].items()) for row in rows]
    return [number / float(getattr(row, quantity)) - 1.0 for number, row in zip(predicted, rows, strict=True)]


def unseen_errors(
    quantity: str, out: Sequence[PublishedRow], rows: Sequence[PublishedRow], counts: RowCounts
) -> list[float]:
    """Return the relative errors of left-out rows, predicted by a fit of the others."""
    rest = [row for row in rows if row not in out]
    return fit_errors(quantity, out, counts, coefficients(quantity, rest, counts))


def left_out_errors(quantity: str, rows: Sequence[PublishedRow], counts: RowCounts, *, with_twins: bool) -> list[float]:
    """Return the relative error of every row, predicted by a fit that has not seen it.

    `with_twins` also leaves out rows with the same term counts (an EReg row and its plain row).
    """
    errors = []
    for row in rows:
        twins = [other for other in rows if with_twins and counts[other.name] == counts[row.name] and other != row]
        errors.append(unseen_errors(quantity, [row, *twins], rows, counts)[0])
    return errors


def checks(
    rows: Sequence[PublishedRow],
    counts: RowCounts,
    *,
    sent_bytes: Mapping[str, float],
    latency_s: Mapping[str, float],
    num_flops_wrong: int,
) -> tuple[Check, ...]:
    """Return all figures of `validate`; `sent_bytes` and `latency_s` are the committed coefficients."""
    own_bytes, hh_bytes = _split("sent_bytes", rows, fit_errors("sent_bytes", rows, counts, sent_bytes))
    latency, _ = _split("latency_s", rows, fit_errors("latency_s", rows, counts, latency_s))
    return (
        Check("rows whose FLOPs differ from a printed digit", num_flops_wrong / len(rows), 0.0),
        Check(f"communication, worst of {len(own_bytes)} own-method rows", max(own_bytes), 0.005),
        Check("communication, mean of own-method rows", fmean(own_bytes)),
        Check(f"communication, worst of {len(hh_bytes)} HH rows", max(hh_bytes)),
        Check(f"communication, mean of {len(rows)} rows", fmean([*own_bytes, *hh_bytes])),
        Check(f"latency, mean of {len(rows)} rows", fmean(latency), 0.02),
        Check(f"latency, worst of {len(rows)} rows", max(latency), 0.05),
        *_without_terms("sent_bytes", rows, counts),
        *_without_rows("sent_bytes", rows, counts, bar=0.015),
        *_without_terms("latency_s", rows, counts),
        *_without_rows("latency_s", rows, counts, bar=None),
    )


def _without_terms(quantity: str, rows: Sequence[PublishedRow], counts: RowCounts) -> list[Check]:
    figures = []
    for term in EXAMINED_TERMS:
        values = coefficients(quantity, rows, counts, free=(term,))
        capped, others = _split(quantity, rows, fit_errors(quantity, rows, counts, values))
        what, whose = f"{TITLES[quantity]}, refitted without {term}", "own-method rows" if others else "rows"
        figures.append(Check(f"{what}, mean of {len(rows)} rows", fmean([*capped, *others])))
        figures.append(Check(f"{what}, worst of {len(capped)} {whose}", max(capped)))
    return figures


def _without_rows(quantity: str, rows: Sequence[PublishedRow], counts: RowCounts, *, bar: float | None) -> list[Check]:
    """Return errors on rows that the fit has not seen; the bound is for rows to which the quantity's cap applies."""
    figures = []
    for with_twins, left_out in ((False, "row"), (True, "architecture at one T and L")):
        capped, others = _split(quantity, rows, left_out_errors(quantity, rows, counts, with_twins=with_twins))
        what, whose = f"{TITLES[quantity]}, leaving one", " own-method" if others else ""
        figures.append(Check(f"{what}{whose} {left_out} out, mean", fmean(capped)))
        figures.append(Check(f"{what}{whose} {left_out} out, worst", max(capped), bar))
        if others:
            figures.append(Check(f"{what} HH {left_out} out, worst", max(others)))
    return figures


def _split(quantity: str, rows: Sequence[PublishedRow], errors: Sequence[float]) -> tuple[list[float], list[float]]:
    pairs = list(zip(map(abs, errors), QUANTITIES[quantity].capped(rows), strict=True))
    return [error for error, bound in pairs if bound], [error for error, bound in pairs if not bound]


def held_out_checks(
    rows: Sequence[PublishedRow], counts: RowCounts, values: Mapping[str, Mapping[str, float]]
) -> list[Check]:
    """Return the greatest errors on held-out rows, the papers' own and He and Hofmann's, without bounds.

    `values` maps a quantity to seconds or bytes per unit of each term.
    """
    figures = []
    for quantity, title in TITLES.items():
        errors = fit_errors(quantity, rows, counts, values[quantity])
        for is_own, whose in ((True, "own-method"), (False, "HH")):
            some = [abs(error) for row, error in zip(rows, errors, strict=True) if row.own_method == is_own]
            figures.append(Check(f"{title}, held out, worst of {len(some)} {whose} rows", max(some)))
    return figures


def left_out_group_checks(rows: Sequence[PublishedRow], counts: RowCounts) -> list[Check]:
    """Return the errors on all own-method rows of a depth or prompt length, by fits without any such row."""
    figures = []
    for unit, of in GROUPS.items():
        for value in sorted({of(row) for row in rows}):
            out = [row for row in rows if of(row) == value]
            for quantity, title in TITLES.items():
                errors = zip(out, unseen_errors(quantity, out, rows, counts), strict=True)
                own = [abs(error) for row, error in errors if row.own_method]
                what = f"{title}, leaving all of {value} {unit} out"
                figures.append(Check(f"{what}, mean of {len(own)} own-method rows", fmean(own)))
                figures.append(Check(f"{what}, worst", max(own)))
    return figures
