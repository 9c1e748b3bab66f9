"""The search of the SmolLM2 experiments, within shares of the parent's cost."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments.smollm2.corpora import ENGLISH, TEXT, english, text
from nas.api import Run, Study, load_run
from nas.recipe.overrides import RecipeChanges, ScaleChanges

CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """A part of an experiment's YAML, as the flags of `nas.search`.

    Attributes:
        space: A file beside the experiment's.
        tokens, batch: Training tokens of each candidate, and sequences per step.
    """

    space: str
    protocol: str
    network: str
    budget_latency: str
    budget_comm: str
    num_trials: int
    num_proxy_evals: int
    finalist_seeds: int
    tokens: int
    batch: int


def run_search(settings: SearchSettings, learning_rate: float, parent: Path, folder: Path, console: Console) -> Run:
    """Run or resume the search in a folder with the text of the experiment."""
    place = folder / "search"
    if (place / "meta.json").exists():
        return load_run(place).resume(console=console)
    study = Study(
        parent=str(parent),
        space=str(CONFIGS / settings.space),
        protocol=settings.protocol,
        network=settings.network,
        budget_latency=settings.budget_latency,
        budget_comm=settings.budget_comm,
        data=str(text(folder / TEXT)),
        second_eval_data=str(english(folder / ENGLISH)),
        num_trials=settings.num_trials,
        num_proxy_evals=settings.num_proxy_evals,
        tokens=settings.tokens,
        finalist_seeds=settings.finalist_seeds,
        recipe=RecipeChanges(scale=small_steps(settings.batch, learning_rate)),
    )
    return study.run(output_dir=place, console=console)


def small_steps(batch: int, learning_rate: float) -> ScaleChanges:
    """Return a recipe's changes to steps of one forward pass."""
    return ScaleChanges(batch=batch, micro_batch=batch, learning_rate=learning_rate)
