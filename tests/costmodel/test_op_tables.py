"""Every op type is in every table that must know it, or is left out for a reason that is written here.

Guards what no type checker sees: the tables are dictionaries, and a missing entry is an error only once it is read.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest

from costmodel import ops
from costmodel.calibration.microbenchmark import plan
from costmodel.config.files import load_mapping
from costmodel.execution import op_functions
from costmodel.ops import OP_TYPES, Op
from costmodel.protocols import ckks_steps, crypten, op_programs, published, sigma_programs
from costmodel.protocols.derived import POOL, UNMEASURED
from costmodel.protocols.formulas import ENGINE_PROTOCOLS

ROOT = Path(__file__).parents[2]
LOCAL = {op_type.__name__: "it is local" for op_type in OP_TYPES if op_type.is_local}
NOT_TABLED = dict.fromkeys(("Sigmoid", "Tanh"), "the code of SIGMA has no table for it")
NOT_PRINTED = dict.fromkeys(
    ("RmsNorm", "Square", "Silu", "Sigmoid", "Tanh", "Multiply", "Scale"), "no printed row has one"
)
NOT_PACKED = dict.fromkeys(
    ("KeyValueCache", "TakeColumns", "JoinRows", "JoinColumns"), "rows and columns are not moved between ciphertexts"
)
PRODUCTS = dict.fromkeys(
    {op_type.__name__ for op_type in OP_TYPES if op_type.is_product} - {"TokenEmbedding"},  # which has lookups too
    "its seconds are those of all matrix products",
)

SIMILAR = {name: f"its seconds are those of {other}" for name, other in UNMEASURED.items()}


class Table(NamedTuple):
    """One table, and what an entry of it says of an op.

    entries: names of the op types that it knows. exempt: op type -> why it needs no entry.
    """

    file: str
    name: str
    holds: str
    entries: frozenset[str]
    exempt: dict[str, str]


def table(file: str, name: str, holds: str, entries: Iterable[Any], exempt: dict[str, str] | None = None) -> Table:
    names = frozenset(getattr(entry, "__name__", entry) for entry in entries)
    return Table(file=file, name=name, holds=holds, entries=names, exempt=exempt or {})


def first_words(names: Iterable[str], separator: str) -> set[str]:
    return {name.partition(separator)[0] for name in names}


def of_testbed(protocol: str) -> Table:
    file = f"costmodel/testbeds/{protocol}.yaml"
    engine = ENGINE_PROTOCOLS[protocol].engine
    holds = f"its fitted seconds: `python -m costmodel calibrate --engine {engine} --protocol {protocol}`"
    kinds = first_words(load_mapping(ROOT / file)["kinds"], ".") - {POOL}
    lacking = {name: why for name, why in SIMILAR.items() if name not in kinds}  # testbeds from before the op
    return table(file, "kinds", holds, kinds, PRODUCTS | lacking)


def of_measured(protocol: str) -> Table:
    file = "tests/costmodel/protocols/measured.yaml"
    measured = load_mapping(ROOT / file)["sent_bytes_and_messages"][protocol]["default"]
    holds = "bytes and messages the engine sent: an op in `some_ops` of test_measured_bytes.py, then measure again"
    return table(file, protocol, holds, first_words(measured, "("))


def of_golden() -> Table:
    file = "tests/costmodel/golden_prices.yaml"
    cases = load_mapping(ROOT / file)["prices"]["semi2k secret"].values()
    kinds = first_words((kind for case in cases for kind in case), ".") - {"total"}
    return table(file, "prices", "its prices: an op in a case of test_golden_prices.py, then write it anew", kinds)


@cache
def tables() -> list[Table]:
    """All tables, in the order in which a new op is added to them."""
    programs = {**op_programs.ELEMENTWISE, **op_programs.PROGRAMS}
    return [
        table("costmodel/ops/__init__.py", "OP_TYPES", "its dimensions, forms and shapes, a frozen class", OP_TYPES),
        table("costmodel/execution/op_functions.py", "FUNCTIONS", "what it computes", op_functions.FUNCTIONS),
        table("costmodel/protocols/op_programs.py", "PROGRAMS", "the calls it makes", programs, LOCAL),
        table(
            "costmodel/protocols/published.py", "COUNTS", "how many terms it has", published.COUNTS, NOT_PRINTED | LOCAL
        ),
        table(
            "costmodel/protocols/sigma_programs.py",
            "PROGRAMS",
            "its steps under sigma",
            sigma_programs.PROGRAMS,
            NOT_TABLED | LOCAL,
        ),
        table("costmodel/protocols/crypten.py", "PROGRAMS", "its steps under crypten", crypten.PROGRAMS, LOCAL),
        table("costmodel/protocols/ckks_steps.py", "PROGRAMS", "its steps under ckks", ckks_steps.PROGRAMS, NOT_PACKED),
        *map(of_testbed, ENGINE_PROTOCOLS),
        *map(of_measured, (name for name, protocol in ENGINE_PROTOCOLS.items() if protocol.engine == "spu")),
        of_golden(),
    ]


def faults(some: Sequence[Table], names: Sequence[str]) -> list[str]:
    """What is in no table though it must be, in one though it is exempt, or in one though there is no such op."""
    lines = []
    for op_table in some:
        where = f"{op_table.name} in {op_table.file}"
        lines += [f"{name} is not in {where}" for name in names if name not in op_table.entries | set(op_table.exempt)]
        lines += [
            f"{name} is in {where}, but exempt: {op_table.exempt[name]}"
            for name in op_table.exempt.keys() & op_table.entries
        ]
        lines += [f"{name} of {where} is no op" for name in (op_table.entries | set(op_table.exempt)) - set(names)]
    return lines


def checklist(some: Sequence[Table]) -> str:
    steps = [
        f"  {step}. {op_table.name} in {op_table.file}: {op_table.holds}" for step, op_table in enumerate(some, start=1)
    ]
    reason = "Where it needs no entry, say why in tests/costmodel/test_op_tables.py. Also add whatever makes it: "
    makers = "search_spaces/lower.py or costmodel/tracing, and nas/model/decoder.py if it is trained."
    return "\n".join(("To add an op:", *steps, reason + makers))


def test_every_op_is_in_every_table_or_exempt_for_a_reason():
    families = {ops.Op, ops.OnRows, ops.OnScores}
    types = [value for value in vars(ops).values() if isinstance(value, type) and issubclass(value, Op)]
    if lines := faults(tables(), sorted(op_type.__name__ for op_type in types if op_type not in families)):
        pytest.fail("\n".join((*lines, checklist(tables()))))


def test_the_checklist_names_tables_that_are_there():
    assert [op_table for op_table in tables() if op_table.name not in (ROOT / op_table.file).read_text()] == []


def test_a_missing_an_exempt_and_an_unknown_op_are_told():
    made = Table(file="f.py", name="T", holds="h", entries=frozenset({"A", "B", "C"}), exempt={"B": "why", "D": "x"})
    assert sorted(faults([made], ["A", "B", "D", "New"])) == [
        "B is in T in f.py, but exempt: why",
        "C of T in f.py is no op",
        "New is not in T in f.py",
    ]
    assert "\n  1. T in f.py: h\n" in checklist([made])


def test_weights_have_a_holder_and_matrices_of_them_are_drawn_by_their_size():
    timed = [op for series in plan("semi2k") for op in series.sizes]
    assert all((op.weights != "none") == bool(op.weight_shapes) for op in timed)
    public = {type(op).__name__ for op in timed if op.weights == "public"}
    assert public == {"Temperature", "ScoreBound", "ShapedAttention"}
    hidden = [op for op in timed if op.weights == "hidden"]
    with_matrix = {type(op) for op in hidden if any(len(shape) == 2 for shape in op.weight_shapes.values())}
    assert with_matrix == {op_type for op_type in OP_TYPES if op_type.weight_std is not None}


def test_every_form_is_timed_and_its_coefficient_is_for_forms_that_were_printed():
    timed = {series.sizes[0] for series in plan("semi2k")}
    assert {type(op) for op in timed} == set(OP_TYPES)
    for op_type in OP_TYPES:
        forms = {name: hint for name, hint in get_type_hints(op_type).items() if get_origin(hint) is Literal}
        assert (op_type in published.MEASURED_FORMS) == bool(forms)
        for name, hint in forms.items():
            assert {getattr(op, name) for op in timed if isinstance(op, op_type)} == set(get_args(hint))
