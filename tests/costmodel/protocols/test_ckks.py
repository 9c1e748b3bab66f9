"""Tests of ckks: forms against numpy, counts with the arithmetic written out, placement against brute force, fits."""

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.polynomial import chebyshev
from scipy.special import erf

from costmodel import ops
from costmodel.errors import UserError
from costmodel.estimate import estimate
from costmodel.ops import Node
from costmodel.protocols import ckks, load_pricer
from costmodel.protocols import ckks_forms as forms
from costmodel.protocols.ckks import BOUNDARY, place, place_by_layer
from costmodel.protocols.ckks_forms import FORMS, Packing, Value, packing_of
from costmodel.protocols.ckks_steps import Step, steps_of
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.costmodel.protocols import ckks_rows


def gpt2_small(num_tokens):
    return lower(parse("SM+LN+G", base_architecture("gpt2-small")).architecture, num_tokens)


class Numbers:
    """The machine of programs, on arrays."""

    def product(self, a, b):
        return a * b

    def combined(self, values, factors, number=0.0):
        return sum(value * factor for value, factor in zip(values, factors, strict=True)) + number

    def summed(self, *values):
        return sum(values)

    def shifted(self, value, number):
        return value + number

    def negated(self, value):
        return -value


def by_series(name, function):
    form = FORMS[name]
    middle, half = (form.low + form.high) / 2, (form.high - form.low) / 2
    coefficients = chebyshev.chebinterpolate(lambda at: function(middle + half * at), form.degree)
    return lambda x: forms.series(Numbers(), x, coefficients, form.low, form.high)


def root(x):
    form = FORMS["inverse root"]
    middle, half = (form.low + form.high) / 2, (form.high - form.low) / 2
    coefficients = chebyshev.chebinterpolate(lambda at: (middle + half * at) ** -0.5, forms.ROOT_DEGREE)
    return forms.inverse_root(Numbers(), x, coefficients) * x**0.5  # relative


def sign(x):
    for odd in (*[forms.G3] * forms.SIGN_G, *[forms.F3] * forms.SIGN_F):
        x = forms.sign_part(Numbers(), x, odd)
    return x


FUNCTIONS = {
    "gelu": lambda x: x * (1 + erf(x / 2**0.5)) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "exponential": np.exp,
}
APPROXIMATIONS = {
    **{name: (by_series(name, function), function) for name, function in FUNCTIONS.items()},
    "inverse": (lambda x: forms.inverse(Numbers(), x) * x, np.ones_like),
    "inverse root": (root, np.ones_like),
    "sign": (sign, np.sign),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_its_stated_error_on_its_range_and_needs_all_of_it(name):
    approximation, function = APPROXIMATIONS[name]
    x = np.linspace(FORMS[name].low, FORMS[name].high, 20_001)
    error = np.abs(approximation(x) - function(x)).max()
    assert FORMS[name].error / 1000 < error <= FORMS[name].error


def test_levels_of_forms():
    # an even power of 3 products; a series: one level to its range, T_32 of 5 more, a leaf, and the last product
    assert forms.counted(forms.eighth_power)[1] == [3]
    assert forms.counted(forms.series, [1.0] * 64, -1.0, 1.0)[1] == [8]
    assert forms.counted(forms.inverse)[1] == [1 + forms.INVERSE_STEPS]


PACKING = Packing(tokens=128, slots=2**15)  # 256 columns


def step_of(op, packing=PACKING):
    inputs = tuple(f"in{index}" for index in range(len(op.input_shapes)))
    (step,) = steps_of([Node(name="op", layer=0, op=op, inputs=inputs)], packing)
    return step


def linear(rows, in_features, out_features):
    return ops.Linear(rows=rows, in_features=in_features, out_features=out_features, bias=True)


HEADS: Any = {"heads": 12, "queries": 128, "keys": 128, "head_dim": 64}
COUNTS = {
    # 3 ciphertexts into 12, 256 diagonals each: 32 baby steps and 8 giant steps turn 3 x 31 + 12 x 7 times
    "wide linear": (linear(128, 768, 3072), PACKING, {("plain_product", 0): 3 * 12 * 256, ("rotation", 0): 177,
        ("rescale", 0): 12}),
    # 32 columns into 8 of 256: 8 diagonals of 2 baby and 4 giant steps (or 4 and 2), and 2 folds of 32 to 8
    "narrow linear": (linear(128, 32, 8), PACKING, {("plain_product", 0): 8, ("rotation", 0): 1 + 3, ("rescale", 0): 1,
        ("rotation", 1): 2}),
    "square": (ops.Square(rows=128, features=768), PACKING, {("product", 0): 3, ("relinearisation", 0): 3,
        ("rescale", 0): 3}),
    # 3 ciphertexts x 128 distances; 64 columns are summed in 6 rotations; two sets of 64 distances are moved by one
    "scores": (ops.AttentionScores(**HEADS), PACKING, {("rotation", 0): 3 * 127, ("product", 0): 384,
        ("relinearisation", 0): 384, ("rescale", 0): 384, ("rotation", 1): 384 * 6 + 3 * 126,
        ("plain_product", 1): 384, ("rescale", 1): 6}),
    "mix": (ops.AttentionMix(**HEADS), PACKING, {("rotation", 0): 3 * 126 + 3 * 127, ("plain_product", 0): 384,
        ("rescale", 0): 384, ("rotation", 1): 384 * 6, ("product", 1): 384, ("relinearisation", 1): 3,
        ("rescale", 1): 3}),
    "rotary": (ops.Rotary(rows=128, heads=4, rotary_dim=64), PACKING, {("rotation", 0): 2 * 3,
        ("plain_product", 0): 3 * 3, ("rescale", 0): 3}),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTS)
def test_counts_of_steps(case):
    op, packing, counts = COUNTS[case]
    assert dict(step_of(op, packing).work) == counts


def chain(depths, sizes, edges):
    """Steps that read the given earlier ones, or `in`."""
    return [
        Step(node=Node(name=f"s{index}", layer=index // 3, op=linear(1, 1, 1), inputs=("tokens",)),
             kind="any", inputs=tuple("in" if at < 0 else f"s{at}" for at in read), program=list, depth=depth,
             work=Counter({("rotation", 0): size}), output=Value(name=f"s{index}", width=1), ciphertexts=size,
             distinct=1)
        for index, (depth, size, read) in enumerate(zip(depths, sizes, edges, strict=True))
    ]  # fmt: skip


def least_by_brute_force(steps, top):
    """The fewest bootstrapped ciphertexts over every choice of what is bootstrapped ahead of each step."""
    options = [(index, name) for index, step in enumerate(steps) for name in dict.fromkeys(step.inputs)]
    size, least = {step.name: step.ciphertexts for step in steps}, float("inf")
    for chosen in product((False, True), repeat=len(options)):
        taken = {option for option, is_in in zip(options, chosen, strict=True) if is_in}
        levels, works = {"in": top}, True
        for index, step in enumerate(steps):
            levels.update({name: top for name in step.inputs if (index, name) in taken})
            levels[step.name] = min(levels[name] for name in step.inputs) - step.depth
            works = works and levels[step.name] >= 0
        if works:
            least = min(least, sum(size.get(name, 1) for _, name in taken))
    return least


@pytest.mark.parametrize("seed", range(12))
def test_placement_is_that_of_brute_force(seed):
    # chains, residual streams and branches that are read again, of up to 7 steps
    random = Random(seed)
    num = random.randint(3, 7)
    edges = [
        tuple({index - 1, *([random.randint(-1, index - 1)] if random.random() < 0.5 else [])}) for index in range(num)
    ]
    depths, sizes = ([random.randint(low, 3) for _ in range(num)] for low in (0, 1))
    steps = chain(depths, sizes, edges)
    placement = place(steps, 4)
    assert_has_levels(steps, placement, 4)
    assert placement.counts["bootstrap"] == least_by_brute_force(steps, 4)


def assert_has_levels(steps, placement, top):
    """Every step finds its values on the level on which it is said to begin."""
    levels = {}
    for index, (step, level) in enumerate(zip(steps, placement.levels, strict=True)):
        levels.update({name: top for at, name in placement.bootstraps if at == index})
        assert all(levels.get(name, top) >= level >= step.depth for name in step.inputs)
        levels[step.name] = level - step.depth


def test_placement_by_layer_adds_up_and_is_never_better_than_over_the_whole():
    graph = gpt2_small(128)
    steps = steps_of(graph.nodes, packing_of(graph.nodes, 2**15))
    by_layer, whole = (find(steps, 17) for find in (place_by_layer, place))
    assert whole.counts["bootstrap"] == 132 <= by_layer.counts["bootstrap"] == 135
    for placement in (by_layer, whole):
        assert_has_levels(steps, placement, 17)
    handed = [step for step in steps if step.kind == "moved" and step.node.name.endswith("ffn.residual")]
    assert all(by_layer.levels[steps.index(step)] >= BOUNDARY for step in handed)


def test_a_price_sums_over_ops_and_has_one_round_and_the_bytes_of_its_ciphertexts():
    total = estimate(graph := gpt2_small(1), pricer := ckks.load("lan")).total
    # one-hot tokens in 2 ciphertexts of 18 residues, logits in 2 of one; two polynomials' residues have 2^20 bytes
    assert total.sent_bytes == 2 * 18 * 2**20 + 2 * 2**20
    assert (total.rounds, total.messages, total.key_bytes) == (1, 2, None)
    placed = pricer.placed(graph.nodes)
    assert total.compute_s == pytest.approx(sum(pricer.testbed.seconds(placed).values()), rel=1e-3)
    assert placed.counts["bootstrap"] == 60
    low, high = pricer.latency_s_range(graph)
    assert low < total.latency_s < high


@pytest.mark.parametrize("name", ["rtx-pro-6000", "a100"])
def test_committed_cards_are_the_fit_of_the_fitted_rows(name):
    assert ckks_rows.fitted_testbed(name, gpt2_small(1).nodes) == ckks.load(testbed=Path(name)).testbed


def test_held_out_rows_are_not_fitted_and_within_15_percent():
    rows = ckks_rows.ckks_rows()
    fitted = [row for row in rows if row["use"] == "fitted"]
    found = ckks_rows.fit("rtx-pro-6000", rows)
    assert found == ckks_rows.fit("rtx-pro-6000", fitted)
    held_out = [row for row in rows if row["use"] == "held out"]
    assert len(held_out) == 2
    assert all(abs(found(int(row["bootstraps"])) / float(row["seconds"]) - 1) <= 0.15 for row in held_out)


def nodes_of(notation, seq_len=8, base="gpt2-small", **dimensions):
    return lower(
        parse(notation, base_architecture(base, Dimensions(layers=1, **dimensions))).architecture, seq_len
    ).nodes


def lookup():
    return [Node(name="e", layer="embed", op=ops.TokenEmbedding(tokens=4, vocab=8, features=4, encoding="lookup"),
                 inputs=("tokens",))]  # fmt: skip


REFUSED = {
    "lookup": (lookup, "op 'e' must have a price: protocol ckks has no form for TokenEmbedding: .* forms for one-hot"),
    "piecewise": (
        lambda: nodes_of("SM+G", gelu="piecewise"),
        "no form for Gelu: .*; there are forms for tanh and exact",
    ),
    "head": (lambda: nodes_of("SM+G", heads=8, d_model=24), "a head of 3 features has no packing"),
    "tokens": (
        lambda: [Node(name="l", layer="head", op=ops.VocabProjection(rows=2**16, features=4, vocab=8), inputs=("x",))],
        "32768 slots of a ciphertext, but got 65536 tokens at once, of which not even a vocabulary projection fits",
    ),
    "long": (
        lambda: nodes_of("SM+G", 1024),
        "a head's 64 features of 1024 tokens in 32768 slots, which hold 512 tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_form_or_packing_is_refused_in_one_line(case):
    nodes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        load_pricer("ckks").prices(list(nodes()))


def test_a_step_deeper_than_the_parameters_is_refused():
    pricer = ckks.load()
    shallow = replace(pricer, testbed=replace(pricer.testbed, levels=5))
    with pytest.raises(
        UserError, match=r"needs 7 levels at once for its exponential, but the parameters of ckks leave 5"
    ):
        shallow.prices(nodes_of("SM+ScFuFFN"))


TESTBEDS = {
    "h100": r"must be a card \(rtx-pro-6000, a100, ant-ace-cpu\) or a \.yaml file, but got 'h100'",
    "levels: 17|levels: 18": r"`levels` must be from 1 to 17",
    "slots: 32768|slots: 65536": r"`slots` must be a power of two up to 32768, but got 65536",
    "at_levels: [0, 31]|at_levels: [31, 0]": "seconds of rotation must be finite, .* one for each of rising",
    "  rotation:|  turn:": "`turn` of `primitives` of .* must be one of rotation",
}


@pytest.mark.parametrize("change", TESTBEDS)
def test_a_bad_card_or_testbed_is_refused_in_one_line(change, tmp_path):
    old, _, new = change.partition("|")
    path = Path(change)
    if new:
        path = tmp_path / "mine.yaml"
        path.write_text((ckks.TESTBEDS / "ckks.yaml").read_text().replace(old, new))
    with pytest.raises(UserError, match=TESTBEDS[change]):
        load_pricer("ckks", testbed=path)
