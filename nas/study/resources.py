"""How many trials run at a time, and on what: cores, or shares of GPUs, of this machine or the nodes of a cluster."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from costmodel.errors import StoppedError, UserError
from nas.malloc import num_cores
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import SMALL_SCALES
from nas.run.config import StudyConfig
from nas.study.schedule import GENERATION_SIZE
from nas.study.throughput import keep_rates, kept_rates, shared_rates, training_rate
from nas.training.device import lowered
from nas.training.memory import available_bytes, training_memory

_log = logging.getLogger(__name__)

LEAST_GENERATIONS = 4  # the first two generations of a search see no results
GAIN = 1.1  # more trainings share a GPU, and more threads a trial, if that is faster by this factor
COUNTS = (1, 2, 4, 8)  # trainings on one GPU, or threads of one training, that are measured
FREE_SHARE = 0.9  # of a GPU's memory that trainings may take, by their estimate
MEASURING_S = 30.0  # a guess of what a measurement takes
WORTH = 20  # a measurement may take 1 / WORTH of the time of the search


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine that runs trials. node_id: Ray's, empty for this machine. name: printed to the user."""

    node_id: str
    name: str
    num_cpus: int
    num_gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The resources of trials. A trial takes one GPU at most.

    Attributes:
        slots: trials that the nodes can run at a time.
        max_concurrent: trials that may run at a time; None for as many as the nodes can, also new ones that join.
        num_gpus: GPUs of this machine that Ray gets; 0 on a cluster, or if trials train on the CPU.
        gpus_per_trial: share of a GPU per trial; 0 for none.
        threads_per_trial: threads, and cores, of a trial.
        ray_address: an existing cluster, whose nodes share the run folder, or None for this machine.
    """

    slots: int
    max_concurrent: int | None
    num_gpus: int = 0
    gpus_per_trial: float = 0.0
    threads_per_trial: int = 1
    ray_address: str | None = None

    @property
    def at_a_time(self) -> int:
        """Number of trials that run at a time."""
        return self.max_concurrent or self.slots


def this_machine() -> Node:
    """Return this machine as a node, with the cores that this process may use and the GPUs that torch sees."""
    return Node(node_id="", name="this machine", num_cpus=num_cores(), num_gpus=torch.cuda.device_count())


def study_resources(config: StudyConfig, nodes: Sequence[Node]) -> Resources:
    """Return resources for as many trials at a time as the cores and GPUs of the nodes allow, or fewer if asked.

    By default, a trial has one thread and, if there are GPUs, one GPU. Raises UserError if GPUs are asked for but
    missing, no trial fits on a node, or this machine cannot run as many trials at a time as asked.
    """
    num_gpus = sum(node.num_gpus for node in nodes)
    share = config.gpus_per_trial if config.gpus_per_trial is not None else float(num_gpus > 0)
    if share > num_gpus:
        raise UserError(f"--gpus-per-trial {share:g} needs a CUDA device, but there is none; 0 trains on the CPU.")
    on_one = int(1 / share + 1e-9) if share else 0  # trials per GPU; none uses two
    threads = config.threads_per_trial or 1
    on_cores = [node.num_cpus // threads for node in nodes]
    slots = sum(
        min(places, node.num_gpus * on_one) if share else places for node, places in zip(nodes, on_cores, strict=True)
    )
    where = "this machine" if config.ray_address is None else f"the cluster at {config.ray_address}"
    cores = "a core" if threads == 1 else f"{threads} cores"
    if not slots and not any(on_cores):
        most = max(node.num_cpus for node in nodes)
        raise UserError(
            f"a trial takes {cores} of a node, but no node of {where} has more than {most}; --threads-per-trial "
            f"{max(1, most)} takes fewer."
        )
    if not slots:
        raise UserError(f"a trial takes {cores} and {share:g} GPUs of a node, but no node of {where} has both.")
    if config.ray_address is None and (config.max_concurrent or 0) > slots:
        per = f"{cores} and {share:g} GPUs" if share else cores
        raise UserError(
            f"--max-concurrent must be at most {slots}, as a trial takes {per} of {where}, but got "
            f"{config.max_concurrent}."
        )
    limit = slots if config.ray_address is None else None
    return Resources(
        slots=slots,
        max_concurrent=config.max_concurrent or limit,
        num_gpus=num_gpus if config.ray_address is None and share else 0,
        gpus_per_trial=share,
        threads_per_trial=threads,
        ray_address=config.ray_address,
    )


def resolved(config: StudyConfig, resources: Resources) -> StudyConfig:
    """Set `generation_size` and `gpus_per_trial` of a new run by the machine where it begins; a resumed run keeps them.

    By default, a generation has half as many trials as there are slots, since two are in training at once, but at most
    a quarter of all trials, and at least GENERATION_SIZE. `--max-concurrent` is ignored, so that it changes no result.
    """
    half, learning = math.ceil(resources.slots / 2), config.num_trials // LEAST_GENERATIONS
    size = config.generation_size or max(GENERATION_SIZE, min(half, learning))
    return replace(config, generation_size=size, gpus_per_trial=resources.gpus_per_trial)


def resource_lines(config: StudyConfig, resources: Resources) -> list[str]:
    """Describe the resources, and which of them stay idle, one line each. config: result of `resolved`."""
    assert config.generation_size is not None
    of_gpus = f", {resources.gpus_per_trial:g} GPU each" if resources.gpus_per_trial else ", on the CPU"
    of_gpus += f", {resources.threads_per_trial} threads each" if resources.threads_per_trial > 1 else ""
    lines = [f"{resources.at_a_time} trials at a time{of_gpus}; generations of {config.generation_size}"]
    if 2 * config.generation_size < resources.at_a_time:
        idle = resources.at_a_time - 2 * config.generation_size
        lines.append(
            f"note: two generations of {config.generation_size} leave {idle} of {resources.at_a_time} places idle; "
            f"more --num-trials, or a larger --generation-size, which learns later, fills them"
        )
    return lines


def best_share(gpu: Mapping[int, float], num_gpus: int, on_cores: float | None) -> float:
    """Return the share of a GPU per trial with the highest rate, or 0 if the cores together are as fast as the GPUs.

    More trainings share a GPU only if that is faster by GAIN.

    gpu: total tokens a second of the trainings on one GPU, by their number. on_cores: total tokens a second of one
        training per core, as if they did not slow each other; None if trials may not run on the CPU.
    """
    best = _worthwhile(gpu)
    return 0.0 if on_cores is not None and on_cores >= num_gpus * gpu[best] else 1 / best


def _worthwhile(rates: Mapping[int, float]) -> int:
    """Return the largest number whose rate exceeds that of the best smaller one by GAIN."""
    best = min(rates)
    for number in sorted(rates):
        best = number if rates[number] > GAIN * rates[best] else best
    return best


def choose_threads(config: StudyConfig, resources: Resources, node: Node, candidate: Candidate) -> int:
    """Return the number of threads per trial of a new search; log the reason if there were several to choose from.

    It is 1 at a small scale, on GPUs, on a cluster, and if the time budget is too short to measure. Otherwise the cores
    that two generations leave idle are divided among their trials, as far as a measurement finds that faster.

    config: result of `resolved`. resources: for trials of one thread. node: this machine. candidate: the largest one.
    """
    assert config.generation_size is not None
    most = node.num_cpus // min(resources.slots, 2 * config.generation_size, config.num_trials)
    is_small = candidate.recipe.scale.name in SMALL_SCALES
    if most == 1 or is_small or resources.gpus_per_trial or resources.ray_address is not None:
        return 1
    device = f"CPU of {node.num_cpus} cores, {torch.backends.cpu.get_cpu_capability()}"
    rates, counts = kept_rates(candidate, device) or {}, sorted({*(n for n in COUNTS if n < most), most})
    missing = [count for count in counts if count not in rates]
    if missing and (config.time_budget_s or math.inf) < WORTH * MEASURING_S:
        return 1
    if missing:
        _log.info(
            f"measuring how fast a candidate trains on {', '.join(map(str, missing))} threads, once for this shape"
        )
        rates |= {count: training_rate(candidate, "cpu", num_threads=count) for count in missing}
        keep_rates(candidate, device, rates)
    chosen = _worthwhile({count: rates[count] for count in counts})
    why = ", ".join(f"{count} train {rates[count]:,.0f} tokens/s" for count in counts)
    _log.info(f"threads of a trial: {chosen} ({why}); --threads-per-trial overrides this")
    return chosen


def choose_share(config: StudyConfig, node: Node, candidate: Candidate) -> float:
    """Return the share of a GPU per trial of a new search on this machine, which has GPUs; 0 for the CPU. Logs why.

    At a small scale a GPU waits for its host between operations, and many cores train faster together. So the CPU is
    used, unless the GPU is known to be faster, or the search is so long that measuring both is worth its time.
    candidate: the largest one, with the recipe of a CPU.
    """
    is_small, measuring = candidate.recipe.scale.name in SMALL_SCALES, config.time_budget_s or math.inf
    on_gpu, on_cores = lowered(candidate, "cuda", config.recipe), None
    if candidate.recipe.scale.name == "smoke":
        measuring = 0.0
    elif is_small:
        on_cores = node.num_cpus * training_rate(candidate, "cpu")
        scale = candidate.recipe.scale
        trainings = config.num_trials + config.most_replicates + scale.rungs[0] * config.most_proxy_evals
        measuring = min(measuring, trainings * scale.tokens / on_cores)
    by_memory = int(FREE_SHARE * (available_bytes("cuda") or 0) / training_memory(on_gpu, "cuda").total)
    card, most = torch.cuda.get_device_name(), max(1, min(COUNTS[-1], node.num_cpus // node.num_gpus, by_memory))
    rates, source = kept_rates(on_gpu, card), "measured by an earlier search"
    if rates is None and (most > 1 or is_small) and measuring >= WORTH * MEASURING_S:
        _log.info(f"measuring how fast {card} trains candidates, for about {MEASURING_S:.0f} s, once for this shape")
        try:
            rates, source = shared_rates(on_gpu, "cuda", [n for n in COUNTS if n <= most]), "just measured"
            keep_rates(on_gpu, card, rates)
        except StoppedError as error:
            _log.info(f"no measurement: {error}")
    rates = {count: rate for count, rate in (rates or {}).items() if count <= most}
    if not rates:
        share = 0.0 if is_small else 1.0
        why = f"{card} was not measured at this shape"
    else:
        share = best_share(rates, node.num_gpus, on_cores)
        why = ", ".join(f"{count} at a time train {rate:,.0f} tokens/s" for count, rate in rates.items())
        why = f"on {card}, {why} ({source})" + ("" if on_cores is None else f", on all cores about {on_cores:,.0f}")
    where = f"{round(1 / share)} trials train on each GPU" if share else "trials train on the CPU"
    _log.info(f"{where}: {why}; --gpus-per-trial {'0' if share else '1'} overrides this")
    return share
