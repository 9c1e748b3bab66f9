"""Data-parallel training with `torchrun`: every process takes a share of each batch, and gradients are averaged.

All processes have the same weights and make the same decisions; only rank 0 writes files and prints.
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

PREPARATION = timedelta(days=1)  # longest wait for rank 0 to prepare a corpus, or for a slow step


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """The processes that train one model. A single process exchanges nothing."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """Return this process's rows of a batch, whose length must be a multiple of the size."""
        return batch.chunk(self.size)[self.rank]

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their mean over processes, with one exchange per dtype. Shapes must agree."""
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
        """Return the result of `make` in the first process, while others wait; raise its expected errors in all."""
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
    """Yield the team of this process and its device: as started by `torchrun`, or alone on `device`."""
    if "WORLD_SIZE" not in os.environ:
        yield SOLO, device
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device != "cpu" else "gloo", timeout=PREPARATION)
    try:
        yield Team(rank=distributed.get_rank(), size=distributed.get_world_size()), device
        distributed.barrier()  # no process leaves while another still exchanges
    finally:
        distributed.destroy_process_group()
