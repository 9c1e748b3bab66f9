from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.calibration.fit_published import calibrate, coefficients, dump_testbed
from costmodel.calibration.validate_published import held_out_checks, left_out_group_checks
from costmodel.errors import UserError
from costmodel.protocols import published, published_rows
from costmodel.protocols.published_rows import held_out_rows

PRICER = published.load()
VALUES = {"sent_bytes": PRICER.sent_bytes, "latency_s": PRICER.latency_s}


@pytest.fixture(scope="module")
def held_out():
    return held_out_rows()


@pytest.fixture(scope="module")
def held_out_counts(held_out, graph_of):
    return {row.name: published.graph_counts(graph_of(row.notation, 512, vocab=16_384)) for row in held_out}


def test_a_fit_refuses_a_held_out_row(held_out, held_out_counts, rows, row_counts):
    counts = {**row_counts, **held_out_counts}
    for quantity in VALUES:
        with pytest.raises(
            UserError, match=r"must not be fitted, but got SM\+LN\+G L=12 T=512; leave it to `validate`"
        ):
            coefficients(quantity, [*rows, held_out[0]], counts)


def test_the_committed_fit_reads_the_fitted_rows_alone(monkeypatch, row_graphs):
    """The same testbed comes out where the held-out file is not there at all, and no other file of rows is opened."""
    opened = []
    original = Path.open

    def watched(path, *args, **rest):
        opened.append(path.name)
        return original(path, *args, **rest)

    monkeypatch.setattr(published_rows, "HELD_OUT", Path("absent.csv"))
    monkeypatch.setattr(Path, "open", watched)
    rows = published_rows.published_rows()
    text = dump_testbed(calibrate(rows, row_graphs))
    assert opened == ["published_rows.csv"]
    assert "T=512" not in text
    assert text.count("- name: ") == published.TESTBED.read_text().count("- name: ") == 27


def test_errors_on_held_out_rows_are_what_is_known(held_out, held_out_counts):
    values = {check.name: check.value for check in held_out_checks(held_out, held_out_counts, VALUES)}
    assert values == {
        "communication, held out, worst of 7 own-method rows": pytest.approx(0.0114, abs=5e-5),
        "communication, held out, worst of 1 HH rows": pytest.approx(0.0156, abs=5e-5),
        "latency, held out, worst of 7 own-method rows": pytest.approx(0.0345, abs=5e-5),
        "latency, held out, worst of 1 HH rows": pytest.approx(0.1312, abs=5e-5),
    }


def test_leaving_a_depth_or_a_length_out(rows, row_counts):
    values = {check.name: check.value for check in left_out_group_checks(rows, row_counts)}
    assert len(values) == 2 * 2 * 2 * 2  # depth or length, two of each, two quantities, mean and worst
    for unit in ("12 layers", "18 layers", "128 tokens", "256 tokens"):
        mean = next(value for name, value in values.items() if f"latency, leaving all of {unit} out, mean" in name)
        assert 0.05 < mean <= values[f"latency, leaving all of {unit} out, worst"] < 0.4
    # what was left out was not seen: prices that fit it perfectly change nothing of the fit on the rest
    deep = [replace(row, latency_min=row.latency_min * 2) if row.num_layers == 18 else row for row in rows]
    doubled = {check.name: check.value for check in left_out_group_checks(deep, row_counts)}
    name = "latency, leaving all of 18 layers out, worst"
    assert doubled[name] > values[name] + 0.2
