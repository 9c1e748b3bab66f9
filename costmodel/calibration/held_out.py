"""Errors of `published` on rows that no fit has seen: the held-out ones, and a depth or a prompt length left out."""

from collections.abc import Callable, Mapping, Sequence

from costmodel.calibration.fit_published import coefficients
from costmodel.calibration.validate_published import Check, RowCounts, fit_errors
from costmodel.protocols.published_rows import PublishedRow

TITLES = {"sent_bytes": "communication", "latency_s": "latency"}

NOTES = (
    "fused FFNs of 12 layers at T=512 have 7.248 GFLOP; the papers print 7.3, an eighth of the rounded 58.0",
    "depths tell layers from embedding and head, lengths tell scores from what grows with tokens: a fit that has seen "
    "one depth or one length cannot, which is what those errors show; the 27 rows have two of each",
)

# what is left out together -> of a row
GROUPS: dict[str, Callable[[PublishedRow], int]] = {
    "layers": lambda row: row.num_layers,
    "tokens": lambda row: row.seq_len,
}


def held_out_checks(
    rows: Sequence[PublishedRow], counts: RowCounts, values: Mapping[str, Mapping[str, float]]
) -> list[Check]:
    """Greatest errors on held-out rows, the papers' own and He and Hofmann's apart; no bars, for nothing is tuned here.

    values: quantity -> seconds or bytes per unit of each term.
    """
    found = []
    for quantity, title in TITLES.items():
        errors = fit_errors(quantity, rows, counts, values[quantity])
        for own, whose in ((True, "own-method"), (False, "HH")):
            some = [abs(error) for row, error in zip(rows, errors, strict=True) if row.own_method == own]
            found.append(Check(name=f"{title}, held out, worst of {len(some)} {whose} rows", value=max(some)))
    return found


def left_out_group_checks(rows: Sequence[PublishedRow], counts: RowCounts) -> list[Check]:
    """Errors on all own-method rows of a depth, or of a prompt length, by fits that have seen none of that."""
    found = []
    for unit, of in GROUPS.items():
        for value in sorted({of(row) for row in rows}):
            rest = [row for row in rows if of(row) != value]
            out = [row for row in rows if of(row) == value and row.own_method]
            for quantity, title in TITLES.items():
                fitted = coefficients(quantity, rest, counts)
                errors = [abs(error) for error in fit_errors(quantity, out, counts, fitted)]
                what = f"{title}, leaving all of {value} {unit} out"
                found.append(Check(name=f"{what}, mean of {len(out)} own-method rows", value=sum(errors) / len(out)))
                found.append(Check(name=f"{what}, worst", value=max(errors)))
    return found
