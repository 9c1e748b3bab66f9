"""`python -m costmodel validate`: printed rows beside predictions, and what fails it."""

import pytest

from costmodel.commands.validate import PrintedFigure, compared_with_papers, paper_flops
from costmodel.protocols import published


@pytest.mark.parametrize(
    ("printed", "ours", "bar", "passed"),
    [
        ("7.7", 7.749, 0.0, True),
        ("7.7", 7.751, 0.0, False),
        ("7.7", 8.0, 0.04, True),
        ("7.7", 8.1, 0.04, False),
        ("7.7", 8.1, None, True),
    ],
)
def test_a_figure_passes_by_its_digits_or_bar(printed, ours, bar, passed):
    assert PrintedFigure(printed, ours, bar).passed == passed


def test_validate_prints_every_row_and_bound(run, rows):
    code, out, err = run("validate")
    assert (code, err) == (0, "")
    assert all(row.name in out for row in rows)
    assert out.count("T=512  ") == 8
    assert (out.count("pass"), out.count("FAIL")) == (7, 0)  # bytes of HH rows and held-out rows have no bound
    assert out.count("not identified by the rows: ") == 11
    assert (
        "SM+LN+G L=12 T=128                 fitted                       25.32 (equal)     8.21 (ours 7.89, -3.95%)"
        in out
    )


def test_validate_fails_when_an_error_is_beyond_its_bound(run, monkeypatch, tmp_path):
    text = published.TESTBED.read_text()
    (tmp_path / "off.yaml").write_text(text.replace("value: 1676.45", "value: 1776.45"))
    assert (tmp_path / "off.yaml").read_text() != text
    monkeypatch.setattr(published, "TESTBED", tmp_path / "off.yaml")
    code, out, _ = run("validate")
    assert code == 1
    assert "FAIL" in out


def test_errors_on_held_out_rows_are_what_is_known():
    rows = [row for row in compared_with_papers() if row.use.startswith("held out")]

    def greatest(what, use):
        return max(abs(row.figures[what].error) for row in rows if row.use == use)

    assert greatest("communication GB", "held out") == pytest.approx(0.0114, abs=5e-5)
    assert greatest("communication GB", "held out, HH") == pytest.approx(0.0156, abs=5e-5)
    assert greatest("latency min", "held out") == pytest.approx(0.0345, abs=5e-5)
    assert greatest("latency min", "held out, HH") == pytest.approx(0.1312, abs=5e-5)


def test_flops_written_out(row_graphs):
    # 12 layers, T = 128, d = 768: FFN 16 * 128 * 768^2 * 12 = 14.496 GFLOP, fused 2 * ... = 1.812, pruned by 6 0.906;
    # attention (8 * 128 * 768^2 + 3 * 128^2 * 768) * 12 = 7.701, simplified (4 ..., 2 ...) * 12 = 3.926.
    graphs = [row_graphs[f"{name} L=12 T=128"] for name in ("SM+LN+G", "SM+ScFuFFN_i6", "HH(SM+ScFuFFN)")]
    plain, pruned, simplified = map(paper_flops, graphs)
    assert plain == (16 * 128 * 768**2 * 12, (8 * 128 * 768**2 + 3 * 128**2 * 768) * 12)
    assert pruned[0] == 2 * 128 * 768**2 * 6
    assert simplified == (2 * 128 * 768**2 * 12, (4 * 128 * 768 + 2 * 128**2) * 768 * 12)
