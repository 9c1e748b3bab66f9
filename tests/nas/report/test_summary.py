import math
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from costmodel.estimate import outside_data
from costmodel.protocols import load_pricer
from nas.report import progress
from nas.report.progress import line, share_progress, table
from nas.report.summary import against_parent, closing_lines, parent_lines, price_line, searcher_lines
from nas.run.folder import ParentResult
from nas.run.members import members
from nas.run.run import Run
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from tests.conftest import made_record, over_seeds

BASE = base_architecture("gpt2-small")
PARENT = ParentResult(name="builtin", notation="SM+LN+G", val_loss=math.log(8.0), latency_s=400.0)


def below(*perplexities, role="candidate", **changes):
    """Records of candidates, dearer and dearer by a second, of so many perplexities."""
    return [
        made_record(index, latency_s=100.0 + index, val_loss=math.log(value), perplexity=value, role=role, **changes)
        for index, value in enumerate(perplexities)
    ]


def baseline(perplexity, latency_s):
    (record,) = below(perplexity, role="baseline", notation="SM+LN+G")
    return replace(record, index=9, arch_id="a9", candidate_id="c9", trial_id="t9-s0-a0", latency_s=latency_s)


def named(*perplexities):
    """Printed at L=12, T=128: SM+ScFuFFN 3.48, SM+ScFuFFN_i6 3.54."""
    names = ("SM+ScFuFFN", "SM+ScFuFFN_i6")
    return [replace(record, notation=name) for record, name in zip(below(*perplexities), names, strict=True)]


def seeds(*members):
    """Of (losses, seconds, more), a candidate each."""
    made = [over_seeds(index, *losses, latency_s=s, **more) for index, (losses, s, more) in enumerate(members)]
    return [record for of_one in made for record in of_one]


HERE, THERE = (((0.5, loss - 0.02), (0.5, loss + 0.02)) for loss in (3.0, 2.9))
ROLE = {"role": "baseline"}
# what a run with these records ends with; baselines are outside the budget of 300 s but for one
CLOSED = {
    "a short front": below(20.0, tokens=262_144, scale="proxy", width=96, tokenizer="bpe-2048"),
    "a front": below(20.0, 19.0, 18.0, 17.0),
    "a baseline outside": [*below(110.0), baseline(100.0, 480.0)],
    "a baseline inside": [*below(110.0), baseline(100.0, 280.0)],
    "another order than the papers'": named(20.0, 10.0),
    "the papers' order": named(20.0, 30.0),
    "a range across the budget": [replace(below(20.0)[0], latency_s=299.0, latency_s_range=(280.0, 310.0))],
    "a range within the budget": [replace(below(20.0)[0], latency_s=299.0, latency_s_range=(280.0, 299.5))],
    # pooled variance (2 * 0.02^2 + 2 * 0.01^2 + 2 * 0.02^2) / 6 = 0.0173^2; the first has the larger 0.02 of its own:
    # e^3.02 = 20.49, and half of e^(3.02 + 2 * 0.02 / sqrt 3) - e^(3.02 - 2 * 0.02 / sqrt 3) = 0.47
    "seeds": seeds(
        ((3.0, 3.02, 3.04), 100.0, {}),
        ((2.99, 3.0, 3.01), 110.0, {}),
        ((2.5, 2.52, 2.54), 120.0, {}),
        ((2.4,), 130.0, {}),
        ((2.51,), 500.0, ROLE),
    ),
    # an error of 0.02, and of 0.80 in perplexity
    "documents": seeds(((3.0,), 100.0, {"documents": HERE}), ((2.9,), 500.0, {"documents": THERE, **ROLE})),
    "nothing to test by": seeds(((3.0,), 100.0, {}), ((1.0,), 500.0, ROLE)),
    "a seed that diverged": seeds(((3.0, 3.0, None), 100.0, {}), ((2.0,), 100.0, {})),
    "a floor": [*below(30.0, 17.0), baseline(25.0, 400.0)],  # the trigram's is 18
}


@pytest.fixture
def lines(make_run):
    def text_of(records, ngrams=None, parent=None) -> str:
        run = make_run(records, meta={"ngrams": ngrams, "parent": parent, "base": BASE})
        text = "\n".join(closing_lines(run, [run.folder / "plots" / "pareto.png"]))
        return text.replace(str(run.folder), "RUN")

    return text_of


@pytest.mark.parametrize("name", CLOSED)
def test_what_a_run_ends_with(lines, snapshot, ngrams, name):
    snapshot(f"closing, {name}", lines(CLOSED[name], ngrams if name == "a floor" else None))


def test_says_what_the_parent_reaches_and_how_far_behind_the_best_member_is(lines, make_run, make_record):
    text = lines([make_record(0, latency_s=300.0, val_loss=math.log(10.0), perplexity=10.0)], parent=PARENT)
    assert "parent builtin, SM+LN+G unmodified: perplexity 8.00, 6.67 min; best in budget is +25.0% in" in text
    assert "in perplexity, 25% less time" in text
    (dear,) = members([make_record(0, latency_s=600.0, val_loss=math.log(10.0), perplexity=10.0)])
    assert against_parent(PARENT, dear) == "+25.0% in perplexity, 50% more time"
    paired = replace(PARENT, documents=((0.5, math.log(8.0)), (0.5, math.log(8.0))))
    (unlike,) = members([replace(dear.first, documents=((0.5, math.log(9.0)), (0.5, math.log(10.0**2 / 9))))])
    # two documents, half as much each, ln(10/9) from the mean: an error of sqrt(2 * 2 * 0.25) ln(10/9)
    assert against_parent(paired, unlike).startswith(f"+25.0% ± {1.25 * math.sinh(2 * math.log(10 / 9)):.1%} in")
    assert "best in budget" not in "".join(parent_lines(make_run(meta={"parent": PARENT})))
    assert "\nparent" not in lines([make_record(0)])


@pytest.fixture
def priced(make_run, make_record):
    """Makes the line of a run with a member on its front; `empty`: with none."""
    member = make_record(0, notation="SM+LN+R", placement="12xLSLRo")

    def line(base=BASE, *, empty: bool = False, **config) -> str:
        return price_line(make_run(() if empty else [member], meta={"base": base}, **config))

    return line


def test_says_whom_a_price_trusts_and_what_is_extrapolated(priced):
    published = "costs: protocol published (2 parties, semi-honest, dishonest majority)"
    assert priced() == priced(empty=True) == published
    assert priced(protocol="semi2k").endswith("dishonest majority, trusted dealer)")
    narrow = base_architecture("gpt2-small", Dimensions(d_model=12))
    assert priced(narrow).endswith("; extrapolated: d_model 12 (data: 768), d_ff 48 (data: 3072)")
    assert priced(projection="last").endswith("; extrapolated: projection last (data: all)")
    assert "extrapolated" not in priced(narrow, protocol="aby3")


def test_a_dimension_outside_is_named_once_and_of_ops_the_most_beyond(make_run, make_record):
    made = [
        make_record(i, placement=f"{12 - i}xLSLRo-{i}xooooo", latency_s=100.0 - i, val_loss=1.0 + i) for i in (1, 2, 10)
    ]
    line = price_line(make_run(made, meta={"base": BASE}))
    assert line.endswith("; extrapolated: num_layers 2, 10, 11 (data: 12 to 18)")
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
        records += [replace(proposed, is_proxy=True, expected_loss=2.0), proposed, end]
    (first,) = searcher_lines(make_run(records))
    assert "R^2 -5.40 at proposal (9 candidates), R^2 0.85 after a short training (9 candidates)" in first
    assert searcher_lines(make_run(records[:12])) == []


def shown(run: Run) -> tuple[str, str]:
    """The line and the table of a run's progress."""
    console = Console(record=True, width=200)
    console.print(table(run, None))
    return line(run, None), console.export_text()


@pytest.mark.parametrize("trained", [True, False])
def test_the_trigram_stands_beside_the_best_perplexity(make_run, make_record, ngrams, trained):
    records = [make_record(0, val_loss=math.log(21.5))] if trained else []
    for text in shown(make_run(records, meta={"ngrams": ngrams})):
        assert f"{'21.50' if trained else '-'} (trigram 18.00)" in text
    for text in shown(make_run(records)):
        assert ("21.50" in text) == trained
        assert "trigram" not in text


def test_candidates_that_fail_early_do_not_take_the_place_of_final_trainings(make_run, make_record):
    failed = [make_record(index, status="failed", is_proxy=True, val_loss=None, perplexity=None) for index in (1, 2)]
    run = make_run([make_record(0), *failed], num_trials=2)
    assert line(run, None).startswith("3/4 ended (1 completed, 0 diverged, 2 failed)")


@pytest.mark.parametrize(("left_s", "eta"), [(90.0, ", ETA 1.50 min\n"), (-1.0, "\n"), (math.inf, "\n")])
def test_a_run_is_expected_to_end_with_its_time_at_the_latest(make_run, make_record, left_s, eta):
    file = StringIO()
    with progress.shown(Console(file=file), lambda: make_run([make_record(0)], num_trials=2), lambda: left_s):
        pass
    assert file.getvalue().endswith(f"best perplexity in budget 7.39{eta}")


def test_progress_is_told_in_lines_where_no_terminal_shows_a_bar(monkeypatch):
    now = iter((0.0, 20.0, 60.0, 70.0))  # the first share was done before
    monkeypatch.setattr("nas.report.progress.time.monotonic", lambda: next(now))
    file = StringIO()
    with share_progress(Console(file=file), "training") as tell:
        for share in (0.1, 0.25, 0.5):
            tell(share)
    assert file.getvalue() == "training: 25%, ETA 3.33 min\n"
