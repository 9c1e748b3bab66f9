"""Parts of `experiments run gpu` that measure training steps: of GPT-2, and from a parent.

Our steps are the trainer's, on random tokens, so that everything that a user's training does is in them.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

from costmodel.errors import StoppedError
from experiments.figures import median_ratio
from experiments.measured import GIB, Rows, Way, speeds
from experiments.plain_gpt2 import plain_step
from experiments.smollm2.pipeline import UNTAUGHT
from nas.conversion.parent import Parent, load_parent
from nas.model.bf16_products import has_matrix_units
from nas.recipe.candidate import Candidate, recipe_at
from nas.recipe.overrides import DistillationChanges, RecipeChanges, changed
from nas.recipe.recipe import Precision, ScaleName
from nas.study.throughput import random_corpus
from nas.training.device import Device, lowered
from nas.training.distillation.library import initial_weights
from nas.training.distillation.teacher import teacher_of
from nas.training.memory import CONTEXT_BYTES, training_memory
from nas.training.trainer import TrainingRun
from search_spaces.architecture import Architecture
from search_spaces.forms import FFNS, Ffn
from search_spaces.notation import placement
from search_spaces.resolve import resolve

WHOLE = ", float32"  # after the name of a training, where others are in bfloat16
PLAIN, COMPILED, OURS, REGULARISED = "plain", "plain compiled", "ours", "ours, entropy regularised"
LAYERS = "SM+LN+G"
ENDLESS = 10**12  # tokens, so that no training ends while it is measured


class Sizes(NamedTuple):
    """Sizes at a scale.

    base, lengths, tokens: of the trained GPT-2, whose steps have so many tokens at each sequence length.
    rounds, burst_s: of the measurement of a step, and seconds of a round.
    parent_tokens, parent_length: tokens of a step from a parent, of sequences of this length.
    blockwise_tokens: of the library with which a candidate begins.
    shared: scale of trainings that share a device, and their numbers. searched: flags of the search.
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
    """What every part is given."""

    device: Device
    sizes: Sizes
    parent: str | None
    rows: Rows


def steps(place: Place) -> None:
    """Measure training steps of GPT-2, plain and ours."""
    for seq_len in place.sizes.lengths:
        plain = (_plain(place, seq_len, name) for name in (COMPILED, PLAIN))
        _compare(place, [*plain, *_ours(place, seq_len)], f"T={seq_len}")
    if place.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        place.rows.add("CUDA context", (total - free - torch.cuda.memory_reserved()) / GIB, "GiB")
        place.rows.add("CUDA context, predicted", CONTEXT_BYTES / GIB, "GiB")


def _compare(place: Place, ways: Sequence[Way], subject: str) -> None:
    """Write rows of ways, with ratios to earlier ones: the plain ones, and ours."""
    sizes, add, rates = place.sizes, place.rows.add, dict[str, list[float]]()
    for way, speed in speeds(ways, place.device, rounds=sizes.rounds, burst_s=sizes.burst_s, rows=place.rows):
        name, rates[way.name] = f"{subject}, {way.name}", speed.rates
        add(name, statistics.median(speed.rates), "tokens/s")
        for other in (COMPILED, PLAIN, OURS, f"{way.name}{WHOLE}"):
            if other in rates and other != way.name:
                add(name, median_ratio(speed.rates, rates[other]), f"of {other}")
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


def _ours(place: Place, seq_len: int) -> Iterator[Way]:
    for name in (OURS, REGULARISED):
        yield _way(place, name, _gpt2(place, seq_len, entropy_regularised=name == REGULARISED))


def _gpt2(place: Place, seq_len: int, *, entropy_regularised: bool) -> Candidate:
    recipe = recipe_at("paper", "random", entropy_regularised=entropy_regularised)
    batch = place.sizes.tokens // seq_len
    scale = replace(recipe.scale, seq_len=seq_len, batch=batch, micro_batch=batch, tokens=ENDLESS)
    architecture = resolve(LAYERS, place.sizes.base).architecture
    made = Candidate(architecture=architecture, recipe=replace(recipe, scale=scale))
    return made if place.device == "cpu" else lowered(made, place.device)  # as the proxy's, which it measures there


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
    """Give a function that takes a step of the trainer on random tokens. Raises StoppedError if the training diverged.

    initial: weights to start from. parent: the teacher.
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
    """Measure a parent's tuning, distillation without softmax and activations, and initial weights.

    On a CPU with matrix units all of it is measured in float32 too.
    """
    assert place.parent is not None
    is_cpu_with_units = place.device == "cpu" and has_matrix_units()
    precisions: dict[str, Precision | None] = {WHOLE: "float32", "": None} if is_cpu_with_units else {"": None}
    rows, sizes, parent = place.rows, place.sizes, load_parent(place.parent)
    with TemporaryDirectory(prefix="nas-library-") as folder:
        own = parent.model.architecture
        # eighth powers in softmax's place, and quadratics in that of the activations
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
