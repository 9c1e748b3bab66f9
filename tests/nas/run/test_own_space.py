"""The space of a parent of any family, with the parent's own settings, is priced and counted."""

import re
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")

from costmodel.cost import Budget  # noqa: E402
from costmodel.protocols import load_pricer  # noqa: E402
from experiments.trainings import DATA  # noqa: E402
from nas.run.folder import own_space  # noqa: E402
from search_spaces.architecture import Architecture  # noqa: E402
from search_spaces.bases import BASES  # noqa: E402
from search_spaces.budget.feasible import priced_within, within_budget  # noqa: E402
from search_spaces.budget.priced_space import (  # noqa: E402
    CostForm,
    cheapest,
    most_expensive,
    price_architecture,
    price_of,
    price_space,
    priceable,
)
from search_spaces.checkpoints.checkpoint import read_checkpoint  # noqa: E402
from search_spaces.checkpoints.settings import architecture_of  # noqa: E402
from search_spaces.lower import Workload  # noqa: E402
from search_spaces.notation import parse  # noqa: E402
from search_spaces.space import sample  # noqa: E402
from tests.nas.conversion.test_families import FAMILIES, QUICK, SIZES  # noqa: E402


def settings(kind: str, **changes: Any) -> Architecture:
    """An architecture by settings of transformers, of which a family without some of SIZES has its own."""
    make = getattr(transformers, f"{kind}Config")
    known = make().to_dict()
    return architecture_of(
        make(**{key: value for key, value in changes.items() if key in known or key not in SIZES}), kind
    )


@pytest.mark.parametrize(("num_kv_heads", "is_offered"), [(2, True), (1, False)])
def test_half_of_the_heads_is_offered_where_it_is_fewer(num_kv_heads: int, is_offered: bool) -> None:
    own = settings("Llama", **{**SIZES, "num_key_value_heads": num_kv_heads})
    assert ("softmax-half" in {layer.attention for layer in own_space(own).layers}) == is_offered


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in (*QUICK, "phi3-heads"))) for name in FAMILIES]
)
def test_a_member_of_every_family_costs_what_its_op_graph_costs_and_is_counted(name: str) -> None:
    kind, changes = FAMILIES[name]
    own, pricer, work = settings(kind, **{**SIZES, **changes}), load_pricer("semi2k"), Workload(prompt_len=8)
    forms: tuple[CostForm, ...] = ("folded", "unfolded")
    for cost_of in forms:
        space, _ = priceable(own_space(own), pricer, work, cost_of)
        priced, rng = price_space(space, pricer, work, cost_of), np.random.default_rng(0)
        drawn = [sample(space, rng) for _ in range(3)]
        costs = [price_of(priced, member) for member in (*drawn, cheapest(priced), most_expensive(priced))]
        for member, cost in zip(drawn, costs, strict=False):
            whole = price_architecture(member.architecture, pricer, work, cost_of).price
            assert (cost.latency_s, cost.sent_bytes) == pytest.approx((whole.latency_s, whole.sent_bytes))
    within = within_budget(priced, Budget(latency_s=costs[0].latency_s * (1 + 1e-9)))
    fits = [cost.latency_s <= costs[0].latency_s * (1 + 1e-9) for cost in costs[:3]]
    assert [within.fits(member) for member in drawn] == fits
    assert within.fits(within.sample(rng))


def test_a_parent_whose_heads_pass_the_stream_on_keeps_them_all() -> None:
    space = own_space(parse("HH(SM+LN+R)", BASES["tiny"]).architecture)
    assert space.definition.choices.attention == ("softmax", "bounded", "power8")
    price_space(space, load_pricer("semi2k"), Workload(prompt_len=8))


# google/gemma-3-270m
GEMMA = {"vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18}
GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256}
DEPTHS = {"Qwen3-0.6B": (16, 18, 22), "Llama-3.2-1B": (18, 22, 28), "OLMo-2-0425-1B": (18, 22, 28)}  # and their own
SHAPES = ["gemma-3-270m", *sorted(path.name for path in (DATA / "families").iterdir())]
SHAPES += [f"{name} of {depth}" for name, depths in DEPTHS.items() for depth in depths]
PROTOCOLS = ("semi2k", "aby3", "cheetah", "sigma", "crypten", "semi2k,crypten")
BUDGETS = (("latency_s",), ("latency_s", "sent_bytes"))


def shape(name: str) -> Architecture:
    """A published model, with another number of layers if `name` says so."""
    if name == "gemma-3-270m":
        return settings("Gemma3Text", **GEMMA)
    folder, _, depth = name.partition(" of ")
    own: Architecture = read_checkpoint(str(DATA / "families" / folder)).model
    return replace(own, layers=own.layers[:1] * int(depth), layer_positions=()) if depth else own


@pytest.mark.slow
@pytest.mark.parametrize(("protocols", "bounds"), list(product(PROTOCOLS, BUDGETS)))
@pytest.mark.parametrize("name", SHAPES)
def test_a_published_model_is_counted_in_two_gigabytes(name: str, protocols: str, bounds: tuple[str, ...]) -> None:
    own, work = shape(name), Workload(prompt_len=128)
    asked = []
    for pricer in map(load_pricer, protocols.split(",")):
        space, _ = priceable(own_space(own), pricer, work)
        priced = price_space(space, pricer, work)
        ends = [price_of(priced, end(priced)) for end in (cheapest, most_expensive)]
        asked.append((pricer, Budget(**{name: sum(getattr(end, name) for end in ends) / 2 for name in bounds})))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew; tracemalloc would triple the time
    began = time.process_time()
    feasible, _ = priced_within(own_space(own), asked, work, "folded")
    seconds = time.process_time() - began
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert int(peak) * 1024 < 2e9
    assert feasible.num_feasible > 0
    print(f"{name}, {protocols}, {len(bounds)} budgets: {seconds:.1f} s, {peak} kB, {feasible.tolerance:.2%}")  # by -rP
    assert feasible.tolerance < (0.1 if len(asked) * len(bounds) < 4 else 1)  # steps are fewer within four budgets
    rng = np.random.default_rng(0)
    for member in (feasible.sample(rng) for _ in range(5)):
        for constraint in feasible.every:
            price = price_of(constraint.priced, member)
            assert all(getattr(price, name) <= most * (1 + 1e-9) for name, most in constraint.budget.bounds.items())
