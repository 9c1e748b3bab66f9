"""The search of the SmolLM2 experiments, within shares of the parent's cost."""

from dataclasses import dataclass, fields
from pathlib import Path

from rich.console import Console

from experiments.smollm2.corpora import ENGLISH, TEXT, english, text
from experiments.smollm2.tables import model_figure, model_table, models
from nas.api import Run, Study, load_run
from nas.recipe.overrides import RecipeChanges, ScaleChanges
from nas.report.draw import draw_panels, save_figure
from nas.study.open_trials import BLOCKS_FILE
from nas.training.distillation.sub_layers import BlockScores, from_csv

CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """A part of an experiment's YAML, as the flags of `nas.search`.

    Attributes:
        space: A file beside the experiment's.
        tokens, batch, learning_rate: Training tokens of each candidate, sequences per step, and rate. Candidates start
            closer to their final loss than the parent did, so their rate is lower.
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
    learning_rate: float


def run_search(
    name: str, settings: SearchSettings, parent: Path, folder: Path, console: Console
) -> tuple[Run, BlockScores]:
    """Run or resume the search in a folder with the text, print and plot its models, and return the block scores."""
    place = folder / "search"
    if (place / "meta.json").exists():
        searched = load_run(place).resume(console=console)
    else:
        batch, rate = settings.batch, settings.learning_rate
        names = (field.name for field in fields(SearchSettings) if field.name not in ("batch", "learning_rate"))
        flags = {name: getattr(settings, name) for name in names}
        study = Study(
            **flags | {"space": str(CONFIGS / settings.space)},
            parent=str(parent),
            data=str(text(folder / TEXT)),
            second_eval_data=str(english(folder / ENGLISH)),
            recipe=RecipeChanges(scale=ScaleChanges(batch=batch, micro_batch=batch, learning_rate=rate)),
        )
        searched = study.run(output_dir=place, console=console)
    shown = models(searched)
    console.print(model_table(shown))
    written = save_figure(folder / name, draw_panels(model_figure(shown)))
    console.print(f"plot: {written[0]}", soft_wrap=True, highlight=False)
    return searched, from_csv((place / BLOCKS_FILE).read_text(encoding="utf-8"), BLOCKS_FILE)
