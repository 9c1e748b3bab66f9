"""What comes with the builtin parent: the table of trainings, as nats over what the parent loses."""

import csv
import math
from pathlib import Path

import pytest

from costmodel.config.strict_yaml import load_mapping
from experiments.trainings import DATA
from nas.searchers.known_trainings import TOKENS, TRAININGS_FILE, known_trainings
from search_spaces.notation import placement
from search_spaces.space import load_space

CONFIGS = Path(__file__).parents[3] / "experiments" / "configs"


def test_they_are_those_of_the_table() -> None:
    parent_loss = load_mapping(CONFIGS / "search-benchmark.yaml")["parent_loss"]
    found = {placement(one.member.architecture): one for one in known_trainings(load_space("gpt2-small"), parent_loss)}
    with (DATA / "table-12.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(found) == len(rows) == 150
    for row in rows:
        assert int(row["tokens"]) == TOKENS
        assert found[row["row"]].log_perplexity == pytest.approx(math.log(float(row["perplexity"])), abs=1e-4)


def test_a_space_is_told_of_its_own_layers_alone() -> None:
    space = load_space("gpt2-papers")
    found = known_trainings(space, 2.0)
    assert len(found) < 150
    assert all(set(one.member.architecture.layers) <= set(space.layers) for one in found)


def test_the_file_is_small() -> None:
    assert TRAININGS_FILE.stat().st_size < 20_000
