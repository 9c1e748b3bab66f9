from typing import Any

import pytest

from costmodel.protocols.published_rows import PublishedRow, held_out_rows, published_rows
from experiments.__main__ import definitions, kind_of, settings_of
from experiments.papers.costs import cost_table, costs_of, flops_table, operation_table, savings_table
from experiments.papers.results import Experiment
from experiments.papers.settings import Settings

SETTINGS: dict[str, Settings] = {name: settings_of(name) for name in definitions() if kind_of(name) == "paper"}
TABLES = {
    ("CodeParrot", 12, 128): "ega-table-2",
    ("CodeParrot", 12, 256): "ega-table-2-t256",
    ("CodeParrot", 18, 128): "ega-table-2-18-layers",
    ("Languini", 12, 512): "languini",
}


def records(table) -> dict[str, dict[str, Any]]:
    headings = [column.heading for column in table.columns]
    assert len(set(headings)) == len(headings)
    return {str(row[0]): dict(zip(headings, row, strict=True)) for row in table.rows}


def priced(name: str) -> Experiment:
    return Experiment(name, SETTINGS[name], {})


def rows_of(name: str) -> list[PublishedRow]:
    return [
        row for row in (*published_rows(), *held_out_rows()) if TABLES[row.dataset, row.num_layers, row.seq_len] == name
    ]


@pytest.mark.parametrize("name", TABLES.values())
def test_every_printed_row_and_value_is_in_its_table(name: str):
    costs, operations = records(cost_table(priced(name))), records(operation_table(priced(name)))
    printed = rows_of(name)
    assert printed
    for row in printed:
        cells = costs[row.notation]
        assert cells["communication GB, printed"] == float(row.sent_gigabytes)
        assert cells["latency min, printed"] == float(row.latency_min)
        assert cells["perplexity, printed"] == (float("inf") if row.perplexity is None else row.perplexity)
        assert operations[row.notation]["FFN GFLOP, printed"] == float(row.ffn_gflop)
        assert operations[row.notation]["attention GFLOP, printed"] == float(row.attention_gflop)
        assert operations[row.notation]["FFN GFLOP, ours"] == pytest.approx(float(row.ffn_gflop), abs=0.06)
        assert operations[row.notation]["attention GFLOP, ours"] == pytest.approx(float(row.attention_gflop), abs=0.06)


@pytest.mark.parametrize(("name", "bytes_percent", "latency_percent"), [("ega-table-2", 1.3, 5), ("languini", 1.7, 14)])
def test_ours_is_within_the_documented_errors_of_print(name: str, bytes_percent: float, latency_percent: float):
    for row in rows_of(name):
        cells = records(cost_table(priced(name)))[row.notation]
        assert abs(cells["communication, error %"]) < bytes_percent
        assert abs(cells["latency, error %"]) < latency_percent


def test_operations_are_counted_as_the_papers_count_them():
    costs = costs_of(SETTINGS["ega-table-2"])
    counts = {row: tuple(cost.counts.values()) for row, cost in costs.items()}
    assert counts["SM+LN+G"] == (12 * 12, 2 * 12, 12, 0)  # heads x layers; two norms and one activation a layer
    assert counts["SM+LN+R"] == (144, 24, 0, 12)
    assert counts["SM+ScFuFFN_i6"] == counts["EReg(SM(t)+ScFuFFN)"] == (144, 0, 0, 0)
    assert counts["HH(SM+ScFFN)"] == (144, 1, 0, 0)  # one norm, at the input
    deeper = costs_of(SETTINGS["ega-table-2-18-layers"])["SM+LN+G"]
    assert deeper.counts == {"softmax": 216, "LayerNorm": 36, "GELU": 18, "ReLU": 0}


def test_savings_are_the_quotients_that_the_abstracts_claim():
    twelve, eighteen = (records(savings_table(priced(name))) for name in ("ega-table-2", "ega-table-2-18-layers"))
    assert twelve["SM+LN+G"]["communication, printed"] == twelve["SM+LN+G"]["latency, ours"] == 1
    assert twelve["SM+ScFuFFN"]["communication, printed"] == pytest.approx(25.32 / 6.43)
    assert round(twelve["SM+ScFuFFN"]["communication, printed"], 2) == 3.94  # arXiv 2501.03489
    assert round(twelve["SM+ScFuFFN"]["latency, printed"], 2) == 1.72  # 8.21 / 4.76, arXiv 2501.03489
    assert round(twelve["SM+ScFuFFN_i6"]["latency, printed"], 2) == 1.94  # 8.21 / 4.23, arXiv 2410.13060
    assert round(eighteen["SM+ScFuFFN_i4"]["communication, printed"], 2) == 4.23  # 37.17 / 8.79, arXiv 2410.13060


def test_a_row_without_printed_costs_has_ours_alone():
    cells = records(savings_table(priced("aero-steps")))["SM+R"]
    assert cells["communication, printed"] is None
    costs = costs_of(SETTINGS["aero-steps"])
    assert cells["communication, ours"] == (
        costs["SM+LN+G"].ours["communication GB"] / costs["SM+R"].ours["communication GB"]
    )
    assert cells["communication, ours"] > 1


def test_shares_of_flops_by_length():
    cells = {(row[0], row[1]): row[2:] for row in flops_table(priced("flops-share")).rows}
    # FFN 16 d, linears of attention 8 d, products 3 T, of a layer, each x T x d; d = 768
    whole = (16 + 8) * 768 + 3 * 8192
    expected = tuple(100 * part / whole for part in (16 * 768, 8 * 768, 3 * 8192))
    assert cells["SM+LN+G", 8192][2:] == pytest.approx(expected)
    assert cells["SM+ScFuFFN", 128][0] == pytest.approx(2 * 128 * 768**2 * 12 / 1e9)
    assert cells["SM+ScFuFFN_i6", 128][0] == cells["SM+ScFuFFN", 128][0] / 2  # half of the layers have an FFN
