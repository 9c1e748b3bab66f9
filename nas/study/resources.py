"""How many trials run at a time, and on what: of this machine, or of the nodes of a cluster."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from costmodel.errors import UserError
from nas.run.config import StudyConfig
from nas.study.schedule import GENERATION_SIZE

LEAST_GENERATIONS = 4  # of a search that learns: the first two know no result


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine of a cluster. name: for people."""

    node_id: str
    name: str
    num_cpus: int
    num_gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The resources that trials run on: each on one GPU at most, and on a CPU on one thread.

    slots: trials that the nodes can take at a time. max_concurrent: that may run; None for as many as nodes, of which
        more may come, can take.
    num_gpus: of this machine. gpus_per_trial: share of one, 0 for none.
    ray_address: an existing cluster (whose nodes share the run folder), or None for this machine alone.
    """

    slots: int
    max_concurrent: int | None
    num_gpus: int = 0
    gpus_per_trial: float = 0.0
    ray_address: str | None = None

    @property
    def at_a_time(self) -> int:
        return self.max_concurrent or self.slots


def this_machine() -> Node:
    """This machine as a cluster of one."""
    cores = len(os.sched_getaffinity(0))
    return Node(node_id="", name="this machine", num_cpus=cores, num_gpus=torch.cuda.device_count())


def study_resources(config: StudyConfig, nodes: Sequence[Node]) -> Resources:
    """Resources for as many trials as there are cores, or as share the GPUs, unless fewer are asked for.

    Where there are GPUs each trial has one, unless `config` says otherwise.

    Raises UserError if no trial fits on a node, or this machine does not take as many as are asked for.
    """
    num_gpus = sum(node.num_gpus for node in nodes)
    share = config.gpus_per_trial if config.gpus_per_trial is not None else float(num_gpus > 0)
    if share > num_gpus:
        raise UserError(f"--gpus-per-trial {share:g} needs a CUDA device, but there is none; leave it out for the CPU.")
    on_one = int(1 / share + 1e-9) if share else 0  # trials on a GPU, none of them on two
    slots = sum(min(node.num_cpus, node.num_gpus * on_one) if share else node.num_cpus for node in nodes)
    where = "this machine" if config.ray_address is None else f"the cluster at {config.ray_address}"
    if not slots:
        raise UserError(f"a trial takes a core and {share:g} GPUs of a node, but no node of {where} has both.")
    if config.ray_address is None and (config.max_concurrent or 0) > slots:
        per = f"a core and {share:g} GPUs" if share else "a core"
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
        ray_address=config.ray_address,
    )


def resolved(config: StudyConfig, resources: Resources) -> StudyConfig:
    """The configuration of a new run, with what it takes from where it is begun and keeps wherever it goes on.

    Two generations are in training at once. `--max-concurrent` has no say, so that it changes no number.
    """
    half, learning = math.ceil(resources.slots / 2), config.num_trials // LEAST_GENERATIONS
    size = config.generation_size or max(GENERATION_SIZE, min(half, learning))
    return replace(config, generation_size=size, gpus_per_trial=resources.gpus_per_trial)


def resource_lines(config: StudyConfig, resources: Resources) -> list[str]:
    """Describes the resources and what of them is idle, a line each. config: resolved."""
    assert config.generation_size is not None
    of_gpus = f", {resources.gpus_per_trial:g} GPU each" if resources.gpus_per_trial else ", on the CPU"
    lines = [f"{resources.at_a_time} trials at a time{of_gpus}; generations of {config.generation_size}"]
    if 2 * config.generation_size < resources.at_a_time:
        idle = resources.at_a_time - 2 * config.generation_size
        lines.append(
            f"note: two generations of {config.generation_size} leave {idle} of {resources.at_a_time} places idle; "
            f"more --num-trials, or a larger --generation-size, which learns later, fills them"
        )
    return lines
