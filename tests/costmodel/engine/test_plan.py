"""The graphs of a session compute what the whole prompt would, at the cost of their ops, and how far two runs agree."""

import numpy as np
import pytest

from costmodel import ops
from costmodel.deployment.client_layers import halves
from costmodel.deployment.deploy import Deployment
from costmodel.engine.agreement import compared, joined, wilson
from costmodel.engine.compare import drawn_weights, predict
from costmodel.engine.greedy import ClearRun, ClientLayers
from costmodel.engine.plan import Plan, fingerprint, graphs, variables
from costmodel.engine.predicted import predictions
from costmodel.engine.programs import operands
from costmodel.estimate import estimate
from costmodel.execution import interpreter
from costmodel.protocols import cheetah, derived
from costmodel.protocols.primitives import EngineSetting, total_comm
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

TOKENS = np.array([3, 14, 15, 9, 26, 5, 35, 8])


def test_token_after_token_the_logits_are_those_of_the_whole_prompt(decoder, weights):
    steps = graphs(decoder, Plan(kind="tokens", num_tokens=5, num_new=4))
    clear = ClearRun(weights)
    for step, graph in enumerate(steps):
        fed = TOKENS[:5] if step == 0 else TOKENS[4 + step : 5 + step]
        whole = interpreter.execute(decoder(5 + step), weights, TOKENS[: 5 + step])
        assert clear.output(graph, fed) == pytest.approx(whole[-1:], abs=1e-12)


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_behind_the_clients_layers_the_logits_are_those_of_the_whole_prompt(num_layers):
    """A shaped block reads its values from the stream itself."""
    base = base_architecture("gpt2-small", Dimensions(layers=3, heads=2, d_model=16, vocab=50, context=16))
    shaped, plan = parse("HH(1xLSLGo-2xoSoGo)", base).architecture, Plan(kind="tokens", num_tokens=5, num_new=4)
    weights = drawn_weights(lower(shaped, 16), np.random.default_rng(0))
    client, private = (
        graphs(lambda *given, part=part: halves(lower(shaped, *given), num_layers)[part], plan) for part in range(2)
    )
    client_layers, clear = ClientLayers(graphs=client, run=ClearRun(weights)), ClearRun(weights)
    for step, graph in enumerate(private):
        fed = TOKENS[:5] if step == 0 else TOKENS[4 + step : 5 + step]
        whole = interpreter.execute(lower(shaped, 5 + step), weights, TOKENS[: 5 + step])
        assert clear.output(graph, None, client_layers.stream(step, fed)) == pytest.approx(whole[-1:], abs=1e-12)


def test_a_prompt_keeps_keys_and_values_of_every_layer(decoder):
    prompt, second = graphs(decoder, Plan(kind="tokens", num_tokens=5, num_new=2))
    kept = [node for node in prompt if isinstance(node.op, ops.KeyValueCache)]
    assert [(node.layer, node.op) for node in kept] == [
        (0, ops.KeyValueCache(past_len=0, rows=5, features=32)),
        (1, ops.KeyValueCache(past_len=0, rows=5, features=32)),
    ]
    assert set(variables(second).values()) == {node.name for node in kept}


def test_sequences_have_one_graph_with_the_logits_of_all_tokens(decoder, weights):
    (graph,) = graphs(decoder, Plan(kind="sequences", num_tokens=8))
    whole = interpreter.execute(decoder(8), weights, TOKENS)
    assert ClearRun(weights).output(graph, TOKENS) == pytest.approx(whole, abs=1e-12)


def test_every_weight_is_one_operand_but_for_tables_that_are_read_by_token(decoder, weights):
    weight_operands = list(operands(graphs(decoder, Plan(kind="tokens", num_tokens=5, num_new=2))))
    names = [operand.variable for operand in weight_operands]
    assert len(set(names)) == len(names)
    assert {name.partition("@")[0] for name in names} == set(weights)
    assert [name for name in names if "position" in name] == ["position.weight@0-5", "position.weight@5-6"]
    assert all(operand.shape == operand.of(weights).shape for operand in weight_operands)
    row = next(operand for operand in weight_operands if operand.variable == "position.weight@5-6")
    assert (row.of(weights) == weights["position.weight"][5:6]).all()


def test_another_length_or_deployment_has_another_fingerprint(decoder):
    plans = [Plan(kind="tokens", num_tokens=count, num_new=2) for count in (5, 6)]
    first, second = (fingerprint(graphs(decoder, plan)) for plan in plans)
    assert first != second
    assert first == fingerprint(graphs(decoder, plans[0]))
    assert fingerprint((decoder(5),)) != fingerprint((decoder(5, Deployment(projection="last")),))


def test_a_plan_without_tokens_is_refused():
    with pytest.raises(ValueError, match="must have tokens to run"):
        Plan(kind="tokens", num_tokens=3, num_new=0)


PLAN = Plan(kind="tokens", num_tokens=5, num_new=3)


@pytest.mark.parametrize("protocol", ["semi2k", "aby3"])
def test_a_step_costs_what_its_graph_is_estimated_at(decoder, protocol):
    steps = graphs(decoder, PLAN)
    costs = predictions(steps, protocol, EngineSetting(), "lan")
    pricer = derived.load(protocol, "lan")
    for index, (graph, cost) in enumerate(zip(steps, costs, strict=True)):
        total = estimate(graph, pricer).total
        assert (cost.sent_bytes, cost.messages) == (total.sent_bytes, total.messages)
        start_s = 0.0 if index == 0 else pricer.testbed.start_s  # once a session
        assert cost.seconds == pytest.approx(total.latency_s - start_s, abs=1e-5)


def test_set_up_of_cheetah_is_in_the_step_that_needs_it(decoder):
    steps = graphs(decoder, PLAN)
    costs = predictions(steps, "cheetah", EngineSetting(), "lan")
    whole = total_comm(cheetah.walk([node.op for graph in steps for node in graph], EngineSetting()))
    assert sum(cost.sent_bytes for cost in costs) == whole.online_bytes + whole.setup_bytes
    assert costs[0].sent_bytes > costs[1].sent_bytes + 19e6  # keys alone are 19.4 MB


def test_kept_masks_are_opened_in_the_first_step(decoder):
    steps, kept = graphs(decoder, PLAN), EngineSetting(weight_masks="kept")
    costs = predictions(steps, "semi2k", kept, "lan")
    settings = [EngineSetting(), kept, kept]
    expected = [total_comm(predict(graph, "semi2k", setting)) for graph, setting in zip(steps, settings, strict=True)]
    assert [cost.sent_bytes for cost in costs] == [comm.online_bytes for comm in expected]


def test_no_seconds_are_predicted_in_another_ring(decoder):
    (only,) = predictions((decoder(4),), "semi2k", EngineSetting(ring_bits=128, fraction_bits=26), "lan")
    assert only.seconds is None
    assert only.sent_bytes > 0


def test_a_ring_too_small_is_refused_before_anything_runs(decoder):
    with pytest.raises(ValueError, match="`ring_bits` must be at least 64"):
        predictions((decoder(4),), "semi2k", EngineSetting(ring_bits=32, fraction_bits=8), "lan")


def test_wilsons_interval_is_the_root_of_its_equation():
    """Ends p of the interval solve (p - share)^2 = z^2 p (1 - p) / n, with z = 1.959964."""
    for successes, trials in ((99, 100), (1, 7), (2045, 2048), (512, 512)):
        for end in wilson(successes, trials):
            assert (end - successes / trials) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / trials, rel=1e-5)


def test_agreement_counts_positions_and_takes_the_largest_error():
    clear = np.array([[0.0, 1.0, 0.5], [2.0, 0.0, 0.0]])
    private = np.array([[0.0, 1.1, 0.5], [0.0, 0.3, 0.0]])
    agreement = compared(private, clear)
    assert (agreement.num_positions, agreement.num_equal, agreement.largest_error) == (2, 1, 2.0)
    both = joined([agreement, compared(clear[:1], clear[:1])])
    assert (both.num_positions, both.num_equal, both.largest_error) == (3, 2, 2.0)
    assert both.top1 == pytest.approx(2 / 3)
