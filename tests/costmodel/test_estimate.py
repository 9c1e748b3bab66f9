import json
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.commands.diff import changes
from costmodel.cost import Budget, Price, total_price
from costmodel.deployment.deploy import Deployment, generation
from costmodel.errors import UserError
from costmodel.estimate import Pricer, estimate, estimate_generation
from costmodel.ops import Add, Node, OpGraph, Tanh
from costmodel.protocols import TRUST, load_pricer
from costmodel.protocols.primitives import EngineSetting
from costmodel.report.estimates import op_records, price_numbers, total_document
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.costmodel.conftest import refused


class Distinct(Pricer):
    """A power of ten of its own for every field of a price, so that no sum of one is a sum of another."""

    protocol, network, cost_model_id, range_over = "distinct", "lan", "0", "nothing"
    trust = TRUST["published"]

    def price(self, op):
        return Price(**{field.name: 10**digit for digit, field in enumerate(fields(Price))})


def test_every_field_of_a_price_is_summed_and_reported():
    add = Add(rows=1, features=1)
    layers: tuple[Any, ...] = ("embed", 0, 0, 1, 1, 1)
    nodes = tuple(Node(name=str(index), layer=layer, op=add, inputs=("tokens",)) for index, layer in enumerate(layers))
    result = estimate(OpGraph(nodes=nodes), Distinct())
    assert [layer for layer, _ in result.by_layer] == ["embed", 0, 1]
    assert [node.name for node, _ in result.by_op] == [node.name for node in nodes]
    assert (result.protocol, result.network, result.latency_s_range) == ("distinct", "lan", None)
    names = [field.name for field in fields(Price)]
    for price, num_ops in [(result.total, 6), *zip((price for _, price in result.by_layer), (1, 2, 3), strict=True)]:
        assert asdict(price) == {name: num_ops * 10**digit for digit, name in enumerate(names)}
    total = total_document(result)
    for part in (total, price_numbers(result.by_layer[0][1]), *op_records(result)):
        assert set(names) <= set(part)
    assert {name: total[name] for name in names} == asdict(result.total)


def test_an_op_without_a_formula_is_named_by_its_node():
    op = Tanh(rows=1, features=32)
    graph = OpGraph(nodes=(Node(name="bert.pooler.activation", layer="head", op=op, inputs=("tokens",)),))
    with pytest.raises(UserError) as refusal:
        estimate(graph, load_pricer("published"))
    assert str(refusal.value) == (
        "op 'bert.pooler.activation' must have a price: protocol published has no formula for Tanh, which no printed "
        "row has; choose protocol semi2k, aby3 or cheetah."
    )
    for protocol in ("semi2k", "aby3", "cheetah"):
        assert estimate(graph, load_pricer(protocol)).total.latency_s > 0


SECONDS = st.integers(0, 10**6).map(float)


@given(st.lists(st.tuples(SECONDS, SECONDS, st.none() | st.integers(0, 99)), min_size=1))
def test_totals_are_sums_and_unknown_parts_make_them_unknown(parts):
    whole = total_price(Price(latency_s=a, sent_bytes=b, rounds=c) for a, b, c in parts)
    assert whole.latency_s == sum(a for a, _, _ in parts)
    assert whole.sent_bytes == sum(b for _, b, _ in parts)
    rounds = [c for _, _, c in parts]
    assert whole.rounds == (None if None in rounds else sum(rounds))
    assert whole.messages is None


def test_budgets_admit_up_to_their_bounds_and_there_is_no_total_of_nothing():
    price = Price(latency_s=300.0, sent_bytes=8e9)
    assert Budget().admits(price)
    assert Budget(latency_s=300.0, sent_bytes=8e9).admits(price)
    assert not Budget(latency_s=299.0).admits(price)
    assert not Budget(latency_s=300.0, sent_bytes=7e9).admits(price)
    with pytest.raises(ValueError, match="at least one price"):
        total_price([])


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_bounds_are_refused(bound):
    with pytest.raises(ValueError, match="budget `latency_s` must be positive and finite"):
        Budget(latency_s=bound)


def priced(graph_of, name, protocol="published", **dimensions):
    return estimate(graph_of(name, **dimensions), load_pricer(protocol))


@pytest.mark.parametrize(("name", "other"), [("SM+LN+G", "SM+ScFuFFN_i6"), ("SM_i12", "SM+LN+R"), ("SM", "SM+LN")])
def test_changes_are_the_difference_of_the_totals(graph_of, name, other):
    before, after = priced(graph_of, name), priced(graph_of, other)
    differences = changes(before, after)
    assert sum(change["latency_s"] for change in differences) == after.total.latency_s - before.total.latency_s
    assert sum(change["sent_bytes"] for change in differences) == after.total.sent_bytes - before.total.sent_bytes
    assert [change["latency_s"] for change in differences] == sorted(change["latency_s"] for change in differences)


def test_what_an_activation_costs(graph_of):
    before, after = priced(graph_of, "SM+LN+G"), priced(graph_of, "SM+LN+R")
    assert changes(before, before) == []
    gelu, relu = changes(before, after)
    assert (gelu["op"], gelu["num_before"], gelu["num_after"]) == ("Gelu", 12, 0)
    assert (relu["op"], relu["num_before"], relu["num_after"]) == ("Relu", 0, 12)
    assert gelu["latency_s"] < 0 < relu["latency_s"]


def test_equal_ops_at_other_prices_differ(graph_of):
    before, after = (priced(graph_of, "SM", protocol, base="tiny", seq_len=8) for protocol in ("semi2k", "aby3"))
    changes_by_op = {change["op"]: change for change in changes(before, after)}
    assert (changes_by_op["Softmax"]["num_before"], changes_by_op["Softmax"]["num_after"]) == (2, 2)
    assert changes_by_op["Softmax"]["sent_bytes"]


BASE = base_architecture("gpt2-small", Dimensions(layers=1, heads=2, d_model=16, vocab=50, context=16))
MODEL = parse("SM(t)+LN+R", BASE).architecture
LAST, DECODE = Deployment(projection="last"), Deployment(phase="decode")
PROMPT, NEW = 5, 4
RUNS = [lower(MODEL, PROMPT, LAST), *(lower(MODEL, PROMPT + step, DECODE) for step in range(1, NEW))]
SMALL = ("SM+LN+R", "--base=tiny", "--seq-len=6")


def generated(deployment):
    whole = partial(lower, MODEL)
    return generation(whole, prompt_len=PROMPT, new_tokens=NEW, deployment=deployment, context=16)


def test_the_prompt_is_followed_by_decoded_tokens():
    assert generated(LAST) == RUNS
    needed = replace(LAST, rows="needed", embedding="lookup", query_block=2)
    assert generated(needed)[1:] == [
        lower(MODEL, PROMPT + step, replace(DECODE, embedding="lookup")) for step in range(1, NEW)
    ]


@pytest.mark.parametrize("protocol", ["published", "semi2k", "aby3", "cheetah"])
def test_the_sum_is_that_of_separate_estimates(protocol):
    pricer = load_pricer(protocol)
    apart = [estimate(run, pricer).total for run in RUNS]
    generation_estimate = estimate_generation(RUNS, pricer)
    assert generation_estimate.by_token == tuple(apart)
    assert generation_estimate.whole.total == total_price(apart)
    assert total_price(price for _, price in generation_estimate.whole.by_op) == total_price(apart)
    decoded = [node for node, _ in generation_estimate.whole.by_op if node.name.endswith("@decode")]
    assert [node.op for node in decoded] == [node.op for node in RUNS[-1]]
    assert generation_estimate.whole.latency_s_range is not None
    low_s, high_s = generation_estimate.whole.latency_s_range
    assert low_s <= generation_estimate.whole.total.latency_s <= high_s


def test_masks_that_are_kept_are_opened_in_the_first_run():
    fresh, kept = (load_pricer("semi2k", setting=EngineSetting(weight_masks=masks)) for masks in ("fresh", "kept"))
    first, *later = RUNS
    apart = [estimate(first, fresh), *(estimate(run, kept) for run in later)]
    generation_estimate = estimate_generation(RUNS, kept)
    assert generation_estimate.by_token == tuple(part.total for part in apart)
    assert (
        generation_estimate.whole.total
        == total_price(generation_estimate.by_token)
        == total_price(price for _, price in generation_estimate.whole.by_op)
    )
    ranges = np.array([part.latency_s_range for part in apart])
    assert generation_estimate.whole.latency_s_range == pytest.approx(ranges.sum(axis=0))
    num_weights = 12 * 16 * 16 + 2 * 50 * 16
    saved = estimate_generation(RUNS, fresh).whole.total.sent_bytes - generation_estimate.whole.total.sent_bytes
    assert saved == (NEW - 1) * 2 * 8 * num_weights


def estimated(run, *args):
    code, out, err = run("estimate", *args)
    assert (code, err) == (0, "")
    return out


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_tables_and_csv_have_the_tokens(run, snapshot, form):
    snapshot(
        f"tokens-{form}",
        estimated(run, *SMALL, "--protocol=semi2k", "--new-tokens=12", "--egress-price=1", f"--format={form}"),
    )


def test_a_traced_model_generates_at_the_price_of_its_name(run, tmp_path, monkeypatch):
    (tmp_path / "a_decoder.py").write_text(
        "from nas.model.decoder import Decoder\n"
        "from search_spaces.bases import Dimensions, base_architecture\n"
        "from search_spaces.notation import parse\n"
        "def make():\n"
        "    base = base_architecture('tiny', Dimensions(context=9))\n"
        "    return Decoder(parse('SM+LN+R', base).architecture)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = ("--protocol=semi2k", "--seq-len=6", "--format=json")
    traced = json.loads(estimated(run, "a_decoder:make", *flags, "--new-tokens=4"))
    named = json.loads(estimated(run, "SM+LN+R", "--base=tiny", *flags, "--new-tokens=4"))
    assert traced["total"] == named["total"]
    said = refused(run("estimate", "a_decoder:make", *flags, "--new-tokens=5"))
    assert "longer than the model's context, but got 10 tokens, context=9" in said


def test_what_cannot_be_generated_is_refused(run):
    for flags, message in (
        (["--new-tokens=0"], "--new-tokens must be at least 1, but got 0"),
        (["--new-tokens=1", "--phase=decode"], "--new-tokens counts from the whole prompt, so it does not go"),
        (["--new-tokens=124"], "must fit the context of 128 tokens, but got a prompt of 6 and 124 new tokens; shorten"),
    ):
        assert message in refused(run("estimate", *SMALL, "--protocol=semi2k", *flags))
    assert run("estimate", *SMALL, "--protocol=semi2k", "--new-tokens=123")[0] == 0
