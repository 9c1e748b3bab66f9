"""Tokens a second of training on this machine's cores: a plain loop against ours, and what each lever adds.

All ways are started first and then take turns of a few seconds, so that whatever else the machine does meets them
alike; on a busy machine that favours ways whose threads do not wait for one another. A ratio is the median over rounds
of two ways' rates within a round. The arithmetic of a step (the backward pass is twice the forward pass) is compared
with the rate of a large fp32 matrix product on all cores in the same rounds.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from costmodel import ops
from costmodel.errors import StoppedError, UserError
from experiments.bars import Figure, figure_table, fresh_process, median_ratio, table
from nas.attention import causal
from nas.malloc import keep_freed_memory
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import SCALES, Recipe, ScaleName
from nas.study.worker import worker_env
from nas.training.objective import Objective
from nas.training.optimizer import adamw
from search_spaces.bases import base_architecture
from search_spaces.lower import lower
from search_spaces.resolve import resolve

PEAK_SIZE = 1024  # of the square matrices whose product is the peak
PEAK_S = 1.0

_training: list[tuple[Callable[[], float], int]] = []  # of a process of a way: what takes a step, and its tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How to train: processes side by side, each a candidate of its own, with so many threads.

    over: the way it is compared with. allocator: freed memory stays in the process. fused: AdamW, and our loop;
    without it the loop of a tutorial. native: attention in our C++, not torch's. vocab_size: None is the scale's.
    chunked: cross-entropy in chunks where ours would be.
    """

    processes: int
    threads: int
    allocator: bool
    fused: bool
    over: str | None = None
    native: bool = False
    compiled: bool = False
    vocab_size: int | None = None
    chunked: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it. required_ratio: of `ours` over `plain`.

    Raises UserError if one of the two is missing, or a way is over one that is not there.
    """

    architecture: str
    base: str
    scale: ScaleName
    rounds: int
    burst_s: float
    required_ratio: float
    ways: dict[str, Way]

    def __post_init__(self) -> None:
        wanted = {"plain", "ours"} | {way.over for way in self.ways.values() if way.over is not None}
        if missing := sorted(wanted - set(self.ways)):
            raise UserError(f"`ways` must hold {', '.join(missing)}, but has {', '.join(self.ways)}.")

    def candidate(self, way: Way) -> Candidate:
        scale = SCALES[self.scale]
        recipe = Recipe(scale=replace(scale, vocab_size=way.vocab_size or scale.vocab_size))
        architecture = resolve(self.architecture, base_architecture(self.base)).architecture
        return Candidate(architecture=architecture, recipe=recipe)


def run(name: str, settings: Settings, console: Console) -> None:
    """Prints a line per way, and whether ours is as fast as required."""
    rates, peaks = measure(settings, lambda line: console.print(line, style="dim"))
    console.print(way_table(settings, rates, statistics.median(peaks)))
    reached = median_ratio(rates["ours"], rates["plain"])
    console.print(figure_table("", [Figure("ours over plain", reached, least=settings.required_ratio)]))


def measure(settings: Settings, log: Callable[[str], None]) -> tuple[dict[str, list[float]], list[float]]:
    """Tokens a second of every way in every round, all its processes together, and the peak of every round, FLOP/s."""
    rates: dict[str, list[float]] = {name: [] for name in settings.ways}
    peaks = []
    with ExitStack() as stack:
        trainers = {name: _started(settings, way, stack) for name, way in settings.ways.items()}
        log("all ways are ready")
        for index in range(settings.rounds):
            for name, processes in trainers.items():
                bursts = [process.submit(_burst, settings.burst_s) for process in processes]
                rates[name].append(sum(burst.result() for burst in bursts))
            peaks.append(peak_flop_per_s())
            log(f"round {index + 1} of {settings.rounds}")
    return rates, peaks


def way_table(settings: Settings, rates: Mapping[str, list[float]], peak: float) -> Table:
    """A row per way: its rate, its ratio to the way that it adds a lever to, its share of the peak (FLOP/s)."""
    rows = []
    for name, way in settings.ways.items():
        rate = statistics.median(rates[name])
        gained = f"{median_ratio(rates[name], rates[way.over]):.2f}" if way.over else ""
        share = rate * flop_per_token(settings.candidate(way)) / peak
        rows.append((name, f"{rate:,.0f}", gained, way.over or "", f"{share:.0%}"))
    return table(("way", "tokens/s", "ratio", "over", "of peak"), rows)


def flop_per_token(candidate: Candidate) -> float:
    """FLOPs of one training step, forward and backward: linears, logits and the causal half of attention's two
    products.
    """
    architecture, seq_len = candidate.trained, candidate.recipe.scale.seq_len
    matrices = [
        node.op for node in lower(architecture, seq_len) if isinstance(node.op, ops.Linear | ops.VocabProjection)
    ]
    linears = sum(math.prod(op.weight_shapes["weight"]) for op in matrices)
    return 3 * (2 * linears + 2 * (seq_len + 1) * architecture.d_model * architecture.num_layers)


def peak_flop_per_s() -> float:
    """Rate of a product of large fp32 matrices on as many threads as this process may use cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    left, right = torch.ones(PEAK_SIZE, PEAK_SIZE), torch.ones(PEAK_SIZE, PEAK_SIZE)
    out, count = left @ right, 0
    start_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < PEAK_S:
        torch.mm(left, right, out=out)
        count += 1
    torch.set_num_threads(before)
    return 2 * PEAK_SIZE**3 * count / elapsed_s


def _started(settings: Settings, way: Way, stack: ExitStack) -> list[ProcessPoolExecutor]:
    """Processes that have taken their first step."""
    with patch.dict(os.environ, worker_env(way.threads)):  # which libraries read when they are loaded
        processes = [stack.enter_context(fresh_process()) for _ in range(way.processes)]
        for ready in [process.submit(_begin, way, settings.candidate(way)) for process in processes]:
            ready.result()
    return processes


def _begin(way: Way, candidate: Candidate) -> None:
    """Makes this process one that trains so."""
    if way.allocator:
        keep_freed_memory()
    if not way.native:
        causal.has_native = lambda head_dim: False  # type: ignore[assignment]
    elif not causal.has_native(candidate.trained.head_dim):
        raise StoppedError("our attention cannot be compiled here; the reason is in the log.")
    scale, step = candidate.recipe.scale, stepper(way, candidate)
    step()
    _training.append((step, scale.batch * scale.seq_len))


def _burst(burst_s: float) -> float:
    """Trains for so many seconds; tokens a second."""
    ((step, tokens),) = _training
    count, since_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - since_s) < burst_s:
        step()
        count += 1
    return count * tokens / elapsed_s


def stepper(way: Way, candidate: Candidate) -> Callable[[], float]:
    """A function that takes one training step on random tokens and returns its loss."""
    torch.set_num_threads(way.threads)
    generator = torch.Generator().manual_seed(0)
    objective = Objective(candidate, generator)
    if way.compiled:
        for layer in objective.model.layers:
            layer.compile()  # equal layers share their code
    scale, vocab_size = candidate.recipe.scale, candidate.trained.vocab_size
    inputs, targets = torch.randint(vocab_size, (2, scale.batch, scale.seq_len), generator=generator)
    parameters = list(objective.parameters())
    optimizer = adamw(objective, candidate.recipe) if way.fused else torch.optim.AdamW(parameters)

    def backward() -> Tensor:
        if way.fused and way.chunked:
            return objective.backward(inputs, targets, num_parts=1, penalty_weight=0.0).cross_entropy
        logits = objective.model(inputs, with_entropies=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        return loss

    def step() -> float:
        loss = backward()
        nn.utils.clip_grad_norm_(parameters, candidate.recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step
