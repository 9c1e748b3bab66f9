"""CrypTen's parties and their dealer as processes: what they compute and send, how they die, and how they end."""

import hashlib
import time
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest

from costmodel import ops
from costmodel.engine import installed, spu
from costmodel.engine.assignment import Assignment
from costmodel.engine.greedy import ClearRun, generate
from costmodel.engine.plan import Plan, graphs
from costmodel.engine.predicted import predictions
from costmodel.engine.session import on_this_machine
from costmodel.engine.spu import ops_job
from costmodel.errors import StoppedError, UserError
from costmodel.execution import interpreter
from costmodel.ops import Input, Node, OpGraph
from costmodel.pricing.price import price
from costmodel.protocols.crypten import CryptenSetting

PROMPT = [3, 14, 15, 9, 26]
PARTIES, DEALER = ("client", "server"), 2


@pytest.fixture
def crypten_client(decoder, weights):
    plan = Plan(kind="tokens", num_tokens=len(PROMPT), num_new=3)
    return Assignment(protocol="crypten", setting=CryptenSetting(), graph_of=decoder, plan=plan, weights=weights)


@pytest.mark.needs_crypten
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_tokens_cost_what_is_predicted_and_are_those_in_the_clear(crypten_client, weights, device):
    crypten_client = replace(crypten_client, setting=CryptenSetting(device=device))
    steps = graphs(crypten_client.graph_of, crypten_client.plan)
    expected = predictions(steps, "crypten", crypten_client.setting, "loopback")
    with on_this_machine(crypten_client) as (session, ready):
        tokens = list(generate(session, steps, PROMPT, ClearRun(weights), end=None))
        session.leave()
    assert ready.num_steps == len(tokens) == 3
    for token, cost in zip(tokens, expected, strict=True):
        assert (token.cost.sent_bytes, token.cost.messages) == (cost.sent_bytes, cost.messages)
        assert (cost.seconds is None) == (device != "cpu")
        assert token.agreement.num_equal == 1
        assert token.agreement.largest_error < 0.02
        client, server, dealer = token.cost.by_party
        assert [cost.sent_bytes for cost in client] == [cost.sent_bytes for cost in server]
        assert [cost.messages for cost in dealer] == [int(cost.messages > 0) for cost in server]
    (architecture,) = crypten_client.graph_of.args
    priced = price(architecture, protocol="crypten", new_tokens=3, seq_len=5, projection="last", rows="needed")
    assert [cost.sent_bytes for cost in priced.tokens.by_token] == [token.cost.sent_bytes for token in tokens]


@pytest.mark.needs_crypten
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1, DEALER])
def test_killing_a_party_or_the_dealer_ends_the_others(killed):
    size = 1_000_000
    job = ops_job([ops.Silu(rows=1, features=size)], protocol="crypten", setting=CryptenSetting())
    with on_this_machine(job.client) as (session, _):
        processes = [child.process for child in session.children.values()]
        Thread(target=kill_in_op, args=(session.children[killed],)).start()
        with pytest.raises(StoppedError, match=rf"^party {killed} has ended \(status -9\) in op '0.Silu': no output$"):
            session.run(0, job.inputs)
        begun = time.monotonic()
        for process in processes:
            assert process.wait(10) != 0
        assert time.monotonic() - begun < 10


def kill_in_op(child):
    while not child.progress.at:
        time.sleep(0.01)
    child.process.kill()


@pytest.mark.needs_crypten
def test_another_version_is_refused(crypten_client, monkeypatch):
    monkeypatch.setattr(installed, "version", lambda package: "0.5.0")
    with (
        pytest.raises(UserError, match=r"^CrypTen must be 0\.4\.1, but 0\.5\.0 is installed; run: .*crypten==0\.4\.1$"),
        on_this_machine(crypten_client),
    ):
        pass


@pytest.mark.needs_crypten
def test_masks_are_those_of_a_seed_of_256_bits():
    from costmodel.engine.crypten_dealer import Draws

    seed = bytes(range(32))
    first, second = Draws(seed), Draws(seed)
    assert first((2, 3)).tolist() == second((2, 3)).tolist()
    expected = np.frombuffer(hashlib.shake_128(seed + (2).to_bytes(8, "big")).digest(16), dtype=np.int64)
    assert first((2,)).tolist() == expected.tolist() != Draws(seed)((2,)).tolist()
    assert Draws(bytes(32))((2,)).tolist() != Draws(seed)((2,)).tolist()


@pytest.mark.needs_crypten
@pytest.mark.parametrize("device", ["cpu", pytest.param("emulated", marks=pytest.mark.slow)])
def test_mean_squares_of_large_numbers_are_right(device):
    """If each party truncated its share of the large squares alone, one in 128 would be wrong."""
    norm = ops.RmsNorm(rows=512, features=1024, affine=False)
    node = Node(name="norm", layer=0, op=norm, inputs=("x",))
    graph = OpGraph(nodes=(node,), inputs=(Input(name="x", shape=norm.output_shape),))
    source = np.random.default_rng(0).normal(size=norm.output_shape)
    source[:, 0] = 6000
    setting = CryptenSetting(device=device)
    run = spu.run(graph, {}, None, {"x": source}, protocol="crypten", setting=setting)
    expected = interpreter.execute(graph, {}, None, {"x": source})
    np.testing.assert_allclose(run.logits, expected, rtol=0.005, atol=0.001)


@pytest.mark.needs_crypten
def test_norms_of_small_and_large_rows_are_right():
    """With 15 fraction bits, a mean square of 0.001 has five bits, and the inverse root of 50,000 seven."""
    norm = ops.RmsNorm(rows=60, features=64, affine=False)
    node = Node(name="norm", layer=0, op=norm, inputs=("x",))
    graph = OpGraph(nodes=(node,), inputs=(Input(name="x", shape=norm.output_shape),))
    source = np.random.default_rng(0).normal(size=norm.output_shape) * 2.0 ** np.linspace(-5, 8, 60)[:, None]
    setting = CryptenSetting(fraction_bits=15)
    run = spu.run(graph, {}, None, {"x": source}, protocol="crypten", setting=setting)
    expected = interpreter.execute(graph, {}, None, {"x": source})
    ratios = np.median(run.logits / expected, axis=1)
    assert np.abs(ratios - 1).max() < 0.002


@pytest.mark.needs_crypten
def test_small_weights_keep_their_digits():
    linear = ops.Linear(rows=8, in_features=512, out_features=64, bias=False)
    node = Node(name="linear", layer=0, op=linear, inputs=("x",))
    graph = OpGraph(nodes=(node,), inputs=(Input(name="x", shape=(8, 512)),))
    generator = np.random.default_rng(0)
    weights = {"linear.weight": generator.normal(size=(64, 512)) * 0.02}
    source = generator.normal(size=(8, 512))
    run = spu.run(graph, weights, None, {"x": source}, protocol="crypten", setting=CryptenSetting(fraction_bits=15))
    error = run.logits - interpreter.execute(graph, weights, None, {"x": source})
    assert np.sqrt(np.square(error).mean()) < 1e-4  # 2e-4 if weights had 15 digits behind the point


@pytest.mark.needs_crypten
def test_weights_of_eighth_powers_are_right_for_sums_of_any_size():
    softmax = ops.Softmax(heads=1, queries=64, keys=64, form="power8")
    graph = OpGraph(
        nodes=(Node(name="softmax", layer=0, op=softmax, inputs=("x",)),),
        inputs=(Input(name="x", shape=softmax.output_shape),),
    )
    scores = np.random.default_rng(0).uniform(0.6, 1, softmax.output_shape)
    sums = (scores**8 * np.tri(64)).sum(axis=-1, keepdims=True)
    scores *= (2.0 ** np.linspace(-11, 17, 64)[:, None] / sums) ** (1 / 8)
    run = spu.run(graph, {}, None, {"x": scores}, protocol="crypten", setting=CryptenSetting())
    expected = interpreter.execute(graph, {}, None, {"x": scores})
    assert np.abs(run.logits.reshape(expected.shape) - expected).max() < 0.03
