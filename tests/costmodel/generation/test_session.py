"""Parties as processes: what they compute and send, and how they end."""

import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from costmodel.engine.runtimes import SERVER, dealt, owner_of_weights, packed
from costmodel.errors import StoppedError, UserError
from costmodel.generation.assignment import part_of
from costmodel.generation.clear import ClearRun
from costmodel.generation.greedy import generate, sequences
from costmodel.generation.plan import Plan, graphs
from costmodel.generation.predicted import predictions
from costmodel.generation.session import await_ready, on_loopback, started
from costmodel.pricing.asked import ModelFlags
from costmodel.pricing.price import price
from costmodel.protocols.primitives import EngineSetting

pytestmark = pytest.mark.needs_engine

PROMPT = [3, 14, 15, 9, 26]
CHEETAH_TOLERANCE = 1e-3  # compressed ciphertexts vary in size


def answered(client, weights, end=None):
    """Every token with its prediction, and what the parties said of themselves."""
    steps = graphs(client.graph_of, client.plan)
    expected = predictions(steps, client.protocol, client.setting, "loopback")
    with started(on_loopback(client)) as session:
        said = await_ready(session)
        found = list(generate(session, steps, PROMPT, ClearRun(weights), end))
        session.leave()
    return list(zip(found, expected, strict=False)), said


@pytest.mark.parametrize(
    ("protocol", "setting"),
    [
        ("semi2k", {}),
        ("semi2k", {"weight_masks": "kept"}),
        ("aby3", {}),
        ("aby3", {"weights": "server"}),
        ("cheetah", {}),
    ],
)
def test_tokens_cost_what_is_predicted_and_are_those_in_the_clear(client, weights, protocol, setting):
    asked = client(protocol, **setting)
    found, said = answered(asked, weights)
    assert len(found) == 3
    for token, expected in found:
        assert token.agreement.num_equal == 1
        assert token.agreement.largest_error < 0.01
        assert token.cost.messages == expected.messages
        if protocol == "cheetah":
            assert token.cost.sent_bytes == pytest.approx(expected.sent_bytes, rel=CHEETAH_TOLERANCE)
        else:
            assert token.cost.sent_bytes == expected.sent_bytes
    if protocol != "cheetah":  # an estimate has shares of batches that a session makes whole
        (architecture,) = asked.graph_of.args
        whole: ModelFlags = {"seq_len": 5, "projection": "last", "rows": "needed"}
        priced = price(architecture, protocol=protocol, new_tokens=3, **whole, **setting)
        assert [each.sent_bytes for each in priced.tokens.by_token] == [token.cost.sent_bytes for token, _ in found]
        assert [each.messages for each in priced.tokens.by_token] == [token.cost.messages for token, _ in found]
    assert len({each["agreed"] for each in said.values()}) == 1
    clear = ClearRun(weights)  # greedy, in the clear
    tokens, alone = np.array(PROMPT), []
    for graph in graphs(asked.graph_of, asked.plan):
        alone.append(int(clear.logits(graph, tokens)[-1].argmax()))
        tokens = np.array(alone[-1:])
    assert [token.token for token, _ in found] == alone


@pytest.mark.parametrize("protocol", ["semi2k", "aby3", "cheetah"])
def test_of_weights_that_the_server_holds_others_have_zeros(protocol):
    value, setting = np.full((4, 8), 0.7), EngineSetting(weights="server")
    shares = [packed(share)[1] for share in dealt(protocol, setting, value, owner=owner_of_weights(setting))]
    for rank, share in enumerate(shares):
        assert any(share[-4 * 8 * 8 :]) == (rank == SERVER)
    both = [packed(share)[1] for share in dealt(protocol, EngineSetting(), value)]
    assert all(any(share[-4 * 8 * 8 :]) for share in both)


def test_the_end_of_a_document_ends_the_answer(client, weights):
    asked = client("semi2k")
    first = ClearRun(weights).logits(graphs(asked.graph_of, asked.plan)[0], np.array(PROMPT))[-1].argmax()
    found, _ = answered(asked, weights, end=first)
    assert [token.token for token, _ in found] == [first]


def test_sequences_give_the_logits_of_every_token(client, weights):
    asked = replace(client("semi2k"), plan=Plan(kind="sequences", num_tokens=8))
    (graph,) = graphs(asked.graph_of, asked.plan)
    drawn = np.random.default_rng(1).integers(50, size=(2, 8))
    with started(on_loopback(asked)) as session:
        await_ready(session)
        found = list(sequences(session, graph, list(drawn), ClearRun(weights)))
        session.leave()
    assert [each.cost.logits.shape for each in found] == [(8, 50)] * 2
    for each, tokens in zip(found, drawn, strict=True):
        assert np.abs(each.cost.logits - ClearRun(weights).logits(graph, tokens)).max() < 0.01
    expected = predictions([graph] * 2, "semi2k", asked.setting, "loopback")
    assert [each.cost.sent_bytes for each in found] == [each.sent_bytes for each in expected]


@pytest.mark.parametrize(("protocol", "killed"), [("semi2k", 1), ("aby3", 2)])
def test_killing_one_party_ends_the_others(client, weights, protocol, killed):
    asked = client(protocol)
    steps = graphs(asked.graph_of, asked.plan)
    with started(on_loopback(asked)) as session:
        await_ready(session)
        pids = {rank: child.process for rank, child in session.children.items()}
        answers = generate(session, steps, PROMPT, None, None)
        next(answers)
        begun = time.monotonic()
        os.kill(pids[killed].pid, signal.SIGKILL)
        with pytest.raises(StoppedError, match=rf"^party {killed} has ended \(status -9\)") as caught:
            list(answers)
        assert "\n" not in str(caught.value)
        for process in pids.values():
            assert process.wait(10) != 0
        assert time.monotonic() - begun < 10


def test_a_party_that_is_lost_elsewhere_is_named(client):
    """The server runs in a session of its own, as on another machine."""
    asked = client("semi2k")
    with started([part_of(asked, 1)]) as elsewhere, started([part_of(asked, 0)]) as here:
        await_ready(here)
        await_ready(elsewhere)
        elsewhere.children[1].process.kill()
        with pytest.raises(StoppedError, match=r"^party 1 \(the server, 127.0.0.1:\d+\) is gone; start all parties"):
            here.run(0, np.array(PROMPT))


def test_parties_of_other_models_do_not_share_anything(client):
    asked = client("semi2k")
    other = replace(asked, graph_of=OtherGraph(asked.graph_of))
    mixed = [part_of(asked, 0), part_of(other, 1)]
    with started(mixed) as session, pytest.raises(UserError, match="must have the same op graph.*nothing was shared"):
        await_ready(session)


class OtherGraph:
    """The same model, without its deployment."""

    def __init__(self, graph_of):
        self.graph_of = graph_of

    def __call__(self, seq_len, deployment):
        return self.graph_of(seq_len)


def test_an_engine_that_fails_says_why(client):
    """In a ring of 32 bits the engine has no division."""
    asked = client("semi2k", ring_bits=32, fraction_bits=8)
    with started(on_loopback(asked)) as session:
        await_ready(session)
        with pytest.raises(StoppedError, match=r"^the engine failed at party [01]: .*FM32"):
            session.run(0, np.array(PROMPT))
