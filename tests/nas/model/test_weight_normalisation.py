from collections.abc import Callable
from itertools import product
from typing import Literal, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from costmodel.execution import interpreter
from nas.model.decoder import Decoder, build
from nas.model.weight_normalisation import LINEARS, normalise
from nas.model.weights import deployed_weights, load_deployed, load_stored, stored_weights
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import SCALES, Normalisation, NormalisedLinears, Recipe
from nas.training.objective import Objective
from search_spaces.bases import base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.small_models import GPT2

Kind: TypeAlias = Literal["weight", "spectral"]
KINDS: tuple[Kind, ...] = ("weight", "spectral")


def made(kind: Kind, linears: NormalisedLinears, name: str = "SM") -> Decoder:
    generator = torch.Generator().manual_seed(0)
    model = build(parse(name, GPT2).architecture, generator)
    normalise(model, Normalisation(kind=kind, linears=linears), generator)
    return model


def linears_of_ffns(model: Decoder) -> list[nn.Module]:
    return [
        model.get_submodule(f"layers.{index}.ffn.{name}")
        for index in range(len(model.layers))
        for name in ("up", "down")
    ]


def train_a_little(model: nn.Module, some_tokens: Callable[..., Tensor], steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        logits = model(some_tokens(seed=step)).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), some_tokens(seed=step + 1).flatten()).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "linears", "name"), list(product(KINDS, LINEARS, ("SM", "SM+LN+G", "SM+ScFuFFN", "1xLHoRo-1xooMRo")))
)
def test_the_deployed_op_graph_is_the_trained_model(kind, linears, name, some_tokens):
    model = made(kind, linears, name)
    train_a_little(model, some_tokens)
    tokens = some_tokens()
    with torch.no_grad():
        logits = model(tokens).logits[0]
    weights = {name: value.double().numpy() for name, value in deployed_weights(model).items()}
    again = interpreter.execute(lower(model.architecture, 11), weights, tokens[0].numpy())
    np.testing.assert_allclose(again, logits.numpy(), rtol=1e-5, atol=1e-5 * logits.abs().max().item())


@pytest.mark.parametrize("linears", LINEARS)
def test_the_listed_linears_are_normalised_and_no_others(linears):
    plain, normed = build(GPT2, torch.Generator().manual_seed(0)), made("spectral", linears, "SM+LN+G")
    before, after = deployed_weights(plain), deployed_weights(normed)
    changed = {name for name in before if not torch.allclose(before[name], after[name], rtol=1e-5)}
    expected = {f"layers.{index}.{name}.weight" for index, name in product((0, 1), LINEARS[linears])}
    assert changed == expected & before.keys()
    if linears.startswith("qk"):
        queries, keys, values = after["layers.0.attention.qkv.weight"].chunk(3)
        for matrix in (queries, keys, values) if linears.startswith("qkv") else (queries, keys):
            assert torch.linalg.matrix_norm(matrix, 2).item() == pytest.approx(1, abs=0.1)
        _, _, before_values = before["layers.0.attention.qkv.weight"].chunk(3)
        assert torch.equal(before_values, values) != linears.startswith("qkv")


def test_weight_normalisation_starts_at_the_weight_and_trains_as_torchs_own(some_tokens):
    ours, theirs = made("weight", "ffn"), build(parse("SM", GPT2).architecture, torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(some_tokens()).logits, theirs(some_tokens()).logits)
    for linear in linears_of_ffns(theirs):
        parametrizations.weight_norm(linear)
    for model in (ours, theirs):
        train_a_little(model, some_tokens)
    torch.testing.assert_close(ours(some_tokens()).logits, theirs(some_tokens()).logits, rtol=1e-4, atol=1e-5)


def test_spectral_normalisation_is_torchs_own_once_the_power_method_has_settled(some_tokens):
    ours, theirs = made("spectral", "ffn"), build(parse("SM", GPT2).architecture, torch.Generator().manual_seed(0))
    ours, theirs = ours.double(), theirs.double()
    for linear in linears_of_ffns(theirs):
        parametrizations.spectral_norm(linear)
    for _ in range(300):  # both power methods begin at random; 60 steps leave up to 2e-5 in the logits, 200 2e-14
        logits = ours(some_tokens()).logits, theirs(some_tokens()).logits
    torch.testing.assert_close(*logits, rtol=1e-8, atol=1e-10)


def test_validation_moves_no_singular_vector(some_tokens):
    model = made("spectral", "qkvo+ffn")
    before = {name: value.clone() for name, value in stored_weights(model).items()}
    with torch.no_grad():
        model(some_tokens())
    assert all(torch.equal(before[name], value) for name, value in stored_weights(model).items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_model_goes_on_as_if_it_had_not_been_stored(kind, some_tokens):
    model, again = made(kind, "qkvo+ffn", "SM+LN+G"), made(kind, "qkvo+ffn", "SM+LN+G")
    train_a_little(model, some_tokens)
    load_stored(again, {name: value.clone() for name, value in stored_weights(model).items()})
    for decoder in (model, again):
        train_a_little(decoder, some_tokens)
    assert torch.equal(model(some_tokens()).logits, again(some_tokens()).logits)


def test_weights_from_elsewhere_are_divided_by_their_own_singular_values():
    model, other = made("spectral", "qk"), build(GPT2, torch.Generator().manual_seed(7))
    load_deployed(model, {name: 3 * value for name, value in deployed_weights(other).items() if "qkv" in name})
    for matrix in deployed_weights(model)["layers.0.attention.qkv.weight"].chunk(3)[:2]:
        assert torch.linalg.matrix_norm(matrix, 2).item() == pytest.approx(1, abs=0.1)


def test_a_recipe_normalises_its_candidate():
    recipe = Recipe(scale=SCALES["smoke"], normalisation=Normalisation(kind="weight", linears="qk"), slopes="global")
    objective = Objective(
        Candidate(architecture=base_architecture("tiny"), recipe=recipe), torch.Generator().manual_seed(0)
    )
    assert "layers.1.attention.qkv.parametrizations.weight.original0" in stored_weights(objective.model)


@pytest.mark.parametrize(
    ("name", "linears", "message"),
    [("HH(SM+ScFFN)", "qk", "needs block 'gpt2' or 'opt' or 'pythia'"), ("SM_i2", "ffn", "has nothing to act on")],
)
def test_what_cannot_be_normalised_is_refused(name, linears, message):
    with pytest.raises(ValueError, match=message):
        made("weight", linears, name)
