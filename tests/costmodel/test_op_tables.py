"""Every op type is in every table that must know it, or is left out for a reason that is written here.

Guards what no type checker sees: the tables are dictionaries, and a missing entry is an error only once it is read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from costmodel import elementwise, ops
from costmodel.calibration.microbenchmark import plan
from costmodel.config.strict_yaml import load_mapping
from costmodel.engine.compare import MATRIX_STD
from costmodel.execution import interpreter, op_functions
from costmodel.ops import OP_TYPES
from costmodel.protocols import compute_testbed, derived, op_programs, published
from nas.report import cost_figures

ROOT = Path(__file__).parents[2]
NAMES = tuple(each.__name__ for each in OP_TYPES)
GRAPH = {"Node", "Input", "OpGraph"}  # frozen data of costmodel/ops.py that is no op

NO_WEIGHTS = dict.fromkeys(
    (
        "PackHeads", "Rotary", "RepeatHeads", "KeyValueCache", "AttentionScores", "Softmax", "AttentionMix", "Gelu",
        "Relu", "Square", "Silu", "Sigmoid", "Tanh", "Multiply", "Scale", "Add", "TakeRows", "JoinRows",
        "JoinColumns",
    ),
    "it has no weights",
)  # fmt: skip
PUBLIC_WEIGHTS = dict.fromkeys(("Temperature", "ShapedAttention"), "its learned scalars are public, whoever holds them")
NO_MATRIX = dict.fromkeys(
    ("LayerNorm", "RmsNorm", "FrozenNorm", "Temperature", "ShapedAttention", "LeakyRelu", "ScaledAdd"),
    "its weights are no matrix",
)
NOT_PRINTED = dict.fromkeys(
    ("RmsNorm", "Square", "Silu", "Sigmoid", "Tanh", "Multiply", "Scale"), "no printed row has one"
)
NO_FORMS = dict.fromkeys(set(NAMES) - {"TokenEmbedding", "Softmax", "Gelu"}, "it has one form")
OWN_NAME = dict.fromkeys(
    (
        "PackHeads", "Rotary", "RepeatHeads", "KeyValueCache", "ShapedAttention", "Silu", "Sigmoid", "Tanh", "Multiply",
        "Scale", "TakeRows", "JoinRows", "JoinColumns",
    ),
    "figures call it by its own name",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table, and what an entry of it says of an op.

    entries: names of the op types that it knows. exempt: op type -> why it needs no entry.
    """

    file: str
    name: str
    holds: str
    entries: frozenset[str]
    exempt: dict[str, str]


def _table(file: str, name: str, holds: str, entries: Iterable[Any], exempt: dict[str, str] | None = None) -> Table:
    names = frozenset(getattr(each, "__name__", each) for each in entries)
    return Table(file=file, name=name, holds=holds, entries=names, exempt=exempt or {})


def _data_of_ops() -> set[str]:
    where = {ops.__name__, elementwise.__name__}
    own = [each for each in vars(ops).values() if isinstance(each, type) and each.__module__ in where]
    return {each.__name__ for each in own if is_dataclass(each)} - GRAPH


def _first_words(names: Iterable[str], separator: str) -> set[str]:
    return {name.partition(separator)[0] for name in names}


def _of_testbed(protocol: str) -> Table:
    file = f"costmodel/testbeds/{protocol}.yaml"
    holds = f"its fitted seconds: `python -m costmodel calibrate --engine spu --protocol {protocol}`"
    products = {each.__name__ for each in compute_testbed.PRODUCTS} - {"TokenEmbedding"}  # which has lookups too
    exempt = dict.fromkeys(products, "its seconds are those of all matrix products")
    kinds = _first_words(load_mapping(ROOT / file)["kinds"], ".") - {compute_testbed.POOL}
    return _table(file, "kinds", holds, kinds, exempt)


def _of_measured(protocol: str) -> Table:
    file = "tests/costmodel/protocols/measured.yaml"
    measured = load_mapping(ROOT / file)["sent_bytes_and_messages"][protocol]["default"]
    holds = "bytes and messages the engine sent: an op in PLAN of test_measured_bytes.py beside it, then measure again"
    return _table(file, protocol, holds, _first_words(measured, "("))


def _of_golden() -> Table:
    file = "tests/costmodel/golden_prices.yaml"
    cases = load_mapping(ROOT / file)["prices"]["semi2k secret"].values()
    kinds = _first_words((kind for case in cases for kind in case), ".") - {"total"}
    return _table(file, "prices", "its prices: an op in a case of test_golden_prices.py, then write it anew", kinds)


def tables() -> list[Table]:
    """All tables, in the order in which a new op is added to them."""
    return [
        _table("costmodel/ops.py", "Op", "its name, dimensions and forms, a frozen class", NAMES),
        _table("costmodel/execution/op_functions.py", "FUNCTIONS", "what it computes", op_functions.FUNCTIONS),
        _table("costmodel/execution/interpreter.py", "INPUTS", "shapes of what it reads", interpreter.INPUTS),
        _table(
            "costmodel/execution/interpreter.py", "WEIGHT_SHAPES", "its weights; those no party may hide in PUBLIC too",
            interpreter.WEIGHT_SHAPES, NO_WEIGHTS,
        ),
        _table(
            "costmodel/engine/compare.py", "MATRIX_STD", "the standard deviation of drawn weights",
            MATRIX_STD, NO_WEIGHTS | NO_MATRIX,
        ),
        _table("costmodel/protocols/op_programs.py", "PROGRAMS", "the calls it makes", op_programs.PROGRAMS),
        _table("costmodel/protocols/compute_testbed.py", "WORK", "the work its seconds follow", compute_testbed.WORK),
        _table(
            "costmodel/protocols/compute_testbed.py", "WEIGHTED", "that its seconds depend on who holds its weights",
            compute_testbed.WEIGHTED, NO_WEIGHTS | PUBLIC_WEIGHTS,
        ),
        _table("costmodel/protocols/published.py", "COUNTS", "how many terms it has", published.COUNTS, NOT_PRINTED),
        _table(
            "costmodel/protocols/published.py", "MEASURED_FORMS", "the forms that printed rows have",
            published.MEASURED_FORMS, NO_FORMS,
        ),
        _table(
            "costmodel/calibration/microbenchmark.py", "plan", "the sizes it is timed in, in every form",
            {type(series.sizes[0]) for series in plan("semi2k")},
        ),
        *map(_of_testbed, derived.COMM),
        *map(_of_measured, derived.COMM),
        _table("nas/report/cost_figures.py", "KINDS", "its name in legends", cost_figures.KINDS, OWN_NAME),
        _of_golden(),
    ]  # fmt: skip


def faults(some: Sequence[Table], names: Sequence[str]) -> list[str]:
    """What is in no table though it must be, in one though it is exempt, or in one though there is no such op."""
    told = []
    for table in some:
        where = f"{table.name} in {table.file}"
        told += [f"{name} is not in {where}" for name in names if name not in table.entries | set(table.exempt)]
        told += [
            f"{name} is in {where}, but exempt: {table.exempt[name]}" for name in table.exempt.keys() & table.entries
        ]
        told += [f"{name} of {where} is no op" for name in (table.entries | set(table.exempt)) - set(names)]
    return told


def checklist(some: Sequence[Table]) -> str:
    steps = [f"  {step}. {each.name} in {each.file}: {each.holds}" for step, each in enumerate(some, start=1)]
    reason = (
        "Where it needs no entry, say why in tests/costmodel/test_op_tables.py. A new op also needs whatever makes it: "
    )
    makers = "search_spaces/lower.py or costmodel/tracing, and nas/model/decoder.py if it is trained."
    return "\n".join(("To add an op:", *steps, reason + makers))


def test_every_op_is_in_every_table_or_exempt_for_a_reason() -> None:
    some = tables()
    if told := faults(some, sorted(_data_of_ops())):
        pytest.fail("\n".join((*told, checklist(some))))


def test_the_checklist_names_tables_that_are_there() -> None:
    assert [each for each in tables() if each.name not in (ROOT / each.file).read_text()] == []


def test_a_missing_an_exempt_and_an_unknown_op_are_told() -> None:
    table = Table(file="f.py", name="T", holds="h", entries=frozenset({"A", "B", "C"}), exempt={"B": "why", "D": "x"})
    assert sorted(faults([table], ["A", "B", "D", "New"])) == [
        "B is in T in f.py, but exempt: why",
        "C of T in f.py is no op",
        "New is not in T in f.py",
    ]
    assert "\n  1. T in f.py: h\n" in checklist([table])


def test_weights_are_held_by_a_party_or_public() -> None:
    assert set(compute_testbed.WEIGHTED) == set(interpreter.WEIGHT_SHAPES) - interpreter.PUBLIC
    assert set(PUBLIC_WEIGHTS) == {each.__name__ for each in interpreter.PUBLIC}


def test_every_form_is_timed() -> None:
    timed = {series.sizes[0] for series in plan("semi2k")}
    for op_type in OP_TYPES:
        forms = {name: hint for name, hint in get_type_hints(op_type).items() if get_origin(hint) is Literal}
        assert (op_type.__name__ in NO_FORMS) == (not forms)
        for name, hint in forms.items():
            assert {getattr(op, name) for op in timed if isinstance(op, op_type)} == set(get_args(hint))
