"""Does a cheap training rank architectures as a long one does, and as the papers' did?"""

import math
import statistics
from dataclasses import dataclass

from rich.console import Console

from costmodel.errors import UserError
from experiments.ranking import correlation_table, perplexity_table, verdicts
from experiments.trainings import Job, Plan, Variant, train_all
from nas.recipe.recipe import ScaleName
from nas.storage import RUNS, locked

DIVERGED = "diverged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it.

    rows: published perplexity by notation; `diverged` where it did, None where no paper has the row.
    variants: by the name of a column; the others are compared with the first.
    committed: file of outcomes in `experiments/data`.

    Raises UserError for fewer than two rows or a variant without seeds.
    """

    scale: ScaleName
    base: str
    rows: dict[str, float | str | None]
    variants: dict[str, Variant]
    data: str = "stdlib"
    committed: str | None = None

    def __post_init__(self) -> None:
        if len(self.rows) < 2:
            raise UserError(f"`rows` must hold at least 2 rows to rank, but got {', '.join(self.rows) or 'none'}.")
        if odd := [row for row, value in self.rows.items() if isinstance(value, str) and value != DIVERGED]:
            raise UserError(f"`rows` must hold perplexities, `{DIVERGED}` or nothing, but not so {', '.join(odd)}.")
        if empty := [name for name, variant in self.variants.items() if not variant.seeds] or not self.variants:
            raise UserError(f"`variants` must hold at least one, each with seeds, but got {empty=}.")

    @property
    def published(self) -> dict[str, float]:
        """Printed perplexities of the rows that a paper has; a divergence is infinite."""
        return {
            row: math.inf if isinstance(value, str) else value for row, value in self.rows.items() if value is not None
        }

    @property
    def plan(self) -> Plan:
        return Plan(
            scale=self.scale,
            base=self.base,
            rows=tuple(self.rows),
            variants=self.variants,
            data=self.data,
            committed=self.committed,
        )


def run(name: str, settings: Settings, console: Console) -> None:
    """Trains what is not trained yet, one thread on every core, then prints tables and verdicts.

    Raises UserError if another process is running the experiment.
    """
    folder = RUNS / "experiments" / name / settings.scale
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        ended = train_all(settings.plan, folder, console)
    variants = {
        name: {seed: {row: ended[Job(name, seed, row)].ranked for row in settings.rows} for seed in variant.seeds}
        for name, variant in settings.variants.items()
    }
    seconds = {
        name: statistics.fmean(training.seconds for job, training in ended.items() if job.variant == name)
        for name in variants
    }
    console.print(perplexity_table(settings.published, variants))
    console.print(correlation_table(settings.published, variants, seconds))
    for line in verdicts(settings.published, variants):
        console.print(line)
