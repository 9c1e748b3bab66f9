from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from costmodel.cost import Price, total_price
from costmodel.deployment.deploy import Deployment
from costmodel.errors import UnpricedOpError, UserError
from costmodel.estimate import Pricer, estimate, estimate_generation
from costmodel.ops import Op, OpGraph, RmsNorm, Softmax
from costmodel.protocols import load_pricer
from costmodel.protocols.primitives import EngineSetting
from search_spaces.bases import BASES, Dimensions
from search_spaces.budget.priced_space import (
    CostForm,
    cheaper,
    cheapest,
    most_expensive,
    price_architecture,
    price_by_part,
    price_of,
    price_space,
    priceable,
)
from search_spaces.deployed import deployed
from search_spaces.lower import Workload, lower
from search_spaces.notation import Member, parse
from search_spaces.space import (
    SHIPPED,
    Choices,
    Definition,
    SearchSpace,
    build_space,
    load_definition,
    load_space,
    member_at,
    members,
    sample,
    with_first_layers,
)

ACCOUNTINGS = pytest.mark.parametrize("cost_of", ["folded", "unfolded"])


def whole(member: Member, pricer: Pricer, cost_of: CostForm, seq_len: int = 8) -> Price:
    run = member.architecture if cost_of == "unfolded" else deployed(member.architecture)
    return estimate(lower(run, seq_len), pricer).total


@ACCOUNTINGS
@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("seq_len", [1, 64])
def test_a_path_costs_what_its_op_graph_costs(name, seq_len, cost_of, pricer):
    space, rng = load_space(name), np.random.default_rng(0)
    priced = price_space(space, pricer, seq_len, cost_of)
    for member in (sample(space, rng) for _ in range(4)):
        price = price_of(priced, member)
        assert price == whole(member, pricer, cost_of, seq_len)
        assert total_price(price_by_part(priced, member).values()) == price


def test_parts_are_the_embedding_the_layers_and_the_head_and_outsiders_have_no_price(pricer):
    """Seconds as in the fixture; a ReLU layer behind a frozen norm keeps 3 + 1 as deployed."""
    space = load_space("gpt2-small")
    prices = price_by_part(price_space(space, pricer, 8), parse("SM+fLN+R", space.base))
    seconds = {part: price.latency_s for part, price in prices.items()}
    assert seconds == {"embedding": 7.0, "layers": 12 * (3 + 1), "head": 11.0}
    priced = price_space(load_space("tiny"), pricer, 8)
    with pytest.raises(ValueError, match="only members of space 'tiny' are priced here"):
        price_of(priced, parse("SM+LN+G", load_space("tiny").base))


@pytest.mark.parametrize(
    ("name", "notation", "whose", "cost_of"),
    [
        ("gpt2-small", "6xLSLGo", {"public_layers": "embed,0-1"}, "folded"),
        ("gpt2-small", "6xLSLGo", {"client_layers": 2}, "unfolded"),
        ("gpt2-small", "6xLSLGo", {"client_layers": 0}, "folded"),
        ("smollm2-135m", "6xMSMWo", {"public_layers": "embed,0-1"}, "unfolded"),
        ("smollm2-135m", "6xMSMWo", {"client_layers": 2}, "folded"),
    ],
)
def test_layers_that_are_no_secret_are_priced_so(name, notation, whose, cost_of):
    """Every member begins with them; a tail without layers is still the model that the deployment names layers of."""
    whole = build_space(replace(load_definition(name), dimensions=Dimensions(layers=6)))
    first, pricer = parse(notation, whole.base).architecture.layers[:2], load_pricer("semi2k")
    space = with_first_layers(whole, first)
    work = Workload(prompt_len=8, deployment=Deployment(**whose))
    priced = price_space(space, pricer, work, cost_of)
    for member in (cheapest(priced), sample(space, np.random.default_rng(0)), most_expensive(priced)):
        price, expected = price_of(priced, member), price_architecture(member.architecture, pricer, work, cost_of)
        assert (price.latency_s, price.sent_bytes) == pytest.approx(
            (expected.price.latency_s, expected.price.sent_bytes)
        )
        secret = price_architecture(member.architecture, pricer, Workload(prompt_len=8), cost_of).price
        assert price.sent_bytes < secret.sent_bytes


@ACCOUNTINGS
def test_a_price_is_per_new_token(cost_of):
    space, work, costs = load_space("tiny"), Workload(prompt_len=8, new_tokens=3), list[float]()
    for masks in ("fresh", "kept"):  # the first token makes the masks
        pricer = load_pricer("semi2k", setting=EngineSetting(weight_masks=masks))
        priced = price_space(space, pricer, work, cost_of)
        for member in (member_at(space, index) for index in (0, 77, 300)):
            price, expected = price_of(priced, member), price_architecture(member.architecture, pricer, work, cost_of)
            assert (price.latency_s, price.sent_bytes) == pytest.approx(
                (expected.price.latency_s, expected.price.sent_bytes)
            )
        costs.append(price.sent_bytes)
    graphs = work.graphs(deployed(member.architecture) if cost_of == "folded" else member.architecture)
    generation = estimate_generation(graphs, pricer)
    assert costs[1] == pytest.approx(generation.whole.total.sent_bytes / 3)
    assert costs[1] < costs[0]
    assert generation.by_token[0].sent_bytes == estimate(graphs[0], load_pricer("semi2k")).total.sent_bytes


def test_reused_masks_are_proposed_for_several_tokens():
    base = replace(load_space("tiny").base, vocab_size=50_000)
    architecture, pricer = parse("SM+LN+G", base).architecture, load_pricer("semi2k")
    for num_tokens in (1, 3):
        found = cheaper(architecture, pricer, Workload(prompt_len=16, new_tokens=num_tokens), "folded")
        assert ("--weight-masks kept" in [saving.flags for saving in found]) == (num_tokens > 1)


@ACCOUNTINGS
def test_simplified_blocks_are_priced_per_depth(cost_of, pricer):
    """Layer 0 alone has a value projection; the price of a layer may depend on where it stands."""

    class PerLinear(type(pricer)):  # type: ignore[misc]
        def price(self, op: Op) -> Price:
            return Price(latency_s=float(type(op).__name__ == "Linear"), sent_bytes=0.0)

    tiny = load_space("tiny")
    space = replace(tiny, base=replace(tiny.base, block="sas"))
    priced = price_space(space, PerLinear(), 8, cost_of)
    for member in members(space):
        price, expected = price_of(priced, member), whole(member, PerLinear(), cost_of)
        assert (price.latency_s, price.sent_bytes) == (expected.latency_s, expected.sent_bytes)


@pytest.mark.parametrize("measure", ["latency_s", "sent_bytes"])
def test_cheapest_and_most_expensive_by_enumeration(small_space, pricer, measure):
    priced = price_space(small_space, pricer, 8)
    costs = {member: getattr(price_of(priced, member), measure) for member in members(small_space)}
    assert costs[cheapest(priced, measure)] == min(costs.values())
    assert costs[most_expensive(priced, measure)] == max(costs.values())
    with pytest.raises(UserError, match="`measure` must not be key_bytes, since protocol round has no keys"):
        cheapest(priced, "key_bytes")


@pytest.mark.parametrize("latency_s", [float("nan"), float("inf"), -1.0])
def test_impossible_prices_are_refused(pricer, latency_s):
    class Broken(type(pricer)):  # type: ignore[misc]
        def price(self, op: Op) -> Price:
            return Price(latency_s=latency_s, sent_bytes=0.0)

    with pytest.raises(ValueError, match="prices under 'round' must be finite and non-negative"):
        price_space(load_space("tiny"), Broken(), 8)


@ACCOUNTINGS
def test_prices_that_do_not_add_up_are_refused(cost_of, pricer):
    """`cheapest` and every count rest on additivity, so a lowering that broke it must not go unseen."""

    def lower_with_surcharge(architecture, seq_len):
        graph = lower(architecture, seq_len)
        again = tuple(replace(node, name=f"{node.name}@again") for node in graph)
        return OpGraph(nodes=(*graph, *again)) if len(set(architecture.layers)) > 1 else graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("search_spaces.lower.lower", lower_with_surcharge)
        with pytest.raises(ValueError, match="prices under 'round' must add up over layers"):
            price_space(load_space("tiny"), pricer, 8, cost_of)


WORK = Workload(prompt_len=8)
NO_ROW = "protocol published has no formula for {}, which no printed row has; choose protocol semi2k, aby3 or cheetah."
NO_FORM = "protocol published prices {} only, but got {!r}; choose protocol semi2k, aby3 or cheetah."


def space_of(**choices: tuple[str, ...]) -> SearchSpace:
    plain = {"norm1": ("none",), "attention": ("softmax",), "norm2": ("none",), "ffn": ("relu",)}
    made: Any = {**plain, "stabiliser": ("none",), **choices}
    return build_space(Definition(name="own", base="tiny", dimensions=Dimensions(layers=2), choices=Choices(**made)))


def test_what_the_printed_rows_lack_leaves_the_space_of_forms():
    space, left_out = priceable(load_space("gpt2-forms"), load_pricer(), WORK)
    assert left_out == {
        "norm1 rmsnorm": NO_ROW.format("RmsNorm"),
        "attention 2quad": NO_FORM.format("Softmax with `form` exact", "2quad"),
        "attention relu": NO_FORM.format("Softmax with `form` exact", "relu"),
        "norm2 rmsnorm": NO_ROW.format("RmsNorm"),
        "ffn gelu-piecewise": NO_FORM.format("Gelu with `form` tanh or exact", "piecewise"),
        "ffn square": NO_ROW.format("Square"),
    }
    choices = space.definition.choices
    assert (choices.norm1, choices.attention) == (("layernorm", "none"), ("softmax", "none"))
    assert (choices.norm2, choices.ffn) == (("layernorm", "none"), ("gelu", "relu", "none"))
    price_space(space, load_pricer(), WORK)  # all of it


@pytest.mark.parametrize("cost_of", ["folded", "unfolded"])
def test_a_space_that_lists_its_members_is_left_as_it_is(cost_of, pricer):
    """So is a space all of which has a price; a frozen norm, which no printed row has, is taken as folded."""
    definition = Definition(name="squares", base="tiny", members=("SM+SQ", "SM+R"))
    for space in (load_space("ladder"), load_space("gpt2-small"), build_space(definition)):
        assert priceable(space, load_pricer(), WORK, cost_of) == (space, {})
    for name in ("gpt2-papers", "gpt2-small", "tiny"):
        assert priceable(load_space(name), pricer, WORK, cost_of)[0] is load_space(name)
    with pytest.raises(UnpricedOpError, match="no formula for Square"):
        price_space(build_space(definition), load_pricer(), WORK)


def test_a_base_without_removable_attention_has_prices_for_all_its_choices(pricer):
    base = parse("HH(SM+LN+R)", BASES["tiny"]).architecture
    kept: Any = {"norm1": ("layernorm", "none"), "norm2": ("layernorm", "none"), "stabiliser": ("none",)}
    choices = Choices(**kept, attention=("softmax",), ffn=("relu", "fused"))
    space = build_space(Definition(name="shaped", base="tiny", choices=choices), base)
    assert priceable(space, pricer, WORK) == (space, {})


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"ffn": ("square", "gelu-piecewise")},
            "a choice of ffn .* got square, gelu-piecewise: .* no formula for Square",
        ),
        ({"attention": ("2quad", "relu")}, "a choice of attention .* got 2quad, relu: .* prices Softmax"),
        ({"norm1": ("rmsnorm",)}, "a choice of norm1 .* got rmsnorm: .* no formula for RmsNorm"),
    ],
)
def test_a_kind_without_any_price_is_refused_by_name(choices, message):
    with pytest.raises(ValueError, match=f"space 'own' must have {message}"):
        priceable(space_of(**choices), load_pricer(), WORK)


def test_a_choice_leaves_for_its_own_sake_alone(pricer):
    class NoSoftmax(type(pricer)):  # type: ignore[misc]
        def price(self, op: Op) -> Price:
            if isinstance(op, (Softmax, RmsNorm)):
                raise UnpricedOpError(f"no {type(op).__name__}.")
            return super().price(op)

    space = space_of(norm1=("layernorm",), attention=("softmax", "softmax-half", "none"), norm2=("rmsnorm", "none"))
    _, left_out = priceable(space, NoSoftmax(), WORK)
    assert left_out == {
        "attention softmax": "no Softmax.",
        "attention softmax-half": "no Softmax.",
        "norm2 rmsnorm": "no RmsNorm.",
    }
