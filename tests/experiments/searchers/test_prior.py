from dataclasses import replace

import numpy as np
import pytest

from costmodel.errors import UserError
from experiments.__main__ import settings_of
from experiments.searchers.prior import LACKING, Losses, ParentRows, fit_table, fitted, losses_of
from nas.searchers.surrogate import BLOCK_FACTORS, GAPS, SCARCITY


def test_the_prior_of_the_searcher_is_what_is_fitted():
    rows: dict[str, ParentRows] = settings_of("prior").parents
    parents = {name: losses_of(of_parent) for name, of_parent in rows.items()}
    assert [len(losses.over) for losses in parents.values()] == [28, 28, 28, 100, 50, 256, 28, 28]
    names = [name for name, of_parent in rows.items() if of_parent.is_fitted]
    means = [*(prior.mean for prior in SCARCITY), GAPS.mean, BLOCK_FACTORS[1].mean]
    assert fitted({name: parents[name] for name in names}) == pytest.approx(means, rel=0.05)
    table = fit_table(parents, names)
    assert (table.row_count, len(table.columns)) == (1 + len(names), 1 + len(LACKING) + len(parents))
    in_no_fit = [next(iter(column.cells)) for column in table.columns[-3:]]  # parents: 4 layers, pythia, English
    assert in_no_fit == ["0.78", "0.86", "0.85"]


def test_parents_count_alike_and_no_weight_is_negative():
    rng = np.random.default_rng(0)
    weights = np.array([0.1, 0.2, 1.5, 0.0])
    lacking = {"small": rng.random((10, 4)), "large": rng.random((40, 4))}
    exact = {name: Losses(rows, rows @ weights) for name, rows in lacking.items()}
    assert fitted(exact) == pytest.approx(weights)
    assert exact["small"].r2(weights) == pytest.approx(1)
    other = exact | {"large": Losses(lacking["large"], lacking["large"] @ [0.3, 0.1, 0.5, 0.2])}
    thrice = other | {"large": Losses(*(np.concatenate([values] * 3) for values in other["large"]))}
    assert fitted(thrice) == pytest.approx(fitted(other))
    assert (fitted({"small": Losses(lacking["small"], -lacking["small"] @ weights)}) >= 0).all()


def test_a_variant_that_a_file_lacks_is_refused():
    rows: ParentRows = settings_of("prior").parents["width 48"]
    with pytest.raises(UserError, match=r"across-widths\.csv must hold variant '24', but does not"):
        losses_of(replace(rows, variant="24"))
