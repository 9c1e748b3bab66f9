"""Measures training and search on one GPU in four minutes, or on a CPU, and writes the figures to gpu.csv.

A plain GPT-2 in PyTorch is measured beside our trainings in the same run. Ratios are medians over rounds.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from costmodel.errors import StoppedError, UserError
from experiments.gpu_trainings import ENDLESS, LAYERS, Place, Sizes, from_parent, steps
from experiments.measured import Rows
from nas.api import load_run
from nas.conversion.parent import BUILTIN
from nas.malloc import keep_freed_memory
from nas.recipe.candidate import Candidate, candidate_at
from nas.recipe.recipe import ScaleName
from nas.run.config import THREADS_PER_TRIAL
from nas.storage import RUNS
from nas.study.throughput import shared_rates, threads, training_rate
from nas.training.device import Device, lowered, usual_device
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.resolve import resolve

CSV_FILE = "gpu.csv"
TOTAL_S: dict[Device, float] = {"cpu": 600, "cuda": 240}  # of all parts that run, by their shares
ENDING_S = 10  # in which a search whose time is over writes its results and ends Ray
SMALL_SEARCH = ("--scale", "smoke", "--tokens", "2048", "--num-trials", "2")
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
    """Measure part after part. Raises StoppedError at the end if one failed."""
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
    with threads(THREADS_PER_TRIAL) if device == "cpu" else nullcontext():
        for part in chosen:
            measure, share = PARTS[part]
            ends_s += TOTAL_S[device] * share / all_shares
            with rows.part(part, ends_s):
                measure(place)
    console.print(f"figures: {rows.path}", soft_wrap=True, highlight=False)
    if rows.failed:
        raise StoppedError(f"experiment {name}: {', '.join(rows.failed)} failed; the tracebacks above say why.")


def sharing(place: Place) -> None:
    """Measure trainings that share a device, each in a process of its own."""
    scale, counts = place.sizes.shared
    for count, rate in shared_rates(_usual(scale, place.device), place.device, counts).items():
        place.rows.add(f"{count} at a time, scale {scale}", rate, "tokens/s in all")


def _usual(scale: ScaleName, device: Device) -> Candidate:
    """Return a candidate of a search from scratch at a scale, in the usual precision of a device."""
    member = resolve(LAYERS, base_architecture("gpt2-small"))
    return lowered(candidate_at(member, scale, data="random", tokens=ENDLESS), device)


def searched(place: Place) -> None:
    """Measure the default command's trainings on every device, then run a search to a front."""
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
