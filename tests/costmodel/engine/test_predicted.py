"""What a session should cost is the sum of what its ops cost, in the order in which they run."""

import pytest

from costmodel.engine.compare import predict
from costmodel.engine.plan import Plan, graphs
from costmodel.engine.predicted import predictions
from costmodel.estimate import estimate
from costmodel.protocols import cheetah, derived
from costmodel.protocols.primitives import EngineSetting, total_comm

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
