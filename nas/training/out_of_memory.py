"""What torch raises where memory runs out, as one error that says what to lower."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from costmodel.errors import StoppedError
from nas.recipe.candidate import Candidate


class TooLargeError(StoppedError):
    """The memory does not hold a micro-batch; the text says which, and what to lower."""


@contextmanager
def raise_out_of_memory(candidate: Candidate, device: str) -> Iterator[None]:
    """Raises TooLargeError for whatever torch raises where memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        scale = candidate.recipe.scale
        raise TooLargeError(
            f"out of memory on {device} with {scale.micro_batch} sequences of {scale.seq_len} tokens in a forward pass "
            f"at width {candidate.trained.d_model}; lower `micro_batch`, `seq_len` or the width."
        ) from error
