import pytest

from costmodel.deployment.deploy import Deployment
from costmodel.estimate import Pricer, estimate_generation
from costmodel.protocols import load_pricer
from search_spaces.bases import BASES
from search_spaces.budget.priced_space import Accounting
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import parse
from search_spaces.pricing import price_architecture
from search_spaces.workload import Workload

GPT2, TINY = BASES["gpt2-small"], BASES["tiny"]


@pytest.mark.parametrize("accounting", ["deployed", "written"])
def test_a_range_is_the_mean_over_the_new_tokens(accounting: Accounting) -> None:
    pricer, architecture = load_pricer(), parse("SM+LN+R", TINY).architecture
    run = deployed(architecture) if accounting == "deployed" else architecture
    graphs = [lower(run, 8), lower(run, 9, Deployment(phase="decode"))]
    together = estimate_generation(graphs, pricer).whole.latency_s_range
    assert together is not None
    price, latency_range = price_architecture(architecture, pricer, Workload(prompt_len=8, new_tokens=2), accounting)
    assert latency_range is not None
    assert latency_range == pytest.approx((together[0] / 2, together[1] / 2))
    assert latency_range[0] <= price.latency_s <= latency_range[1]


def test_what_is_folded_is_priced_as_it_is(pricer: Pricer) -> None:
    folded = deployed(parse("SM+LN+G", TINY).architecture)
    both = [
        price_architecture(folded, pricer, Workload(prompt_len=8), accounting) for accounting in ("deployed", "written")
    ]
    assert both[0] == both[1]
