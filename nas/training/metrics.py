"""Files of a trial's training curve: a CSV row per step, also for TensorBoard, and a JSON object per diagnosed step.

A resumed trial first drops rows after its checkpoint, so that each step has one row. A diagnosis costs one more forward
pass of a micro-batch, and does not change the training.
"""

import csv
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from costmodel.config.files import MOST_ROWS, read_bytes
from nas.recipe.recipe import Scale
from nas.storage import replace_file
from nas.training.objective import Objective, summarise

METRICS_FILE = "metrics.csv"
DIAGNOSTICS_FILE = "diagnostics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
NUM_DIAGNOSES = 20  # per run
# Suffixes of learned scalars: alpha and beta, slopes of leaky ReLUs, gains of He and Hofmann's attention.
SCALARS = (".alpha", ".beta", ".slope", ".identity", ".softmax", ".uniform")


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The state of a model before the update of `step`, on the step's first micro-batch.

    Attributes:
        head_entropies: mean attention entropy over rows and sequences, in nats, by layer and head; None if not finite.
        quarter_shares, flags: as in `EntropySummary`; None and empty if an entropy is not finite.
        num_nan: number of attention rows whose entropy is NaN, by layer.
        gradient_norms: norm of the gradient before clipping, by layer or other part of the model; None if not finite.
        thresholds: thresholds of the entropy regulariser, by layer and head, as shares of E_max; None without one.
        temperatures: layer, such as `layers.0`, -> geometric mean over positions of each head's learned temperatures.
        scalars: learned scalars by name, one number each or one per head.
    """

    step: int
    head_entropies: list[list[float | None]]
    quarter_shares: tuple[float, float, float, float] | None
    flags: tuple[str, ...]
    num_nan: list[int]
    gradient_norms: dict[str, float | None]
    thresholds: list[list[float]] | None
    temperatures: dict[str, list[float]]
    scalars: dict[str, list[float]]


def is_due(step: int, scale: Scale) -> bool:
    """Whether to diagnose `step`, from 1: at most NUM_DIAGNOSES steps, evenly spaced, the last step included."""
    return step * NUM_DIAGNOSES // scale.num_steps > (step - 1) * NUM_DIAGNOSES // scale.num_steps


@torch.no_grad()
def diagnose(objective: Objective, inputs: Tensor, *, step: int) -> Diagnosis:
    """Return a diagnosis of the model on `inputs` (tokens, batch x T) and of its present gradients, for `step`."""
    model, penalty = objective.model, objective.penalty
    _, entropies = model.features(inputs, with_entropies=True)  # without logits, which would be the largest tensor
    assert entropies is not None
    rows = [layer.double() for layer in entropies]  # each batch x heads x T
    head_means = [layer.mean(dim=(0, 2)) for layer in rows]
    summary = summarise(head_means, inputs.shape[1]) if torch.cat(head_means).isfinite().all() else None
    thresholds = None
    if penalty is not None:
        thresholds = [row[: len(means)] for row, means in zip(penalty.thresholds.tolist(), head_means, strict=True)]
    gradients: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in objective.named_parameters():
        if parameter.grad is not None:
            place = name.removeprefix("model.").split(".")
            gradients[".".join(place[:2]) if place[0] == "layers" else place[0]].append(parameter.grad)
    learned = dict(model.named_parameters())
    return Diagnosis(
        step=step,
        head_entropies=[[_finite(mean) for mean in layer.tolist()] for layer in head_means],
        quarter_shares=summary.quarter_shares if summary else None,
        flags=summary.flags if summary else (),
        num_nan=[int(layer.isnan().sum()) for layer in rows],
        gradient_norms={part: _finite(nn.utils.get_total_norm(values).item()) for part, values in gradients.items()},
        thresholds=thresholds,
        temperatures={
            name.removesuffix(".attention.temperature.log_weight"): log_weight.mean(dim=1).exp().tolist()
            for name, log_weight in learned.items()
            if name.endswith(".temperature.log_weight")
        },
        scalars={name: value.flatten().tolist() for name, value in learned.items() if name.endswith(SCALARS)},
    )


def _finite(number: float) -> float | None:
    """Return the number, or None if JSON cannot represent it."""
    return number if math.isfinite(number) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step; losses are in nats per token.

    tokens: training tokens so far. train_loss: cross-entropy of the batch before the update. penalty: value of the
        entropy regulariser, not multiplied by its weight, nats^2. gradient_norm: norm of the whole gradient before
        clipping. seconds: wall time of the trial so far, summed over its processes. val_loss: validation loss after
        the update; None at a step without validation.
    """

    step: int
    tokens: int
    learning_rate: float
    train_loss: float
    penalty: float
    gradient_norm: float
    seconds: float
    val_loss: float | None = None


COLUMNS = tuple(field.name for field in fields(StepMetrics))


class MetricsLog:
    """Appends metrics and diagnoses to files, which `flush` writes to disk. Raises OSError, e.g. if the disk is full.

    last_step: step of the checkpoint from which the trial is resumed, or 0; rows of later steps are removed.
    """

    def __init__(self, folder: Path, *, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imported late, because it takes 1.5 seconds

        folder.mkdir(parents=True, exist_ok=True)
        header = ",".join(COLUMNS) + "\n"
        _keep_until(folder / METRICS_FILE, last_step, header, lambda row: int(row.split(",", 1)[0]))
        _keep_until(folder / DIAGNOSTICS_FILE, last_step, "", lambda line: int(json.loads(line)["step"]))
        self._file = (folder / METRICS_FILE).open("a", newline="", encoding="utf-8")
        self._diagnostics = (folder / DIAGNOSTICS_FILE).open("a", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=last_step + 1)

    def add(self, metrics: StepMetrics) -> None:
        """Append a row to METRICS_FILE and to the log of TensorBoard."""
        row = asdict(metrics)
        self._writer.writerow(["" if row[name] is None else repr(row[name]) for name in COLUMNS])
        for name in COLUMNS[2:]:
            if row[name] is not None:
                self._board.add_scalar(name, row[name], metrics.step)

    def add_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Append a line to DIAGNOSTICS_FILE."""
        self._diagnostics.write(json.dumps(asdict(diagnosis)) + "\n")

    def flush(self) -> None:
        for file in (self._file, self._diagnostics):
            file.flush()
            os.fsync(file.fileno())
        self._board.flush()

    def close(self) -> None:
        self._file.close()
        self._diagnostics.close()
        self._board.close()


def _keep_until(path: Path, last_step: int, header: str, step_of: Callable[[str], int]) -> None:
    """Rewrite a file with a header and the lines up to a step or the first torn line."""
    lines: list[str] = []
    if path.exists() and last_step:
        text = read_bytes(path, MOST_ROWS).decode(errors="replace")
        for line in text.splitlines(keepends=True)[1 if header else 0 :]:
            try:
                if not line.endswith("\n") or step_of(line) > last_step:
                    break
            except (ValueError, KeyError, TypeError, RecursionError):  # torn, or not written here
                break
            lines.append(line)
    replace_file(path, header + "".join(lines))
