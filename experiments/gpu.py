"""Measures training and search on one GPU in four minutes, or on a CPU, and writes the figures to gpu.csv.

A plain GPT-2 in PyTorch is measured beside our trainings in the same run. Our training steps are those of the trainer,
on random tokens, so that they include all that a user's training does. Ratios are medians over rounds.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from costmodel.errors import StoppedError, UserError
from experiments.measured import GIB, Rows, Way, speeds
from experiments.plain_gpt2 import plain_step
from nas.api import load_run
from nas.conversion.parent import BUILTIN, Parent, load_parent
from nas.malloc import keep_freed_memory
from nas.model.bf16_products import has_bf16_units
from nas.recipe.candidate import Candidate, candidate_at, recipe_at
from nas.recipe.overrides import DistillationChanges, RecipeChanges, changed
from nas.recipe.recipe import Precision, ScaleName
from nas.storage import RUNS
from nas.study.throughput import random_corpus, shared_rates, threads, training_rate
from nas.training.device import Device, lowered, usual_device
from nas.training.distillation.library import initial_weights
from nas.training.distillation.teacher import teacher_of
from nas.training.memory import CONTEXT_BYTES, training_memory
from nas.training.trainer import TrainingRun
from search_spaces.architecture import Architecture
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.forms import FFNS, Ffn
from search_spaces.notation import placement
from search_spaces.resolve import resolve

CSV_FILE = "gpu.csv"
TOTAL_S: dict[Device, float] = {"cpu": 600, "cuda": 240}  # seconds of all parts that run together
ENDING_S = 10  # in which a search whose time is over writes its results and ends Ray
SMALL_SEARCH = ("--scale", "smoke", "--tokens", "2048", "--num-trials", "2")
WHOLE = ", float32"  # added to the name of a training in float32 if others are in bfloat16
PLAIN, COMPILED, OURS, REGULARISED = "plain", "plain compiled", "ours", "ours, entropy regularised"
LAYERS = "SM+LN+G"
ENDLESS = 10**12  # tokens, so that no training ends while it is measured
UNTAUGHT = RecipeChanges(distillation=DistillationChanges(prediction_weight=0.0, hidden_state_weight=0.0))


class Sizes(NamedTuple):
    """Sizes of what is measured at a scale.

    base, lengths, tokens: the trained GPT-2's dimensions, sequence lengths, and tokens of a step at every length.
    rounds, burst_s: number of rounds in which each step is measured, and its seconds in a round.
    parent_tokens, parent_length: of trainings from a parent, the numbers of tokens of a step, and sequence length.
    blockwise_tokens: tokens on which each new sub-layer is trained before a candidate is assembled from them.
    shared: scale of the trainings that share a device, and numbers of trainings at a time. usual: scale of the
        trainings that are measured beside the search. searched: flags of the search.
    """

    base: Architecture
    lengths: tuple[int, ...]
    tokens: int
    rounds: int
    burst_s: float
    parent_tokens: tuple[int, ...]
    parent_length: int
    blockwise_tokens: int
    shared: tuple[ScaleName, tuple[int, ...]]
    usual: ScaleName
    searched: tuple[str, ...]


class Place(NamedTuple):
    """The arguments of every part. parent: name that `load_parent` takes, or None. rows: where results are written."""

    device: Device
    sizes: Sizes
    parent: str | None
    rows: Rows


SIZES: dict[ScaleName, Sizes] = {
    "smoke": Sizes(
        base_architecture("tiny", Dimensions(vocab=509)), (16, 32), 256, 2, 0.2, (64, 256), 32, 1_024,
        ("smoke", (1, 2)), "smoke", SMALL_SEARCH,
    ),
    "proxy": Sizes(
        base_architecture("gpt2-small", Dimensions(d_model=96, vocab=512)), (128,), 1_024, 5, 5.0, (512, 4_096), 128,
        4_096, ("proxy", (1, 2)), "proxy", SMALL_SEARCH,
    ),
    "paper": Sizes(
        base_architecture("gpt2-small", Dimensions(vocab=50_257)), (128, 1_024), 32_768, 3, 0.7, (4_096, 32_768), 128,
        32_768, ("gpu", (1, 2, 4, 8)), "proxy",
        ("--scale", "gpu", "--num-trials", "8", "--gpus-per-trial", "0.25", "--tokens", "1000000",
         "--recipe.scale.validation-tokens", "65536"),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML, and its flags.

    Attributes:
        device: None for a GPU if there is one.
        scale: smoke to try the script out; by default GPT-2 small's size on a GPU, and the proxy's on a CPU.
        output_dir: folder of the figures, by default runs/experiments/NAME.
        parent: GGUF file of SmolLM2, or another parent.
        parts: what is measured, by default all that the parent allows.
    """

    device: Device | None = None
    scale: ScaleName | None = None
    output_dir: str | None = None
    parent: str | None = None
    parts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda needs a GPU that torch can use, but there is none; give --device cpu.")
        if self.scale not in (None, *SIZES):
            raise UserError(f"--scale of this experiment must be one of {', '.join(SIZES)}, but got {self.scale!r}.")
        if odd := [part for part in self.parts or () if part not in PARTS]:
            raise UserError(f"--parts must be some of {','.join(PARTS)}, but got {odd[0]!r}.")
        if self.parent not in (None, BUILTIN) and not Path(self.parent).exists():
            raise UserError(f"--parent must be {BUILTIN}, a file or a folder, but {self.parent!r} does not exist.")
        if self.parent is None and "smollm2" in (self.parts or ()):
            raise UserError("part smollm2 needs --parent; docs/llama.md says where the file of SmolLM2 is.")


def run(name: str, settings: Settings, console: Console) -> None:
    """Measure the chosen parts one after the other, and write gpu.csv. Raises StoppedError at the end if one failed."""
    device = settings.device or usual_device()
    folder = Path(settings.output_dir) if settings.output_dir else RUNS / "experiments" / name
    folder.mkdir(parents=True, exist_ok=True)
    rows = Rows(folder / CSV_FILE, device, console)
    sizes = SIZES[settings.scale or ("paper" if device == "cuda" else "proxy")]
    place = Place(device, sizes, settings.parent, rows)
    allowed = [part for part in PARTS if part != "smollm2" or settings.parent is not None]
    chosen = [part for part in PARTS if part in (settings.parts or allowed)]
    ends_s, all_shares = time.monotonic(), sum(PARTS[part][1] for part in chosen)
    if device == "cpu":
        keep_freed_memory()
    with threads(1) if device == "cpu" else nullcontext():
        for part in chosen:
            measure, share = PARTS[part]
            ends_s += TOTAL_S[device] * share / all_shares
            with rows.part(part, ends_s):
                measure(place)
    console.print(f"figures: {rows.path}", soft_wrap=True, highlight=False)
    if rows.failed:
        raise StoppedError(f"experiment {name}: {', '.join(rows.failed)} failed; the tracebacks above say why.")


def steps(place: Place) -> None:
    """Measure training steps of GPT-2 in plain PyTorch and by the toolkit's trainer, and memory of the CUDA context."""
    for seq_len in place.sizes.lengths:
        plain = (_plain(place, seq_len, name) for name in (COMPILED, PLAIN))
        ours = (_way(place, name, _gpt2(place, seq_len, name)) for name in (OURS, REGULARISED))
        _compare(place, [*plain, *ours], f"T={seq_len}")
    if place.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        place.rows.add("CUDA context", (total - free - torch.cuda.memory_reserved()) / GIB, "GiB")
        place.rows.add("CUDA context, predicted", CONTEXT_BYTES / GIB, "GiB")


def _compare(place: Place, ways: Sequence[Way], subject: str) -> None:
    """Measure ways and write their rows, with ratios to earlier ones: plain, ours, and the same in float32."""
    sizes, add, rates = place.sizes, place.rows.add, dict[str, list[float]]()
    for way, speed in speeds(ways, place.device, rounds=sizes.rounds, burst_s=sizes.burst_s, rows=place.rows):
        name, rates[way.name] = f"{subject}, {way.name}", speed.rates
        add(name, statistics.median(speed.rates), "tokens/s")
        for other in (COMPILED, PLAIN, OURS, f"{way.name}{WHOLE}"):
            if other in rates and other != way.name:
                ratios = (ours / theirs for ours, theirs in zip(speed.rates, rates[other], strict=True))
                add(name, statistics.median(ratios), f"of {other}")
        add(f"{name}, until warm", speed.start_s, "s")
        add(f"{name}, compiled after the warm-up", speed.num_recompiled, "graphs")
        if way.predicted_bytes is not None:
            add(f"{name}, predicted memory", way.predicted_bytes / GIB, "GiB")
        if speed.peak_bytes is not None:
            add(f"{name}, peak memory", speed.peak_bytes / GIB, "GiB")
            if way.predicted_bytes is not None:
                add(f"{name}, predicted memory", way.predicted_bytes / speed.peak_bytes, "of peak")


def _plain(place: Place, seq_len: int, name: str) -> Way:
    batch = place.sizes.tokens // seq_len
    step = partial(plain_step, place.sizes.base, batch=batch, seq_len=seq_len, device=place.device)
    return Way(name, place.sizes.tokens, lambda: nullcontext(step(compiled=name == COMPILED)))


def _gpt2(place: Place, seq_len: int, name: str) -> Candidate:
    recipe = recipe_at("paper", "random", entropy_regularised=name == REGULARISED)
    batch = place.sizes.tokens // seq_len
    scale = replace(recipe.scale, seq_len=seq_len, batch=batch, micro_batch=batch, tokens=ENDLESS)
    architecture = resolve(LAYERS, place.sizes.base).architecture
    made = Candidate(architecture=architecture, recipe=replace(recipe, scale=scale))
    return made if place.device == "cpu" else lowered(made, place.device)  # on a CPU in float32, like scale proxy


def _way(
    place: Place,
    name: str,
    candidate: Candidate,
    initial: Mapping[str, Tensor] | None = None,
    parent: Parent | None = None,
) -> Way:
    memory, scale = training_memory(candidate, place.device), candidate.recipe.scale
    start = partial(training, candidate, place.device, initial, parent)
    return Way(name, scale.batch * scale.seq_len, start, memory.total - memory.context)


@contextmanager
def training(
    candidate: Candidate, device: str, initial: Mapping[str, Tensor] | None = None, parent: Parent | None = None
) -> Iterator[Callable[[], object]]:
    """Yield a function that takes a step of the trainer on random tokens. Raises StoppedError if the training ended.

    initial: weights to start from, None for random ones. parent: the teacher; None to train without one.
    """
    with TemporaryDirectory(prefix="nas-step-") as folder:
        corpus = random_corpus(candidate, Path(folder))
        teacher = None if parent is None else teacher_of(parent, corpus, candidate.recipe, device)
        run = TrainingRun(candidate, corpus, seed=0, folder=None, device=device, initial=initial or {}, teacher=teacher)
        try:
            yield run.step
            run.settle()
        finally:
            run.close()
        if run.progress.outcome is not None:
            raise StoppedError(f"the measured training of {candidate.name} ended: {run.progress.outcome.reason}.")


def from_parent(place: Place) -> None:
    """Measure steps that tune a parent, and steps and making of initial weights of a distillation from it.

    The candidate has eighth powers in place of softmax, and quadratic functions in place of activations. On a CPU with
    bfloat16 units, everything is measured in float32 too.
    """
    assert place.parent is not None
    is_cpu_with_units = place.device == "cpu" and has_bf16_units()
    precisions: dict[str, Precision | None] = {WHOLE: "float32", "": None} if is_cpu_with_units else {"": None}
    rows, sizes, parent = place.rows, place.sizes, load_parent(place.parent)
    with TemporaryDirectory(prefix="nas-library-") as folder:
        own = parent.model.architecture
        quadratics: list[Ffn] = ["quadglu" if FFNS[layer.ffn].is_gated else "square" for layer in own.layers]
        layers = zip(own.layers, quadratics, strict=True)
        replaced = replace(own, layers=tuple(replace(layer, attention="power8", ffn=ffn) for layer, ffn in layers))
        taught = RecipeChanges(distillation=DistillationChanges(blockwise_tokens=sizes.blockwise_tokens))
        initial: dict[str, Mapping[str, Tensor]] = {}
        for said, precision in precisions.items():
            distilled = _of_parent(
                place, parent, replaced, replace(taught, precision=precision), sizes.parent_tokens[0]
            )
            corpus = random_corpus(distilled, Path(folder))
            since_s = time.perf_counter()
            initial[said] = initial_weights(parent, distilled, corpus, device=place.device)
            rows.add(f"library of {placement(replaced)} alone{said}", time.perf_counter() - since_s, "s")
        for tokens in sizes.parent_tokens:
            ways = []
            for said, precision in precisions.items():
                tuned = _of_parent(place, parent, own, replace(UNTAUGHT, precision=precision), tokens)
                distilled = _of_parent(place, parent, replaced, replace(taught, precision=precision), tokens)
                ways.append(_way(place, f"tuned{said}", tuned, parent.start(tuned, corpus), parent))
                name = f"distilled to {placement(replaced)}{said}"
                ways.append(_way(place, name, distilled, initial[said], parent))
            _compare(place, ways, f"{tokens} tokens a step")


def _of_parent(
    place: Place, parent: Parent, architecture: Architecture, changes: RecipeChanges, tokens: int
) -> Candidate:
    seq_len, distillation = place.sizes.parent_length, parent.distillation
    recipe = recipe_at(
        "parent", "random", entropy_regularised=False, distillation=distillation, seq_len=seq_len, tokens=ENDLESS
    )
    batch = tokens // seq_len
    recipe = changed(replace(recipe, scale=replace(recipe.scale, batch=batch, micro_batch=batch)), changes)
    return lowered(Candidate(architecture=architecture, recipe=recipe), place.device, changes)


def sharing(place: Place) -> None:
    """Measure the total speed of trainings that share a device, each in its own process."""
    scale, counts = place.sizes.shared
    for count, rate in shared_rates(_usual(scale, place.device), place.device, counts).items():
        place.rows.add(f"{count} at a time, scale {scale}", rate, "tokens/s in all")


def _usual(scale: ScaleName, device: Device) -> Candidate:
    """Return a candidate of a search from scratch at a scale, in the usual precision of a device."""
    member = resolve(LAYERS, base_architecture("gpt2-small"))
    return lowered(candidate_at(member, scale, data="random", tokens=ENDLESS), device)


def searched(place: Place) -> None:
    """Measure default trainings, on a core and on the GPU if that is the device, and then a search.

    Raises StoppedError if no time is left for the search, or it fails or has no front.
    """
    rows, scale, cores = place.rows, place.sizes.usual, len(os.sched_getaffinity(0))
    on_core = training_rate(_usual(scale, "cpu"), "cpu")
    rows.add(f"scale {scale}, on one core", on_core, "tokens/s")
    if place.device == "cuda":
        on_gpu = training_rate(_usual(scale, "cuda"), "cuda")
        rows.add(f"scale {scale}, one training on the GPU", on_gpu, "tokens/s")
        rows.add(f"scale {scale}, one training on the GPU", on_gpu / on_core / cores, f"of {cores} cores")
    with TemporaryDirectory(prefix="nas-search-") as folder:
        target = Path(folder) / "run"
        budget_s = max(1, round(rows.left_s - ENDING_S))
        command = (
            *(sys.executable, "-m", "nas.search", "--budget-latency", "5min", "--output-dir", str(target)),
            *("--num-proxy-evals", "0", "--finalist-seeds", "0"),
            *("--parent", "none", "--time-budget", f"{budget_s}s", *place.sizes.searched),
        )
        since_s = time.monotonic()
        code = _ended(command, budget_s + ENDING_S)
        rows.add("search to a front", time.monotonic() - since_s, "s")
        if code:
            raise StoppedError(f"{' '.join(command[1:])} ended with code {code}.")
        found = load_run(target)
        rows.add("members of the front", len(found.front), f"of {found.config.num_trials} candidates")
        if not found.front:
            raise StoppedError("the search ended without a front.")


def _ended(command: tuple[str, ...], limit_s: float) -> int:
    """Run a command and return its exit code; interrupt it when it takes too long, and kill it if it goes on."""
    with subprocess.Popen(command, start_new_session=True) as process:
        for sent, wait_s in ((signal.SIGINT, limit_s), (signal.SIGKILL, ENDING_S)):
            try:
                return process.wait(wait_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, sent)
        return process.wait()


# what measures a part, and its share of the time of all parts that run
PARTS: dict[str, tuple[Callable[[Place], None], float]] = {
    "step": (steps, 0.42),
    "smollm2": (from_parent, 0.22),
    "sharing": (sharing, 0.11),
    "search": (searched, 0.22),
}
