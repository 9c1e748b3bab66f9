import math
from pathlib import Path

from costmodel.cost import Budget
from nas.report.summary import closing_lines

BUDGET = Budget(latency_s=300.0)


def lines(records, floors=None) -> str:
    folder = Path("runs/x")
    plots = [folder / "plots" / "pareto.png"]
    return "\n".join(
        closing_lines(records, BUDGET, num_layers=12, seq_len=128, folder=folder, plots=plots, floors=floors)
    )


def test_says_scale_tokens_tokenizer_and_places(make_record):
    text = lines([make_record(0, tokens=262_144, scale="proxy", width=96, tokenizer="bpe-2048")])
    assert "scale proxy: width 96, 262,144 training tokens a candidate, one seed" in text
    assert "perplexities are of bpe-2048, validation, and of this scale only" in text
    assert "runs/x/plots/pareto.png" in text
    assert "runs/x/architectures/" in text


def test_says_that_a_front_is_short(make_record):
    assert "fewer than 4 members" in lines([make_record(0)])
    longer = [make_record(i, latency_s=100.0 + i, val_loss=3.0 - i / 10, perplexity=20.0 - i) for i in range(4)]
    assert "fewer than 4 members" not in lines(longer)


def test_shows_a_baseline_outside_the_budget_with_the_observed_gap(make_record):
    baseline = make_record(0, role="baseline", notation="SM+LN+G", latency_s=480.0, perplexity=100.0, val_loss=4.605)
    text = lines([baseline, make_record(1, perplexity=110.0, val_loss=4.7)])
    assert "baseline outside the budget" in text
    assert "best in budget is +10.0% in perplexity" in text


def test_says_where_the_order_differs_from_the_papers_and_only_there(make_record):
    # printed at L=12, T=128: SM+ScFuFFN 3.48, SM+ScFuFFN_i6 3.54
    one = make_record(0, notation="SM+ScFuFFN", perplexity=20.0, val_loss=3.0)
    other = make_record(1, notation="SM+ScFuFFN_i6", perplexity=10.0, val_loss=2.3)
    text = lines([one, other])
    assert "the order differs from the papers' in 1 of 1 pairs" in text
    assert "here:   SM+ScFuFFN_i6 10 < SM+ScFuFFN 20" in text
    assert "papers: SM+ScFuFFN 3.48 < SM+ScFuFFN_i6 3.54" in text
    same = make_record(1, notation="SM+ScFuFFN_i6", perplexity=30.0, val_loss=3.4)
    assert "order differs" not in lines([one, same])


def test_marks_a_price_range_that_crosses_the_budget(make_record):
    assert "crosses the budget" in lines([make_record(0, latency_s=299.0, latency_s_range=(280.0, 310.0))])
    assert "crosses the budget" not in lines([make_record(0, latency_s=299.0, latency_s_range=(280.0, 299.5))])


def test_the_floor_is_one_line_and_who_is_above_the_trigram_is_marked(make_record, floors):
    """Perplexities 30 and 17 on the front, 25 beyond the budget; the trigram's is 18."""
    records = [
        make_record(0, latency_s=100.0, perplexity=30.0, val_loss=math.log(30)),
        make_record(1, latency_s=200.0, perplexity=17.0, val_loss=math.log(17)),
        make_record(2, latency_s=400.0, perplexity=25.0, val_loss=math.log(25), role="baseline"),
    ]
    text = lines(records, floors).splitlines()
    (floor,) = (line for line in text if line.startswith("floor"))
    assert floor == (
        "floor, perplexity of n-gram models of 524,288 training tokens: "
        "unigram 200, bigram 40, trigram 18, 4-gram 15, 5-gram 14"
    )
    (above,) = (line for line in text if "perplexity 30.00" in line)
    (below,) = (line for line in text if "perplexity 17.00" in line)
    (baseline,) = (line for line in text if "perplexity 25.00" in line)
    assert above.endswith("; knows less than a trigram")
    assert "trigram" not in below
    assert "; knows less than a trigram; best in budget is" in baseline


def test_a_run_without_a_floor_says_nothing_of_it(make_record):
    text = lines([make_record(0, perplexity=300.0, val_loss=math.log(300))])
    assert "gram" not in text
    assert "floor" not in text
