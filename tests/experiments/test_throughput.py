"""The benchmark of throughput, small."""

from dataclasses import replace

import pytest
import torch
from rich.console import Console

from experiments import throughput
from experiments.__main__ import settings_of
from experiments.bars import median_ratio
from search_spaces.lower import lower

SETTINGS = settings_of("throughput")
SMALL = replace(SETTINGS, base="tiny", scale="smoke")


@pytest.mark.parametrize("name", ["plain", "ours"])
def test_a_step_learns(name: str) -> None:
    way = replace(SMALL.ways[name], threads=1)
    before = torch.get_num_threads()
    step = throughput.stepper(way, SMALL.candidate(way))
    assert step() > [step() for _ in range(10)][-1]
    torch.set_num_threads(before)


def test_arithmetic_is_six_per_weight_of_a_matrix_and_token_and_attention() -> None:
    candidate = SMALL.candidate(SMALL.ways["ours"])
    architecture, seq_len = candidate.trained, candidate.recipe.scale.seq_len
    matrices = [
        node.op.weight_shapes["weight"]
        for node in lower(architecture, seq_len)
        if "weight" in node.op.weight_shapes and type(node.op).__name__ in ("Linear", "VocabProjection")
    ]
    attention = 2 * architecture.num_layers * architecture.d_model * (seq_len + 1)
    expected = 6 * sum(rows * columns for rows, columns in matrices) + 3 * attention
    assert throughput.flop_per_token(candidate) == pytest.approx(expected)


def test_ratios_are_medians_within_rounds() -> None:
    rates = {name: [100.0, 10.0, 1000.0] for name in SETTINGS.ways} | {"ours": [150.0, 30.0, 1400.0]}
    assert median_ratio(rates["ours"], rates["plain"]) == 1.5
    console = Console(width=120)
    with console.capture() as capture:
        console.print(throughput.way_table(SETTINGS, rates, peak=1e12))
    assert "1.50" in capture.get()


def test_a_way_over_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold nowhere"):
        replace(SETTINGS, ways=SETTINGS.ways | {"plain": replace(SETTINGS.ways["plain"], over="nowhere")})
