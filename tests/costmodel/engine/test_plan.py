import numpy as np
import pytest

from costmodel import ops
from costmodel.deployment.deploy import Deployment
from costmodel.deployment.known_layers import halves
from costmodel.engine import registry, spu
from costmodel.engine.compare import compare, drawn_weights, predict
from costmodel.engine.greedy import Agreement, ClearRun, ClientLayers, compared, joined
from costmodel.engine.party import OpCost
from costmodel.engine.plan import SERVER, Plan, fingerprint, graphs, predictions, variables
from costmodel.engine.programs import operands
from costmodel.engine.runtime import Traffic
from costmodel.engine.session import StepRun
from costmodel.engine.spu_runtime import entries, make_shares
from costmodel.estimate import estimate
from costmodel.execution import interpreter
from costmodel.ops import GeluForm, Node, OpGraph, Temperature
from costmodel.protocols import cheetah, derived, load_pricer
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


def test_another_length_or_deployment_has_another_fingerprint_and_a_plan_has_tokens(decoder):
    plans = [Plan(kind="tokens", num_tokens=count, num_new=2) for count in (5, 6)]
    first, second = (fingerprint(graphs(decoder, plan)) for plan in plans)
    assert first != second
    assert first == fingerprint(graphs(decoder, plans[0]))
    assert fingerprint((decoder(5),)) != fingerprint((decoder(5, Deployment(projection="last")),))
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


def test_set_up_of_cheetah_and_kept_masks_are_in_the_first_step(decoder):
    steps = graphs(decoder, PLAN)
    costs = predictions(steps, "cheetah", EngineSetting(), "lan")
    whole = total_comm(cheetah.walk([node.op for graph in steps for node in graph], EngineSetting()))
    assert sum(cost.sent_bytes for cost in costs) == whole.online_bytes + whole.setup_bytes
    assert costs[0].sent_bytes > costs[1].sent_bytes + 19e6  # keys alone are 19.4 MB
    steps, kept = graphs(decoder, PLAN), EngineSetting(weight_masks="kept")
    costs = predictions(steps, "semi2k", kept, "lan")
    settings = [EngineSetting(), kept, kept]
    expected = [total_comm(predict(graph, "semi2k", setting)) for graph, setting in zip(steps, settings, strict=True)]
    assert [cost.sent_bytes for cost in costs] == [comm.online_bytes for comm in expected]


def test_no_seconds_are_predicted_in_another_ring_and_one_too_small_is_refused(decoder):
    (only,) = predictions((decoder(4),), "semi2k", EngineSetting(ring_bits=128, fraction_bits=26), "lan")
    assert only.seconds is None
    assert only.sent_bytes > 0
    with pytest.raises(ValueError, match="`ring_bits` must be at least 64"):
        predictions((decoder(4),), "semi2k", EngineSetting(ring_bits=32, fraction_bits=8), "lan")


def test_wilsons_interval_is_the_root_of_its_equation():
    """Ends p of the interval solve (p - share)^2 = z^2 p (1 - p) / n, with z = 1.959964."""
    for successes, trials in ((99, 100), (1, 7), (2045, 2048), (512, 512)):
        agreement = Agreement(num_positions=trials, num_equal=successes, largest_error=0.0)
        for end in agreement.interval:
            assert (end - successes / trials) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / trials, rel=1e-5)


def test_agreement_counts_positions_and_takes_the_largest_error():
    clear = np.array([[0.0, 1.0, 0.5], [2.0, 0.0, 0.0]])
    private = np.array([[0.0, 1.1, 0.5], [0.0, 0.3, 0.0]])
    agreement = compared(private, clear)
    assert (agreement.num_positions, agreement.num_equal, agreement.largest_error) == (2, 1, 2.0)
    both = joined([agreement, compared(clear[:1], clear[:1])])
    assert (both.num_positions, both.num_equal, both.largest_error) == (3, 2, 2.0)
    assert both.top1 == pytest.approx(2 / 3)


KEPT = EngineSetting(weight_masks="kept")
SMALL = base_architecture("gpt2-small", Dimensions(layers=1, heads=2, d_model=16, vocab=50, context=32))
RELU = ops.Relu(rows=1, features=1)
NUM_INPUTS = 361
GELU_INPUTS = np.linspace(-18.0, 18.0, NUM_INPUTS)
GELU_FORMS: tuple[GeluForm, ...] = ("tanh", "exact", "piecewise")


@pytest.mark.needs_engine
def test_kept_masks_of_weights_are_opened_once():
    graph = lower(parse("SM+LN+R", SMALL).architecture, 9)
    comparison = compare(graph, predict(graph, "semi2k", KEPT), protocol="semi2k", setting=KEPT)
    for node, comm, measured in comparison.by_op:
        assert (comm.online_bytes, comm.messages) == (measured.sent_bytes, measured.messages), node.name
    assert comparison.logits_max_abs_error < 0.01


@pytest.mark.parametrize("protocol", ["aby3", "cheetah"])
def test_only_semi2k_keeps_masks_and_of_secret_weights(protocol):
    with pytest.raises(ValueError, match="`weight_masks` kept is of protocol semi2k, but got protocol"):
        predict(lower(parse("SM", SMALL).architecture, 4), protocol, KEPT)
    with pytest.raises(ValueError, match="`weight_masks` kept is of protocol semi2k"):
        load_pricer(protocol, None, None, KEPT)
    with pytest.raises(ValueError, match="`weight_masks` kept goes with weights that are secret"):
        EngineSetting(weights="server", weight_masks="kept")


@pytest.mark.needs_engine
def test_gelu_under_the_engine_is_far_from_tanh_and_near_the_other_forms():
    """One token, whose features are the inputs; every form side by side. What `nas.private --gelu` says of it."""
    embed = ops.TokenEmbedding(tokens=1, vocab=1, features=NUM_INPUTS)
    joined = ops.JoinColumns(rows=1, features=len(GELU_FORMS) * NUM_INPUTS, part=NUM_INPUTS)
    gelus = [
        Node(name=form, layer=0, op=ops.Gelu(rows=1, features=NUM_INPUTS, form=form), inputs=("embed",))
        for form in GELU_FORMS
    ]
    nodes = (
        Node(name="embed", layer="embed", op=embed, inputs=("tokens",)),
        *gelus,
        Node(name="all", layer=0, op=joined, inputs=GELU_FORMS),
    )
    graph, weights, tokens = OpGraph(nodes=nodes), {"embed.weight": GELU_INPUTS[None]}, np.array([0])
    run = spu.run(graph, weights, tokens, protocol="semi2k", setting=EngineSetting())
    errors = np.abs(run.logits - interpreter.execute(graph, weights, tokens)).reshape(len(GELU_FORMS), NUM_INPUTS)
    tanh, exact, piecewise = errors
    near = np.abs(GELU_INPUTS) <= 5
    assert 0.004 < tanh[near].max() < 0.01
    assert 0.02 < tanh.max() < 0.03
    assert tanh[~near] == pytest.approx(0.00135 * np.abs(GELU_INPUTS[~near]), rel=0.05)
    assert exact.max() < 0.001
    assert piecewise.max() < 0.0001


def test_an_unknown_protocol_and_an_engine_that_is_not_installed_are_refused(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="is not installed.*run: .*pip install 'spu==0.9.5'"):
        spu.measure([RELU], protocol="semi2k", setting=EngineSetting())
    with pytest.raises(ValueError, match="must be one of semi2k, aby3, cheetah, crypten, but got 'spdz'"):
        spu.measure([RELU], protocol="spdz", setting=EngineSetting())


def test_costs_are_read_from_the_engines_logs():
    log = """
[info] [Profiling] SPU execution embed completed, input processing took 1e-06s, total time 0.5s.
[info] - pphlo.dot, executed 1 times, duration 0.1s, send bytes 99 recv bytes 99, send actions 9, recv actions 9
[info] Link details: total send bytes 12, recv bytes 10, send actions 2, recv actions 1
[info] [Profiling] SPU execution logits completed, input processing took 1e-06s, total time 0.1s.
[info] Link details: total send bytes 5, recv bytes 5, send actions 1, recv actions 1
"""
    assert entries(log) == [Traffic(12, 2), Traffic(5, 1)]


def test_an_op_takes_from_the_first_start_or_the_end_of_the_op_before_to_the_last_end():
    first = [OpCost(8, 1, 1.0, 2.0, 70), OpCost(0, 0, 2.0, 3.5, None), OpCost(5, 1, 4.5, 5.0, 1)]
    second = [OpCost(0, 0, 1.5, 3.0, 80), OpCost(0, 0, 3.0, 4.0, 2), OpCost(1, 1, 4.5, 5.0, 3)]
    done = StepRun(by_party=(tuple(first), tuple(second)), seconds=5.0, logits=np.zeros((1, 1)))
    assert [cost.seconds for cost in done.by_op] == [2.0, 1.0, 0.5]
    assert [(cost.sent_bytes, cost.messages) for cost in done.by_op] == [(8, 1), (0, 0), (6, 2)]
    assert (done.sent_bytes, done.messages, done.peak_bytes) == (14, 3, (70, 80))


PUBLIC = Deployment(public_layers="embed,1")


@pytest.mark.needs_engine
@pytest.mark.parametrize("weights", ["secret", "server"])
@pytest.mark.parametrize("protocol", ["semi2k", "aby3", "cheetah"])
def test_parties_hold_the_weights_of_public_layers_and_of_no_other(protocol, weights, decoder):
    """A party has a weight in the clear if its share contains the numbers as the engine encodes them."""
    graph, setting = decoder(5, PUBLIC), EngineSetting(weights=weights)
    drawn = drawn_weights(graph, np.random.default_rng(0))
    for operand in operands([graph]):
        values = operand.of(drawn)
        shares = make_shares(protocol, setting, values, operand.node.op)
        encoded = (np.float32(values) * 2**setting.fraction_bits).astype(np.int64).tobytes()
        holders = {rank for rank, share in enumerate(shares) if encoded in b"".join(share.share_chunks)}
        is_public = operand.node.layer in ("embed", 1) or isinstance(operand.node.op, Temperature)
        others = {SERVER} if weights == "server" else set()
        assert holders == (set(range(len(shares))) if is_public else others), operand.variable
