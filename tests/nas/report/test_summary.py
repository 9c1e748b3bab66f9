import math
from pathlib import Path

from costmodel.cost import Budget
from nas.report.summary import against_parent, closing_lines, parent_lines
from nas.results.members import members
from nas.results.parent import ParentResult

BUDGET = Budget(latency_s=300.0)


PARENT = ParentResult(name="builtin", notation="SM+LN+G", val_loss=math.log(8.0), latency_s=400.0)


def lines(records, ngrams=None, parent=None) -> str:
    folder = Path("runs/x")
    plots = [folder / "plots" / "pareto.png"]
    more = {"folder": folder, "plots": plots, "ngrams": ngrams, "parent": parent}
    return "\n".join(closing_lines(records, BUDGET, num_layers=12, seq_len=128, **more))


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
    inside = make_record(0, role="baseline", notation="SM+LN+G", latency_s=280.0, perplexity=100.0, val_loss=4.605)
    assert "baseline: " in lines([inside, make_record(1, perplexity=110.0, val_loss=4.7)])


def test_says_what_the_parent_reaches_and_how_far_behind_the_best_member_is(make_record):
    text = lines([make_record(0, latency_s=300.0, val_loss=math.log(10.0), perplexity=10.0)], parent=PARENT)
    assert "parent builtin, SM+LN+G as it was given: perplexity 8.00, 6.67 min; best in budget is +25.0% in" in text
    assert "in perplexity, 25% less time" in text
    (dear,) = members([make_record(0, latency_s=600.0, val_loss=math.log(10.0), perplexity=10.0)])
    assert against_parent(PARENT, dear) == "+25.0% in perplexity, 50% more time"
    assert "best in budget" not in "".join(parent_lines(PARENT, ()))
    assert "parent" not in lines([make_record(0)])


def test_says_where_the_order_differs_from_the_papers_and_only_there(make_record):
    # printed at L=12, T=128: SM+ScFuFFN 3.48, SM+ScFuFFN_i6 3.54
    one = make_record(0, notation="SM+ScFuFFN", perplexity=20.0, val_loss=3.0)
    other = make_record(1, notation="SM+ScFuFFN_i6", perplexity=10.0, val_loss=2.3)
    text = lines([one, other])
    assert "the order differs from the papers' in 1 of 1 pairs" in text
    assert "here:   SM+ScFuFFN_i6 9.974 < SM+ScFuFFN 20.09" in text
    assert "pairs of published rows, beyond noise in 0:" in text
    assert "papers: SM+ScFuFFN 3.48 < SM+ScFuFFN_i6 3.54" in text
    same = make_record(1, notation="SM+ScFuFFN_i6", perplexity=30.0, val_loss=3.4)
    assert "order differs" not in lines([one, same])


def test_marks_a_price_range_that_crosses_the_budget(make_record):
    assert "crosses the budget" in lines([make_record(0, latency_s=299.0, latency_s_range=(280.0, 310.0))])
    assert "crosses the budget" not in lines([make_record(0, latency_s=299.0, latency_s_range=(280.0, 299.5))])


def test_members_have_their_seeds_and_what_is_within_noise_says_so(over_seeds):
    cheap = over_seeds(0, 3.0, 3.02, 3.04, latency_s=100.0)
    same = over_seeds(1, 2.99, 3.0, 3.01, latency_s=110.0)
    best = over_seeds(2, 2.5, 2.52, 2.54, latency_s=120.0)
    single = over_seeds(3, 2.4, latency_s=130.0)
    baseline = over_seeds(4, 2.51, role="baseline", latency_s=500.0)
    text = lines([*cheap, *same, *best, *single, *baseline])
    # pooled variance (2 * 0.02^2 + 2 * 0.01^2 + 2 * 0.02^2) / 6 = 0.0173^2; the first has the larger 0.02 of its own:
    # e^3.02 = 20.49, and half of e^(3.02 + 2 * 0.02 / sqrt 3) - e^(3.02 - 2 * 0.02 / sqrt 3) = 0.47
    assert "a0 SM+ScFuFFN: perplexity 20.49 ± 0.47 (3 seeds), 1.67 min, 1.00 GB\n" in text
    assert "20.09 ± 0.40 (3 seeds), 1.83 min, 1.00 GB, within noise of its cheaper neighbour\n" in text
    assert "12.43 ± 0.29 (3 seeds), 2.00 min, 1.00 GB\n" in text
    assert "11.02 (1 seed), 2.17 min, 1.00 GB\n" in text
    assert "best in budget is -10.4% in perplexity: better" in text
    assert "1 to 3 seeds" in text


def test_without_a_second_seed_no_difference_is_said(over_seeds):
    text = lines([*over_seeds(0, 3.0), *over_seeds(1, 1.0, role="baseline", latency_s=500.0)])
    assert "in perplexity: no difference shown" in text
    assert "one seed, which shows no difference" in text
    assert "within noise" not in text


def test_a_member_of_which_a_seed_diverged_is_named(over_seeds):
    assert "not on the front: a0 SM+ScFuFFN: 1 of 3 seeds diverged; perplexity of the others 20.09" in lines(
        [*over_seeds(0, 3.0, 3.0, None), *over_seeds(1, 2.0)]
    )


def test_the_floor_is_one_line_and_who_is_above_the_trigram_is_marked(make_record, ngrams):
    """Perplexities 30 and 17 on the front, 25 beyond the budget; the trigram's is 18."""
    records = [
        make_record(0, latency_s=100.0, perplexity=30.0, val_loss=math.log(30)),
        make_record(1, latency_s=200.0, perplexity=17.0, val_loss=math.log(17)),
        make_record(2, latency_s=400.0, perplexity=25.0, val_loss=math.log(25), role="baseline"),
    ]
    text = lines(records, ngrams).splitlines()
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


def test_a_member_is_marked_by_its_mean_beside_what_noise_says(over_seeds, ngrams):
    """The trigram is at ln 18; the first two have means above it and a seed below; the third the other way round."""
    trigram = math.log(18)
    above = over_seeds(0, trigram - 0.1, trigram + 0.3, latency_s=100.0)
    in_noise = over_seeds(1, trigram - 0.15, trigram + 0.25, latency_s=200.0)
    below = over_seeds(2, trigram + 0.1, trigram - 0.5, latency_s=250.0)
    found = [line for line in lines([*above, *in_noise, *below], ngrams).splitlines() if line.startswith("  a")]
    assert found[0].endswith("(2 seeds), 1.67 min, 1.00 GB; knows less than a trigram")
    assert found[1].endswith("1.00 GB, within noise of its cheaper neighbour; knows less than a trigram")
    assert found[2].endswith("1.00 GB, within noise of its cheaper neighbour")


def test_a_run_without_a_floor_says_nothing_of_it(make_record):
    text = lines([make_record(0, perplexity=300.0, val_loss=math.log(300))])
    assert "gram" not in text
    assert "floor" not in text
