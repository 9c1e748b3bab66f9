from dataclasses import replace

import pytest

from costmodel.calibrate import (
    MARGINAL_S_PER_BYTE,
    QUANTITIES,
    RELU_BYTES,
    calibrate,
    coefficients,
    dump_testbed,
)
from costmodel.protocols import published
from costmodel.testbed import load_testbed


def test_refitting_gives_the_committed_file(rows, row_graphs):
    fitted, committed = calibrate(rows, row_graphs), load_testbed(published.TESTBED)
    assert replace(fitted, sent_bytes={}, latency_s={}) == replace(committed, sent_bytes={}, latency_s={})
    for quantity in ("sent_bytes", "latency_s"):
        for term, constant in getattr(committed, quantity).items():
            again = getattr(fitted, quantity)[term]
            assert again.value == pytest.approx(constant.value, rel=1e-5)
            assert (again.identified_by, again.source) == (constant.identified_by, constant.source)


def test_a_written_testbed_reads_back(rows, row_graphs, tmp_path):
    path = tmp_path / "testbed.yaml"
    path.write_text(dump_testbed(calibrate(rows, row_graphs)))
    again = dump_testbed(load_testbed(path))
    assert again == path.read_text()
    assert published.pricer(load_testbed(path), "0").sent_bytes.keys() == published.TERMS.keys()


def test_priors_written_out():
    # Measured send bytes of relu 128x1024 and 64x256: slope (15,856,280 - 4,559,512) / 114,688 elements.
    assert pytest.approx(98.5, abs=0.01) == RELU_BYTES
    # 8.1, 7.5 and 6.9 s per GB between the GELU and ReLU rows: about 1.07 Gbit/s.
    assert pytest.approx(1.07e9, rel=0.01) == 8 / MARGINAL_S_PER_BYTE


def test_no_coefficient_depends_on_the_order_of_rows(rows, row_counts):
    for quantity in QUANTITIES:
        forward, backward = coefficients(quantity, rows, row_counts), coefficients(quantity, rows[::-1], row_counts)
        assert forward == pytest.approx(backward, rel=1e-4)


def test_a_testbed_with_a_term_missing_is_refused():
    testbed = load_testbed(published.TESTBED)
    short = {term: constant for term, constant in testbed.latency_s.items() if term != "softmax_scores"}
    with pytest.raises(ValueError, match="`latency_s` of the testbed must have exactly the terms"):
        published.pricer(replace(testbed, latency_s=short), "0")
