from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from costmodel import ops
from costmodel.calibration.fit_published import (
    MARGINAL_S_PER_BYTE,
    QUANTITIES,
    RELU_BYTES,
    calibrate,
    coefficients,
    dump_testbed,
)
from costmodel.calibration.fit_sigma import class_work, compute_s_of, dump_sigma, fit
from costmodel.calibration.printed_rows import (
    own_bytes,
    printed_checks,
    printed_rows,
    shaft_activation,
    shaft_softmax,
)
from costmodel.calibration.sigma_rows import sigma_rows
from costmodel.calibration.validate_published import (
    checks,
    fit_errors,
    flops_as_printed,
    held_out_checks,
    left_out_errors,
    left_out_group_checks,
    paper_flops,
    row_costs,
)
from costmodel.cost import Price
from costmodel.errors import UserError
from costmodel.protocols import published, published_rows
from costmodel.protocols.published import load_testbed
from costmodel.protocols.published_rows import held_out_rows
from costmodel.protocols.sigma import CLASSES, TESTBED, load_sigma


def test_refitting_gives_the_committed_file_which_reads_back(rows, row_graphs, tmp_path):
    fitted, committed = calibrate(rows, row_graphs), load_testbed(published.TESTBED)
    assert replace(fitted, sent_bytes={}, latency_s={}) == replace(committed, sent_bytes={}, latency_s={})
    for quantity in ("sent_bytes", "latency_s"):
        for term, constant in getattr(committed, quantity).items():
            again = getattr(fitted, quantity)[term]
            assert again.value == pytest.approx(constant.value, rel=1e-5)
            assert (again.identified_by, again.source) == (constant.identified_by, constant.source)
    path = tmp_path / "testbed.yaml"
    path.write_text(dump_testbed(calibrate(rows, row_graphs)))
    again = dump_testbed(load_testbed(path))
    assert again == path.read_text()
    assert published.pricer(load_testbed(path), "0").sent_bytes.keys() == published.TERMS.keys()


def test_priors_written_out():
    # Close to what the engine sends: slope (15,856,280 - 4,559,512) / 114,688 elements of relu 128x1024 and 64x256.
    assert pytest.approx(98.5, rel=0.03) == RELU_BYTES
    # 8.1, 7.5 and 6.9 s per GB between the GELU and ReLU rows: about 1.07 Gbit/s.
    assert pytest.approx(1.07e9, rel=0.01) == 8 / MARGINAL_S_PER_BYTE


def test_no_coefficient_depends_on_the_order_of_rows(rows, row_counts):
    for quantity in QUANTITIES:
        forward, backward = coefficients(quantity, rows, row_counts), coefficients(quantity, rows[::-1], row_counts)
        assert forward == pytest.approx(backward, rel=1e-4)


def test_simplified_rows_rule_out_no_layernorm_and_three(rows, row_counts):
    """He and Hofmann's block as the papers count it has one LayerNorm; the bytes leave a second one open."""

    def mean_error(num_norms):
        counts = {
            row.name: row_counts[row.name]
            if row.own_method
            else {**row_counts[row.name], "layernorm_elements": num_norms * row.seq_len * row.d_model}
            for row in rows
        }
        errors = fit_errors("sent_bytes", rows, counts, coefficients("sent_bytes", rows, counts))
        simplified = [abs(error) for row, error in zip(rows, errors, strict=True) if not row.own_method]
        return sum(simplified) / len(simplified)

    assert all(row_counts[row.name]["layernorm_elements"] == row.seq_len * row.d_model for row in rows[2:5])
    assert max(mean_error(1), mean_error(2)) < 0.005 < min(mean_error(0), mean_error(3))


def test_simplified_rows_do_not_touch_what_own_method_rows_identify(rows, row_counts):
    own_rows = [row for row in rows if row.own_method]
    alone, together = (coefficients("sent_bytes", chosen, row_counts) for chosen in (own_rows, rows))
    del alone["shaped_scores"], together["shaped_scores"]
    assert alone == pytest.approx(together, rel=1e-4)


def test_every_term_has_a_constant_that_says_which_rows_identify_it():
    testbed = load_testbed(published.TESTBED)
    assert "6 of them with this term (HH rows only)" in testbed.sent_bytes["shaped_scores"].source
    assert "least mean error with own-method ones within 0.3%" in testbed.sent_bytes["shaped_scores"].source
    assert "3 of them with this term: " in testbed.latency_s["gelu_elements"].source
    short = {term: constant for term, constant in testbed.latency_s.items() if term != "softmax_scores"}
    with pytest.raises(ValueError, match="`latency_s` of the testbed must have exactly the terms"):
        published.pricer(replace(testbed, latency_s=short), "0")


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


def test_flops_written_out(rows, row_graphs):
    # 12 layers, T = 128, d = 768: FFN 16 * 128 * 768^2 * 12 = 14.496 GFLOP, fused 2 * ... = 1.812, pruned by 6 0.906;
    # attention (8 * 128 * 768^2 + 3 * 128^2 * 768) * 12 = 7.701, simplified (4 ..., 2 ...) * 12 = 3.926.
    by_name = {row.name: row for row in rows}
    graphs = {name: row_graphs[f"{name} L=12 T=128"] for name in ("SM+LN+G", "SM+ScFuFFN_i6", "HH(SM+ScFuFFN)")}
    plain, pruned, simplified = map(paper_flops, graphs.values())
    assert (plain.ffn, plain.attention) == (16 * 128 * 768**2 * 12, (8 * 128 * 768**2 + 3 * 128**2 * 768) * 12)
    assert pruned.ffn == 2 * 128 * 768**2 * 6
    assert (simplified.ffn, simplified.attention) == (2 * 128 * 768**2 * 12, (4 * 128 * 768 + 2 * 128**2) * 768 * 12)
    costs = row_costs(graphs["SM+LN+G"], Price(latency_s=60.0, sent_bytes=1e9))
    assert flops_as_printed(by_name["SM+LN+G L=12 T=128"], costs) == (Decimal("14.5"), Decimal("7.7"))
    wrong = replace(by_name["SM+LN+G L=12 T=128"], ffn_gflop=Decimal("14.50"))
    assert flops_as_printed(wrong, costs) == (Decimal("14.50"), Decimal("7.7"))
    assert flops_as_printed(wrong, costs | {"FFN GFLOP": 14.51}) != (wrong.ffn_gflop, wrong.attention_gflop)
    assert (costs["communication GB"], costs["latency min"]) == (1.0, 1.0)


def test_every_bar_is_met_unless_coefficients_are_off(rows, row_counts):
    results = checks(rows, row_counts, sent_bytes=PRICER.sent_bytes, latency_s=PRICER.latency_s, num_flops_wrong=0)
    assert [check.name for check in results if not check.passed] == []
    bars = {check.name: check.bar for check in results if check.bar is not None}
    assert list(bars.values()) == [0.0, 0.005, 0.02, 0.05, 0.015, 0.015]
    dear = {term: 1.06 * value for term, value in PRICER.latency_s.items()}
    results = checks(rows, row_counts, sent_bytes=PRICER.sent_bytes, latency_s=dear, num_flops_wrong=1)
    failed = [check.name for check in results if not check.passed]
    assert failed == [
        "rows whose FLOPs differ from a printed digit",
        "latency, mean of 27 rows",
        "latency, worst of 27 rows",
    ]


def test_every_examined_term_is_needed(rows, row_counts):
    """What the counts claim: without per-row costs of linears or shaped scores, a bar fails."""
    results = checks(rows, row_counts, sent_bytes=PRICER.sent_bytes, latency_s=PRICER.latency_s, num_flops_wrong=0)
    values = {check.name: check.value for check in results}
    assert values["communication, refitted without linear_rows, worst of 21 own-method rows"] > 0.005
    assert values["latency, refitted without linear_rows, mean of 27 rows"] > 0.02
    assert values["latency, refitted without shaped_scores, mean of 27 rows"] > 0.02
    assert values["latency, refitted without shaped_scores, worst of 27 rows"] > 0.05
    whole = values["communication, mean of 27 rows"]
    assert values["communication, refitted without shaped_scores, mean of 27 rows"] > 1.2 * whole


def test_leaving_out_sees_less_than_the_fit(rows, row_counts):
    fitted = fit_errors("latency_s", rows, row_counts, PRICER.latency_s)
    left_out = left_out_errors("latency_s", rows, row_counts, with_twins=True)
    assert len(left_out) == len(rows)
    assert sum(map(abs, left_out)) > sum(map(abs, fitted))


ROWS = printed_rows()


def test_runs_of_crypten_are_equal_to_the_last_digit():
    checks = [check for check in printed_checks(ROWS) if check.row.group == "CrypTen as run by SIGMA"]
    assert [check.row.gigabytes for check in checks] == ["8.34", "3.45", "3.27", ".11", "3.92", "8.34", "21.11"]
    assert all(check.is_equal and check.factor is None for check in checks)
    # x sigmoid(1.702 x): a sign, an exponential, two iterations, four products and a selection, of 16 bytes a number
    assert own_bytes(checks[1].row) == 12 * 128 * 3072 * 16 * (27 + 2 + 8 + 6 + 4 + 2)


def test_shafts_functions_send_what_it_prints():
    """354 MB and 19 rounds for a GELU of 128 x 3,072: a ReLU, a sign, an opening and a product, of 8 bytes a share."""
    comm = shaft_activation(ops.Silu(rows=128, features=3072))
    assert comm.online_bytes == 128 * 3072 * (464 + 432 + 16 + 32) == 354 * 2**20
    assert comm.rounds == 9 + 8 + 1 + 1
    # scores are clipped at both ends by a ReLU each; 16 steps of two products
    assert shaft_softmax(ops.Softmax(heads=1, queries=1, keys=4)).online_bytes == 4 * (2 * 464 + 16 * 2 * 32)


@pytest.mark.parametrize(
    ("protocol", "num_held_out", "bar"), [("crypten", 2, 0.003), ("aby3", 4, 0.05), ("cheetah", 1, 0.02)]
)
def test_held_out_rows_are_near_by_the_factor_of_one(protocol, num_held_out, bar):
    checks = [check for check in printed_checks(ROWS) if check.row.protocol == protocol and check.factor is not None]
    held_out = [check for check in checks if not check.row.fitted]
    assert len(held_out) == num_held_out
    assert all(abs(check.error) < bar for check in held_out)
    assert all(check.error == pytest.approx(0) for check in checks if check.row.fitted)


@pytest.mark.parametrize("protocol", ["crypten", "aby3", "cheetah"])
def test_validate_prints_them(run, protocol):
    code, out, _ = run("validate", "--protocol", protocol)
    assert code == 0
    assert all(row.name in out for row in ROWS if row.protocol == protocol)


def test_validate_fails_when_a_printed_digit_differs(run, monkeypatch):
    off = tuple(replace(row, gigabytes="8.35") if row.gigabytes == "8.34" else row for row in ROWS)
    monkeypatch.setattr("costmodel.commands.validate.printed_rows", lambda: off)
    code, out, _ = run("validate", "--protocol", "crypten")
    assert code == 1
    assert "FAIL" in out


SIGMA_ROWS = sigma_rows()
FITTED_SIGMA = [row for row in SIGMA_ROWS if row.fitted]


def test_the_committed_testbed_is_the_fit_of_its_rows_alone():
    assert dump_sigma(fit(FITTED_SIGMA)) == TESTBED.read_text(encoding="utf-8")
    assert load_sigma(TESTBED).rows == tuple(row.name for row in FITTED_SIGMA)
    with pytest.raises(UserError, match="must not be fitted, but got BERT-tiny T=128 loopback; leave it"):
        fit([*FITTED_SIGMA, next(row for row in SIGMA_ROWS if row.model == "BERT-tiny")])


def test_classes_sum_to_what_a_run_computed():
    small = FITTED_SIGMA[0]
    parts = compute_s_of(small)
    assert sum(parts.values()) == pytest.approx(1.394522 - 0.214182)
    assert set(parts) == set(CLASSES)
    # twelve layers of 12 d^2 weights, all of them in linears
    assert class_work(small, "linear")["weights"] == 12 * 12 * 768**2
    assert class_work(small, "softmax")["weights"] == 0
