"""Several sequences at once: the logits of each are those of a run of its own."""

from dataclasses import replace

import numpy as np
import pytest

from costmodel.deployment.deploy import Deployment
from costmodel.engine.compare import compare, drawn_weights, predict
from costmodel.execution import interpreter
from costmodel.protocols.primitives import EngineSetting
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.costmodel.kv_cache import kv_cache
from tests.small_models import GPT2, PYTHIA

MODELS = [(GPT2, "SM(t)+LN+G"), (GPT2, "1xLHLRo-1xooLGs"), (GPT2, "HH(SM(t)+G)"), (PYTHIA, "SM+LN+G")]
WAYS = {
    "whole": Deployment(),
    "last": Deployment(projection="last", rows="needed"),
    "blocks": Deployment(query_block=4),
    "looked up": Deployment(embedding="lookup"),
    "decode": Deployment(phase="decode"),
}
LENGTH, BATCH = 7, 3


@pytest.mark.parametrize(("base", "name"), MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_each_sequence_has_the_logits_of_a_run_of_its_own(base, name, way):
    architecture, deployment = parse(name, base).architecture, WAYS[way]
    weights = drawn_weights(lower(architecture, LENGTH), np.random.default_rng(0))
    tokens = np.random.default_rng(1).integers(40, size=(LENGTH, BATCH))
    read = tokens[-1:] if way == "decode" else tokens
    single, batched = (lower(architecture, LENGTH, replace(deployment, batch=batch)) for batch in (1, BATCH))
    apart, past = [], {}
    for index in range(BATCH):
        whole = lower(architecture, LENGTH)
        clear = interpreter.values(whole, weights, tokens[:, index])
        caches = kv_cache(single, clear)
        past.update({(name, index): value for name, value in caches.items()})
        apart.append(interpreter.execute(single, weights, read[:, index], caches))
    side_by_side = {
        cache.name: np.stack([past[cache.name, index] for index in range(BATCH)], axis=1).reshape(cache.shape)
        for cache in batched.inputs
    }
    logits = interpreter.execute(batched, weights, read.reshape(-1), side_by_side)
    np.testing.assert_allclose(logits.reshape(-1, BATCH, 40), np.stack(apart, axis=1), rtol=1e-9, atol=1e-9)


def test_caches_of_a_batch_come_from_a_run_of_the_batch():
    architecture = parse("SM+LN+R", GPT2).architecture
    weights = drawn_weights(lower(architecture, LENGTH), np.random.default_rng(0))
    tokens = np.random.default_rng(1).integers(40, size=(LENGTH, BATCH))
    clear = interpreter.values(lower(architecture, LENGTH, Deployment(batch=BATCH)), weights, tokens.reshape(-1))
    step = lower(architecture, LENGTH, Deployment(phase="decode", batch=BATCH))
    logits = interpreter.execute(step, weights, tokens[-1], kv_cache(step, clear))
    np.testing.assert_allclose(logits, clear["logits"][-BATCH:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("protocol", ["semi2k", "aby3"])
def test_weights_of_the_server_and_first_positions_are_priced_in_a_batch(protocol):
    """Positions are added to several rows from one table; all first tokens turn by nothing."""
    pytest.importorskip("spu")
    setting = EngineSetting(weights="server")
    for base, name, length in ((GPT2, "SM(t)+LN+R", 3), (PYTHIA, "SM+R", 1)):
        graph = lower(parse(name, base).architecture, length, Deployment(batch=BATCH))
        comparison = compare(graph, predict(graph, protocol, setting), protocol=protocol, setting=setting)
        for node, comm, measured in comparison.by_op:
            assert (comm.online_bytes, comm.messages) == (measured.sent_bytes, measured.messages), node.name


def test_a_batch_of_one_changes_nothing_and_one_below_is_refused():
    architecture = parse("SM+LN+R", GPT2).architecture
    assert lower(architecture, 8, Deployment(batch=1)) == lower(architecture, 8)
    with pytest.raises(ValueError, match="`batch` must be at least 1, but got 0"):
        Deployment(batch=0)
