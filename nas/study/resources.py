"""How many trials run at a time, and on what: this machine or the nodes of a cluster."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from costmodel.errors import UserError
from nas.malloc import num_cores
from nas.run.config import StudyConfig
from nas.study.schedule import GENERATION_SIZE

LEAST_GENERATIONS = 4  # the first two generations of a search see no results


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine of a cluster. name: printed to the user."""

    node_id: str
    name: str
    num_cpus: int
    num_gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The resources of trials. A trial takes one GPU at most, and one thread on a CPU.

    Attributes:
        slots: trials that the nodes can run at a time.
        max_concurrent: trials that may run at a time; None for as many as the nodes can, to which more may be added.
        num_gpus: GPUs of this machine.
        gpus_per_trial: share of a GPU per trial; 0 for none.
        ray_address: an existing cluster, whose nodes share the run folder, or None for this machine.
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
    """Describe this machine, or the container that it is, as a node."""
    return Node(node_id="", name="this machine", num_cpus=num_cores(), num_gpus=torch.cuda.device_count())


def study_resources(config: StudyConfig, nodes: Sequence[Node]) -> Resources:
    """Return resources for as many trials as there are cores, or as share the GPUs, or for fewer if asked.

    If there are GPUs, each trial has one, unless `config` says otherwise. Raises UserError if no trial fits on a node,
    or if this machine cannot run as many as asked.
    """
    num_gpus = sum(node.num_gpus for node in nodes)
    share = config.gpus_per_trial if config.gpus_per_trial is not None else float(num_gpus > 0)
    if share > num_gpus:
        raise UserError(f"--gpus-per-trial {share:g} needs a CUDA device, but there is none; 0 trains on the CPU.")
    on_one = int(1 / share + 1e-9) if share else 0  # trials per GPU; none uses two
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
    """Fix the settings of a new run that depend on the machine where it begins; a resumed run keeps them.

    Two generations are in training at once. `--max-concurrent` is ignored, so that it changes no number.
    """
    half, learning = math.ceil(resources.slots / 2), config.num_trials // LEAST_GENERATIONS
    size = config.generation_size or max(GENERATION_SIZE, min(half, learning))
    return replace(config, generation_size=size, gpus_per_trial=resources.gpus_per_trial)


def resource_lines(config: StudyConfig, resources: Resources) -> list[str]:
    """Describe the resources, and which of them stay idle, one line each. config: result of `resolved`."""
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
