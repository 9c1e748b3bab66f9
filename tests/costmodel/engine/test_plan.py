"""The graphs of a session compute what the whole prompt would, token after token."""

import numpy as np
import pytest

from costmodel import ops
from costmodel.deployment.client_layers import halves
from costmodel.deployment.deploy import Deployment
from costmodel.engine.compare import drawn_weights
from costmodel.engine.greedy import ClearRun, ClientLayers
from costmodel.engine.plan import Plan, fingerprint, graphs, variables
from costmodel.engine.programs import operands
from costmodel.execution import interpreter
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
