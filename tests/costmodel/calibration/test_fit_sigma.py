"""The committed seconds of protocol `sigma` are what its logged rows give."""

import pytest

from costmodel.calibration.fit_sigma import class_work, compute_s_of, dump_sigma, fit
from costmodel.calibration.sigma_rows import sigma_rows
from costmodel.errors import UserError
from costmodel.protocols.sigma import CLASSES, TESTBED, load_sigma

ROWS = sigma_rows()
FITTED = [row for row in ROWS if row.fitted]


def test_the_committed_testbed_is_the_fit_of_its_rows():
    assert dump_sigma(fit(FITTED)) == TESTBED.read_text(encoding="utf-8")
    assert load_sigma(TESTBED).rows == tuple(row.name for row in FITTED)


def test_a_held_out_row_is_not_fitted():
    with pytest.raises(UserError, match="must not be fitted, but got BERT-tiny T=128 loopback; leave it"):
        fit([*FITTED, next(row for row in ROWS if row.model == "BERT-tiny")])


def test_classes_sum_to_what_a_run_computed():
    small = FITTED[0]
    parts = compute_s_of(small)
    assert sum(parts.values()) == pytest.approx(1.394522 - 0.214182)
    assert set(parts) == set(CLASSES)
    # twelve layers of 12 d^2 weights, all of them in linears
    assert class_work(small, "linear")["weights"] == 12 * 12 * 768**2
    assert class_work(small, "softmax")["weights"] == 0
