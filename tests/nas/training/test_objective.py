"""The loss of a candidate: what of it compares the streams between layers with the parent's."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from nas.corpus.corpus import Corpus
from nas.model.weights import load_deployed
from nas.recipe.candidate import candidate_at
from nas.training.distillation.teacher import teacher_of
from nas.training.objective import Objective
from search_spaces.bases import BASES
from search_spaces.notation import parse
from tests.nas.study.conftest import untrained_parent

TOKENS = torch.arange(64).view(4, 16)


@pytest.fixture
def objectives(corpus: Corpus):
    """Objectives of a candidate that starts from a parent, by the weight of streams; and the teacher."""
    parent = untrained_parent(corpus, output_scale=4.0)

    def of(name: str, streams: float):
        candidate = candidate_at(parse(name, BASES["tiny"]), "smoke", data="stdlib", route=parent.route, seq_len=16)
        route = replace(parent.route, streams=streams)
        candidate = replace(candidate, recipe=replace(candidate.recipe, route=route))
        objective = Objective(candidate, torch.Generator().manual_seed(0))
        load_deployed(objective.model, parent.start(candidate, corpus))
        return objective, teacher_of(parent, corpus, candidate.recipe, "cpu")

    return of


@torch.no_grad()
def test_streams_weigh_in_the_loss_as_the_schedule_says(objectives) -> None:
    objective, teacher = objectives("SM+LN+R", 10.0)
    predictions, streams, theirs = teacher.predictions(range(4), TOKENS), list[Tensor](), list[Tensor]()
    objective.model.features(TOKENS, with_entropies=False, streams=streams)
    teacher.model.features(TOKENS, with_entropies=False, streams=theirs)
    measure = partial(teacher.stream_error, teacher.streams(range(4), TOKENS))
    error = measure(streams)
    assert error > 0.01
    losses = [objective(TOKENS, TOKENS, predictions, given)[0] for given in (measure, None)]
    torch.testing.assert_close(losses[0] - losses[1], 10 * error)
    norms = teacher.model.layers[1].norm1, teacher.model.final_norm
    by_hand = [
        [((ours - parent)[:, at] ** 2).mean() / (parent[:, at] ** 2).mean() for at in range(16)]
        for norm, *both in zip(norms, streams[1:], theirs[1:], strict=True)
        for ours, parent in [map(norm, both)]
    ]
    torch.testing.assert_close(error, torch.tensor(by_hand).mean(), rtol=1e-3, atol=0.0)  # kept in half precision


def test_a_parent_leaves_what_it_leaves(objectives) -> None:
    objective, teacher = objectives("SM+LN+G", 1.0)
    streams = list[Tensor]()
    objective.model.features(TOKENS, with_entropies=False, streams=streams)
    assert teacher.stream_error(teacher.streams(range(4), TOKENS), streams) < 1e-6


def test_gradients_are_of_the_streams_too(objectives) -> None:
    gradients = []
    for weight in (0.0, 10.0):
        objective, teacher = objectives("SM+LN+R", weight)
        predictions, wanted = teacher.predictions(range(4), TOKENS), teacher.streams(range(4), TOKENS)
        errors = [partial(teacher.stream_error, part) for part in wanted.chunk(2)]
        objective.backward(
            TOKENS, TOKENS, num_parts=2, penalty_weight=0.0, predictions=predictions, stream_errors=errors
        )
        gradients.append(objective.model.layers[0].ffn.down.weight.grad)
    assert not torch.allclose(gradients[0], gradients[1], rtol=0.1)
