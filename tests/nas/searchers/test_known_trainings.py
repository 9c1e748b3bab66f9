"""What comes with the builtin parent: tables of trainings, as nats over what the parent loses.

`python tests/nas/searchers/test_known_trainings.py` writes them anew from the tables.
"""

import math
from dataclasses import replace

import pytest

from costmodel.config.strict_yaml import load_mapping
from experiments.searchers.table import CONFIGS
from experiments.trainings import DATA, Recorded, read_outcomes
from nas.conversion.parent import load_parent
from nas.run.config import StudyConfig, study_recipe
from nas.searchers.anchors import TOKENS, TRAININGS_FILE, known_trainings
from nas.study.open_run import require_knowledge
from search_spaces.notation import name_of
from search_spaces.space import load_space

TABLES = ("table.yaml", "table-known.yaml")
PARENT_LOSS: float = load_mapping(CONFIGS / "search-benchmark.yaml")["parts"]["12"]["parent_loss"]


def trainings() -> list[Recorded]:
    """All of twelve layers."""
    parts = [part for name in TABLES for part in load_mapping(CONFIGS / name)["parts"].values()]
    return [
        outcome for part in parts if part["parent"] == "builtin" for outcome in read_outcomes(DATA / part["committed"])
    ]


def test_they_are_those_of_the_tables() -> None:
    known = known_trainings(load_space("gpt2-small"), PARENT_LOSS)
    assert len(known) == len(trainings()) == 174
    for outcome, recorded in zip(known, trainings(), strict=True):
        assert recorded.ended.perplexity is not None
        assert recorded.ended.tokens == TOKENS
        assert outcome.log_perplexity == pytest.approx(math.log(recorded.ended.perplexity), abs=1e-4)
        regularised = outcome.member.entropy_regularised
        assert name_of(outcome.member.architecture, entropy_regularised=regularised) == recorded.row


def test_they_are_known_with_the_builtin_parent_at_its_own_tokens_alone() -> None:
    parent, config = load_parent("builtin"), StudyConfig(budget_latency="5min")
    asked, recipe = replace(config, knowledge="shipped"), study_recipe(config, parent.route)
    longer = study_recipe(replace(config, tokens=1_000_000), parent.route)
    require_knowledge(asked, parent, recipe)
    for other, made in ((parent._replace(name="runs/mine"), recipe), (parent, longer), (None, recipe)):
        require_knowledge(config, other, made)
        with pytest.raises(ValueError, match="--knowledge shipped is of the builtin parent, .* leave it out"):
            require_knowledge(asked, other, made)


def test_a_space_is_told_of_its_own_layers_alone() -> None:
    space = load_space("gpt2-papers")
    known = known_trainings(space, 2.0)
    assert len(known) < 174
    assert all(set(outcome.member.architecture.layers) <= set(space.layers) for outcome in known)


if __name__ == "__main__":
    over = [
        f"{outcome.row},{math.log(outcome.ended.perplexity or math.nan) - PARENT_LOSS:.4f}" for outcome in trainings()
    ]
    TRAININGS_FILE.write_text("\n".join(["notation,nats_over_parent", *over, ""]), encoding="utf-8")
