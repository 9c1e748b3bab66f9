"""Masks of weights that semi2k keeps between runs: opened once, then never again."""

import pytest

from costmodel.deployment.deploy import Deployment, Phase
from costmodel.engine.compare import compare, predict
from costmodel.protocols import load_pricer
from costmodel.protocols.primitives import EngineSetting, total_comm
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

KEPT = EngineSetting(weight_masks="kept")
BASE = base_architecture("gpt2-small", Dimensions(layers=1, heads=2, d_model=16, vocab=50, context=32))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_engine_sends_what_is_predicted(phase: Phase) -> None:
    pytest.importorskip("spu")
    graph = lower(parse("SM+LN+R", BASE).architecture, 9, Deployment(phase=phase))
    predicted = predict(graph, "semi2k", KEPT)
    found = compare(graph, predicted, protocol="semi2k", setting=KEPT)
    for node, comm, measured in found.by_op:
        assert (comm.online_bytes, comm.messages) == (measured.sent_bytes, measured.messages), node.name
    assert found.logits_max_abs_error < 0.01


def test_what_is_saved_is_the_weights() -> None:
    graph = lower(parse("SM+LN+R", BASE).architecture, 9, Deployment(phase="decode"))
    fresh, kept = (total_comm(predict(graph, "semi2k", each)) for each in (EngineSetting(), KEPT))
    num_weights = 12 * 16 * 16 + 2 * 50 * 16
    assert fresh.online_bytes - kept.online_bytes == 2 * 8 * num_weights
    assert (fresh.rounds, fresh.messages) == (kept.rounds, kept.messages)


@pytest.mark.parametrize("protocol", ["aby3", "cheetah"])
def test_only_semi2k_has_them(protocol: str) -> None:
    graph = lower(parse("SM", BASE).architecture, 4)
    with pytest.raises(ValueError, match="`weight_masks` kept is of protocol semi2k, but got protocol"):
        predict(graph, protocol, KEPT)
    with pytest.raises(ValueError, match="`weight_masks` kept is of protocol semi2k"):
        load_pricer(protocol, None, None, KEPT)


def test_weights_that_the_server_holds_have_none() -> None:
    with pytest.raises(ValueError, match="`weight_masks` kept goes with weights that are secret"):
        EngineSetting(weights="server", weight_masks="kept")
