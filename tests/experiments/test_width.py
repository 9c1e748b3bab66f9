"""Training at a model's own width, at a small one."""

import io
from dataclasses import replace

import torch
from rich.console import Console

from experiments import width
from experiments.__main__ import settings_of
from nas.training.memory import training_memory
from search_spaces.bases import Dimensions

SETTINGS = settings_of("width")
DIMENSIONS = Dimensions(layers=2, heads=2, d_model=16, vocab=64, context=16)
SMALL = replace(
    SETTINGS, dimensions=DIMENSIONS, candidate="1xLSLGo-1xLSLRo", seq_len=16, rounds=1, large={"small": DIMENSIONS}
)


def test_every_way_takes_steps_that_are_timed_and_weighed() -> None:
    before = torch.get_num_threads()
    measured = {way: width.measure(SMALL, way, 1) for way in width.WAYS}
    torch.set_num_threads(before)
    assert all(measurement.step_cpu_s > 0 and measurement.peak_bytes > 1 << 20 for measurement in measured.values())
    table = width.step_table(SMALL, 1, measured)
    assert table.row_count == len(width.WAYS)


def test_what_a_gpu_holds_and_how_fast_is_arithmetic() -> None:
    console = Console(file=(text := io.StringIO()), width=200)
    gpu = replace(SETTINGS.gpu, share=0.5, flops_per_s=8e9, memory_bytes=1e9)
    console.print(width.gpu_table(replace(SMALL, gpu=gpu, gpu_micro_batch=4)))
    assert "by arithmetic on one 80 GB GPU, 50%" in text.getvalue()
    made = width.candidate_of(SMALL, DIMENSIONS, 4)
    num_parameters = training_memory(made).parameters / 4
    assert f"{4e9 / (8 * num_parameters):,.0f}" in text.getvalue()  # 6 products a parameter, and 2 of the parent
    assert f"{4e9 / (6 * num_parameters):,.0f}" in text.getvalue()
