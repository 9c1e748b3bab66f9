"""Members that a nested training judges before a run trains any: which ones, what is kept, and where there are none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from costmodel.errors import UserError
from nas.conversion.parent import Parent
from nas.corpus.corpus import Corpus
from nas.run.config import StudyConfig, study_candidate, study_recipe
from nas.searchers.strategy import SearchProblem
from nas.study import cuts
from nas.study.cuts import CUTS_FILE, nested_tokens, read_cuts, study_cuts
from nas.study.nested import Nested, nested_training
from nas.training.batches import validate
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.notation import Member, parse

CONFIG = StudyConfig(budget_latency="25s", space="tiny", scale="smoke", seq_len=16, tokens=1024, nested_tokens=256)


@pytest.fixture
def judged(parent: Parent, texts: Corpus, feasible: FeasibleSpace, tmp_path: Path, monkeypatch):
    """Judges four members, two at a time."""
    monkeypatch.setattr(cuts, "NUM_CUTS", 4)
    monkeypatch.setattr(cuts, "AT_A_TIME", 2)
    problem = SearchProblem(
        feasible=feasible, reference_loss=6.0, parent=parent.model.architecture, parent_loss=5.0, anchors=()
    )
    recipe = study_recipe(CONFIG, parent.route)

    def judge(folder: Path = tmp_path) -> dict[Member, float]:
        console = Console(quiet=True)
        return study_cuts(problem, CONFIG, parent, recipe, texts, folder, console)

    return judge


def test_members_are_judged_by_what_they_lose_more_than_the_parent(judged, parent, texts, feasible, monkeypatch):
    made: list[Nested] = []

    def training(*args: Any, **kwargs: Any) -> Nested:
        made.append(nested_training(*args, **kwargs))
        return made[0]

    monkeypatch.setattr(cuts, "nested_training", training)
    losses = judged()
    assert len(losses) == 4
    recipe = study_recipe(CONFIG, parent.route)
    parents = validate(parent.decoder(), texts, recipe.scale, recipe.scale.rung_validation_tokens).loss
    for member, over in losses.items():
        assert feasible.fits(member)
        assert over == pytest.approx(made[0].loss(study_candidate(recipe, member).trained) - parents, abs=1e-12)


def test_a_run_that_was_killed_goes_on_with_the_members_it_would_have_judged(
    judged, feasible, tmp_path: Path, monkeypatch
):
    whole = judged(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    write, kept = cuts._write, []

    def killed(path: Path, known: dict[Member, float]) -> None:
        write(path, known)
        kept.append(len(known))
        raise KeyboardInterrupt

    monkeypatch.setattr(cuts, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        judged(other)
    assert len(read_cuts(other / CUTS_FILE, feasible)) == kept[0] == 2
    monkeypatch.setattr(cuts, "_write", write)
    assert judged(other) == whole == read_cuts(other / CUTS_FILE, feasible)
    monkeypatch.setattr(cuts, "nested_training", None)  # nothing is trained for what is whole
    assert judged(other) == whole


def test_a_damaged_file_is_told_in_one_line(judged, tmp_path: Path):
    judged()
    (tmp_path / CUTS_FILE).write_text("notation,nats_over_parent\nSM,much\n")
    with pytest.raises(
        UserError, match=r"cuts.csv must have the columns notation, nats_over_parent, but: could not .*; remove"
    ):
        judged()


def test_there_is_one_by_default_at_scale_proxy_from_a_parent_of_which_nothing_is_known(parent: Parent):
    recipe = study_recipe(CONFIG, parent.route)
    proxy = replace(CONFIG, scale="proxy", nested_tokens=None)
    assert nested_tokens(proxy, parent, recipe) == 2 * recipe.scale.tokens
    assert nested_tokens(CONFIG, parent, recipe) == 256
    for off in (
        replace(CONFIG, nested_tokens=None),
        replace(proxy, nested_tokens=0),
        replace(proxy, searcher="evolution"),
        replace(proxy, knowledge="shipped"),
        replace(proxy, parent="builtin", client_layers=1),
    ):
        assert nested_tokens(off, parent, recipe) == 0
    assert nested_tokens(proxy, None, recipe) == 0


@pytest.mark.parametrize(
    ("searcher", "layers", "message"),
    [
        ("trellis", None, "--nested-tokens needs a parent, but candidates start from scratch; leave it out"),
        ("evolution", "2xLSLGo", "--nested-tokens needs searcher trellis, but it is evolution; leave it out"),
        (
            "trellis",
            "2xlSlGo",
            "--nested-tokens needs a parent of live norms, softmax and FFNs without a gate; leave it out",
        ),
    ],
)
def test_where_it_cannot_be_it_is_refused(parent: Parent, searcher: str, layers: str | None, message: str):
    recipe = study_recipe(CONFIG, parent.route)
    if layers is not None:
        architecture = parse(layers, parent.model.architecture).architecture
        parent = parent._replace(model=parent.model._replace(architecture=architecture))
    with pytest.raises(UserError, match=message):
        nested_tokens(replace(CONFIG, searcher=searcher), None if layers is None else parent, recipe)
