import pytest

from costmodel.deployment.deploy import Deployment
from nas.report.price_lines import price_line
from nas.results.members import members
from search_spaces.bases import Dimensions, base_architecture
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
