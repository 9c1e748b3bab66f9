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

LEAST_GENERATIONS = 4  # fewest generations of a search by default, since the first two see no results
GAIN = 1.1  # more trainings share a GPU, or more threads a trial, only if that is faster by this factor
COUNTS = (1, 2, 4, 8)  # measured numbers of trainings on one GPU, and of threads of one training
FREE_SHARE = 0.9  # share of a GPU's free memory that the estimated memory of trainings may take
MEASURING_S = 30.0  # guessed duration of a measurement
WORTH = 20  # a measurement may take 1 / WORTH of the time of the search


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine that runs trials. node_id: Ray's id; empty for this machine. name: for messages. num_cpus: cores."""

    node_id: str
    name: str
    num_cpus: int
    num_gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """How many trials run at a time, and the GPU share and threads of each. A trial takes one GPU at most.

    Attributes:
        slots: number of trials that the nodes can run at a time.
        max_concurrent: most trials at a time; None for as many as all nodes can run, including nodes that join later.
        num_gpus: GPUs of this machine that Ray may use; 0 on a cluster, or if trials train on the CPU.
        gpus_per_trial: share of a GPU per trial; 0 to train on the CPU.
        threads_per_trial: threads of a trial, for each of which a core is reserved.
        ray_address: address of an existing cluster, whose nodes share the run folder; None for this machine.
    """

    slots: int
    max_concurrent: int | None
    num_gpus: int = 0
    gpus_per_trial: float = 0.0
    threads_per_trial: int = 1
    ray_address: str | None = None

    @property
    def at_a_time(self) -> int:
        """Number of trials that run at a time: `max_concurrent`, or `slots` if that is None."""
        return self.max_concurrent or self.slots


def this_machine() -> Node:
    """Return this machine as a node, with the cores that this process may use and the GPUs that torch sees."""
    return Node(node_id="", name="this machine", num_cpus=num_cores(), num_gpus=torch.cuda.device_count())


def study_resources(config: StudyConfig, nodes: Sequence[Node]) -> Resources:
    """Return resources for `max_concurrent` trials at a time or, by default, as many as cores and GPUs allow.

    By default, a trial has one thread and, if there are GPUs, one GPU. Raises UserError if GPUs are requested but
    missing, no trial fits on a node, or `max_concurrent` is more than this machine can run.
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
        most = max((node.num_cpus for node in nodes), default=0)
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
    """Return the configuration with the `gpus_per_trial` of `resources`, and a `generation_size` if it has none.

    By default, a generation has half as many trials as there are slots, since two generations are in training at once,
    but at most a quarter of all trials, and at least GENERATION_SIZE. `--max-concurrent` does not enter, so that it
    changes no result.
    """
    half, learning = math.ceil(resources.slots / 2), config.num_trials // LEAST_GENERATIONS
    size = config.generation_size or max(GENERATION_SIZE, min(half, learning))
    return replace(config, generation_size=size, gpus_per_trial=resources.gpus_per_trial)


def resource_lines(config: StudyConfig, resources: Resources) -> list[str]:
    """Return a line on trials at a time and their devices and, if places stay idle, a note. config: from `resolved`."""
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
    """Return the share of a GPU per trial with the highest rate, or 0 if all cores together reach the rate of all GPUs.

    More trainings share a GPU only if that is faster by the factor GAIN.

    gpu: total tokens per second of all trainings on one GPU, by their number. num_gpus: GPUs of the machine. on_cores:
        tokens per second of one training times the number of cores; None if trials may not run on the CPU.
    """
    best = _worthwhile(gpu)
    return 0.0 if on_cores is not None and on_cores >= num_gpus * gpu[best] else 1 / best


def _worthwhile(rates: Mapping[int, float]) -> int:
    """Return the number that is reached from the smallest by moving to a larger one whenever that is faster by GAIN."""
    best = min(rates)
    for number in sorted(rates):
        best = number if rates[number] > GAIN * rates[best] else best
    return best


def choose_threads(config: StudyConfig, resources: Resources, node: Node, candidate: Candidate) -> int:
    """Return the number of threads per trial of a new search; log the reason if rates were compared.

    The number is 1 at a small scale, on GPUs, on a cluster, and if the time budget is too short for a measurement that
    is needed. Otherwise the cores that two generations leave idle are divided among their trials, as far as more
    threads were measured to be faster.

    config: result of `resolved`. resources: for trials of one thread. node: this machine. candidate: the largest of the
        search.
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

    At a small scale, where a GPU waits for its host between operations and many cores train faster together, the CPU is
    used unless the GPU was measured to be faster. The GPU is measured only if the search takes long enough.

    node: this machine. candidate: the largest of the search, with the recipe for a CPU.
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
