"""Estimate the memory of a training before it starts, with tensors without data, and report when memory runs out."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from costmodel.config.units import format_bytes
from costmodel.errors import StoppedError, UserError
from nas.attention.causal import causal_attention, has_native
from nas.malloc import free_bytes
from nas.model.cross_entropy import CHUNK_SIZE
from nas.model.decoder import Decoder
from nas.model.mpc_friendly import FORMS
from nas.recipe.candidate import Candidate
from nas.training.device import counted_layer_function
from nas.training.distillation.teacher import Lesson, Predictions
from nas.training.objective import Objective
from nas.training.optimizer import optimizers

BF16_BYTES, FP32_BYTES = 2, 4
MOMENTS = {"AdamW": 2, "Muon": 1}  # numbers that an optimizer stores per parameter
CONTEXT_BYTES = 600 * 10**6  # of CUDA and its libraries, per process: a usual figure, not measured here
# Bytes of a logit in compiled losses: itself in single precision, and its gradient in the precision of products.
LOGIT_BYTES = {"float32": 8, "tf32": 8, "bfloat16": 6}
PARENT_LOGIT_BYTES = 4  # of a logit of the teacher


class TooLargeError(StoppedError):
    """The memory is too small for a micro-batch; the message says on which device, and what to lower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The largest tensors of a training, in bytes, without overhead of the allocator, products or saving a checkpoint.

    parent: parameters of the teacher, counted as many as the model's, and on a CPU in bfloat16 their rounded copies; 0
        without a teacher. moments: states of the optimizers. activations: tensors saved for the gradients of
        a micro-batch, including the gradient of the projection to the vocabulary and copies of weights in bfloat16.
        logits: the largest chunk of logits on a GPU, with what the loss stores for it; 0 on a CPU, where chunks are
        small. context: memory of the CUDA context; 0 on a CPU.
    """

    parameters: int
    parent: int
    gradients: int
    moments: int
    activations: int
    logits: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts, in bytes."""
        return sum(astuple(self))

    @property
    def line(self) -> str:
        """The total and its parts as text, without parts of 0 bytes."""
        parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in asdict(self).items() if n)
        return f"memory: {format_bytes(self.total)} ({parts})"


def training_memory(candidate: Candidate, device: str = "cpu") -> Memory:
    """Estimate the memory of one training without attention entropies; on CUDA, less what compiled layers save."""
    scale, is_cuda = candidate.recipe.scale, torch.device(device).type == "cuda"
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype", UserWarning)  # of torch, on norms in bfloat16
        objective = Objective(candidate, torch.Generator())
        objective.penalty = None
        if is_cuda:
            objective.model.layer_function = counted_layer_function(candidate.recipe)
        else:
            _count_kernel(objective.model)
        parameter_storages = {value.untyped_storage()._cdata for value in objective.parameters()}
        tokens = torch.zeros(min(scale.micro_batch, scale.batch), scale.seq_len, dtype=torch.int64)
        lesson = None
        if (distillation := candidate.recipe.distillation) is not None:
            shape = (*tokens.shape, min(distillation.teacher_top_k, candidate.trained.vocab_size - 1))
            predictions = Predictions(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape))
            lesson = Lesson(predictions.distill, None)
        kept: dict[int, Tensor] = {}

        def keep(value: Tensor) -> Tensor:
            kept[value.untyped_storage()._cdata] = value
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            result = objective(tokens, tokens, lesson)
        activations = _size(value for storage, value in kept.items() if storage not in parameter_storages)
        del result
        parameters = _size(objective.parameters())
        moments = sum(
            MOMENTS[type(optimizer).__name__] * _size(group["params"])
            for optimizer in optimizers(objective, candidate.recipe)
            for group in optimizer.param_groups
        )
        copied = candidate.recipe.precision == "bfloat16" and not is_cuda
        table = objective.model.logits.weight.numel() * BF16_BYTES if copied else 0  # others are among the activations
        logits = min(tokens.numel() * candidate.trained.vocab_size, CHUNK_SIZE["cuda"]) if is_cuda else 0
        logit_bytes = LOGIT_BYTES[candidate.recipe.precision] + (0 if lesson is None else PARENT_LOGIT_BYTES)
    return Memory(
        parameters=parameters,
        parent=0 if lesson is None else parameters + (parameters * BF16_BYTES // FP32_BYTES if copied else 0),
        gradients=_size(value for value in objective.parameters() if value.requires_grad),
        moments=moments,
        activations=activations + table,
        logits=logits * logit_bytes,
        context=CONTEXT_BYTES if is_cuda else 0,
    )


def require_memory(memory: Memory, available: int | None, num_trials: int = 1) -> None:
    """Raise UserError if `num_trials` trainings at once need more than the available bytes; None (unknown) passes."""
    if available is not None and num_trials * memory.total > available:
        at_a_time = f" for each of {num_trials} trials at a time" if num_trials > 1 else ""
        raise UserError(
            f"training needs {memory.line.removeprefix('memory: ')}{at_a_time}, but {format_bytes(available)} are "
            f"free; lower --recipe.scale.micro-batch, or give --recipe.recompute or "
            f"--recipe.distillation.trainable changed."
        )


def available_bytes(device: str) -> int | None:
    """Return the free bytes of memory: of the GPU `device`, or what machine and container allow; None if unknown."""
    return int(torch.cuda.mem_get_info(device)[0]) if torch.device(device).type == "cuda" else free_bytes()


@contextmanager
def raise_out_of_memory(candidate: Candidate, device: str) -> Iterator[None]:
    """Raise TooLargeError in place of Python's and torch's errors when memory runs out in the body."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        scale = candidate.recipe.scale
        raise TooLargeError(
            f"out of memory on {device} with {scale.micro_batch} sequences of {scale.seq_len} tokens in a forward pass "
            f"at width {candidate.trained.d_model}; lower `micro_batch`, the length of sequences or the width."
        ) from error


def _size(tensors: Iterable[Tensor | nn.Parameter]) -> int:
    return sum(value.untyped_storage().nbytes() for value in tensors)


def _count_kernel(model: Decoder) -> None:
    """Make attention in other forms than softmax save as much as the kernel on the CPU, where that can be used."""
    for layer in model.layers:
        attention: Any = layer.attention
        if (
            attention is not None
            and attention.form in FORMS
            and attention.cap is None
            and has_native(attention.head_dim)
        ):
            attention.attend = causal_attention
