"""Training at a real model's own width: a step on this machine's cores, and by arithmetic on a GPU.

A step is of a parent's candidate: predictions of the parent, gradients, AdamW. Every way has a process of its own, with
its peak memory beside what was said before it started; its first step, in which optimizer and predictions come to be,
is not counted. The share of the teacher is measured in the step that has one, in processor seconds.

On the GPU: 6 products of a parameter a token to train, 2 more for a parent whose predictions are not kept yet (Kaplan
et al. 2020, arXiv 2001.08361, section 2.1), at a share of the printed rate; nothing of it was measured.
"""

import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from costmodel.config.units import format_bytes, format_seconds
from experiments.bars import Figure, figure_table, fresh_process, table
from nas.malloc import keep_freed_memory
from nas.model.decoder import build
from nas.recipe.candidate import Candidate
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.recipe import SCALES, Recipe
from nas.training.distillation.teacher import Teacher
from nas.training.memory import training_memory
from nas.training.objective import Objective
from nas.training.optimizer import optimizers
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.notation import parse, placement

BASE = "gpt2-small"

WAYS: dict[str, dict[str, Any]] = {  # what differs from the recipe
    "teacher at every step": {},
    "predictions kept": {},
    "kept, only changed parts": {"trainable": "changed"},
    "kept, layers computed again": {"recompute": True},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """flops_per_s: as printed, of dense products in bfloat16. share: of it that training reaches."""

    name: str
    memory_bytes: float
    flops_per_s: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """candidate: its placement, from the parent SM+LN+G. large: of the models on the GPU, by name.

    gpu_micro_batch: sequences. tokens, num_candidates: of a search there.
    """

    dimensions: Dimensions
    candidate: str
    seq_len: int
    batch: int
    micro_batch: int
    most_likely: int
    threads: tuple[int, ...]
    rounds: int
    max_teacher_share: float
    large: dict[str, Dimensions]
    gpu: Gpu
    gpu_micro_batch: int
    tokens: int
    num_candidates: int


class Measured(NamedTuple):
    """Medians over rounds, seconds; bytes. step_cpu_s, teacher_cpu_s: of all threads of the process."""

    step_s: float
    step_cpu_s: float
    teacher_cpu_s: float
    peak_bytes: int


def run(name: str, settings: Settings, console: Console) -> None:
    """Measures and prints."""
    for threads in settings.threads:
        measured: dict[str, Measured] = {}
        for way in WAYS:
            with fresh_process() as pool:
                measured[way] = pool.submit(measure, settings, way, threads).result()
        console.print(step_table(settings, threads, measured))
        taught = measured["teacher at every step"]
        share = taught.teacher_cpu_s / taught.step_cpu_s
        console.print(figure_table("", [Figure("share of the teacher", share, most=settings.max_teacher_share)]))
        console.print()
    console.print(gpu_table(settings))


def candidate_of(settings: Settings, dimensions: Dimensions, micro_batch: int, **changes: Any) -> Candidate:
    base = base_architecture(BASE, dimensions)
    route = DistillationSchedule(
        parent="",
        placement=placement(parse("SM+LN+G", base).architecture),
        most_likely=settings.most_likely,
        trainable=changes.pop("trainable", "all"),
    )
    batch = max(settings.batch, micro_batch)
    scale = replace(SCALES["paper"], seq_len=settings.seq_len, batch=batch, micro_batch=micro_batch)
    recipe = Recipe(scale=scale, route=route, **changes)
    return Candidate(architecture=parse(settings.candidate, base).architecture, recipe=recipe)


def measure(settings: Settings, way: str, threads: int) -> Measured:
    """Steps of a fresh model on random tokens, in this process."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    candidate = candidate_of(settings, settings.dimensions, settings.micro_batch, **WAYS[way])
    generator = torch.Generator().manual_seed(0)
    objective = Objective(candidate, generator)
    parent = build(parse("SM+LN+G", candidate.trained).architecture, generator).requires_grad_(False).eval()
    moving = optimizers(objective, candidate.recipe)
    shape = (settings.batch, settings.seq_len + 1)
    tokens = torch.randint(candidate.trained.vocab_size, shape, generator=generator)
    rounds: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        teacher = Teacher(parent, settings.most_likely, Path(folder) / "kept" if "kept" in way else None)
        for _ in range(settings.rounds + 1):
            since_s, cpu_since_s = time.perf_counter(), time.process_time()
            predictions = teacher.predictions(range(settings.batch), tokens[:, :-1])
            taught_s = time.process_time() - cpu_since_s
            num_parts = settings.batch // settings.micro_batch
            parts = tokens[:, :-1], tokens[:, 1:]
            objective.backward(*parts, num_parts=num_parts, penalty_weight=0.0, predictions=predictions)
            nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
            for optimizer in moving:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            rounds.append((time.perf_counter() - since_s, time.process_time() - cpu_since_s, taught_s))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    step_s, cpu_s, teacher_s = (statistics.median(seconds) for seconds in zip(*rounds[1:], strict=True))
    return Measured(step_s, cpu_s, teacher_s, peak)


def step_table(settings: Settings, threads: int, measured: dict[str, Measured]) -> Table:
    """A line a way."""
    tokens = settings.batch * settings.seq_len
    rows = []
    for way, (step_s, cpu_s, _, peak) in measured.items():
        said = training_memory(candidate_of(settings, settings.dimensions, settings.micro_batch, **WAYS[way]))
        seconds = (f"{step_s:.2f}", f"{cpu_s:.2f}", f"{tokens / step_s:,.0f}")
        rows.append((way, *seconds, format_bytes(peak), format_bytes(said.total)))
    columns = ("", "seconds a step", "of the processor", "tokens/s", "peak", "said before")
    return table(columns, rows, title=f"{tokens:,} tokens a step on {threads} threads")


def gpu_table(settings: Settings) -> Table:
    """A line a model and way, by arithmetic."""
    gpu = settings.gpu
    rows: list[Sequence[str]] = []
    for name, dimensions in settings.large.items():
        for way, changes in WAYS.items():
            made = candidate_of(settings, dimensions, settings.gpu_micro_batch, precision="bfloat16", **changes)
            memory = training_memory(made)
            products = 6 if "kept" in way else 8
            forward = 2 if "again" in way else 0
            num_parameters = memory.parameters / 4
            rate = gpu.share * gpu.flops_per_s / ((products + forward) * num_parameters)
            search_s = settings.num_candidates * settings.tokens / rate
            fits = "yes" if memory.total <= gpu.memory_bytes else "no"
            size = f"{num_parameters / 1e6:,.0f} M"
            rows.append((name, size, way, f"{rate:,.0f}", format_bytes(memory.total), fits, format_seconds(search_s)))
    columns = ("", "parameters", "", "tokens/s", "memory", "fits", f"{settings.num_candidates} candidates")
    title = (
        f"by arithmetic on {gpu.name}, {gpu.share:.0%} of {gpu.flops_per_s / 1e12:,.0f} Tflop/s: micro-batches of "
        f"{settings.gpu_micro_batch}, {settings.tokens:,} tokens a candidate"
    )
    return table(columns, rows, title=title)
