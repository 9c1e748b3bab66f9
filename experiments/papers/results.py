"""What trainings of an experiment came to, row by row and seed by seed, and what was recorded inside the models."""

import json
import math
import statistics
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from costmodel.errors import UserError
from experiments.papers.settings import Settings
from experiments.ranking import Perplexities
from experiments.trainings import Ended, Job, train_all, training_folder
from nas.storage import RUNS, locked
from nas.training.metrics import DIAGNOSTICS_FILE

SHARED = RUNS / "experiments" / "papers"  # of all experiments on the papers, in a folder for each scale


class Trained(NamedTuple):
    """A training. folder: with its diagnostics, unless its outcome is a committed one."""

    ended: Ended
    folder: Path

    @property
    def perplexity(self) -> float:
        """Infinite if it diverged."""
        return math.inf if self.ended.perplexity is None else self.ended.perplexity

    def diagnoses(self) -> list[dict[str, Any]]:
        """What was seen inside the model, as `nas.training.diagnostics` writes it. Raises UserError if it is gone."""
        try:
            return [json.loads(line) for line in (self.folder / DIAGNOSTICS_FILE).read_text().splitlines()]
        except (OSError, ValueError):
            raise UserError(
                f"{self.folder / DIAGNOSTICS_FILE} must hold the diagnostics of a training, but cannot be read; "
                "delete its folder to train it anew."
            ) from None


class Experiment(NamedTuple):
    """trained: of every row, one a seed; empty where nothing is trained."""

    name: str
    settings: Settings
    trained: Mapping[str, tuple[Trained, ...]]

    @property
    def perplexities(self) -> Perplexities:
        """Means over seeds by row; infinite if one diverged."""
        return {row: statistics.fmean(one.perplexity for one in each) for row, each in self.trained.items() if each}

    @property
    def first(self) -> dict[str, Trained]:
        """The training with the first seed, by row."""
        return {row: each[0] for row, each in self.trained.items() if each}

    @property
    def scale_line(self) -> str:
        """What was trained, for every output that holds something of it."""
        settings, plan = self.settings, self.settings.plan
        one = next(each[0] for each in self.trained.values() if each)
        tokens = max(each.ended.tokens for each in self.first.values())
        sequences = next(iter(plan.variants.values())).seq_len
        seeds = f"{len(settings.seeds)} seed{'s' if len(settings.seeds) > 1 else ''}"
        return (
            f"trained here at scale {settings.scale}, not the papers': {tokens:,} tokens of {settings.data} in "
            f"sequences of {sequences}, {seeds}" + ("" if one.folder.is_dir() else ", committed outcomes")
        )


def trained_experiment(name: str, settings: Settings, console: Console, pool: Executor | None = None) -> Experiment:
    """Trains what is not trained yet. Trainings are shared by all experiments on the papers.

    pool: as `train_all` takes it. Raises UserError if another process is running one of them at this scale.
    """
    if not settings.seeds:
        return Experiment(name, settings, {})
    folder, plan = SHARED / settings.scale, settings.plan
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        ended = train_all(plan, folder, console, pool)
    return Experiment(
        name,
        settings,
        {
            row: tuple(
                Trained(ended[job], training_folder(plan, job, folder))
                for job in (Job(settings.variant(row), seed, settings.net(row)) for seed in settings.seeds)
            )
            for row in settings.rows
        },
    )
