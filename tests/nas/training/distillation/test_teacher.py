import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nas.conversion.transfer import transferred
from nas.corpus.corpus import Corpus
from nas.model.decoder import Decoder, build
from nas.model.layers import FeedForward
from nas.model.weights import deployed_weights, load_deployed, load_stored
from nas.recipe.candidate import Candidate, candidate_id
from nas.recipe.distillation import DistillationSchedule, trained_parts
from nas.recipe.recipe import EntropyRegularisation, Foldable, Normalisation, Recipe, from_parent
from nas.training import checkpoint
from nas.training.distillation import teacher
from nas.training.distillation.foldable import floor_singular_values, keep_foldable
from nas.training.distillation.parts import Gates
from nas.training.distillation.teacher import RECORD, CachedTeacher, Kept, Predictions
from nas.training.objective import Objective
from nas.training.trainer import TrainingRun, train
from search_spaces.bases import BASES, Dimensions, base_architecture
from search_spaces.notation import parse
from tests.nas.training import short_runs
from tests.nas.training.short_runs import SCALE, assert_resumes, parent_of

INPUTS = torch.randint(300, (3, 8), generator=torch.Generator().manual_seed(0))
FLOOR = 0.3
SETTINGS = Foldable(floor=FLOOR, every=5)


@pytest.fixture
def model() -> Decoder:
    architecture = parse("SM+LN+G", BASES["tiny"]).architecture
    return build(architecture, torch.Generator().manual_seed(1)).requires_grad_(False)


class Refusing(Decoder):
    """Is never asked."""

    def features(self, *args, **kwargs):
        raise AssertionError("computed what was kept")


def equal(predictions: Predictions, other: Predictions) -> bool:
    return all(left.equal(right) for left, right in zip(predictions, other, strict=True))


def test_the_most_likely_tokens_with_their_log_probabilities(model):
    predictions = CachedTeacher(model, 16).predictions([0, 1, 2], INPUTS)
    expected = model(INPUTS).logits.log_softmax(-1).topk(16)
    assert predictions.tokens.equal(expected.indices)
    torch.testing.assert_close(predictions.log_probabilities, expected.values)
    assert CachedTeacher(model, 10**6).most_likely == model.architecture.vocab_size - 1


def test_a_teacher_in_bf16_has_logits_and_hidden_states_that_are_not_rounded(model):
    whole, lowered = (CachedTeacher(model, 16, lowered=lowered) for lowered in (False, True))
    predictions, rounded = (teacher.predictions([0, 1, 2], INPUTS) for teacher in (whole, lowered))
    log_probabilities = rounded.log_probabilities  # rounding them to bf16 would change some by 0.016
    assert 0 < (predictions.log_probabilities - log_probabilities).abs().max() < 0.03
    assert not log_probabilities.equal(log_probabilities.bfloat16().float())
    hidden_states, theirs = (teacher.hidden_states([0, 1, 2], INPUTS) for teacher in (whole, lowered))
    torch.testing.assert_close(theirs.float(), hidden_states.float(), rtol=0.03, atol=0.03)


def test_what_was_computed_is_read_back_in_any_batch(model, tmp_path):
    plain = CachedTeacher(model, 16).predictions([5, 0, 9], INPUTS)
    first = CachedTeacher(model, 16, tmp_path / "kept").predictions([5, 0, 9], INPUTS)
    read = CachedTeacher(Refusing(model.architecture), 16, tmp_path / "kept")
    assert equal(first, plain)
    assert equal(read.predictions([5, 0, 9], INPUTS), plain)
    alone = read.predictions([0], INPUTS[1:2])
    assert alone.tokens.equal(plain.tokens[1:2])
    assert equal(CachedTeacher(model, 16).predictions([0], INPUTS[1:2]), alone)
    streams = CachedTeacher(model, 16, hidden_states_path=tmp_path / "streams").hidden_states([5, 0, 9], INPUTS)
    read = CachedTeacher(Refusing(model.architecture), 16, hidden_states_path=tmp_path / "streams")
    assert read.hidden_states([0, 5], INPUTS[[1, 0]]).equal(streams[[1, 0]])
    passed = model.hidden_states(INPUTS)
    assert streams[:, 0].equal(model.layers[1].norm1(passed[1]).half())
    assert streams[:, -1].equal(model.final_norm(passed[-1]).half())


def test_records_that_are_not_whole_or_not_there_are_computed_anew(model, tmp_path):
    path = tmp_path / "kept"
    plain = CachedTeacher(model, 16, path).predictions([0, 1], INPUTS[:2])
    raw = bytearray(path.read_bytes())
    raw[8 * 16 * RECORD.itemsize] = 0  # the mark behind sequence 0
    path.write_bytes(raw[: -3 * RECORD.itemsize])  # the end of sequence 1
    assert equal(CachedTeacher(model, 16, path).predictions([0, 1], INPUTS[:2]), plain)
    assert equal(CachedTeacher(Refusing(model.architecture), 16, path).predictions([0, 1], INPUTS[:2]), plain)
    made = CachedTeacher(model, 16, tmp_path / "missing" / "kept")
    assert equal(made.predictions([0], INPUTS[:1]), CachedTeacher(model, 16).predictions([0], INPUTS[:1]))


def test_a_cache_may_grow_by_a_quarter_of_the_free_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "disk_usage", lambda folder: SimpleNamespace(free=400_000))
    corpus: Any = SimpleNamespace(folder=tmp_path)
    assert teacher._cache_path(corpus, "new.bin", 100_000) == tmp_path / "new.bin"
    assert teacher._cache_path(corpus, "new.bin", 100_001) is None
    with (tmp_path / "old.bin").open("wb") as file:
        file.truncate(1 << 20)  # a gap, which takes no disk
        assert teacher._cache_path(corpus, "old.bin", 100_001) is None
        file.write(bytes(50_000))
        file.flush()
    assert teacher._cache_path(corpus, "old.bin", 140_000) == tmp_path / "old.bin"
    assert teacher._cache_path(corpus, "old.bin", 200_000) is None


def test_a_cache_does_not_fill_the_disk(tmp_path, monkeypatch):
    size = 4 * np.dtype("f4").itemsize
    free = iter([5 * size, 4 * size, 4 * size - 1])
    monkeypatch.setattr(teacher, "disk_usage", lambda folder: SimpleNamespace(free=next(free)))
    kept = Kept(tmp_path / "kept", np.dtype("f4"), (4,), least_free=3 * size)
    for index in range(3):
        kept.all([index], torch.zeros(1, 1), Mock(return_value=np.zeros((1, 4), dtype="f4")))
    assert [kept._read(tmp_path / "kept", index) is None for index in range(3)] == [False, False, True]


def test_a_record_that_the_disk_cut_off_is_not_kept(tmp_path, monkeypatch):
    whole = os.pwrite
    monkeypatch.setattr("os.pwrite", lambda file, data, at: whole(file, data[:-1] or data, at))
    kept = Kept(tmp_path / "kept", np.dtype("f4"), (4,))
    for number in (1.0, 2.0):  # computed again
        assert kept.all([0], torch.zeros(1, 1), Mock(return_value=np.full((1, 4), number, dtype="f4")))[0, 0] == number


def test_sequences_are_predicted_together_as_far_as_memory_says(model, monkeypatch):
    plain = CachedTeacher(model, 16).predictions([0, 1, 2], INPUTS)
    for logits, sizes in ((1 << 22, [3]), (2 * 8 * model.architecture.vocab_size, [2, 1]), (1, [1, 1, 1])):
        monkeypatch.setattr(teacher, "LOGITS_AT_A_TIME", logits)
        seen: list[int] = []
        hook = model.logits.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(len(inputs[0])))
        assert equal(CachedTeacher(model, 16).predictions([0, 1, 2], INPUTS), plain)
        hook.remove()
        assert seen == sizes


def test_predictions_and_hidden_states_of_a_step_take_one_pass(model):
    passes: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0]))
    taught = CachedTeacher(model, 16)
    for inputs in (INPUTS, INPUTS.flip(0)):
        (lesson,) = taught.lessons([0, 1, 2], inputs, 1, predictions=True, hidden_states=True)
        assert lesson.hidden_state_error is not None
        assert lesson.hidden_state_error(model.hidden_states(inputs)) < 1e-5
    assert len(passes) == 4  # two of them are the test's


BASE = base_architecture("tiny", Dimensions(layers=4))
SCHEDULE = DistillationSchedule(parent="p", placement="4xLSLGo")


def partly(name: str, **distillation) -> Candidate:
    recipe = from_parent(Recipe(scale=replace(SCALE, batch=8)), replace(SCHEDULE, **distillation))
    return Candidate(architecture=parse(name, BASE).architecture, recipe=recipe)


@pytest.mark.parametrize("trainable", ["all", "changed", "neighbours"])
def test_layers_that_are_kept_are_not_trained_with_the_embedding(trainable):
    given = partly("2xLSLGo-1xooooo-1xLSLGo", trainable=trainable, kept_layers=2)
    model = Objective(given, torch.Generator()).model
    moved = {name.rpartition(".weight")[0] for name, value in model.named_parameters() if value.requires_grad}
    assert moved
    assert not any(name.startswith(("embed", "position", "layers.0.", "layers.1.")) for name in moved)
    assert any(name.startswith("layers.3.") for name in moved)
    objective = Objective(partly("1xLSLGo-1xlSLGo-2xLSLGo", trainable="changed"), torch.Generator())
    moved = {name for name, value in objective.named_parameters() if value.requires_grad}
    assert {".".join(name.split(".")[1:4]) for name in moved} == {"layers.1.norm1", "layers.1.attention"}
    gone = Objective(partly("4xlSlGo-o", trainable="changed"), torch.Generator())
    assert gone.model.final_norm.weight.requires_grad
    assert not gone.model.embed.weight.requires_grad


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
    made = partly(name)
    parts = trained_parts(made.trained, parse("4xLSLGo", made.trained).architecture, trainable)
    assert (None if parts is None else [f"{part.layer}{part.kind[0]}" for part in parts]) == expected


def test_a_stopped_run_resumes_and_the_rest_stays_the_parents(corpus, tmp_path):
    made = partly("1xLSLGo-1xLSLRo-1xLSooo-1xLSLGo", trainable="neighbours")
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


TARGETS = ("1xooLGo-1xLSooo", "2xlSooo", "1xoTlGo-1xooooo", "1xlSlFs-1xLSlIo", "1xooLFo-1xLHooo")


def candidate(name: str, **recipe: Any) -> Candidate:
    distillation = DistillationSchedule(
        parent="p", placement="2xLSLGo", prediction_weight=recipe.pop("distillation", 0.5)
    )
    made = from_parent(
        Recipe(scale=replace(SCALE, learning_rate=2e-2, tokens=2 * SCALE.tokens, batch=8), **recipe), distillation
    )
    return Candidate(architecture=parse(name, BASES["tiny"]).architecture, recipe=made)


@pytest.fixture
def parent() -> Decoder:
    return parent_of(candidate("SM+LN+G"))[0]


def gated(parent: Decoder, made: Candidate, end_share: float = 0.6) -> tuple[Decoder, Gates]:
    model = Decoder(made.initial_architecture)
    load_deployed(model, parent_of(made)[1])
    assert made.recipe.distillation is not None
    return model, Gates(model, made.trained, replace(made.recipe.distillation, end_share=end_share))


def taught_run(parent: Decoder, made: Candidate, corpus: Corpus) -> TrainingRun:
    weights, teacher = parent_of(made)[1], CachedTeacher(parent, 16)
    return TrainingRun(made, corpus, seed=0, folder=None, device="cpu", initial=weights, teacher=teacher)


@pytest.mark.parametrize("name", [name for name in TARGETS if not set("HFI") & set(name)])
def test_a_model_begins_as_its_parent(parent, some_tokens, name):
    made = candidate(name)
    model, _ = gated(parent, made)
    tokens = some_tokens()
    torch.testing.assert_close(model(tokens).logits, parent(tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TARGETS)
def test_a_model_and_a_run_end_as_what_is_trained(parent, some_tokens, name, corpus, tmp_path):
    made = candidate(name)
    (model, gates), expected = gated(parent, made), Decoder(made.trained)
    for step in range(17):
        gates.move(step=step, num_steps=16)
    assert model.architecture == made.trained
    expected.load_state_dict(model.state_dict())
    tokens = some_tokens()
    torch.testing.assert_close(model(tokens).logits, expected(tokens).logits)
    made = candidate(name, entropy=EntropyRegularisation())
    *_, outcome = train(
        made, corpus, seed=0, folder=tmp_path, initial=parent_of(made)[1], teacher=CachedTeacher(parent, 16)
    )
    assert outcome.status == "completed"
    load_stored(Decoder(made.trained), checkpoint.load_latest(tmp_path).weights)
    attentions = [layer.attention != "none" for layer in made.trained.layers]
    assert [len(heads) > 0 for heads in outcome.entropy.head_means] == attentions


def test_half_way_half_of_a_part_is_left(parent, some_tokens):
    made = candidate("1xooLGo-1xLSooo")
    model, gates = gated(parent, made, end_share=1.0)
    gates.move(step=8, num_steps=16)
    stream = torch.randn(2, 5, parent.architecture.d_model, generator=torch.Generator().manual_seed(3))
    first, second = parent.layers
    attended, _ = first.attention(first.norm1(stream), False)
    middle = stream + attended / 2
    expected = middle + first.ffn(first.norm2(middle), torch.zeros_like(middle))
    torch.testing.assert_close(model.layers[0](stream)[0], expected)
    attended, _ = second.attention(second.norm1(stream), False)
    middle = stream + attended
    expected = middle + second.ffn(second.norm2(middle), torch.zeros_like(middle)) / 2
    torch.testing.assert_close(model.layers[1](stream)[0], expected)


@pytest.mark.parametrize(("stopped_after", "optimizer"), [(5, "adamw"), (9, "muon"), (10, "adamw")])
def test_a_stopped_run_resumes_to_the_same_numbers(corpus, parent, tmp_path, stopped_after, optimizer):
    made = candidate("1xooLFs-1xlSooo", entropy=EntropyRegularisation(), optimizer=optimizer)
    run = partial(train, made, corpus, seed=0, initial=parent_of(made)[1], teacher=CachedTeacher(parent, 16))
    assert_resumes(run, tmp_path, stopped_after=stopped_after)


def test_the_loss_is_shared_between_the_next_token_and_the_parent(parent, corpus):
    made = candidate("SM+LN+R", distillation=0.25)
    run = taught_run(parent, made, corpus)
    inputs, targets = run.batch()
    lessons = (lesson._replace(hidden_state_error=None) for lesson in run.lessons(inputs, 2))
    losses = run.objective.backward(inputs, targets, num_parts=2, penalty_weight=0.0, lessons=lessons)
    gradient = run.objective.model.embed.weight.grad.clone()
    model = run.objective.model
    model.zero_grad()
    ours, theirs = (net(inputs).logits.flatten(0, 1).softmax(1) for net in (model, parent))
    cross_entropy = -ours.gather(1, targets.flatten()[:, None]).log().mean()
    likely = theirs.topk(16).indices
    ours, theirs = (
        torch.cat((shares.gather(1, likely), shares.scatter(1, likely, 0.0).sum(1, keepdim=True)), dim=1)
        for shares in (ours, theirs)
    )
    divergence = (theirs * (theirs.log() - ours.log())).sum(1).mean()
    (0.75 * cross_entropy + 0.25 * divergence).backward()
    torch.testing.assert_close(gradient, model.embed.weight.grad, rtol=1e-4, atol=1e-7)
    assert losses.cross_entropy.item() == pytest.approx(cross_entropy.item(), rel=1e-6)
    assert losses.distillation.item() == pytest.approx(divergence.item(), rel=1e-4)


def floored(name: str = "SM+ScFFN", foldable: Foldable | None = SETTINGS) -> Candidate:
    return short_runs.candidate(name, foldable=foldable)


def ffn_of(layer: nn.Module) -> FeedForward:
    assert isinstance(layer.ffn, FeedForward)
    return layer.ffn


@torch.no_grad()
def model_of(name: str, *, smallest: float = 0.01) -> Decoder:
    """The singular values of every linear FFN's M are evenly spread from `smallest` to 2."""
    generator = torch.Generator().manual_seed(0)
    model = build(floored(name).trained, generator)
    for layer in model.layers:
        ffn, size = ffn_of(layer), model.architecture.d_model
        left, _, right = torch.linalg.svd(torch.randn(size, size, generator=generator))
        product = (left * torch.linspace(2, smallest, size)) @ right
        if ffn.residual is None:
            product -= torch.eye(size)
        else:
            ffn.residual.alpha.fill_(-0.7)
            ffn.residual.beta.fill_(0.8)
            product = -0.7 * (product - 0.8 * torch.eye(size))
        if ffn.fused is None:
            ffn.down.weight.copy_(product @ torch.linalg.pinv(ffn.up.weight))
        else:
            ffn.fused.weight.copy_(product)
    return model


def stream_map(ffn: FeedForward) -> Tensor:
    """M, from what the FFN does to the rows of 1, without biases."""
    identity = torch.eye((ffn.up if ffn.fused is None else ffn.fused).in_features)
    zero = torch.zeros_like(identity)
    return (ffn(identity, identity) - ffn(zero, zero)).T.detach().double()


def smallest(ffn: FeedForward) -> float:
    return float(torch.linalg.svdvals(stream_map(ffn))[-1])


@pytest.mark.parametrize("name", ["SM+ScFuFFN", "SM+ScFFN", "SM", "2xoSoFo"])
def test_singular_values_below_the_floor_are_raised_to_it_and_nothing_else_moves(name):
    for layer in model_of(name).layers:
        before = stream_map(ffn_of(layer))
        left, sizes, right = torch.linalg.svd(before)
        assert 0 < (sizes < FLOOR).sum() < len(sizes)
        floor_singular_values(ffn_of(layer), FLOOR)
        expected = (left * sizes.clamp(min=FLOOR)) @ right
        torch.testing.assert_close(stream_map(ffn_of(layer)), expected, rtol=0, atol=1e-4 * float(sizes[0]))
        assert smallest(ffn_of(layer)) == pytest.approx(FLOOR, rel=1e-3)


def test_of_two_linears_down_changes_the_least_and_what_is_within_the_floor_or_not_finite_stays():
    model = model_of("SM+ScFFN", smallest=FLOOR + 0.01)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    keep_foldable(model, SETTINGS, step=16, num_steps=16)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    broken = ffn_of(model_of("SM+ScFuFFN").layers[0]).requires_grad_(False)
    broken.fused.weight[0, 0] = torch.nan  # left for the divergence rule
    kept = broken.fused.weight.nan_to_num()
    floor_singular_values(broken, FLOOR)
    assert torch.equal(broken.fused.weight.nan_to_num(), kept)
    ffn = ffn_of(model_of("SM+ScFFN").layers[0])
    down, up = (linear.weight.detach().clone().double() for linear in (ffn.down, ffn.up))
    floor_singular_values(ffn, FLOOR)
    moved = ffn.down.weight.detach().double() - down
    least = moved @ up @ torch.linalg.pinv(up)  # of all matrices with the same product
    assert torch.equal(ffn.up.weight.double(), up)
    torch.testing.assert_close(moved, least, rtol=0, atol=1e-4 * float(moved.abs().max()))


@pytest.mark.parametrize(
    ("name", "floored"),
    [
        ("1xLSLGo-1xoSoFs-o", [1]),  # behind the last live norm of a net without a final one
        ("1xoSoFs-1xLSLGo", [0]),  # ahead of the first
        ("1xLSLFs-1xLSLFs", []),  # between live norms
        ("1xoSlFs-1xoSoFs-o", [1]),  # a frozen norm before the FFN
        ("SM+R", []),
    ],
)
def test_only_ffns_that_fold_away_are_floored(name, floored):
    model = model_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    keep_foldable(model, SETTINGS, step=5, num_steps=16)
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {f"layers.{index}.ffn.fused.weight" for index in floored}


def test_a_run_raises_them_every_so_many_steps_and_at_the_end(corpus):
    run, plain = (
        TrainingRun(made, corpus, seed=0, folder=None, device="cpu", initial={})
        for made in (floored(), floored(foldable=None))
    )
    with torch.no_grad():
        for layers in (run.objective.model.layers, plain.objective.model.layers):
            for layer in layers:
                ffn_of(layer).residual.beta.zero_()  # of a map that is far from 1
    for step in range(1, 17):
        run.step()
        plain.step()
        if step < 5:
            assert all(map(torch.equal, run.objective.state_dict().values(), plain.objective.state_dict().values()))
        if step in (5, 10, 15, 16):
            assert min(smallest(ffn_of(layer)) for layer in run.objective.model.layers) >= FLOOR * 0.999


def test_a_floor_names_a_candidate_where_there_is_an_ffn_and_must_be_possible():
    assert candidate_id(floored()) != candidate_id(floored(foldable=None))
    assert candidate_id(floored()) != candidate_id(floored(foldable=Foldable(floor=0.4, every=5)))
    assert candidate_id(floored("SM+LN+G")) == candidate_id(floored("SM+LN+G", foldable=None))
    for numbers in ({"floor": 0.0}, {"floor": 1.1}, {"floor": float("nan")}, {"every": 0}):
        with pytest.raises(ValueError, match="`floor` of foldable FFNs must be above 0 and at most 1, and `every`"):
            Foldable(**numbers)
    Recipe(foldable=Foldable(), normalisation=Normalisation(kind="weight", linears="qk"))
    with pytest.raises(ValueError, match=r"kept foldable or trained with normalised weights, not both.*'qk\+ffn'"):
        Recipe(foldable=Foldable(), normalisation=Normalisation(kind="weight", linears="qk+ffn"))
