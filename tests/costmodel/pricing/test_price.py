import json
import sys

import pytest

import costmodel
from costmodel.network import NETWORKS
from search_spaces.architecture import dump_architecture
from search_spaces.bases import base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

TINY = parse("SM+LN+G", base_architecture("tiny")).architecture


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"protocol": "semi2k", "network": "wan"},
        {"protocol": "aby3", "phase": "decode", "seq_len": 9},
        {"protocol": "semi2k", "rtt": "4ms", "weights": "server"},
        {"protocol": "semi2k", "seq_len": 9, "new_tokens": 3, "batch": 2, "vocab_blocks": 2},
    ],
)
def test_the_command_prints_what_the_function_returns(run, keywords):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in keywords.items()]
    priced = costmodel.price("2xlSlRo", base="tiny", **keywords)
    code, out, _ = run("estimate", "2xlSlRo", "--base=tiny", *flags, "--format=json")
    assert (code, json.loads(out)) == (0, json.loads(json.dumps(priced.to_dict())))
    assert run("estimate", "2xlSlRo", "--base=tiny", *flags)[1].startswith(f"{priced}\n")
    table = run("estimate", "2xlSlRo", "--base=tiny", *flags, "--format=csv")[1].splitlines()
    assert table[0].split(",") == list(priced.to_records()[0])
    assert len(table) == 1 + (keywords.get("new_tokens") or len(priced.estimate.by_op))


def test_a_model_costs_the_same_however_it_is_given(tmp_path):
    export = tmp_path / "export"
    export.mkdir()
    for path in (tmp_path / "one.yaml", export / "architecture.yaml"):
        path.write_text(dump_architecture(TINY))
    named = costmodel.price("SM+LN+G", base="tiny", protocol="semi2k", seq_len=8, query_block=4)
    for model in (TINY, tmp_path / "one.yaml", str(export)):
        other = costmodel.price(model, protocol="semi2k", seq_len=8, query_block=4)
        assert (other.name, other.total) == (named.name, named.total)
        assert (other.deployed.name, other.deployed.total) == (named.deployed.name, named.deployed.total)
    graph = costmodel.price(lower(TINY, 8), protocol="semi2k", query_block=4)
    assert (graph.name, graph.asked.title["seq_len"], graph.total) == ("op graph", 8, named.total)
    assert graph.deployed is None


def test_new_tokens_cost_the_same_however_the_model_is_given():
    named = costmodel.price("SM+LN+G", base="tiny", protocol="semi2k", seq_len=8, new_tokens=3)
    assert [price.sent_bytes for price in named.tokens.by_token] == [row["sent_bytes"] for row in named.to_records()]
    assert sum(row["sent_bytes"] for row in named.to_records()) == named.sent_bytes
    assert named.asked.deployment.projection == "last"
    named = costmodel.price("SM+LN+G", base="tiny", protocol="semi2k", seq_len=8, new_tokens=1)
    graph = lower(TINY, 8)
    assert costmodel.price(graph, protocol="semi2k", new_tokens=1).total == named.total
    with pytest.raises(costmodel.UserError, match="is of 8 and new tokens read 9; give the architecture"):
        costmodel.price(graph, protocol="semi2k", new_tokens=2)


def test_a_network_may_be_given_as_data():
    wan = NETWORKS["wan"]
    given = costmodel.price("SM", base="tiny", protocol="semi2k", network=wan)
    assert given.to_dict() == costmodel.price("SM", base="tiny", protocol="semi2k", network="wan").to_dict()
    faster = costmodel.price("SM", base="tiny", protocol="semi2k", network=wan, bandwidth="10Gbps")
    assert faster.latency_s < given.latency_s
    assert faster.estimate.network == "wan 10Gbps"


def test_records_become_a_table_with_pandas(monkeypatch):
    pandas = pytest.importorskip("pandas")
    priced = costmodel.price("SM+LN+R", base="tiny", protocol="cheetah", seq_len=8)
    table = priced.to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert table.shape == (len(priced.estimate.by_op), 15)
    assert table.sent_bytes.sum() == priced.sent_bytes
    assert list(table.name) == [node.name for node, _ in priced.estimate.by_op]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(costmodel.UserError, match="needs pandas, but it is not installed"):
        priced.to_pandas()


@pytest.mark.parametrize(
    ("model", "keywords", "message"),
    [
        ("SM", {"protocol": "bgw"}, "protocol must be one of published"),
        ("SM", {"network": "wan"}, "published has its network fitted in"),
        (TINY, {"layers": 3}, "Architecture brings its own dimensions; leave out the flags"),
        (TINY, {"base": "gpt2-small"}, "Architecture brings its own dimensions; leave out the flags"),
        (lower(TINY, 8), {"seq_len": 9}, "an op graph of 8 tokens is priced at these, but got seq_len=9; leave it out"),
        (object(), {}, "must be an Architecture or a torch.nn.Module, but is object"),
    ],
)
def test_bad_input_is_one_line(model, keywords, message):
    with pytest.raises(costmodel.UserError, match=message) as refused:
        costmodel.price(model, **keywords)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("whose", "is_folded"), [({}, True), ({"client_layers": 0}, True), ({"client_layers": 1}, False)]
)
def test_layers_that_folding_removes_only_matter_to_what_counts_layers(whose, is_folded):
    assert (costmodel.price("1xlSlRo-1xooooo", base="tiny", **whose).deployed is not None) is is_folded
