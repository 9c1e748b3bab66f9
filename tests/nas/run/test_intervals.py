"""Do printed intervals hold? Losses by document of seven trained models, split in halves by document."""

import csv
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from nas.run.intervals import ERRORS_APART, Documents, differences, document_error, joined

# One trial each of a search from the builtin parent at scale `proxy`, seed 0, under Python 3.11.7
DOCUMENTS = Path(__file__).parent / "documents.csv"
NUM_SPLITS = 20


def losses_by_document() -> list[Documents]:
    with DOCUMENTS.open(newline="") as file:
        _, *rows = csv.reader(file)
    values = np.array([[float(cell) for cell in row[1:]] for row in rows])
    return [tuple(zip(values[:, 0].tolist(), losses.tolist(), strict=True)) for losses in values[:, 1:].T]


def half(documents: Documents, chosen: np.ndarray) -> Documents:
    kept = [document for document, inside in zip(documents, chosen, strict=True) if inside]
    whole = sum(share for share, _ in kept)
    return tuple((share / whole, loss) for share, loss in kept)


def holds(documents: Documents, chosen: np.ndarray) -> bool:
    """Whether the means of two halves are apart by no more than two errors of both.

    Of D documents that count alike the difference of the means of random halves has variance 4 S^2 / D, S^2 that of the
    documents, which is the sum of both halves' squared errors, S^2 / (D / 2) each: the halves share no document.
    """
    chosen_half, other = half(documents, chosen), half(documents, ~chosen)
    means = [sum(share * loss for share, loss in pairs) for pairs in (chosen_half, other)]
    error = joined(document_error(chosen_half), document_error(other))
    assert error is not None
    return abs(means[0] - means[1]) <= ERRORS_APART * error


@pytest.mark.parametrize("kind", ["losses", "differences"])
def test_the_interval_of_one_half_holds_the_mean_of_the_other(kind: str) -> None:
    trained = losses_by_document()
    pairs = [differences(losses, other) for losses, other in combinations(trained, 2)]
    series = trained if kind == "losses" else pairs
    rng, count = np.random.default_rng(0), len(trained[0])
    splits = [rng.permutation(count) < count // 2 for _ in range(NUM_SPLITS)]
    held = [holds(documents, chosen) for documents in series for chosen in splits]
    assert np.mean(held) >= 0.9  # 0.90 of losses and 0.95 of differences; over 2,000 splits 0.96 and 0.95
    assert not all(held)  # two errors are no more than they must be
