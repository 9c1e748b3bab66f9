from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from costmodel import ops
from costmodel.deployment.deploy import Deployment, deploy
from costmodel.deployment.known_layers import halves, public_layers
from costmodel.engine.compare import compare, drawn_caches, drawn_weights, predict
from costmodel.execution import interpreter
from costmodel.ops import Node, Op, OpGraph
from costmodel.pricing.price import price
from costmodel.protocols import load_pricer
from costmodel.protocols.primitives import EngineSetting
from costmodel.trust import at_client
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.costmodel.kv_cache import kv_cache
from tests.small_models import GPT2, PYTHIA

MODELS = [
    (GPT2, "SM(t)+LN+G"),
    (GPT2, "1xLHLRo-1xooLGs"),  # the last attention is in the first layer
    (GPT2, "2xooLRo"),
    (GPT2, "1xMQMRo-1xoUoKs"),
    (GPT2, "HH(SM(t)+G)"),
    (PYTHIA, "SM+LN+G"),
]
NEEDED = Deployment(projection="last", rows="needed")
LENGTH = 11


@pytest.mark.parametrize(("base", "name"), MODELS)
@pytest.mark.parametrize("deployment", [NEEDED, Deployment()], ids=["needed", "all"])
@pytest.mark.parametrize("block", [1, 4, 11])
def test_rows_that_the_last_logits_do_not_need_and_blocks_change_no_logits(base, name, deployment, block):
    architecture = parse(name, base).architecture
    whole = lower(architecture, LENGTH)
    weights = drawn_weights(whole, np.random.default_rng(0))
    tokens = np.random.default_rng(1).integers(architecture.vocab_size, size=LENGTH)
    logits = interpreter.execute(lower(architecture, LENGTH, replace(deployment, query_block=block)), weights, tokens)
    expected = interpreter.execute(whole, weights, tokens)[-len(logits) :]
    assert len(logits) == (1 if deployment == NEEDED else LENGTH)
    np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-9)


def op_of(graph: OpGraph, name: str) -> Op:
    return next(node.op for node in graph if node.name == name)


def test_the_last_layer_is_run_for_the_last_row_and_blocks_see_the_keys_up_to_their_own_end():
    graph = lower(parse("SM+LN+R", GPT2).architecture, 8, NEEDED)
    assert op_of(graph, "layers.0.ffn.up") == ops.Linear(rows=8, in_features=16, out_features=64, bias=True)
    assert op_of(graph, "layers.1.attention.qkv") == ops.Linear(rows=8, in_features=16, out_features=48, bias=True)
    assert op_of(graph, "layers.1.attention.softmax") == ops.Softmax(heads=2, queries=1, keys=8)
    assert op_of(graph, "layers.1.ffn.up") == ops.Linear(rows=1, in_features=16, out_features=64, bias=True)
    assert op_of(graph, "logits") == ops.VocabProjection(rows=1, features=16, vocab=GPT2.vocab_size)
    graph = lower(parse("SM+G", GPT2).architecture, 8, Deployment(query_block=3))
    blocks = [node.op for node in graph if isinstance(node.op, ops.Softmax) and node.layer == 0]
    assert blocks == [ops.Softmax(heads=2, queries=queries, keys=keys) for queries, keys in ((3, 3), (3, 6), (2, 8))]
    assert op_of(graph, "layers.0.attention.mix") == ops.JoinRows(rows=8, features=16, part=3)


def test_a_block_as_long_as_the_prompt_a_prompt_of_one_token_and_a_batch_of_one_change_nothing():
    plain = parse("SM+G", GPT2).architecture
    assert lower(plain, 8, Deployment(query_block=8)) == lower(plain, 8)
    assert lower(plain, 1, NEEDED) == lower(plain, 1)
    architecture = parse("SM+LN+R", GPT2).architecture
    assert lower(architecture, 8, Deployment(batch=1)) == lower(architecture, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": "needed"}, "`rows` needed goes with projection last, but got projection all"),
        ({"query_block": 0}, "`query_block` must be at least 1, but got 0"),
        ({"batch": 0}, "`batch` must be at least 1, but got 0"),
        ({"vocab_blocks": 0}, "`vocab_blocks` must be at least 1, but got 0"),
        ({"phase": "decode", "projection": "last"}, "`projection` last goes with phase prefill"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Deployment(**changes)


def test_an_op_that_mixes_tokens_otherwise_is_refused():
    plain = lower(parse("SM+G", GPT2).architecture, 8)
    joined = ops.Node(name="odd", layer=0, op=ops.JoinRows(rows=8, features=16, part=8), inputs=("position",))
    nodes = (*plain.nodes[:2], joined, *plain.nodes[2:])
    with pytest.raises(ValueError, match="work token by token or look back, but 'odd' is JoinRows"):
        deploy(OpGraph(nodes=nodes), Deployment(phase="decode"))


@pytest.mark.parametrize("deployment", [Deployment(projection="last"), Deployment(phase="decode")])
def test_the_last_token_of_a_graph_without_tokens_is_refused(deployment):
    graph = OpGraph(nodes=(Node(name="a", layer=0, op=ops.Relu(rows=2, features=4), inputs=("tokens",)),))
    with pytest.raises(ValueError, match="need a graph with a token embedding, but this one has none"):
        deploy(graph, deployment)


BASE = base_architecture("tiny", Dimensions(vocab=41, context=16))
MODEL = parse("SM+LN+R", BASE).architecture
WAYS = [Deployment(), Deployment(projection="last"), Deployment(phase="decode"), Deployment(batch=2)]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("num_blocks", [2, 3, 41])
def test_logits_are_those_of_the_whole_projection(way, num_blocks):
    whole, blocks = (lower(MODEL, 7, replace(way, vocab_blocks=count)) for count in (1, num_blocks))
    weights = drawn_weights(whole, np.random.default_rng(0))
    tokens = np.arange(next(node.op for node in whole if isinstance(node.op, ops.TokenEmbedding)).tokens)
    caches = {cache.name: np.random.default_rng(1).normal(size=cache.shape) for cache in whole.inputs}
    logits, wanted = (interpreter.execute(graph, weights, tokens, caches) for graph in (blocks, whole))
    np.testing.assert_allclose(logits, wanted, rtol=1e-12, atol=1e-12)


def test_blocks_read_their_own_entries():
    """41 entries in 3 blocks: 14, 14 and 13."""
    *_, first, second, third, joined = lower(MODEL, 7, Deployment(vocab_blocks=3))
    shared: Any = {"rows": 7, "features": 16, "whole": 41}
    assert [node.op for node in (first, second, third)] == [
        ops.VocabProjection(**shared, vocab=14),
        ops.VocabProjection(**shared, vocab=14, first=14),
        ops.VocabProjection(**shared, vocab=13, first=28),
    ]
    assert (joined.name, joined.inputs) == ("logits", ("logits@0", "logits@14", "logits@28"))
    assert joined.op == ops.JoinColumns(rows=7, features=41, part=14)


def test_weights_of_another_vocabulary_and_more_blocks_than_entries_are_refused():
    blocks = lower(MODEL, 5, Deployment(vocab_blocks=2))
    weights = drawn_weights(lower(MODEL, 5), np.random.default_rng(0))
    weights["logits.weight"] = np.zeros((42, 16))
    with pytest.raises(ValueError, match=r"weight 'logits.weight' must have the shape \(41, 16\), but has \(42, 16\)"):
        interpreter.execute(blocks, weights, np.arange(5))
    message = "`vocab_blocks` must be of at least an entry each, but got 42 and a vocabulary of 41"
    with pytest.raises(ValueError, match=message):
        lower(MODEL, 5, Deployment(vocab_blocks=42))
    embedding = Node(
        name="embed", layer="embed", op=ops.TokenEmbedding(tokens=2, vocab=3, features=4), inputs=("tokens",)
    )
    with pytest.raises(ValueError, match="but got 2 and no vocabulary projection"):
        deploy(OpGraph(nodes=(embedding,)), Deployment(vocab_blocks=2))


BATCHED = [(GPT2, "SM(t)+LN+G"), (GPT2, "1xLHLRo-1xooLGs"), (GPT2, "HH(SM(t)+G)"), (PYTHIA, "SM+LN+G")]
BATCH_WAYS = {
    "whole": Deployment(),
    "last": Deployment(projection="last", rows="needed"),
    "blocks": Deployment(query_block=4),
    "looked up": Deployment(embedding="lookup"),
    "decode": Deployment(phase="decode"),
}
BATCH_LENGTH, BATCH = 7, 3


@pytest.mark.parametrize(("base", "name"), BATCHED)
@pytest.mark.parametrize("way", BATCH_WAYS)
def test_each_sequence_has_the_logits_of_a_run_of_its_own(base, name, way):
    architecture, deployment = parse(name, base).architecture, BATCH_WAYS[way]
    weights = drawn_weights(lower(architecture, BATCH_LENGTH), np.random.default_rng(0))
    tokens = np.random.default_rng(1).integers(40, size=(BATCH_LENGTH, BATCH))
    read = tokens[-1:] if way == "decode" else tokens
    single, batched = (lower(architecture, BATCH_LENGTH, replace(deployment, batch=batch)) for batch in (1, BATCH))
    apart, past = [], {}
    for index in range(BATCH):
        whole = lower(architecture, BATCH_LENGTH)
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
    weights = drawn_weights(lower(architecture, BATCH_LENGTH), np.random.default_rng(0))
    tokens = np.random.default_rng(1).integers(40, size=(BATCH_LENGTH, BATCH))
    clear = interpreter.values(lower(architecture, BATCH_LENGTH, Deployment(batch=BATCH)), weights, tokens.reshape(-1))
    step = lower(architecture, BATCH_LENGTH, Deployment(phase="decode", batch=BATCH))
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


SMALL = Dimensions(layers=3, heads=2, d_model=16, vocab=50, context=32)
MIXED = parse("1xMSlGo-1xLTLEs-1xoSoRo", base_architecture("gpt2-small", SMALL)).architecture
TRUNCATED = {"semi2k": 2 * 4, "aby3": 3 * 4 + 2 * 8}  # bytes an element, all parties: see `_truncate`


def test_numbers_ranges_and_ends_are_layers_of_the_model():
    assert public_layers("0-2,7") == {0, 1, 2, 7}
    assert public_layers("embed,3,head") == {"embed", 3, "head"}
    with pytest.raises(ValueError, match="layers of the model, whose last one is 2, but has 3, 4; leave out"):
        lower(MIXED, 8, Deployment(public_layers="1-4"))


@pytest.mark.parametrize("text", ["", "-1", "2-1", "0-", "0,,1", "all", "0 - 1", "12345"])
def test_what_names_no_layer_is_refused(text):
    with pytest.raises(ValueError, match="`public_layers` must be layers from 0, ranges of them, .* such as 0-5,7,"):
        Deployment(public_layers=text)


@pytest.mark.parametrize("way", [{}, {"phase": "decode"}, {"projection": "last", "rows": "needed", "vocab_blocks": 2}])
def test_hidden_weights_of_those_layers_alone_are_public(way):
    graph, plain = (lower(MIXED, 8, Deployment(public_layers=layers, **way)) for layers in ("1,head", None))
    assert [node.name for node in graph] == [node.name for node in plain]
    hidden = {node.name for node in plain if node.op.hides_weights}
    assert {node.name for node in graph if node.op.hides_weights} == {
        node.name for node in plain if node.name in hidden and node.layer not in (1, "head")
    }


@pytest.mark.parametrize("weights", ["secret", "server"])
@pytest.mark.parametrize("protocol", TRUNCATED)
def test_of_a_linear_with_public_weights_the_truncation_is_left(protocol, weights):
    pricer = load_pricer(protocol, setting=EngineSetting(weights=weights))
    op = next(node.op for node in lower(MIXED, 8, Deployment(public_layers="0")) if node.name == "layers.0.ffn.up")
    assert pricer.price(op).sent_bytes == TRUNCATED[protocol] * 8 * 64


def test_there_is_no_deployed_form_where_folding_gives_layers_other_numbers():
    for name, is_priced in {"3xLSLGo": True, "1xLSLGo-1xooooo-1xLSLGo": False}.items():
        priced = price(name, layers=3, protocol="semi2k", public_layers="0-1", seq_len=8)
        assert (priced.deployed is not None) == is_priced


@pytest.mark.parametrize("protocol", ["published", "sigma", "crypten"])
def test_protocols_without_formulas_of_public_weights_refuse_them(protocol):
    op = lower(MIXED, 8, Deployment(public_layers="embed")).nodes[0].op
    with pytest.raises(
        ValueError, match=f"but got protocol {protocol}, .*; price under one of those, or with no layer"
    ):
        load_pricer(protocol).price(op)


CLIENT_MODEL = parse("1xMSlGo-1xLTLEs-1xoSoRo", base_architecture("pythia-70m", SMALL)).architecture
TOKENS = np.array([3, 14, 15, 9, 26, 5, 35, 8])
CUT_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"phase": "decode"},
    {"projection": "last", "rows": "needed", "vocab_blocks": 2},
    {"query_block": 3},
)


@pytest.mark.parametrize("way", CUT_WAYS)
@pytest.mark.parametrize("num_layers", [0, 2, 3])
def test_the_stream_of_the_client_gives_the_logits_of_the_whole(num_layers, way):
    whole = lower(CLIENT_MODEL, 8, Deployment(**way))
    client, private = halves(whole, num_layers)
    assert private == lower(CLIENT_MODEL, 8, Deployment(client_layers=num_layers, **way))
    assert {node.layer for node in client} == {"embed", *range(num_layers)}
    generator = np.random.default_rng(0)
    weights, caches = drawn_weights(whole, generator), drawn_caches(whole, generator)
    tokens = TOKENS[-1:] if "phase" in way else TOKENS
    stream = interpreter.execute(client, weights, tokens, caches)
    shared = {**caches, client.nodes[-1].name: stream}
    logits = interpreter.execute(private, weights, None, shared)
    assert logits == pytest.approx(interpreter.execute(whole, weights, tokens, caches), abs=1e-12)


@pytest.mark.parametrize("num_layers", [-1, 4])
def test_layers_that_the_client_cannot_have_are_refused(num_layers):
    with pytest.raises(ValueError, match=f"from 0, the embedding alone, to the 3 layers .*, but got {num_layers}"):
        lower(CLIENT_MODEL, 8, Deployment(client_layers=num_layers))


def test_a_model_of_layers_alone_leaves_ops_to_run_privately():
    graph = lower(CLIENT_MODEL, 8)
    layers = tuple(node for node in graph if node.layer != "head")
    with pytest.raises(ValueError, match="must leave ops to run privately, but got 3, all of the model; give fewer"):
        halves(replace(graph, nodes=layers), 3)


def test_what_reads_the_embedding_again_is_not_cut():
    graph = lower(CLIENT_MODEL, 8)
    again = tuple(replace(node, inputs=("embed",)) if node.name == "layers.2.ffn.up" else node for node in graph)
    with pytest.raises(ValueError, match=r"but with 1 that reads layers.0.ffn.*, embed; choose another number"):
        halves(replace(graph, nodes=again), 1)
    assert halves(replace(graph, nodes=again), 0).private.inputs[0].name == "embed"


@pytest.mark.parametrize("protocol", ["published", "semi2k", "sigma", "crypten"])
def test_what_the_client_computes_costs_nothing(protocol):
    asked = {"layers": 3, "protocol": protocol, "seq_len": 8}
    whole, rest = (price("SM+LN+G", client_layers=layers, **asked) for layers in (None, 2))
    by_layer, left = dict(whole.estimate.by_layer), dict(rest.estimate.by_layer)
    assert set(left) == {2, "head"}
    assert all(left[layer] == by_layer[layer] for layer in left)
    assert "embedding and first 2 layers at the client: it has their weights" in rest.asked.whose
    assert [at_client(number) for number in (0, 1)] == ["embedding", "embedding and first layer"]
