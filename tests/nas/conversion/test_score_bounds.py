import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from costmodel import ops
from costmodel.errors import UserError
from costmodel.execution import interpreter
from costmodel.ops import SoftmaxForm
from nas.conversion.change_of_basis import inner_norm_linears
from nas.conversion.fixed_point_scale import factor_for, inner_factor_for, with_inner_scales, with_stream_scale
from nas.conversion.fold import at_dimensions, fold
from nas.conversion.parent import Parent
from nas.conversion.pretrained import Pretrained
from nas.conversion.score_bounds import set_bounds, unheld_by_parent
from nas.conversion.verified_fold import LOG_SUMS, Reference, _sums_share, fold_as_far_as
from nas.model.decoder import Decoder, build
from nas.model.weights import deployed_weights, load_deployed, stored_weights
from nas.recipe.candidate import candidate_at
from nas.study.parent import deployable
from nas.training.checkpoint import Checkpoint
from search_spaces.architecture import Architecture
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.block import BlockName
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import parse
from search_spaces.resolve import resolve

BASE = base_architecture("tiny", Dimensions(vocab=24, context=8))
TOKENS = np.random.default_rng(5).integers(24, size=(3, 8))


def bounded(name: str = "1xLBLBo-1xLSLGo", *, scores: float = 2.0) -> Decoder:
    return with_scores(parse(name, BASE).architecture, scores)


def with_scores(architecture: Architecture, scores: float) -> Decoder:
    """scores: by how much queries, keys and values are larger than drawn ones."""
    model = build(architecture, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(scores if "qk" in name else 1)
    return model


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("1xLBLBo-1xLSLGo", "bounded"),
        ("HH(2xLBLGo)", "bounded"),
        ("1xLPLBo-1xLSLGo", "power8"),
        ("HH(2xLPLGo)", "power8"),
    ],
)
def test_a_bound_or_a_size_has_the_rows_of_its_head_in_the_middle(name: str, form: SoftmaxForm) -> None:
    model = bounded(name)
    before = model(torch.from_numpy(TOKENS)).logits
    set_bounds(model, torch.from_numpy(TOKENS))
    torch.testing.assert_close(model(torch.from_numpy(TOKENS)).logits, before)
    graph = lower(model.architecture, 8)
    weights = {key: value.numpy() for key, value in deployed_weights(model).items()}
    runs = [interpreter.values(graph, weights, sequence) for sequence in TOKENS]
    scores = np.stack([run["layers.0.attention.bound"] for run in runs], axis=1)  # heads x sequences x T x T
    rows = np.tril(np.exp(scores)) if form == "bounded" else np.tril(scores**8)[..., 1:, :]  # the first has but one key
    sums = np.log(rows.sum(axis=-1)).reshape(2, -1)
    middle = 0.0 if form == "bounded" else sum(LOG_SUMS["power8"])
    np.testing.assert_allclose(sums.max(axis=1) + sums.min(axis=1), middle, rtol=1e-4, atol=1e-4)
    assert np.ptp(sums) > 0.5


def test_a_sequence_of_one_token_sets_a_size_too() -> None:
    model = bounded("2xLPLGo")
    before = model(torch.from_numpy(TOKENS)).logits
    assert set_bounds(model, torch.from_numpy(TOKENS[:, :1])) == {0: 0.0, 1: 0.0}
    torch.testing.assert_close(model(torch.from_numpy(TOKENS)).logits, before)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_eighth_powers_of_a_size_that_fixed_point_does_not_hold_are_told(factor: float) -> None:
    model = bounded("2xLPLGo")
    set_bounds(model, torch.from_numpy(TOKENS))
    model.layers[1].scale_queries(torch.full((2,), factor))
    with torch.no_grad():
        model.layers[1].attention.bound.weight.mul_(factor)
    weights = {name: value.clone() for name, value in deployed_weights(model).items()}
    check = Reference.of(model.architecture, weights, TOKENS).check(fold(model.architecture, weights))
    assert check.float_error < 1e-4
    assert (not check.outside) == (factor == 1)


def test_a_bound_that_does_not_hold_is_told() -> None:
    model = bounded()
    set_bounds(model, torch.from_numpy(TOKENS))
    weights = {name: value.clone() for name, value in deployed_weights(model).items()}
    reference, folded = Reference.of(model.architecture, weights, TOKENS), fold(model.architecture, weights)
    assert reference.check(folded).passes
    bound = "layers.0.attention.bound.weight"
    off = reference.check(
        folded._replace(weights={**folded.weights, bound: folded.weights[bound] + 2 * LOG_SUMS["bounded"][1]})
    )
    assert off.float_error < 1e-4
    assert "the distance of a row sum of attention from mid-range is" in off.outside[-1]


# at 40, scores are 2,120 apart, beyond the engine's exponential
@pytest.mark.parametrize(("scores", "exact", "fits"), [(2.0, (), True), (8.0, (0,), True), (40.0, (0,), False)])
def test_where_a_bound_does_not_hold_the_softmax_is_exact(scores: float, exact: tuple[int, ...], fits: bool) -> None:
    candidate = candidate_at(resolve("1xLBLBo-1xLSLGo", BASE), "smoke", data="stdlib", seq_len=8)
    model = with_scores(candidate.trained, scores)
    trained = Checkpoint(step=1, identity={}, progress={}, weights=stored_weights(model), optimizer=None)
    with pytest.raises(UserError, match="must have its training text in the cache"):
        deployable(candidate, trained, None)
    corpus: Any = SimpleNamespace(tokens=lambda split: TOKENS.flatten(), begin_of_text=None)
    architecture, weights, left = deployable(candidate, trained, corpus)
    assert [index for index, layer in enumerate(architecture.layers) if layer.attention == "softmax"] == [*exact, 1]
    assert [reason.split(":")[0] for reason in left] == [f"layers.{depth}.attention" for depth in exact]
    expected = model(torch.from_numpy(TOKENS)).logits
    deployed = Decoder(architecture)
    load_deployed(deployed, weights)
    torch.testing.assert_close(deployed(torch.from_numpy(TOKENS)).logits, expected)
    check = Reference.of(architecture, weights, TOKENS).check(fold(architecture, weights))
    assert (not check.outside) == fits


@pytest.mark.parametrize(
    ("name", "form", "scores", "withheld"),
    [
        ("2xLSLGo", "bounded", 2.0, ()),
        ("2xLSLGo", "bounded", 40.0, (0, 1)),
        ("2xLSLGo", "power8", 2.0, ()),
        ("2xLSLGo", "power8", 40.0, (1,)),
        ("1xLSLGo-1xLBLGo", "power8", 40.0, ()),
    ],
)
def test_a_parent_tells_where_rows_would_not_hold(
    name: str, form: SoftmaxForm, scores: float, withheld: tuple[int, ...]
) -> None:
    model = bounded(name, scores=scores)
    weights = {name: value.clone() for name, value in deployed_weights(model).items()}
    parent = Parent("a test's", Pretrained(model.architecture, weights, None), "")
    assert unheld_by_parent(parent, form, torch.from_numpy(TOKENS)) == withheld


@pytest.mark.parametrize(
    ("num_beyond", "beyond", "holds"),
    [(0, 0.0, True), (1, 1.9, True), (1, 2.1, False), (2, 0.1, True), (9, 0.1, False), (1, np.inf, False)],
)
def test_few_rows_may_be_beyond_the_ends_and_none_far(num_beyond: int, beyond: float, holds: bool) -> None:
    heads, length = 16, 128  # 2,048 rows
    _, most = LOG_SUMS["bounded"]
    scores = np.full((heads, length, length), most) - np.log(np.arange(1, length + 1))[:, None]
    scores[:num_beyond, -1] += beyond
    op = ops.Softmax(heads=heads, queries=length, keys=length, form="bounded")
    assert (_sums_share(op, scores) <= 1 + 1e-9) is holds


LLAMA = base_architecture("smollm2-135m", Dimensions(layers=2, heads=4, kv_heads=2, d_model=16, d_ff=40, vocab=24))


GEMMA = replace(LLAMA, block="gemma3")


@pytest.mark.parametrize(
    ("share", "factor"), [(0.0, 1.0), (0.99, 1.0), (1.0, 0.5), (4.0, 0.25), (9.4, 0.25), (16, 0.125), (np.inf, 1.0)]
)
def test_the_factor_is_no_smaller_than_it_must_be(share: float, factor: float) -> None:
    assert factor_for(share) == factor


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("2xMSMWo", LLAMA),
        ("1xMHMQo-1xoSoFo", LLAMA),
        ("1xooMRo-1xmSmRs", BASE),
        ("1xMSoIs-1xoHmRo", BASE),
        ("1xMSMWo-1xoSmQo", GEMMA),
    ],
)
def test_it_changes_no_logit_and_fits(name: str, base: Architecture) -> None:
    architecture = parse(name, base).architecture
    model = build(architecture, torch.Generator().manual_seed(0))
    weights = {name: value.double() for name, value in deployed_weights(model).items()}
    massive = with_stream_scale(architecture, weights, 2.0**18)
    for tokens in TOKENS:
        logits = [
            interpreter.execute(lower(variant, 8), {name: value.numpy() for name, value in values.items()}, tokens)
            for variant, values in ((architecture, weights), massive)
        ]
        np.testing.assert_allclose(logits[1], logits[0], rtol=1e-12, atol=1e-12 * np.abs(logits[0]).max())
    reference = Reference.of(*massive, TOKENS)
    assert reference.architecture.norm_epsilon < massive[0].norm_epsilon
    folded, check = fold_as_far_as(*massive, TOKENS)
    assert not check.outside
    assert check.float_error < 1e-5
    assert at_dimensions(folded.architecture, architecture) == deployed(architecture)


@pytest.mark.parametrize(
    ("share", "least", "factor"),
    [(0.01, 0.1, 1), (0.01, 0.0, 8), (1e-6, 1e-5, 16), (0.3, 1e-5, 1), (4.0, 1e-5, 0.25), (1e-9, math.inf, 1)],
)
def test_inner_norms_read_squares_of_some_size(share: float, least: float, factor: float) -> None:
    assert inner_factor_for(share, least or 1e-30) == factor


@pytest.mark.parametrize("factor", [2.0**-12, 2.0**7])
@pytest.mark.parametrize("block", ["gemma3", "olmo2"])
def test_small_and_large_inputs_of_inner_norms_are_scaled_to_fit(block: BlockName, factor: float) -> None:
    architecture = parse("1xMSMWo-1xoSmFo", replace(LLAMA, block=block)).architecture
    model = build(architecture, torch.Generator().manual_seed(0))
    weights = {name: value.double() for name, value in deployed_weights(model).items()}
    odd = with_inner_scales(architecture, weights, {norm: factor for norm, *_ in inner_norm_linears(architecture)})
    logits = [
        interpreter.execute(lower(variant, 8), {name: value.numpy() for name, value in values.items()}, TOKENS[0])
        for variant, values in ((architecture, weights), odd)
    ]
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-12, atol=1e-12 * np.abs(logits[0]).max())
    folded, check = fold_as_far_as(*odd, TOKENS)
    assert check.passes
    assert check.fixed_error < 2e-3
    assert at_dimensions(folded.architecture, architecture) == deployed(architecture)


@pytest.mark.parametrize("block", ["gemma3", "olmo2"])
def test_each_inner_norm_has_a_scale_of_its_own(block: BlockName) -> None:
    architecture = parse(
        "1xMSMWo-1xMSooo-1xooMWo-1xMSMWo", replace(LLAMA, block=block, layers=LLAMA.layers * 2)
    ).architecture
    weights = deployed_weights(build(architecture, torch.Generator().manual_seed(0)))
    norms = [norm for norm, *_ in inner_norm_linears(architecture)]
    odd = with_inner_scales(architecture, weights, {norm: 2.0 ** (-4 - at) for at, norm in enumerate(norms)})
    folded, check = fold_as_far_as(*odd, TOKENS)
    assert check.passes
    assert check.float_error < 1e-5
    assert folded.architecture.num_layers == 3
    assert {norm for norm, *_ in inner_norm_linears(folded.architecture)} >= {
        norm for norm, _ in folded.architecture.inner_scales
    }


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("value", "says"), [(math.nan, "nan"), (2.0**-20, None)])
def test_dead_and_broken_ffns_end_in_a_check(value: float, says: str | None) -> None:
    architecture = parse("1xMSMWo", replace(LLAMA, block="gemma3", layers=LLAMA.layers[:1])).architecture
    weights = dict(deployed_weights(build(architecture, torch.Generator().manual_seed(0))))
    weights["layers.0.ffn.down.weight"] = weights["layers.0.ffn.down.weight"] * value
    _, check = fold_as_far_as(architecture, weights, TOKENS)
    assert check.passes == (says is None)
    assert says is None or says in "; ".join(check.outside)


def test_a_layer_norm_is_left_and_told() -> None:
    architecture = parse("SM+LN+G", BASE).architecture
    weights = dict(deployed_weights(build(architecture, torch.Generator().manual_seed(0))))
    weights["embed.weight"] = weights["embed.weight"] * 2.0**20
    _, check = fold_as_far_as(architecture, weights, TOKENS)
    assert check.outside
