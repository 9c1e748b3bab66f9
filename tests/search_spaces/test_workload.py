import pytest

from costmodel.deployment.deploy import Deployment
from costmodel.estimate import estimate
from costmodel.protocols import load_pricer
from search_spaces.bases import BASES
from search_spaces.budget.priced_space import Accounting
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import parse
from search_spaces.pricing import price_architecture
from search_spaces.workload import Workload

TINY = parse("SM(t)+LN+R", BASES["tiny"]).architecture  # context 128


def test_every_other_token_is_decoded_against_those_before_it() -> None:
    """The prompt gives the first of three; the second is decoded as token 9, the third as token 10."""
    last = Deployment(projection="last", embedding="lookup")
    decode = Deployment(phase="decode", embedding="lookup")
    graphs = [lower(TINY, 8, last), lower(TINY, 9, decode), lower(TINY, 10, decode)]
    assert Workload(prompt_len=8, new_tokens=3, deployment=last).graphs(TINY) == graphs
    assert Workload(prompt_len=8, deployment=last).graphs(TINY) == graphs[:1]
    assert Workload(prompt_len=9, deployment=decode).graphs(TINY) == graphs[1:2]  # one decoded token alone


@pytest.mark.parametrize(("new_tokens", "message"), [(0, "must be at least 1, but got 0"), (2, "with phase decode")])
def test_impossible_new_tokens_are_refused(new_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"--new-tokens .*{message}"):
        Workload(prompt_len=8, new_tokens=new_tokens, deployment=Deployment(phase="decode"))


def test_prompt_and_new_tokens_must_fit_the_context() -> None:
    """The last new token is not read again: 100 + 29 - 1 tokens are the whole context."""
    assert len(Workload(prompt_len=100, new_tokens=29).graphs(TINY)) == 29
    message = "must fit the context of 128 tokens, but got a prompt of 100 and 30 new tokens; shorten either"
    with pytest.raises(ValueError, match=message):
        Workload(prompt_len=100, new_tokens=30).graphs(TINY)


@pytest.mark.parametrize("accounting", ["deployed", "written"])
def test_a_price_is_the_mean_over_the_new_tokens(accounting: Accounting) -> None:
    """Under semi2k, by hand: the prompt, then tokens 9 and 10, a third each; rounds and messages too."""
    pricer = load_pricer("semi2k")
    run = deployed(TINY) if accounting == "deployed" else TINY
    graphs = [lower(run, 8), *(lower(run, length, Deployment(phase="decode")) for length in (9, 10))]
    totals = [estimate(graph, pricer).total for graph in graphs]
    price = price_architecture(TINY, pricer, Workload(prompt_len=8, new_tokens=3), accounting).price
    for name in ("latency_s", "sent_bytes", "rounds", "messages", "online_bytes", "setup_bytes"):
        assert getattr(price, name) == pytest.approx(sum(getattr(total, name) for total in totals) / 3)
    assert totals[1].sent_bytes < totals[2].sent_bytes < totals[0].sent_bytes
