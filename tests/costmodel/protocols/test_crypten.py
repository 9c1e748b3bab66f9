"""Protocol `crypten`: bytes and rounds with their arithmetic, and as parties and dealer counted them.

measured_crypten.yaml holds what they counted; to count again, with CrypTen installed:

    python tests/costmodel/protocols/test_crypten.py > measured.yaml
    mv measured.yaml tests/costmodel/protocols/measured_crypten.yaml
"""

import json
import random
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodel import ops
from costmodel.config.files import dump, load_mapping
from costmodel.deployment.deploy import Deployment
from costmodel.engine import registry, spu
from costmodel.engine.children import kept_children
from costmodel.engine.compare import drawn_caches, drawn_tokens, drawn_weights
from costmodel.engine.links import UNHINDERED, tcp
from costmodel.engine.session import Measured, StepRun
from costmodel.engine.spu import ops_job, passes
from costmodel.errors import UnpricedOpError, UserError
from costmodel.execution import interpreter
from costmodel.ops import Op, OpGraph
from costmodel.protocols.crypten import CryptenSetting, comm
from costmodel.protocols.derived import TESTBEDS
from costmodel.protocols.primitives import Comm
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.costmodel.conftest import refused

PATH = Path(__file__).with_name("measured_crypten.yaml")
SETTING = CryptenSetting()
LOGIT_TOLERANCE = 0.02
OPS = "ops by themselves"
ROW: dict[str, Any] = {"rows": 4, "features": 6}
# opened bytes, bytes from the dealer, rounds: of an AND, six levels of two, and a bit
SIGN, SIGN_DEALT, SIGN_ROUNDS = 16 * (2 + 6 * 4 + 1), 8 * (1 + 6 * 2 + 1), 8
# |x|, an exponential of 8 squares, two iterations of a square and a product, and the sign again
LOGISTIC, LOGISTIC_DEALT, LOGISTIC_ROUNDS = SIGN + 16 * (2 + 8 + 2 * 3 + 2), SIGN_DEALT + 8 * 14, SIGN_ROUNDS + 14
# notation and base, and how it is run
CHOICES: list[tuple[str, str, Dimensions, Deployment]] = [
    ("SM+LN+G", "gpt2-small", Dimensions(), Deployment()),
    ("1xLTLGs-1xoSoRo", "gpt2-small", Dimensions(), Deployment(projection="last")),
    ("SM(t)+LN+R_i1", "gpt2-small", Dimensions(), Deployment(embedding="lookup")),
    ("1xLSoGo-1xoToRs", "pythia-70m", Dimensions(gelu="tanh"), Deployment(phase="decode")),
    ("HH(SM+LR)", "gpt2-small", Dimensions(), Deployment(phase="decode")),
    ("1xMSlRo-1xoBoPo", "gpt2-small", Dimensions(), Deployment()),
    ("1xMSMWo-1xMBmBo", "smollm2-135m", Dimensions(kv_heads=2), Deployment()),
    ("HH(SM(t)+G)", "gpt2-small", Dimensions(), Deployment(batch=3, vocab_blocks=2)),
    ("1xMHmXo-1xlUoKo", "gpt2-small", Dimensions(), Deployment()),
    ("SM(t)+LN+R", "gpt2-small", Dimensions(), Deployment(projection="last", rows="needed", query_block=2)),
]


def drawn_graphs() -> dict[str, OpGraph]:
    """Each of the choices in random dimensions."""
    generator = random.Random(0)
    graphs = {}
    for notation, base, forms, deployment in CHOICES:
        heads, head_dim = 2 * generator.randint(1, 3), 2 * generator.randint(1, 4)
        width, vocab, tokens = heads * head_dim, generator.randint(8, 60), generator.randint(3, 12)
        inner: dict[str, Any] = {
            "d_model": width,
            "d_ff": width * 3,
            "head_size": None if base == "gpt2-small" else head_dim,
        }
        dimensions = replace(forms, layers=2, heads=heads, vocab=vocab, context=32, **inner)
        graph = lower(parse(notation, base_architecture(base, dimensions)).architecture, tokens, deployment)
        graphs[f"{notation} {heads} x {head_dim}, T={tokens}, V={vocab}"] = graph
    return graphs


def lone_ops() -> list[Op]:
    """What no notation has, and rows of one key and of many."""
    return [
        ops.Sigmoid(**ROW),
        ops.Tanh(**ROW),
        ops.Scale(**ROW, factor=0.3),
        ops.ScaledAdd(**ROW),
        ops.Softmax(heads=2, queries=3, keys=1, causal=False),
        ops.Softmax(heads=1, queries=2, keys=150),
        ops.Softmax(heads=1, queries=2, keys=3, form="2quad"),
        ops.Softmax(heads=1, queries=2, keys=3, form="power8"),
        ops.ShapedAttention(heads=2, queries=5, keys=5),
        ops.RepeatHeads(rows=3, heads=4, key_heads=2, head_dim=3),
    ]


def counted(costs: Iterable[tuple[Op, int, int]]) -> dict[str, list[int]]:
    """Bytes and rounds by kind of op."""
    kinds: dict[str, list[int]] = {}
    for op, sent_bytes, rounds in costs:
        known = kinds.setdefault(type(op).__name__, [0, 0])
        kinds[type(op).__name__] = [known[0] + sent_bytes, known[1] + rounds]
    return kinds


def predicted(some: Iterable[Op]) -> dict[str, list[int]]:
    return counted((op, _sent(cost), cost.rounds) for op in some for cost in [comm(op, SETTING)])


def _sent(cost: Comm) -> int:
    return cost.online_bytes + cost.setup_bytes


def measured(some: Iterable[tuple[Op, Measured]]) -> dict[str, list[int]]:
    return counted((op, cost.sent_bytes, cost.rounds or 0) for op, cost in some)


def run_of(graph: OpGraph) -> tuple[StepRun, float]:
    """A run, and the greatest error of a logit."""
    generator = np.random.default_rng(0)
    given = drawn_weights(graph, generator), drawn_tokens(graph, generator), drawn_caches(graph, generator)
    run = spu.run(graph, *given, protocol="crypten", setting=SETTING)
    return run, float(np.abs(run.logits - interpreter.execute(graph, *given)).max())


def run_of_ops() -> dict[str, list[int]]:
    (only,) = passes(ops_job(lone_ops(), protocol="crypten", setting=SETTING), tcp, [UNHINDERED])
    return measured(zip(lone_ops(), only.by_op, strict=True))


GRAPHS = drawn_graphs()
QUICK = (6,)  # a run takes ten seconds; the Llama


@pytest.mark.parametrize("name", [*GRAPHS, OPS])
def test_bytes_and_rounds_are_those_that_were_counted(name):
    some = lone_ops() if name == OPS else [node.op for node in GRAPHS[name]]
    assert predicted(some) == load_mapping(PATH)["sent_bytes_and_rounds"][name]


@pytest.mark.needs_crypten
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (index not in QUICK)) for index, name in enumerate(GRAPHS)]
)
def test_crypten_agrees(name):
    run, error = run_of(GRAPHS[name])
    for node, cost in zip(GRAPHS[name], run.by_op, strict=True):
        formula = comm(node.op, SETTING)
        assert (cost.sent_bytes, cost.rounds, cost.messages) == (_sent(formula), formula.rounds, formula.messages)
    assert error < LOGIT_TOLERANCE


@pytest.mark.needs_crypten
def test_crypten_agrees_on_ops_by_themselves():
    assert run_of_ops() == predicted(lone_ops())


@pytest.mark.parametrize(
    ("op", "opened_bytes", "dealt_bytes", "rounds"),
    [
        (ops.Linear(rows=4, in_features=3, out_features=5, bias=True), 16 * (4 * 3 + 3 * 5), 8 * 20, 1),
        (ops.AttentionMix(heads=2, queries=3, keys=4, head_dim=5), 16 * 2 * (3 * 4 + 4 * 5), 8 * 2 * 15, 1),
        (ops.Square(**ROW), 16 * 24, 8 * 24, 1),
        (ops.Multiply(**ROW), 32 * 24, 8 * 24, 1),
        (ops.Relu(**ROW), (SIGN + 32) * 24, (SIGN_DEALT + 8) * 24, 9),
        (ops.Sigmoid(**ROW), LOGISTIC * 24, LOGISTIC_DEALT * 24, LOGISTIC_ROUNDS),
        # two comparisons at once, a product by the other's bit
        (
            ops.Gelu(**ROW, form="tanh"),
            (16 + 32 + LOGISTIC + SIGN + 32 + 32) * 24,
            (32 + LOGISTIC_DEALT + SIGN_DEALT) * 24,
            LOGISTIC_ROUNDS + 4,
        ),
        # squares and 4 sums, products by roots and gains, 4 and 6; roots: 14 signs, a quotient and 11 products
        (
            ops.LayerNorm(**ROW),
            16 * (24 + 4 + 24 + 4 + 24 + 6) + 4 * (14 * SIGN + 16 + 32 * 11),
            8 * (3 * 24 + 2 * 4) + 4 * (14 * SIGN_DEALT + 16 + 8 * 11),
            SIGN_ROUNDS + 12 + 4,
        ),
        # five keys: 2 + 1 + 1 maxima of pairs; one sum, of 15 signs and 8 products
        (
            ops.Softmax(heads=1, queries=1, keys=5),
            4 * (SIGN + 32) + 5 * 16 * 8 + 15 * SIGN + 8 * 32 + 16 * 6,
            4 * (SIGN_DEALT + 8) + 5 * 8 * 8 + 15 * SIGN_DEALT + 8 * 8 + 8 * 5,
            3 * SIGN_ROUNDS + 3 + 8 + SIGN_ROUNDS + 8 + 1,
        ),
        (ops.Scale(**ROW, factor=0.3), 0, 0, 0),
    ],
    ids=lambda value: getattr(value, "label", None),
)
def test_an_op_by_hand(op, opened_bytes, dealt_bytes, rounds):
    cost = comm(op, SETTING)
    assert (cost.online_bytes, cost.setup_bytes, cost.rounds) == (opened_bytes, dealt_bytes, rounds)
    assert cost.messages == 2 * rounds + (1 if rounds else 0)  # and one of the dealer's
    assert cost.waited_bytes == max(opened_bytes // 2, dealt_bytes)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"ring_bits": 32}, "`ring_bits` must be 64 under protocol crypten, but got 32"),
        ({"fraction_bits": 25}, "`fraction_bits` must be from 12 to 24 under protocol crypten"),
        ({"weights": "server"}, "`weights` must be secret under protocol crypten, but got server"),
        ({"threads": 2}, "`threads` must be 1 under protocol crypten, but got 2"),
    ],
)
def test_a_setting_or_form_that_it_does_not_have_is_refused(setting, message):
    with pytest.raises(UserError, match=message):
        CryptenSetting(**setting)
    with pytest.raises(UnpricedOpError, match="no formula for Gelu with `form` exact, whose erf takes wrong powers"):
        comm(ops.Gelu(**ROW, form="exact"), SETTING)


def test_estimate_has_the_seconds_of_the_committed_testbed(run, snapshot):
    code, out, _ = run("estimate", "SM+LN+G", "--protocol", "crypten")
    assert code == 0
    snapshot("crypten", out)
    fewer_bits = ("estimate", "SM+LN+G", "--protocol", "crypten", "--fraction-bits", "13")
    assert run(*fewer_bits)[1].splitlines()[1:] == out.splitlines()[1:]  # no step depends on them
    semi2k = str(TESTBEDS / "semi2k.yaml")
    said = refused(run("estimate", "SM", "--protocol", "crypten", "--testbed", semi2k))
    assert "semi2k.yaml must be CrypTen 0.4.1, as the formulas are, but got SecretFlow-SPU 0.9.5" in said


# flags of a model -> the least seconds of 5 runs of `compare --protocol crypten` on the machine of the testbed, which
# has none of these sizes
MEASURED_S = {
    "SM+LN+G --layers 2 --heads 4 --d-model 64 --vocab 300 --seq-len 32": 0.387,
    "SM+LN+R --layers 2 --heads 4 --d-model 256 --vocab 1000 --seq-len 64": 0.907,
    "SM+RMS+SwiGLU --base smollm2-135m --layers 2 --heads 4 --kv-heads 2 --d-model 128 --d-ff 384 --vocab 500 "
    "--seq-len 48": 0.559,
}


@pytest.mark.parametrize(("model", "seconds"), MEASURED_S.items())
def test_measured_seconds_are_in_the_predicted_interval(run, model, seconds):
    flags = ("--protocol", "crypten", "--network", "loopback", "--format", "json")
    low, high = json.loads(run("estimate", *model.split(), *flags)[1])["total"]["latency_s_range"]
    assert low < seconds < high < 2 * seconds  # an interval that says something


TINY = ("--base", "tiny", "--layers", "1", "--vocab", "40", "--seq-len", "6", "--protocol", "crypten")


@pytest.mark.needs_crypten
def test_compare_counts_bytes_and_rounds(run):
    code, out, _ = run("compare", "SM+LN+R", *TINY, "--format", "json", "--bandwidth", "1Gbps", "--rtt", "4ms")
    assert code == 0
    document = json.loads(out)
    sides = document["total"]["predicted"], document["total"]["measured"]
    assert len({(side["sent_bytes"], side["rounds"], side["messages"]) for side in sides}) == 1
    assert sides[1]["rounds_reason"] is None
    assert sides[0]["latency_s_range"][0] < sides[0]["latency_s"] == sides[0]["compute_s"]
    assert len(document["memory"]["measured_bytes"]) == 3  # the dealer's too
    assert document["on_network"]["predicted"]["network_s"] > 0
    assert (document["setting"]["engine"], document["setting"]["link"]) == ("crypten 0.4.1", "sockets")
    assert (document["setting"]["fraction_bits"], document["setting"]["ring_bits"]) == (16, 64)
    shown = run("compare", "SM", *TINY)[1]
    assert "\nformulas of CrypTen 0.4.1, run under crypten 0.4.1\n" in shown
    assert "one machine: predicted on the committed testbed " in shown


def test_compare_refuses_what_is_of_the_other_engine(run, monkeypatch):
    delays = ("--delays", "10ms,20ms,40ms")
    assert (
        "--delays measures rounds, which crypten counts itself; leave it out" in run("compare", "SM", *TINY, *delays)[2]
    )
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    said = refused(run("compare", "SM", *TINY))
    assert "the engine CrypTen is not installed; run: python -m pip install --no-deps crypten==0.4.1" in said


if __name__ == "__main__":
    with kept_children():
        runs = {name: run_of(graph)[0].by_op for name, graph in GRAPHS.items()}
        ops_of = {name: [node.op for node in graph] for name, graph in GRAPHS.items()}
        measurements = {name: measured(zip(ops_of[name], run, strict=True)) for name, run in runs.items()}
        measurements |= {OPS: run_of_ops()}
    sys.stdout.write(dump({"engine": "crypten 0.4.1", "sent_bytes_and_rounds": measurements}))
