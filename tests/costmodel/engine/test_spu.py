"""The engine runs the same graph as the clear run, its costs are the sum of its ops', and who holds which weights."""

import numpy as np
import pytest

from costmodel import ops
from costmodel.deployment.deploy import Deployment
from costmodel.engine import runtimes, spu
from costmodel.engine.compare import compare, drawn_weights, predict
from costmodel.engine.party import OpCost
from costmodel.engine.programs import operands
from costmodel.engine.runtime import Traffic
from costmodel.engine.runtimes import SERVER
from costmodel.engine.spu_runtime import entries, make_shares
from costmodel.execution import interpreter
from costmodel.ops import GeluForm, Node, OpGraph, Temperature
from costmodel.protocols import load_pricer
from costmodel.protocols.primitives import EngineSetting
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

LOGIT_TOLERANCE = 0.02
KEPT = EngineSetting(weight_masks="kept")
SMALL = base_architecture("gpt2-small", Dimensions(layers=1, heads=2, d_model=16, vocab=50, context=32))
RELU = ops.Relu(rows=1, features=1)
NUM_INPUTS = 361
GELU_INPUTS = np.linspace(-18.0, 18.0, NUM_INPUTS)
GELU_FORMS: tuple[GeluForm, ...] = ("tanh", "exact", "piecewise")


@pytest.mark.needs_engine
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_kept_masks_of_weights_are_opened_once(phase):
    graph = lower(parse("SM+LN+R", SMALL).architecture, 9, Deployment(phase=phase))
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


def test_without_the_engine_the_command_to_install_it_is_said(monkeypatch):
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="is not installed.*run: .*pip install 'spu==0.9.5'"):
        spu.measure([RELU], protocol="semi2k", setting=EngineSetting())


def test_an_unknown_protocol_is_refused():
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
    done = spu._pass([first, second])
    assert done.seconds == 4.0
    assert [cost.seconds for cost in done.by_op] == [2.0, 1.0, 0.5]
    assert [(cost.sent_bytes, cost.messages) for cost in done.by_op] == [(8, 1), (0, 0), (6, 2)]
    assert done.peak_bytes == ((70, 80), (None, 2), (1, 3))


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
