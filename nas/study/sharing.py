"""Where the trials of a search train: on the CPU, or how many on a GPU. Decided once, when a run begins."""

import logging
import math
from collections.abc import Mapping

import torch

from costmodel.errors import StoppedError
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import SMALL_SCALES
from nas.run.config import StudyConfig
from nas.study.resources import Node
from nas.study.throughput import keep_rates, kept_rates, shared_rates, training_rate
from nas.training.device import lowered
from nas.training.memory import available_bytes, training_memory

_log = logging.getLogger(__name__)

GAIN = 1.1  # more trainings share a GPU if they are faster together by this factor
COUNTS = (1, 2, 4, 8)  # trainings on one GPU that are measured
FREE_SHARE = 0.9  # of a GPU's memory that trainings may take, by their estimate
MEASURING_S = 30.0  # a guess of what a measurement takes, not measured on a GPU yet
WORTH = 20  # a measurement may take 1 / WORTH of the time of the search


def best_share(gpu: Mapping[int, float], num_gpus: int, on_cores: float | None) -> float:
    """Return the share of a GPU per trial with the highest rate, or 0 if the cores are as fast as the GPUs.

    gpu: tokens a second of all trainings on one GPU, by their number. on_cores: tokens a second of one training on each
        core of the machine, as if they did not slow each other; None if trials may not run on the CPU.
    """
    best = min(gpu)
    for count in sorted(gpu):
        best = count if gpu[count] > GAIN * gpu[best] else best
    return 0.0 if on_cores is not None and on_cores >= num_gpus * gpu[best] else 1 / best


def choose_share(config: StudyConfig, node: Node, candidate: Candidate) -> float:
    """Choose the share of a GPU per trial of a new search on this machine, which has GPUs, and log why in one line.

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
