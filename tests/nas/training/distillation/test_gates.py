from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from nas.conversion.transfer import transferred
from nas.corpus.corpus import Corpus
from nas.model.decoder import Decoder, build
from nas.model.weights import deployed_weights, load_deployed, load_stored
from nas.recipe.candidate import Candidate
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.recipe import EntropyRegularisation, Recipe, from_parent
from nas.training import checkpoint
from nas.training.distillation.gates import Gates
from nas.training.distillation.teacher import CachedTeacher
from nas.training.trainer import TrainingRun, train
from search_spaces.bases import BASES
from search_spaces.notation import parse
from tests.nas.training.short_runs import SCALE, assert_resumes

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
    made = replace(candidate("SM+LN+G"), recipe=Recipe(scale=SCALE))
    return build(made.trained, torch.Generator().manual_seed(7)).requires_grad_(False)


def gated(parent: Decoder, made: Candidate, end_share: float = 0.6) -> tuple[Decoder, Gates]:
    model = Decoder(made.initial_architecture)
    load_deployed(model, start(parent, made))
    assert made.recipe.distillation is not None
    return model, Gates(model, made.trained, replace(made.recipe.distillation, end_share=end_share))


def taught_run(parent: Decoder, made: Candidate, corpus: Corpus) -> TrainingRun:
    weights, teacher = start(parent, made), CachedTeacher(parent, 16)
    return TrainingRun(made, corpus, seed=0, folder=None, device="cpu", initial=weights, teacher=teacher)


def start(parent: Decoder, made: Candidate) -> dict[str, torch.Tensor]:
    return transferred(parent.architecture, deployed_weights(parent), made.initial_architecture)


@pytest.mark.parametrize("name", [name for name in TARGETS if not set("HFI") & set(name)])
def test_a_model_begins_as_its_parent(parent, some_tokens, name):
    made = candidate(name)
    model, _ = gated(parent, made)
    tokens = some_tokens()
    torch.testing.assert_close(model(tokens).logits, parent(tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TARGETS)
def test_a_model_ends_as_what_is_trained(parent, some_tokens, name):
    made = candidate(name)
    (model, gates), expected = gated(parent, made), Decoder(made.trained)
    for step in range(17):
        gates.move(step=step, num_steps=16)
    assert model.architecture == made.trained
    expected.load_state_dict(model.state_dict())
    tokens = some_tokens()
    torch.testing.assert_close(model(tokens).logits, expected(tokens).logits)


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


@pytest.mark.parametrize("name", TARGETS)
def test_a_run_ends_with_the_weights_of_what_is_trained(corpus, parent, tmp_path, name):
    made = candidate(name, entropy=EntropyRegularisation())
    *_, outcome = train(
        made, corpus, seed=0, folder=tmp_path, initial=start(parent, made), teacher=CachedTeacher(parent, 16)
    )
    assert outcome.status == "completed"
    load_stored(Decoder(made.trained), checkpoint.load_latest(tmp_path).weights)
    attentions = [layer.attention != "none" for layer in made.trained.layers]
    assert [len(heads) > 0 for heads in outcome.entropy.head_means] == attentions


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stopped_after", [1, 5, 9, 10, 15])
def test_a_stopped_run_resumes_to_the_same_numbers(corpus, parent, tmp_path, stopped_after, optimizer):
    made = candidate("1xooLFs-1xlSooo", entropy=EntropyRegularisation(), optimizer=optimizer)
    run = partial(train, made, corpus, seed=0, initial=start(parent, made), teacher=CachedTeacher(parent, 16))
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
