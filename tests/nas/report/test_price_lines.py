import pytest

from costmodel.deployment.deploy import Deployment
from costmodel.protocols import load_pricer
from nas.report.price_lines import outside, price_line
from nas.results.members import members
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.workload import Workload

BASE = base_architecture("gpt2-small")
WORK = Workload(prompt_len=128)


@pytest.fixture
def found(make_record):
    return members([make_record(0, notation="SM+LN+R", placement="12xLSLRo", deployed=None)])


def test_says_whom_a_price_trusts(found):
    published = "prices: protocol published (2 parties, semi-honest, dishonest majority)"
    assert price_line(found, BASE, "published", WORK) == published
    assert price_line((), BASE, "published", WORK) == published
    assert price_line(found, BASE, "semi2k", WORK).endswith("dishonest majority, trusted dealer)")


def test_says_what_is_extrapolated(found):
    narrow = base_architecture("gpt2-small", Dimensions(d_model=12))
    outside = "; extrapolated: d_model 12 (data: 768), d_ff 48 (data: 3072)"
    assert price_line(found, narrow, "published", WORK).endswith(outside)
    last = Workload(prompt_len=128, deployment=Deployment(projection="last"))
    assert price_line(found, BASE, "published", last).endswith("; extrapolated: projection last (data: all)")
    assert "extrapolated" not in price_line(found, narrow, "aby3", WORK)


def test_a_dimension_outside_is_named_once_with_all_its_values(make_record):
    made = [make_record(i, placement=f"{12 - i}xLSLRo-{i}xooooo", deployed=f"{12 - i}xLSLRo") for i in (1, 2, 10)]
    line = price_line(members(made), BASE, "published", WORK)
    assert line.endswith("; extrapolated: num_layers 2, 10, 11 (data: 12 to 18)")


def test_of_ops_beyond_their_measurements_the_most_is_said():
    pricer = load_pricer("cheetah")
    graphs = [lower(BASE, length) for length in (128, 256)]
    most = dict(text.split() for text in pricer.extrapolated(graphs[1]))
    assert f"Softmax {most['Softmax']}," in outside(pricer, graphs)
    assert outside(pricer, graphs).count("Softmax") == 1
