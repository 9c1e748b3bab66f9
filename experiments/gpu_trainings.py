"""Parts of `experiments run gpu` that measure training steps: of GPT-2, their profile, and from a parent.

Our steps are the trainer's, on random tokens, so that everything that a user's training does is in them.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from costmodel.errors import StoppedError
from experiments.bars import median_ratio
from experiments.measured import GIB, WARM_UP, Rows, Way, speeds
from experiments.plain_gpt2 import plain_step
from experiments.smollm2.pipeline import UNTAUGHT
from nas.conversion.parent import Parent, load_parent
from nas.corpus.corpus import Corpus
from nas.recipe.candidate import Candidate
from nas.recipe.overrides import DistillationChanges, RecipeChanges, changed
from nas.recipe.papers import recipe_at, recipe_for
from nas.recipe.recipe import ScaleName
from nas.study.throughput import random_corpus
from nas.training.device import Device, lowered
from nas.training.distillation.library import Library, initial_weights, settings_of
from nas.training.distillation.sub_layers import sub_layers_of, trained_sub_layers
from nas.training.distillation.teacher import teacher_of
from nas.training.memory import CONTEXT_BYTES, training_memory
from nas.training.trainer import TrainingRun
from search_spaces.architecture import Architecture
from search_spaces.forms import FFNS, Ffn
from search_spaces.notation import placement
from search_spaces.resolve import resolve

PROFILE_FILE = "profile.txt"
PLAIN, COMPILED, OURS, REGULARISED = "plain", "plain compiled", "ours", "ours, entropy regularised"
LAYERS = "SM+LN+G"
NUM_STEPS_PROFILED, NUM_KERNELS = 3, 15
ENDLESS = 10**12  # tokens, so that no training ends while it is measured


class Sizes(NamedTuple):
    """Sizes at a scale.

    base, lengths, tokens: of the trained GPT-2, whose steps have so many tokens at each sequence length.
    rounds, burst_s: of the measurement of a step, and seconds of a round.
    parent_tokens, parent_length: tokens of a step from a parent, of sequences of this length.
    blockwise_tokens, library_steps: of the library with which a candidate begins, and of the ones that are timed.
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
    library_steps: tuple[int, int]
    shared: tuple[ScaleName, tuple[int, ...]]
    usual: ScaleName
    searched: tuple[str, ...]


class Place(NamedTuple):
    """What every part is given."""

    device: Device
    sizes: Sizes
    parent: str | None
    folder: Path
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


def vocabulary(place: Place) -> None:
    """Measure the plain steps with a token table of as many rows as there are tokens, which is odd, and ours."""
    seq_len = place.sizes.lengths[0]
    plain = (_plain(place, seq_len, name, padded=False) for name in (COMPILED, PLAIN))
    _compare(place, [*plain, *_ours(place, seq_len)], f"T={seq_len}, vocabulary of {place.sizes.base.vocab_size}")


def _compare(place: Place, ways: Sequence[Way], subject: str) -> None:
    """Write rows of ways, with ratios to earlier ones: the plain ones, and ours."""
    sizes, add, rates = place.sizes, place.rows.add, dict[str, list[float]]()
    for way, speed in speeds(ways, place.device, rounds=sizes.rounds, burst_s=sizes.burst_s, rows=place.rows):
        name, rates[way.name] = f"{subject}, {way.name}", speed.rates
        add(name, statistics.median(speed.rates), "tokens/s")
        for other in (COMPILED, PLAIN, OURS):
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


def _plain(place: Place, seq_len: int, name: str, *, padded: bool = True) -> Way:
    batch, padded = place.sizes.tokens // seq_len, padded and place.device == "cuda"
    step = partial(plain_step, place.sizes.base, batch=batch, seq_len=seq_len, device=place.device, padded=padded)
    return Way(name, place.sizes.tokens, lambda: nullcontext(step(compiled=name == COMPILED)))


def _ours(place: Place, seq_len: int) -> Iterator[Way]:
    for name in (OURS, REGULARISED):
        yield _way(place, name, _gpt2(place, seq_len, entropy_regularised=name == REGULARISED))


def _gpt2(place: Place, seq_len: int, *, entropy_regularised: bool) -> Candidate:
    recipe = recipe_for("paper", "random", entropy_regularised=entropy_regularised)
    batch = place.sizes.tokens // seq_len
    scale = replace(recipe.scale, seq_len=seq_len, batch=batch, micro_batch=batch, tokens=ENDLESS)
    architecture = resolve(LAYERS, place.sizes.base).architecture
    return lowered(Candidate(architecture=architecture, recipe=replace(recipe, scale=scale)), place.device)


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


def profiled(place: Place) -> None:
    """Write where the time of our regularised step goes, by kernel on a GPU and by operator on a CPU."""
    is_cuda = place.device == "cuda"
    candidate = _gpt2(place, place.sizes.lengths[0], entropy_regularised=True)
    with training(candidate, place.device) as step:
        for _ in range(WARM_UP[place.device]):
            step()
        with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
            if is_cuda:
                torch.cuda.synchronize()
            since_s = time.perf_counter()
            for _ in range(NUM_STEPS_PROFILED):
                step()
            if is_cuda:
                torch.cuda.synchronize()
            elapsed_s = time.perf_counter() - since_s
    kind = DeviceType.CUDA if is_cuda else DeviceType.CPU
    time_us = attrgetter(f"self_{'device' if is_cuda else 'cpu'}_time_total")
    events = [event for event in profiler.key_averages() if event.device_type == kind and not event.is_user_annotation]
    kernels = sorted(events, key=time_us, reverse=True)
    total_us = sum(map(time_us, kernels))
    lines = [f"{NUM_STEPS_PROFILED} steps of {candidate.name} in {elapsed_s:.4f} s"]
    if is_cuda:
        ran = (event for event in profiler.events() or () if not event.is_user_annotation)
        spans = (event.time_range for event in ran if event.device_type == kind)
        busy = _union((span.start, span.end) for span in spans) / 1e6 / elapsed_s
        place.rows.add("time that the GPU is busy", 100 * busy, "%")
        lines.append(f"the GPU is busy {100 * busy:.1f} % of the time")
    for kernel in kernels[:NUM_KERNELS]:
        share = 100 * time_us(kernel) / total_us
        lines.append(f"{share:5.1f} %  {time_us(kernel) / 1e3:9.3f} ms  {kernel.count:6d} x  {kernel.key}")
        place.rows.add(kernel.key[:80], share, "% of time")
    (place.folder / PROFILE_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _union(spans: Iterator[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def from_parent(place: Place) -> None:
    """Measure a parent's tuning, distillation without softmax and activations, and block library."""
    assert place.parent is not None
    rows, sizes, parent = place.rows, place.sizes, load_parent(place.parent)
    with TemporaryDirectory(prefix="nas-library-") as folder:
        own, replaced = parent.model.architecture, _replaced(parent)
        taught = RecipeChanges(distillation=DistillationChanges(blockwise_tokens=sizes.blockwise_tokens))
        distilled = _of_parent(place, parent, replaced, taught, sizes.parent_tokens[0])
        corpus = random_corpus(distilled, Path(folder))
        since_s = time.perf_counter()
        initial = initial_weights(parent, distilled, corpus, device=place.device)
        rows.add(f"library of {placement(replaced)} alone", time.perf_counter() - since_s, "s")
        _library(place, parent, distilled, corpus)  # after another one, since the first loads kernels
        for tokens in sizes.parent_tokens:
            tuned = _of_parent(place, parent, own, UNTAUGHT, tokens)
            distilled = _of_parent(place, parent, replaced, taught, tokens)
            own_way = _way(place, "tuned", tuned, parent.start(tuned, corpus), parent)
            replaced_way = _way(place, f"distilled to {placement(replaced)}", distilled, initial, parent)
            _compare(place, [own_way, replaced_way], f"{tokens} tokens a step")


def _replaced(parent: Parent) -> Architecture:
    """Return the parent with eighth powers in softmax's place and quadratics in that of the activations."""
    own = parent.model.architecture
    layers = (replace(layer, attention="power8", ffn=_quadratic(layer.ffn)) for layer in own.layers)
    return replace(own, layers=tuple(layers))


def _quadratic(ffn: Ffn) -> Ffn:
    return "quadglu" if FFNS[ffn].is_gated else "square"


def _of_parent(
    place: Place, parent: Parent, architecture: Architecture, changes: RecipeChanges, tokens: int
) -> Candidate:
    seq_len, distillation = place.sizes.parent_length, parent.distillation
    recipe = recipe_at(
        "parent", "random", entropy_regularised=False, distillation=distillation, seq_len=seq_len, tokens=ENDLESS
    )
    batch = tokens // seq_len
    recipe = changed(replace(recipe, scale=replace(recipe.scale, batch=batch, micro_batch=batch)), changes)
    return lowered(Candidate(architecture=architecture, recipe=recipe), place.device)


def _library(place: Place, parent: Parent, candidate: Candidate, corpus: Corpus) -> None:
    """Measure a step of the block library: two alternatives for each attention and FFN, which the parent lacks."""
    own, recipe = parent.model.architecture, candidate.recipe
    kinds = dict.fromkeys(own.layers)
    layers = [replace(layer, attention="power8", ffn="fused") for layer in kinds]
    layers += [replace(layer, attention="2quad", ffn=_quadratic(layer.ffn)) for layer in kinds]
    places = [(depth, layer) for depth in range(own.num_layers) for layer in layers]
    wanted = {sub_layer for depth, layer in places for sub_layer in sub_layers_of(own, depth, layer)}
    settings, seq_len, seconds = settings_of(recipe), recipe.scale.seq_len, list[float]()
    batch = settings.batch_of(seq_len)
    for num_steps in place.sizes.library_steps:
        place.rows.left_s  # noqa: B018  # raises
        few = replace(settings, batch=batch, tokens=num_steps * batch * seq_len, least_steps=num_steps)
        library = Library(parent, corpus, few, seq_len=seq_len, device=place.device)
        since_s = time.perf_counter()
        for _ in library.trained(sorted(wanted - trained_sub_layers(own)), lambda *_: None):
            pass
        seconds.append(time.perf_counter() - since_s)
    (least, most), searched = place.sizes.library_steps, settings.num_steps(seq_len)
    step_s = (seconds[1] - seconds[0]) / (most - least)
    place.rows.add(f"a step of the library of {len(wanted)} sub-layers", step_s, "s")
    place.rows.add(f"the library in {searched} steps, predicted", seconds[1] + (searched - most) * step_s, "s")
