from dataclasses import replace
from decimal import Decimal

from costmodel.calibration.validate_published import (
    checks,
    fit_errors,
    flops_as_printed,
    left_out_errors,
    paper_flops,
    row_costs,
)
from costmodel.cost import Price
from costmodel.protocols import published

PRICER = published.load()


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


def test_every_bar_is_met(rows, row_counts):
    results = checks(rows, row_counts, sent_bytes=PRICER.sent_bytes, latency_s=PRICER.latency_s, num_flops_wrong=0)
    assert [check.name for check in results if not check.passed] == []
    bars = {check.name: check.bar for check in results if check.bar is not None}
    assert list(bars.values()) == [0.0, 0.005, 0.02, 0.05, 0.015, 0.015]


def test_coefficients_that_are_off_fail_the_bars(rows, row_counts):
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
