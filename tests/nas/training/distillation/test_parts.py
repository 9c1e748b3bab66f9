"""Parts of a model that are trained: those of a schedule and no others, also after a stop."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from nas.conversion.transfer import transferred
from nas.corpus.corpus import Corpus
from nas.model.decoder import Decoder, build
from nas.model.weights import deployed_weights
from nas.recipe.candidate import Candidate
from nas.recipe.distillation import DistillationSchedule, trained_parts
from nas.recipe.recipe import Recipe, from_parent
from nas.training import checkpoint
from nas.training.distillation.teacher import Teacher
from nas.training.objective import Objective
from nas.training.trainer import train
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.notation import parse
from tests.nas.training.short_runs import SCALE, assert_resumes

BASE = base_architecture("tiny", Dimensions(layers=4))
ROUTE = DistillationSchedule(parent="p", placement="4xLSLGo")


def candidate(name: str, **route) -> Candidate:
    recipe = from_parent(Recipe(scale=replace(SCALE, batch=8)), replace(ROUTE, **route))
    return Candidate(architecture=parse(name, BASE).architecture, recipe=recipe)


@pytest.mark.parametrize("trainable", ["all", "changed", "neighbours"])
def test_layers_that_are_kept_are_not_trained_with_the_embedding(trainable) -> None:
    """Also where they are neighbours of what goes."""
    given = candidate("2xLSLGo-1xooooo-1xLSLGo", trainable=trainable, kept_layers=2)
    model = Objective(given, torch.Generator()).model
    moved = {name.rpartition(".weight")[0] for name, value in model.named_parameters() if value.requires_grad}
    assert moved
    assert not any(name.startswith(("embed", "position", "layers.0.", "layers.1.")) for name in moved)
    assert any(name.startswith("layers.3.") for name in moved)


@pytest.mark.parametrize(
    ("name", "trainable", "expected"),
    [
        ("1xLSLGo-1xLSLRo-2xLSLGo", "changed", ["1f"]),
        ("1xLSLGo-1xLSLRo-2xLSLGo", "neighbours", ["1a", "1f", "2a"]),
        ("1xLSLGo-1xLSooo-2xLSLGo", "changed", ["1a", "1f", "2a"]),  # what goes leaves its neighbours to heal
        ("1xLSLRo-3xLSLGo", "neighbours", ["0a", "0f", "1a"]),
        ("1xlSLGo-3xLSLGo", "neighbours", ["0a", "0f"]),
        ("3xLSLGo-1xLSLRo", "neighbours", ["3a", "3f"]),
        ("1xLSLRo-3xLSLGo", "all", None),
        ("4xLSLGo", "changed", None),
    ],
)
def test_the_parts_that_are_trained(name: str, trainable, expected: list[str] | None) -> None:
    made = candidate(name)
    parts = trained_parts(made.trained, parse("4xLSLGo", made.trained).architecture, trainable)
    assert (None if parts is None else [f"{part.layer}{part.kind[0]}" for part in parts]) == expected


def test_parameters_of_other_parts_have_no_gradient() -> None:
    objective = Objective(candidate("1xLSLGo-1xlSLGo-2xLSLGo", trainable="changed"), torch.Generator())
    moved = {name for name, value in objective.named_parameters() if value.requires_grad}
    assert {".".join(name.split(".")[1:4]) for name in moved} == {"layers.1.norm1", "layers.1.attention"}
    gone = Objective(candidate("4xlSlGo-o", trainable="changed"), torch.Generator())
    assert gone.model.final_norm.weight.requires_grad
    assert not gone.model.embed.weight.requires_grad


def test_a_stopped_run_resumes_and_the_rest_stays_the_parents(corpus: Corpus, tmp_path: Path) -> None:
    made = candidate("1xLSLGo-1xLSLRo-1xLSooo-1xLSLGo", trainable="neighbours")
    plain = replace(made, recipe=Recipe(scale=SCALE), architecture=parse("4xLSLGo", BASE).architecture)
    parent = build(plain.trained, torch.Generator().manual_seed(7)).requires_grad_(False)
    weights = transferred(parent.architecture, deployed_weights(parent), made.initial_architecture)
    assert_resumes(
        partial(train, made, corpus, seed=0, initial=weights, teacher=Teacher(parent, 16)), tmp_path, stopped_after=9
    )
    ended = checkpoint.load_latest(tmp_path / "whole").weights
    start = Decoder(made.trained).state_dict()
    assert set(ended) <= set(start) | {"logits.weight"}
    same = {name.rpartition(".")[0] for name, value in ended.items() if name in weights and value.equal(weights[name])}
    assert {"embed", "layers.0.attention.qkv", "layers.0.ffn.up", "layers.3.ffn.down"} <= same
    assert not same & {"layers.1.ffn.up", "layers.1.attention.qkv", "layers.2.attention.out", "layers.3.attention.qkv"}
