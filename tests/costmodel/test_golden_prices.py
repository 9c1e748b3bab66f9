"""Prices of every kind of op under every protocol, as they were when the version of the cost model was last raised.

Guards what a price is made of, and what no other test holds to a number: formulas, counts, programs and work tables,
the lowering, the committed testbeds' seconds, and the link. Two prices are comparable where the version and the
testbed are the same, so whatever moves one must raise the version. To accept changed prices, raise
`COST_MODEL_VERSION` in costmodel/estimate.py, then

    python tests/costmodel/test_golden_prices.py

which writes golden_prices.yaml anew and refuses to while the version in it is the present one. Cases that had no price
before are added without a new version, since no price changes with them.
Counts are exact; seconds, and the bytes of `published`, are so to a relative 1e-12.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isclose
from pathlib import Path
from typing import Any, TypeAlias, get_args

import pytest

from costmodel import ops
from costmodel.calibration.microbenchmark import plan
from costmodel.config.files import dump, load_mapping
from costmodel.cost import Price, total_price
from costmodel.deployment.deploy import Deployment
from costmodel.errors import UserError
from costmodel.estimate import COST_MODEL_VERSION, estimate
from costmodel.ops import OP_TYPES, Node, Op, OpGraph
from costmodel.protocols import ckks_steps, load_pricer, published, sigma_programs
from costmodel.protocols.derived import Derived, kind
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import Holder
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

PATH = Path(__file__).with_name("golden_prices.yaml")
REMEDY = (
    "If the change is meant, raise COST_MODEL_VERSION in costmodel/estimate.py, unless it only adds prices, "
    "and rewrite the golden file with `python tests/costmodel/test_golden_prices.py`."
)
RELATIVE_TOLERANCE = 1e-12
MEASURES = tuple(measure.name for measure in fields(Price) if measure.name != "key_bytes")  # which test_sigma.py has
COLUMNS = ("num_ops", *MEASURES)
SMALL = Dimensions(layers=12, heads=2, d_model=16, vocab=50, context=32)
LARGE = Dimensions(layers=12, heads=12, d_model=768, vocab=50_000, context=1024)  # GPT-2 small
SIZES = {"small": (SMALL, 9), "large": (LARGE, 128)}
Prices: TypeAlias = dict[str, dict[str, Any]]  # case -> kind of op, or `total` -> one value per column


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model that notation can name, and how it is deployed; its dimensions are of `SIZES`."""

    notation: str
    base: str = "gpt2-small"
    forms: Dimensions = field(default_factory=Dimensions)
    folded: bool = False
    deployment: Deployment = field(default_factory=Deployment)


CASES = {
    "baseline": Case(notation="SM+LN+G"),
    "every layer": Case(
        notation="1xLSLGo-1xLTLGs-2xoSoRo-2xoToKs-2xoSoIs-2xoToFs-2xLSooo",
        forms=Dimensions(gelu="exact"),
        deployment=Deployment(projection="last"),
    ),
    "forms": Case(
        notation="SM(t)+LN+G_i6",
        forms=Dimensions(softmax="2quad", gelu="piecewise"),
        deployment=Deployment(embedding="lookup"),
    ),
    "rotary decode": Case(notation="6xLSoGo-6xoToRs", base="pythia-70m", deployment=Deployment(phase="decode")),
    "simplified": Case(notation="HH(SM(t)+ScFuFFN)", folded=True),
    "simplified decode": Case(
        notation="HH(SM+LR)", forms=Dimensions(softmax="relu"), deployment=Deployment(phase="decode")
    ),
    "every choice": Case(notation="1xMSlGo-1xmHMEo-2xoQoPo-2xoUoKo-2xoSoXo-2xLToIs-2xooMFs"),
    "every choice decode": Case(
        notation="4xMHmXo-4xlQoPo-4xoHlEo", base="pythia-70m", deployment=Deployment(phase="decode")
    ),
    "needed rows in blocks": Case(
        notation="SM(t)+LN+R", deployment=Deployment(projection="last", rows="needed", query_block=4)
    ),
    "a batch, its vocabulary in halves": Case(notation="HH(SM(t)+G)", deployment=Deployment(batch=3, vocab_blocks=2)),
    "frozen norms and half the heads": Case(notation="6xlSmGo-6xmHoRo"),
    "choices folded": Case(notation="6xMSoPo-6xoHMXo", folded=True),
    "llama": Case(notation="6xMSMWo-3xMBmBo-3xmHMVo", base="smollm2-135m", forms=Dimensions(kv_heads=2)),
}
HOLDERS: tuple[Holder, ...] = get_args(Holder)
SETTINGS: dict[str, tuple[str, Holder | None]] = {
    "published": ("published", None),
    **{
        f"{protocol} {weights}": (protocol, weights)
        for protocol in ENGINE_PROTOCOLS
        for weights in HOLDERS
        if (protocol, weights) != ("crypten", "server")
    },
    "sigma": ("sigma", None),
    "ckks": ("ckks", None),
}
# protocol of no testbed of the engine -> what it prices, and which of that no case has, as it cannot be priced whole
PRICED: dict[str, tuple[Iterable[type], set[str]]] = {
    "published": (published.COUNTS, set()),
    "sigma": (sigma_programs.PROGRAMS, {"Scale", "Square", "JoinRows"}),
    "ckks": (ckks_steps.PROGRAMS, {"JoinColumns", "JoinRows", "KeyValueCache", "TakeColumns"}),
}


def graph_of(case: Case, size: str) -> OpGraph:
    dimensions, seq_len = SIZES[size]
    shape = replace(dimensions, gelu=case.forms.gelu, softmax=case.forms.softmax, kv_heads=case.forms.kv_heads)
    architecture = parse(case.notation, base_architecture(case.base, shape)).architecture
    return lower(replace(architecture, folded=case.folded), seq_len, case.deployment)


def of_ops(*some: Op) -> OpGraph:
    return OpGraph(
        nodes=tuple(
            Node(name=str(at), layer=0, op=op, inputs=("tokens",) * len(op.input_shapes)) for at, op in enumerate(some)
        )
    )


def traced_graphs(size: str, rows: int, features: int) -> dict[str, OpGraph]:
    """What only traced models have, op after op."""
    heads: Any = {"heads": 4, "key_heads": 2}
    grouped_heads = of_ops(
        ops.Linear(rows=rows, in_features=features, out_features=features, bias=False),
        ops.PackHeads(rows=rows, query_features=features, key_features=features // 2),
        ops.Rotary(rows=rows, rotary_dim=features // 4, **heads),
        ops.RepeatHeads(rows=rows, head_dim=features // 4, **heads),
    )
    gated = of_ops(
        ops.RmsNorm(rows=rows, features=features),
        ops.Silu(rows=rows, features=features),
        ops.Multiply(rows=rows, features=features),
    )
    scaled = of_ops(
        ops.LayerNorm(rows=rows, features=features, bias=False),
        ops.AttentionScores(heads=4, queries=rows, keys=rows, head_dim=features // 4, factor=0.0156),
        ops.Scale(rows=4 * rows, features=rows, factor=1 / 50),
        ops.Tanh(rows=4 * rows, features=rows),
        ops.Softmax(heads=4, queries=rows, keys=rows, causal=False),
        ops.Sigmoid(rows=rows, features=features),
    )
    pooled = of_ops(
        ops.TakeRows(rows=rows, features=features, taken=1),
        ops.Linear(rows=1, in_features=features, out_features=features, bias=True),
    )
    bounded = of_ops(ops.ScoreBound(heads=4, queries=rows, keys=rows))
    powers = of_ops(ops.Softmax(heads=4, queries=rows, keys=rows, form="power8"))
    some = {"grouped heads": grouped_heads, "gated": gated, "scaled": scaled, "pooled": pooled}
    halves = of_ops(ops.TakeColumns(rows=rows, features=features, taken=features // 2, first=features // 2))
    elementwise = of_ops(
        ops.Square(rows=rows, features=features),
        ops.Scale(rows=rows, features=features, factor=1 / 50),
        ops.Tanh(rows=rows, features=features),
        ops.Sigmoid(rows=rows, features=features),
    )
    some |= {"bounded": bounded, "powers": powers, "halves": halves, "elementwise": elementwise}
    return {f"{name}, {size}": graph for name, graph in some.items()}


GRAPHS = {f"{name}, {size}": graph_of(case, size) for name, case in CASES.items() for size in SIZES}
GRAPHS |= traced_graphs("small", 9, 16) | traced_graphs("large", 128, 768)


def prices_of(setting: str) -> Prices:
    """The prices of every case; none for a case with an op that the protocol does not price."""
    protocol, weights = SETTINGS[setting]
    setting_of = None if weights is None else ENGINE_PROTOCOLS[protocol].setting(weights=weights)
    pricer = load_pricer(protocol, setting=setting_of)
    prices: Prices = {}
    for name, graph in GRAPHS.items():
        try:
            prices[name] = _by_kind(graph, [price for _, price in estimate(graph, pricer).by_op], weights or "secret")
        except UserError:
            prices[name] = {}
    return prices


def _by_kind(graph: OpGraph, prices: Iterable[Price], weights: str) -> dict[str, Any]:
    groups: dict[str, list[Price]] = {}
    for node, price in zip(graph, prices, strict=True):
        for group in ("total", kind(node.op, weights)):
            groups.setdefault(group, []).append(price)
    totals = {group: total_price(parts) for group, parts in groups.items()}
    return {
        group: [len(parts), *(getattr(totals[group], name) for name in MEASURES)] for group, parts in groups.items()
    }


def differences(golden: Mapping[str, Any], prices: Mapping[str, Any]) -> list[str]:
    """What differs, case by case, kind by kind and column by column; empty where all is equal."""
    told = []
    for name in dict.fromkeys((*golden, *prices)):
        before, after = golden.get(name, {}), prices.get(name, {})
        for group in dict.fromkeys((*before, *after)):
            if (old := before.get(group)) == (new := after.get(group)):
                continue
            if isinstance(old, list) and isinstance(new, list):
                pairs = zip(COLUMNS, old, new, strict=True)
                told += [f"{name}, {group}: {column} was {a}, is {b}" for column, a, b in pairs if not _same(a, b)]
            else:
                told.append(f"{name}, {group}: was {old}, is {new}")
    return told


def _same(golden: float | None, price: float | None) -> bool:
    if isinstance(golden, float) and isinstance(price, float):
        return isclose(golden, price, rel_tol=RELATIVE_TOLERANCE, abs_tol=0.0)
    return golden == price


def rewritten(golden: Mapping[str, Any], new_prices: Mapping[str, Prices], version: int) -> dict[str, Any]:
    """The content of the file with the prices found; golden: its content before, empty at first.

    Raises UserError for prices that differ from those of the same version, or of a later one; new ones do not.
    """
    told = []
    for setting, prices in golden.get("prices", {}).items():
        before = {name: groups for name, groups in prices.items() if groups}
        told += differences(before, {name: new_prices.get(setting, {}).get(name, {}) for name in before})
    if told and version <= golden.get("cost_model_version", 0):
        raise UserError(
            f"{len(told)} prices differ from those of version {golden['cost_model_version']}, as {told[0]}; raise "
            f"COST_MODEL_VERSION in costmodel/estimate.py, which is {version}, then rewrite the golden file."
        )
    return {"cost_model_version": version, "columns": list(COLUMNS), "prices": dict(new_prices)}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return load_mapping(PATH)


def test_the_golden_prices_are_of_this_version(golden):
    header = (golden["cost_model_version"], golden["columns"], list(golden["prices"]))
    assert header == (COST_MODEL_VERSION, list(COLUMNS), list(SETTINGS)), REMEDY


@pytest.mark.parametrize("setting", SETTINGS)
def test_prices_are_those_of_this_version(setting, golden):
    told = differences(golden["prices"].get(setting, {}), prices_of(setting))
    if told:
        pytest.fail(f"{len(told)} prices of {setting} changed:\n  " + "\n  ".join(told[:8]) + f"\n{REMEDY}")


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_kind_of_op_that_has_a_price_is_in_a_case(setting, golden):
    kinds = {name for case in golden["prices"][setting].values() for name in case} - {"total"}
    protocol, weights = SETTINGS[setting]
    pricer = load_pricer(protocol)
    if isinstance(pricer, Derived):
        others = ".server" if weights == "secret" else ".secret"
        assert kinds == {series.kind for series in plan(protocol) if not series.kind.endswith(others)}
    else:
        priced, not_whole = PRICED[protocol]
        assert {name.partition(".")[0] for name in kinds} == {
            op_type.__name__ for op_type in OP_TYPES if op_type.is_local or op_type in priced
        } - not_whole


def row(num_ops: int, latency_s: float) -> list[float | None]:
    return [num_ops, latency_s, *[None] * (len(COLUMNS) - 2)]


def test_a_changed_price_is_told_and_not_written_over():
    before: Prices = {"case": {"total": row(1, 2.0), "Relu": row(1, 2.0)}}
    after: Prices = {"case": {"total": row(1, 2.0), "Relu": row(2, 2.5)}}
    assert differences(before, before) == differences({}, {}) == []
    assert differences(before, after) == ["case, Relu: num_ops was 1, is 2", "case, Relu: latency_s was 2.0, is 2.5"]
    assert differences({"case": {}}, {"case": {"total": row(1, 2.0)}}) == [f"case, total: was None, is {row(1, 2.0)}"]
    whole: Prices = {"case": {"total": row(2**53, 2.0)}}  # counts are exact, and seconds nearly so
    others = [row(2**53, 2.0 * (1 + 1e-13)), row(2**53, 2.0 * (1 + 1e-11)), row(2**53 + 1, 2.0)]
    assert [len(differences(whole, {"case": {"total": other}})) for other in others] == [0, 1, 1]
    file = {"cost_model_version": 3, "prices": {"semi2k": before}}
    with pytest.raises(UserError, match="2 prices differ from those of version 3, .* raise COST_MODEL_VERSION"):
        rewritten(file, {"semi2k": after}, version=3)
    assert rewritten(file, {"semi2k": after}, version=4)["prices"] == {"semi2k": after}
    assert rewritten(file, {"semi2k": before}, version=3)["prices"] == {"semi2k": before}


def test_prices_are_added_without_a_new_version_and_not_taken_away():
    before: Prices = {"case": {"total": row(1, 2.0)}, "unpriced": {}}
    after: Prices = {"case": {"total": row(1, 2.0)}, "unpriced": {"total": row(1, 3.0)}, "new": {"total": row(1, 4.0)}}
    file = {"cost_model_version": 3, "prices": {"semi2k": before}}
    assert rewritten(file, {"semi2k": after, "aby3": after}, version=3)["prices"] == {"semi2k": after, "aby3": after}
    for fewer in ({"semi2k": {"new": after["new"]}}, {"aby3": after}):
        with pytest.raises(UserError, match="1 prices differ from those of version 3, as case, total: was .*, is None"):
            rewritten(file, fewer, version=3)


def main() -> None:
    before = load_mapping(PATH) if PATH.exists() else {}
    try:
        content = rewritten(before, {setting: prices_of(setting) for setting in SETTINGS}, COST_MODEL_VERSION)
    except UserError as error:
        sys.exit(str(error))
    PATH.write_text(dump(content), encoding="utf-8")


if __name__ == "__main__":
    main()
