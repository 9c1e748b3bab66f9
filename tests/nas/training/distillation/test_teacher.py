from dataclasses import replace
from functools import partial

import pytest
import torch

from nas.conversion.transfer import transferred
from nas.model.decoder import Decoder, build
from nas.model.weights import deployed_weights
from nas.recipe.candidate import Candidate
from nas.recipe.distillation import DistillationSchedule, trained_parts
from nas.recipe.recipe import Recipe, from_parent
from nas.training import checkpoint
from nas.training.distillation import teacher
from nas.training.distillation.teacher import RECORD, CachedTeacher, Predictions
from nas.training.objective import Objective
from nas.training.trainer import train
from search_spaces.bases import BASES, Dimensions, base_architecture
from search_spaces.notation import parse
from tests.nas.training.short_runs import SCALE, assert_resumes

INPUTS = torch.randint(300, (3, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> Decoder:
    architecture = parse("SM+LN+G", BASES["tiny"]).architecture
    return build(architecture, torch.Generator().manual_seed(1)).requires_grad_(False)


class Refusing(Decoder):
    """Is never asked."""

    def forward(self, *args, **kwargs):
        raise AssertionError("computed what was kept")


def equal(predictions: Predictions, other: Predictions) -> bool:
    return all(left.equal(right) for left, right in zip(predictions, other, strict=True))


def test_the_most_likely_tokens_with_their_log_probabilities(model):
    predictions = CachedTeacher(model, 16).predictions([0, 1, 2], INPUTS)
    expected = model(INPUTS).logits.log_softmax(-1).topk(16)
    assert predictions.tokens.equal(expected.indices)
    torch.testing.assert_close(predictions.log_probabilities, expected.values)


def test_what_was_computed_is_read_back_in_any_batch(model, tmp_path):
    plain = CachedTeacher(model, 16).predictions([5, 0, 9], INPUTS)
    first = CachedTeacher(model, 16, tmp_path / "kept").predictions([5, 0, 9], INPUTS)
    read = CachedTeacher(Refusing(model.architecture), 16, tmp_path / "kept")
    assert equal(first, plain)
    assert equal(read.predictions([5, 0, 9], INPUTS), plain)
    alone = read.predictions([0], INPUTS[1:2])
    assert alone.tokens.equal(plain.tokens[1:2])
    assert equal(CachedTeacher(model, 16).predictions([0], INPUTS[1:2]), alone)


def test_records_that_are_not_whole_are_computed_anew(model, tmp_path):
    path = tmp_path / "kept"
    plain = CachedTeacher(model, 16, path).predictions([0, 1], INPUTS[:2])
    raw = bytearray(path.read_bytes())
    raw[8 * 16 * RECORD.itemsize] = 0  # the mark behind sequence 0
    path.write_bytes(raw[: -3 * RECORD.itemsize])  # the end of sequence 1
    assert equal(CachedTeacher(model, 16, path).predictions([0, 1], INPUTS[:2]), plain)
    assert equal(CachedTeacher(Refusing(model.architecture), 16, path).predictions([0, 1], INPUTS[:2]), plain)


def test_a_disk_that_takes_nothing_costs_only_time(model, tmp_path):
    made = CachedTeacher(model, 16, tmp_path / "missing" / "kept")
    assert equal(made.predictions([0], INPUTS[:1]), CachedTeacher(model, 16).predictions([0], INPUTS[:1]))


def test_streams_are_what_norms_read_and_the_same_read_back(model, tmp_path):
    plain = CachedTeacher(model, 16).hidden_states([7, 2, 4], INPUTS)
    first = CachedTeacher(model, 16, hidden_states_path=tmp_path / "kept").hidden_states([7, 2, 4], INPUTS)
    read = CachedTeacher(Refusing(model.architecture), 16, hidden_states_path=tmp_path / "kept").hidden_states(
        [2, 7], INPUTS[[1, 0]]
    )
    passed = model.hidden_states(INPUTS)
    assert plain.equal(first)
    assert read.equal(plain[[1, 0]])
    assert plain[:, 0].equal(model.layers[1].norm1(passed[1]).half())
    assert plain[:, -1].equal(model.final_norm(passed[-1]).half())


def test_a_small_vocabulary_has_fewer_tokens_to_name():
    architecture = parse("SM+LN+G", BASES["tiny"]).architecture
    made = Decoder(architecture)
    assert CachedTeacher(made, 16).most_likely == min(16, architecture.vocab_size - 1)


def test_sequences_are_predicted_together_as_far_as_memory_says(model, monkeypatch):
    plain = CachedTeacher(model, 16).predictions([0, 1, 2], INPUTS)
    for logits, sizes in ((1 << 22, [3]), (2 * 8 * model.architecture.vocab_size, [2, 1]), (1, [1, 1, 1])):
        monkeypatch.setattr(teacher, "LOGITS_AT_A_TIME", logits)
        seen: list[int] = []
        hook = model.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(len(inputs[0])))
        assert equal(CachedTeacher(model, 16).predictions([0, 1, 2], INPUTS), plain)
        hook.remove()
        assert seen == sizes


BASE = base_architecture("tiny", Dimensions(layers=4))


SCHEDULE = DistillationSchedule(parent="p", placement="4xLSLGo")


def candidate(name: str, **distillation) -> Candidate:
    recipe = from_parent(Recipe(scale=replace(SCALE, batch=8)), replace(SCHEDULE, **distillation))
    return Candidate(architecture=parse(name, BASE).architecture, recipe=recipe)


@pytest.mark.parametrize("trainable", ["all", "changed", "neighbours"])
def test_layers_that_are_kept_are_not_trained_with_the_embedding(trainable):
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
def test_the_parts_that_are_trained(name, trainable, expected):
    made = candidate(name)
    parts = trained_parts(made.trained, parse("4xLSLGo", made.trained).architecture, trainable)
    assert (None if parts is None else [f"{part.layer}{part.kind[0]}" for part in parts]) == expected


def test_parameters_of_other_parts_have_no_gradient():
    objective = Objective(candidate("1xLSLGo-1xlSLGo-2xLSLGo", trainable="changed"), torch.Generator())
    moved = {name for name, value in objective.named_parameters() if value.requires_grad}
    assert {".".join(name.split(".")[1:4]) for name in moved} == {"layers.1.norm1", "layers.1.attention"}
    gone = Objective(candidate("4xlSlGo-o", trainable="changed"), torch.Generator())
    assert gone.model.final_norm.weight.requires_grad
    assert not gone.model.embed.weight.requires_grad


def test_a_stopped_run_resumes_and_the_rest_stays_the_parents(corpus, tmp_path):
    made = candidate("1xLSLGo-1xLSLRo-1xLSooo-1xLSLGo", trainable="neighbours")
    plain = replace(made, recipe=Recipe(scale=SCALE), architecture=parse("4xLSLGo", BASE).architecture)
    parent = build(plain.trained, torch.Generator().manual_seed(7)).requires_grad_(False)
    weights = transferred(parent.architecture, deployed_weights(parent), made.initial_architecture)
    assert_resumes(
        partial(train, made, corpus, seed=0, initial=weights, teacher=CachedTeacher(parent, 16)),
        tmp_path,
        stopped_after=9,
    )
    ended = checkpoint.load_latest(tmp_path / "whole").weights
    start = Decoder(made.trained).state_dict()
    assert set(ended) <= set(start) | {"logits.weight"}
    same = {name.rpartition(".")[0] for name, value in ended.items() if name in weights and value.equal(weights[name])}
    assert {"embed", "layers.0.attention.qkv", "layers.0.ffn.up", "layers.3.ffn.down"} <= same
    assert not same & {"layers.1.ffn.up", "layers.1.attention.qkv", "layers.2.attention.out", "layers.3.attention.qkv"}
