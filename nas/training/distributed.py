"""Data-parallel training by `torchrun`: every process takes a share of each batch, gradients are averaged.

All processes hold the same weights and take the same decisions; the one of rank 0 alone writes and speaks.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch import Tensor, distributed

from costmodel.errors import StoppedError, UserError

T = TypeVar("T")

PREPARATION = timedelta(days=1)  # how long the others wait for the first to prepare a corpus, or for a slow step


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """Processes that train one model; of one process nothing is exchanged."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes and speaks."""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """This process's rows of a batch, whose length the size divides."""
        return batch.chunk(self.size)[self.rank]

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors of equal shapes in all processes by their mean over processes, in one exchange per dtype."""
        if self.size == 1:
            return
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in alike])
            distributed.all_reduce(flat)
            parts = torch.split(flat.div_(self.size), [tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def broadcast_from_leader(self, make: Callable[[], T]) -> T:
        """Returns what the first process makes, while the others wait; an error of user or machine is raised in all."""
        if self.size == 1:
            return make()
        box: list[T | UserError | StoppedError | OSError | None] = [None]
        if self.leads:
            try:
                box = [make()]
            except (UserError, StoppedError, OSError) as error:
                box = [error]
        distributed.broadcast_object_list(box)
        if isinstance(box[0], UserError | StoppedError | OSError):
            raise box[0]
        return cast(T, box[0])


SOLO = Team()


@contextmanager
def joined(device: str) -> Iterator[tuple[Team, str]]:
    """The team that `torchrun` started this process in, and this process's own device; else it is alone on `device`."""
    if "WORLD_SIZE" not in os.environ:
        yield SOLO, device
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device != "cpu" else "gloo", timeout=PREPARATION)
    try:
        yield Team(rank=distributed.get_rank(), size=distributed.get_world_size()), device
        distributed.barrier()  # nobody leaves while another still exchanges
    finally:
        distributed.destroy_process_group()
