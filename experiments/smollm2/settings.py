"""Settings of `experiments run smollm2-healing` and `smollm2-cuda`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from costmodel.errors import UserError
from experiments.smollm2.search import SearchSettings
from nas.recipe.distillation import Trainable
from nas.training.device import Device

Part = Literal["table", "search"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """One column of the table: training tokens and sequences per step; 0 tokens validate the initial weights.

    Attributes:
        factors: Of the learning rate, to try, and further ones while the best is the smallest or largest.
        trainable: The part of a placement that is trained; the parent is always trained as a whole.
        again: Placements that are also trained with a second seed.
    """

    tokens: int
    batch: int
    factors: tuple[float, ...] = (1.0,)
    trainable: Trainable = "changed"
    again: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML.

    Attributes:
        parent: File or folder of the model in the current folder.
        placements: Placements to train, by a name for the table.
        lengths, parent_lengths: Numbers of tokens in the order of their trainings.
        learning_rate, parent_rate: Of the first length, before its factors.
        searched: Names of placements whose learning rates are searched; the others take the rate of the last of these.
        micro_batch: Sequences per forward pass. Smaller batches are not compiled, since each size compiles anew.
        library_tokens: Tokens on which each replaced sub-layer is first trained alone.
        scores: File of block scores in `experiments/data`, to compare with trained perplexities.
        search: A search that follows, with the rate of the last length that does not exceed its tokens.
        parts: The parts to run; both keep what is done in the folder.
        most_s: Seconds after which no training starts that is expected to end later; None for no limit.
        device: None for a GPU if there is one.
        output_dir: None for `runs/experiments/` and the experiment's name.
    """

    parent: str
    placements: Mapping[str, str]
    lengths: tuple[Length, ...]
    parent_lengths: tuple[Length, ...]
    learning_rate: float
    parent_rate: float
    searched: tuple[str, ...]
    micro_batch: int
    seq_len: int = 128
    validation_tokens: int = 32_768
    library_tokens: int = 32_768
    scores: str | None = None
    search: SearchSettings | None = None
    parts: tuple[Part, ...] = ("table", "search")
    most_s: float | None = None
    device: Device | None = None
    output_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("placements", "lengths", "parent_lengths", "searched"):
            if not getattr(self, name):
                raise UserError(f"`{name}` must not be empty.")
        names = {*self.searched, *(name for length in self.lengths for name in length.again)}
        if unknown := names - self.placements.keys():
            raise UserError(f"`searched` and `again` must name placements, but got {', '.join(sorted(unknown))}.")
        if self.searched[0] != next(iter(self.placements)):
            raise UserError(f"the first placement must be the first of `searched`, but got {self.searched[0]!r}.")


class Rate(NamedTuple):
    """A learning rate that was best with a batch."""

    value: float
    batch: int

    def at(self, batch: int) -> float:
        """Return the rate for a batch. Source: Malladi et al. 2022, arXiv 2205.10287, square root rule for Adam."""
        return self.value * math.sqrt(batch / self.batch)
