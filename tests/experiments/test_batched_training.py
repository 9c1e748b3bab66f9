"""A population trains each of its members as `nas.training.trainer` trains it alone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.batched_training import Population, check, train_population
from nas.corpus.corpus import Corpus
from nas.recipe.candidate import Candidate
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.recipe import SCALES, EntropyRegularisation, Foldable, Normalisation, Recipe
from nas.training.trainer import TrainingRun, train
from search_spaces.architecture import Layer
from search_spaces.bases import BASES
from search_spaces.notation import parse

pytestmark = pytest.mark.usefixtures("one_thread")

SCALE = replace(
    SCALES["smoke"], seq_len=16, vocab_size=300, tokens=20 * 64, batch=4, micro_batch=2, validation_tokens=128
)  # 20 steps of two parts
REGULARISED = EntropyRegularisation()
MEMBERS = (  # every kind of norm, attention, FFN and stabiliser, some in one layer of two only
    ("SM+LN+G", None),
    ("SM(t)+ScFuFFN", REGULARISED),
    ("SM", None),
    ("SM+LR", REGULARISED),
    ("1xLTLKs-1xoSoFs", REGULARISED),
    ("SM+ScFuFFN_i1", None),
    ("SM+LN+R", None),
    ("1xLSoXo-1xoTLEs", REGULARISED),
)
SEED = 3
TOLERANCE = 1e-4  # relative


def candidate(name: str, entropy: EntropyRegularisation | None = None, base: str = "tiny", **recipe) -> Candidate:
    return Candidate(
        architecture=parse(name, BASES[base]).architecture, recipe=Recipe(scale=SCALE, entropy=entropy, **recipe)
    )


def runs_of(candidates: Sequence[Candidate], corpus: Corpus, device: str = "cpu") -> list[TrainingRun]:
    return [TrainingRun(one, corpus, seed=SEED, folder=None, device=device, initial={}) for one in candidates]


def finish_alone(run: TrainingRun) -> None:
    while run.progress.outcome is None:
        run.step()
        run.validate_if_due()


def finish_together(runs: Sequence[TrainingRun]) -> None:
    population = Population(runs)
    while population.runs:
        population.step()
        population.validate_if_due()


def assert_same_parameters(run: TrainingRun, other: TrainingRun) -> None:
    """But for biases of keys and temperatures of the first row: softmax is blind to them, and AdamW scales up the
    rounding that is their gradient."""
    others = dict(other.objective.named_parameters())
    for name, parameter in run.objective.named_parameters():
        ours, theirs = parameter.detach(), others[name].detach()
        if name.endswith("qkv.bias"):
            ours, theirs = (torch.cat(each.chunk(3)[::2]) for each in (ours, theirs))
        elif name.endswith("log_weight"):
            ours, theirs = ours[:, 1:], theirs[:, 1:]
        assert (ours - theirs).norm() <= TOLERANCE * theirs.norm() + 1e-12, name


def assert_same_run(run: TrainingRun, other: TrainingRun) -> None:
    assert run.progress.losses == pytest.approx(other.progress.losses, rel=TOLERANCE)
    assert [rung.val_loss for rung in run.progress.rungs] == pytest.approx(
        [rung.val_loss for rung in other.progress.rungs], rel=TOLERANCE
    )
    for rung, theirs in zip(run.progress.rungs, other.progress.rungs, strict=True):
        torch.testing.assert_close(
            torch.tensor(rung.entropy.head_means), torch.tensor(theirs.entropy.head_means), rtol=1e-3, atol=1e-4
        )
    assert_same_parameters(run, other)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_twenty_steps_together_are_those_of_each_alone(corpus: Corpus, device: str) -> None:
    candidates = [candidate(name, entropy) for name, entropy in MEMBERS]
    alone, together = runs_of(candidates, corpus, device), runs_of(candidates, corpus, device)
    for run in alone:
        finish_alone(run)
    finish_together(together)
    for run, other in zip(together, alone, strict=True):
        assert run.progress.step == 20
        assert_same_run(run, other)


@pytest.mark.parametrize("entropy", [replace(REGULARISED, form="published-code", warmup_share=0.5), None])
def test_a_group_of_one_is_trained_alike(corpus: Corpus, entropy: EntropyRegularisation | None) -> None:
    alone, together = (runs_of([candidate("SM(t)+G", entropy)], corpus)[0] for _ in range(2))
    finish_alone(alone)
    finish_together([together])
    assert_same_run(together, alone)


norms = st.sampled_from(["layernorm", "none"])
attentions = st.sampled_from(["softmax", "softmax-temperature"])
layers = st.builds(Layer, norm1=norms, attention=attentions, ffn=st.just("none")) | st.builds(
    Layer,
    norm1=norms,
    attention=attentions,
    norm2=norms,
    ffn=st.sampled_from(["gelu", "relu", "leaky-relu", "identity", "fused"]),
    stabiliser=st.sampled_from(["none", "scaled"]),
)
placements = st.tuples(layers, layers, norms, st.sampled_from([None, REGULARISED]))


@settings(max_examples=15, deadline=None)
@given(placed=st.lists(placements, min_size=1, max_size=4), bias=st.booleans(), tied=st.booleans())
def test_the_first_step_of_any_placements_has_the_gradients_of_each_alone(corpus: Corpus, placed, bias, tied) -> None:
    candidates = [
        Candidate(
            architecture=replace(BASES["tiny"], layers=tuple(rest), final_norm=final, bias=bias, tied_embeddings=tied),
            recipe=Recipe(scale=SCALE, entropy=entropy),
        )
        for *rest, final, entropy in placed
    ]
    alone, together = runs_of(candidates, corpus), runs_of(candidates, corpus)
    for run in alone:
        run.step()
    population = Population(together)
    population.step()
    population.leave(together)
    for run, other in zip(together, alone, strict=True):
        moments = [
            [one.optimizers[0].state[part]["exp_avg"] for part in one.objective.parameters()] for one in (run, other)
        ]
        torch.testing.assert_close(moments[0], moments[1], rtol=1e-3, atol=1e-6)  # a tenth of the clipped gradient


def test_a_member_that_leaves_goes_on_alone(corpus: Corpus) -> None:
    candidates = [candidate(name, entropy) for name, entropy in MEMBERS[:3]]
    alone, together = runs_of(candidates, corpus), runs_of(candidates, corpus)
    population = Population(together)
    for _ in range(5):
        population.step()
        population.validate_if_due()
    population.leave(together[1:2])
    finish_alone(together[1])
    while population.runs:
        population.step()
        population.validate_if_due()
    for run, other in zip(together, alone, strict=True):
        finish_alone(other)
        assert_same_run(run, other)


def spoil_weights(run: TrainingRun) -> None:
    run.objective.model.get_parameter("layers.1.attention.out.weight").data[0, 0] = math.nan


def spoil_gradient(run: TrainingRun) -> None:
    """The temperature overflows, and its gradient is 0 times infinity; the loss stays finite."""
    run.objective.model.get_parameter("layers.1.attention.temperature.log_weight").data[0, 5] = 100.0


def lower_start(run: TrainingRun) -> None:
    run.progress = replace(run.progress, initial_loss=0.0)


@pytest.mark.parametrize("spoil", [spoil_weights, spoil_gradient, lower_start])
def test_one_member_diverges_and_the_others_do_not_notice(corpus: Corpus, spoil: Callable[[TrainingRun], None]) -> None:
    candidates = [candidate(name, entropy) for name, entropy in MEMBERS[:4]]
    alone, together = runs_of(candidates, corpus), runs_of(candidates, corpus)
    for run in (alone[1], together[1]):
        spoil(run)
    before = [parameter.detach().clone() for parameter in together[1].objective.parameters()]
    for run in alone:
        finish_alone(run)
    finish_together(together)
    found, expected = together[1].progress.outcome, alone[1].progress.outcome
    assert (found.status, found.reason, found.layer) == ("diverged", expected.reason, expected.layer)
    if found.steps == 1:
        after = list(together[1].objective.parameters())
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    for place in (0, 2, 3):
        assert together[place].progress.outcome.status == "completed"
        assert_same_run(together[place], alone[place])


def test_events_are_those_of_the_trainer(corpus: Corpus) -> None:
    candidates = [candidate(name, entropy) for name, entropy in MEMBERS[:3]]
    events = list(train_population(candidates, corpus, seed=SEED))
    for place, one in enumerate(candidates):
        ours = [event for index, event in events if index == place]
        theirs = list(train(one, corpus, seed=SEED))
        assert [(type(event), event.steps, event.tokens) for event in ours] == [
            (type(event), event.steps, event.tokens) for event in theirs
        ]
        assert [event.val_loss for event in ours] == pytest.approx([event.val_loss for event in theirs], rel=TOLERANCE)


WIDER = replace(BASES["tiny"], d_ff=2 * BASES["tiny"].d_ff)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([], "at least one candidate"),
        ([candidate("SM", base="pythia-70m")], "only block='gpt2', but .* has 'pythia'; train it alone"),
        ([candidate("HH(SM+ScFFN)")], "only block='gpt2', but .* has 'sas'"),
        (
            [candidate("SM", normalisation=Normalisation(kind="spectral"))],
            "only normalisation=None, but SM has 'spectral'",
        ),
        ([candidate("SM+LR", slopes="global")], "only slopes='layer'"),
        ([candidate("SM+ScFFN", foldable=Foldable())], "only foldable=None"),
        ([candidate("SM", precision="bfloat16")], "only precision='float32'"),
        ([candidate("SM", optimizer="muon")], "only optimizer='adamw', but SM has 'muon'"),
        ([candidate("SM", route=DistillationSchedule(parent="p", placement="2xoSooo"))], "only route=None"),
        ([candidate("SM"), candidate("SM", weight_decay=0.0)], "agree in dimensions and recipe"),
        (
            [candidate("SM"), replace(candidate("SM"), architecture=parse("SM", WIDER).architecture)],
            "agree in dimensions and recipe",
        ),
        (
            [candidate("SM", REGULARISED), candidate("SM", replace(REGULARISED, weight=1.0))],
            "agree in the settings of entropy regularisation",
        ),
    ],
)
def test_what_cannot_be_trained_together_is_refused(others: list[Candidate], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check(others)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SM+fLN+G", "only norm='layernorm', but SM\\+fLN\\+G has 'frozen-layernorm'; train it alone"),
        ("SM+RMS", "has 'rmsnorm'"),
        ("2xooLRo", "only attention='softmax', but 2xooLRo has 'none'"),
        ("2xoHoRo", "has 'softmax-half'"),
        ("2xoSoPo", "piecewise"),
    ],
)
def test_choices_without_a_batched_program_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check([candidate(name)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gelu": "piecewise"}, "piecewise"),
        ({"softmax": "2quad"}, "only softmax='exact'"),
        ({"folded": True}, "folded"),
    ],
)
def test_forms_without_a_batched_program_are_refused(change: dict, message: str) -> None:
    plain = candidate("SM+LN+G")
    with pytest.raises(ValueError, match=message):
        check([plain, replace(plain, architecture=replace(plain.architecture, **change))])
