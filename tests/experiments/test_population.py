"""The benchmark of populations, small."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from costmodel.config.schema import decode
from costmodel.config.strict_yaml import load_mapping
from experiments import population
from experiments.__main__ import definitions
from experiments.batched_training import check
from experiments.population import Seconds

DATA = {key: value for key, value in load_mapping(definitions()["population"]).items() if key != "kind"}
SETTINGS = decode(population.Settings, DATA, "experiment population")


def trainings(alone_s: float, together_s: float) -> population.Trainings:
    return {
        (size, way): [Seconds(wall_s * size, 1.0) for wall_s in (seconds, 9 * seconds, seconds)]
        for size in SETTINGS.sizes
        for way, seconds in (("alone", alone_s), ("together", together_s))
    }


def test_the_candidates_can_be_trained_together_and_differ() -> None:
    candidates = population.draw(SETTINGS)
    check(candidates)
    assert len(set(candidates)) == len(candidates) == max(SETTINGS.sizes)
    assert {candidate.recipe.entropy is None for candidate in candidates} == {True, False}


def test_both_ways_are_timed_in_every_round(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"value_{index % 7} = {index * index % 101}\n" for index in range(2_000)))
    small = replace(SETTINGS, scale="smoke", tokens=512, sizes=(2,), rounds=2, data=str(text))
    before = torch.get_num_threads()
    found = population.measure(small)
    torch.set_num_threads(before)
    assert set(found) == {(2, "alone"), (2, "together")}
    assert all(len(each) == 2 and min(one.wall_s for one in each) > 0 for each in found.values())


@pytest.mark.parametrize(("together_s", "expected"), [(1.0, "train groups"), (2.0, "train one at a time")])
def test_the_verdict_is_by_the_required_ratio_of_medians(together_s: float, expected: str) -> None:
    found = trainings(2.2, together_s)
    assert population.ratio(found, 4, "wall_s") == pytest.approx(2.2 / together_s)
    assert expected in population.verdict(SETTINGS, found, "cpu")
    console = Console(width=120)
    with console.capture() as capture:
        console.print(population.table(SETTINGS, found, "cpu"))
    assert f"{3600 / 128 / 2.2:.1f}" in capture.get()  # 4,096 of 524,288 tokens are a 128th


def test_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        replace(SETTINGS, sizes=())
