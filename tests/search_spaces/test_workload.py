import pytest

from costmodel.deployment.deploy import Deployment
from costmodel.estimate import estimate, estimate_generation
from costmodel.protocols import load_pricer
from search_spaces.bases import BASES
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import parse
from search_spaces.pricing import price_architecture
from search_spaces.workload import Workload

TINY = parse("SM(t)+LN+R", BASES["tiny"]).architecture  # context 128


def test_every_other_token_is_decoded_against_those_before_it():
    """The prompt gives the first of three; the second is decoded as token 9, the third as token 10."""
    last = Deployment(projection="last", embedding="lookup")
    decode = Deployment(phase="decode", embedding="lookup")
    graphs = [lower(TINY, 8, last), lower(TINY, 9, decode), lower(TINY, 10, decode)]
    assert Workload(prompt_len=8, new_tokens=3, deployment=last).graphs(TINY) == graphs
    assert Workload(prompt_len=8, deployment=last).graphs(TINY) == graphs[:1]
    assert Workload(prompt_len=9, deployment=decode).graphs(TINY) == graphs[1:2]  # one decoded token alone


def test_prompt_and_new_tokens_must_fit_the_context_and_be_some():
    """The last new token is not read again: 100 + 29 - 1 tokens are the whole context."""
    decode = Deployment(phase="decode")
    assert len(Workload(prompt_len=100, new_tokens=29).graphs(TINY)) == 29
    for make, message in (
        (lambda: Workload(prompt_len=8, new_tokens=0, deployment=decode), "--new-tokens must be at least 1, but got 0"),
        (lambda: Workload(prompt_len=8, new_tokens=2, deployment=decode), "--new-tokens .*with phase decode"),
        (
            lambda: Workload(prompt_len=100, new_tokens=30).graphs(TINY),
            "must fit the context of 128 tokens, but got a prompt of 100 and 30 new tokens; shorten either",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("cost_of", ["folded", "unfolded"])
def test_a_price_is_the_mean_over_the_new_tokens(cost_of):
    """Under semi2k, by hand: the prompt, then tokens 9 and 10, a third each; rounds and messages too."""
    pricer = load_pricer("semi2k")
    run = deployed(TINY) if cost_of == "folded" else TINY
    graphs = [lower(run, 8), *(lower(run, length, Deployment(phase="decode")) for length in (9, 10))]
    totals = [estimate(graph, pricer).total for graph in graphs]
    price = price_architecture(TINY, pricer, Workload(prompt_len=8, new_tokens=3), cost_of).price
    for name in ("latency_s", "sent_bytes", "rounds", "messages", "online_bytes", "setup_bytes"):
        assert getattr(price, name) == pytest.approx(sum(getattr(total, name) for total in totals) / 3)
    assert totals[1].sent_bytes < totals[2].sent_bytes < totals[0].sent_bytes


@pytest.mark.parametrize("cost_of", ["folded", "unfolded"])
def test_a_range_is_the_mean_over_the_new_tokens(cost_of):
    pricer, architecture = load_pricer(), parse("SM+LN+R", BASES["tiny"]).architecture
    run = deployed(architecture) if cost_of == "folded" else architecture
    graphs = [lower(run, 8), lower(run, 9, Deployment(phase="decode"))]
    together = estimate_generation(graphs, pricer).whole.latency_s_range
    price, latency_range = price_architecture(architecture, pricer, Workload(prompt_len=8, new_tokens=2), cost_of)
    assert latency_range == pytest.approx((together[0] / 2, together[1] / 2))
    assert latency_range[0] <= price.latency_s <= latency_range[1]


def test_what_is_folded_is_priced_as_it_is(pricer):
    folded = deployed(parse("SM+LN+G", BASES["tiny"]).architecture)
    both = [price_architecture(folded, pricer, Workload(prompt_len=8), cost_of) for cost_of in ("folded", "unfolded")]
    assert both[0] == both[1]
