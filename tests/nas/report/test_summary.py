import math
from dataclasses import replace

import pytest

from costmodel.estimate import outside_data
from costmodel.protocols import load_pricer
from nas.report.summary import (
    against_parent,
    closing_lines,
    parent_lines,
    price_line,
    searcher_lines,
)
from nas.run.folder import ParentResult
from nas.run.members import members
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower

BASE = base_architecture("gpt2-small")


PARENT = ParentResult(name="builtin", notation="SM+LN+G", val_loss=math.log(8.0), latency_s=400.0)


@pytest.fixture
def lines(make_run):
    def text_of(records, ngrams=None, parent=None) -> str:
        run = make_run(records, meta={"ngrams": ngrams, "parent": parent, "base": BASE})
        return "\n".join(closing_lines(run, [run.folder / "plots" / "pareto.png"]))

    return text_of


def test_says_scale_tokens_tokenizer_and_places(lines, make_record):
    text = lines([make_record(0, tokens=262_144, scale="proxy", width=96, tokenizer="bpe-2048")])
    assert "scale proxy: width 96, 262,144 training tokens a candidate, one seed" in text
    assert "perplexities are of bpe-2048, validation, and of this scale only" in text
    assert "/plots/pareto.png" in text
    assert "/architectures/" in text


def test_says_that_a_front_is_short(lines, make_record):
    assert "fewer than 4 members" in lines([make_record(0)])
    longer = [make_record(i, latency_s=100.0 + i, val_loss=3.0 - i / 10, perplexity=20.0 - i) for i in range(4)]
    assert "fewer than 4 members" not in lines(longer)


def test_shows_a_baseline_outside_the_budget_with_the_observed_gap(lines, make_record):
    baseline = make_record(0, role="baseline", notation="SM+LN+G", latency_s=480.0, perplexity=100.0, val_loss=4.605)
    text = lines([baseline, make_record(1, perplexity=110.0, val_loss=4.7)])
    assert "baseline outside the budget" in text
    assert "best in budget is +10.0% in perplexity" in text
    inside = make_record(0, role="baseline", notation="SM+LN+G", latency_s=280.0, perplexity=100.0, val_loss=4.605)
    assert "baseline: " in lines([inside, make_record(1, perplexity=110.0, val_loss=4.7)])


def test_says_what_the_parent_reaches_and_how_far_behind_the_best_member_is(lines, make_run, make_record):
    text = lines([make_record(0, latency_s=300.0, val_loss=math.log(10.0), perplexity=10.0)], parent=PARENT)
    assert "parent builtin, SM+LN+G as it was given: perplexity 8.00, 6.67 min; best in budget is +25.0% in" in text
    assert "in perplexity, 25% less time" in text
    (dear,) = members([make_record(0, latency_s=600.0, val_loss=math.log(10.0), perplexity=10.0)])
    assert against_parent(PARENT, dear) == "+25.0% in perplexity, 50% more time"
    paired = replace(PARENT, documents=((0.5, math.log(8.0)), (0.5, math.log(8.0))))
    (unlike,) = members([replace(dear.first, documents=((0.5, math.log(9.0)), (0.5, math.log(10.0**2 / 9))))])
    # two documents, half as much each, ln(10/9) from the mean: an error of sqrt(2 * 2 * 0.25) ln(10/9)
    assert against_parent(paired, unlike).startswith(f"+25.0% ± {1.25 * math.sinh(2 * math.log(10 / 9)):.1%} in")
    assert "best in budget" not in "".join(parent_lines(make_run(meta={"parent": PARENT})))
    assert "\nparent" not in lines([make_record(0)])


def test_says_where_the_order_differs_from_the_papers_and_only_there(lines, make_record):
    # printed at L=12, T=128: SM+ScFuFFN 3.48, SM+ScFuFFN_i6 3.54
    record = make_record(0, notation="SM+ScFuFFN", perplexity=20.0, val_loss=3.0)
    other = make_record(1, notation="SM+ScFuFFN_i6", perplexity=10.0, val_loss=2.3)
    text = lines([record, other])
    assert "the order differs from the papers' in 1 of 1 pairs" in text
    assert "here:   SM+ScFuFFN_i6 9.974 < SM+ScFuFFN 20.09" in text
    assert "pairs of published rows, beyond noise in 0:" in text
    assert "papers: SM+ScFuFFN 3.48 < SM+ScFuFFN_i6 3.54" in text
    same = make_record(1, notation="SM+ScFuFFN_i6", perplexity=30.0, val_loss=3.4)
    assert "order differs" not in lines([record, same])


def test_marks_a_price_range_that_crosses_the_budget(lines, make_record):
    assert "crosses the budget" in lines([make_record(0, latency_s=299.0, latency_s_range=(280.0, 310.0))])
    assert "crosses the budget" not in lines([make_record(0, latency_s=299.0, latency_s_range=(280.0, 299.5))])


def test_members_have_their_seeds_and_what_is_within_noise_says_so(lines, over_seeds):
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
    assert "11.02 ± 0.38 (1 seed), 2.17 min, 1.00 GB\n" in text  # that of a trial, over the seeds of the others
    assert "best in budget is -10.4% in perplexity: better" in text
    assert "1 to 3 seeds (± two standard errors over seeds; better and worse" in text


def test_with_one_seed_documents_test_and_the_lines_say_so(lines, over_seeds):
    here, there = (((0.5, loss - 0.02), (0.5, loss + 0.02)) for loss in (3.0, 2.9))
    baseline = over_seeds(1, 2.9, documents=there, role="baseline", latency_s=500.0)
    text = lines([*over_seeds(0, 3.0, documents=here), *baseline])
    assert "best in budget is +10.5% in perplexity: worse over documents, seeds not repeated" in text
    assert "perplexity 20.09 ± 0.80 (1 seed)" in text  # an error of 0.02
    assert (
        "one seed (± two standard errors over validation documents; seeds not repeated; differences, document by"
        in text
    )


def test_where_nothing_tests_a_difference_that_is_said(lines, over_seeds):
    text = lines([*over_seeds(0, 3.0), *over_seeds(1, 1.0, role="baseline", latency_s=500.0)])
    assert "in perplexity: not tested" in text
    assert "one seed, which shows no difference" in text
    assert "within noise" not in text


def test_a_member_of_which_a_seed_diverged_is_named(lines, over_seeds):
    assert "not on the front: a0 SM+ScFuFFN: 1 of 3 seeds diverged; perplexity of the others 20.09" in lines(
        [*over_seeds(0, 3.0, 3.0, None), *over_seeds(1, 2.0)]
    )


def test_the_floor_is_one_line_and_who_is_above_the_trigram_is_marked(lines, make_record, ngrams):
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


@pytest.fixture
def priced(make_run, make_record):
    """Makes the line of a run with a member on its front; `empty`: with none."""
    member = make_record(0, notation="SM+LN+R", placement="12xLSLRo")

    def line(base=BASE, *, empty: bool = False, **config) -> str:
        return price_line(make_run(() if empty else [member], meta={"base": base}, **config))

    return line


def test_says_whom_a_price_trusts_and_what_is_extrapolated(priced):
    published = "prices: protocol published (2 parties, semi-honest, dishonest majority)"
    assert priced() == priced(empty=True) == published
    assert priced(protocol="semi2k").endswith("dishonest majority, trusted dealer)")
    narrow = base_architecture("gpt2-small", Dimensions(d_model=12))
    assert priced(narrow).endswith("; extrapolated: d_model 12 (data: 768), d_ff 48 (data: 3072)")
    assert priced(projection="last").endswith("; extrapolated: projection last (data: all)")
    assert "extrapolated" not in priced(narrow, protocol="aby3")


def test_a_dimension_outside_is_named_once_with_all_its_values(make_run, make_record):
    """Each costs more than the one before it, and loses less."""
    made = [
        make_record(i, placement=f"{12 - i}xLSLRo-{i}xooooo", latency_s=100.0 - i, val_loss=1.0 + i) for i in (1, 2, 10)
    ]
    line = price_line(make_run(made, meta={"base": BASE}))
    assert line.endswith("; extrapolated: num_layers 2, 10, 11 (data: 12 to 18)")


def test_of_ops_beyond_their_measurements_the_most_is_said():
    pricer = load_pricer("cheetah")
    graphs = [lower(BASE, length) for length in (128, 256)]
    most = dict(text.split() for text in pricer.extrapolated(graphs[1]))
    assert f"Softmax {most['Softmax']}," in outside_data(pricer, graphs)
    assert outside_data(pricer, graphs).count("Softmax") == 1


def test_says_how_well_ends_were_expected(make_run, make_record):
    records = []
    for index in range(9):
        end = make_record(index, latency_s=100.0 + index, val_loss=3.0 - index / 10)
        proposed = replace(end, event="proposed", status="proposed", val_loss=None, expected_loss=3.1 - index / 10)
        records += [replace(proposed, is_look=True, expected_loss=2.0), proposed, end]
    (first,) = searcher_lines(make_run(records))
    assert "R^2 -5.40 when first proposed (9 candidates), R^2 0.85 after a look (9 candidates)" in first
    assert searcher_lines(make_run(records[:12])) == []
