"""The whole pipeline on a real model at full width: SmolLM2-135M is tuned, searched, priced and answers privately.

The model is first trained on the text itself; the result is the parent, from which candidates start and learn and with
which they are compared, so that losses are not hidden by gains from the text. After the search come the trainings of
`_plan`, and private answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from costmodel.errors import UserError
from experiments.bars import Figure, figure_table
from experiments.engines import answer_table, private_answers
from experiments.smollm2.corpora import TEXT, text
from experiments.smollm2.search import SearchSettings, run_search, small_steps
from experiments.smollm2.tables import AGAIN, ALONE, kind_table, single_table, singles, spearman, trained_table
from experiments.trainings import Plan, Variant, candidate_of, train_all, training_folder
from nas.conversion.parent import load_parent
from nas.conversion.pretrained import CHECKSUMS_FILE, write_pretrained
from nas.model.weights import deployed_weights
from nas.recipe.overrides import DistillationChanges, RecipeChanges
from nas.recipe.recipe import SCALES, ScaleName
from nas.run.front import picked
from nas.storage import RUNS, locked
from nas.study.verify_fold import trained_model
from nas.training.checkpoint import load_latest

BASE = "smollm2-135m"
SCALE: ScaleName = "parent"
UNTAUGHT = RecipeChanges(distillation=DistillationChanges(prediction_weight=0.0, hidden_state_weight=0.0))
TUNED, FURTHER, ASSEMBLED = "fine-tuned", "fine-tuned twice", "put together"  # variants
LONGER = "longer"
PICKS = "best", "knee"
UNMOVED = 1e-30  # learning rate of a training's one obligatory step, which then changes no weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(SearchSettings):
    """The experiment's YAML.

    Attributes:
        parent, own, space: File of the parent in the current folder, its placement, and a file beside the experiment's.
        parent_tokens, tokens: Tokens to tune the parent, and of each candidate (and the parent again at
            `further_rate`).
        batch, learning_rate: Of candidates, which start closer to their final loss than the parent did.
        assembled: Placements assembled from trained sub-layers without further training.
        longer, singles: A placement that is trained longer, and placements with one replaced sub-layer.
        prompt, new_tokens: What the parent and the picks answer privately, under `answer_protocols`.
    """

    parent: str
    own: str
    parent_tokens: int
    learning_rate: float
    further_rate: float
    assembled: tuple[str, ...]
    longer: str
    longer_tokens: int
    longer_rate: float
    singles: tuple[str, ...]
    single_tokens: int
    least_spearman: float
    prompt: str
    new_tokens: int
    answer_protocols: tuple[str, ...]


def run(name: str, settings: Settings, console: Console) -> None:
    """Run the steps that are not done yet, and print the results; a UserError is raised without the model."""
    if not Path(settings.parent).exists():
        raise UserError(f"experiment {name} needs {settings.parent} in this folder; docs/llama.md says where it is.")
    folder = RUNS / "experiments" / name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        parent = _tuned(settings, folder, console)
        searched, scores = run_search(name, settings, settings.learning_rate, parent, folder, console)
        picks = [picked(searched.front, choice) for choice in (PICKS if searched.front else ())]
        members = {member.arch_id: member for member in picks}
        rows = [member.first.placement for member in members.values()]
        ended = train_all(_plan(settings, parent, folder, rows), folder, console)
        console.print(trained_table(searched, ended))
        console.print(kind_table(scores))
        compared = singles(scores, ended, BASE)
        console.print(single_table(compared))
        by_score, by_training = ({row: pair[at] for row, pair in compared.items()} for at in range(2))
        rank = Figure("Spearman, scores and trainings", spearman(by_score, by_training), least=settings.least_spearman)
        console.print(figure_table("", [rank]))
        deployed = {name: (str(searched.folder), "--pick", name) for name in members}
        asked = ("--prompt", settings.prompt, "--new-tokens", str(settings.new_tokens))
        asked_models = {"parent": (str(parent),), **deployed}
        answers = private_answers(asked_models, settings.answer_protocols, asked, folder, console)
    console.print(answer_table(answers))


def _tuned(settings: Settings, folder: Path, console: Console) -> Path:
    """Return the folder of the parent, trained on the text to predict the next token, without a teacher."""
    target = folder / "parent"
    variants = {TUNED: Variant(seeds=(0,), parent=settings.parent, tokens=settings.parent_tokens, recipe=UNTAUGHT)}
    plan = Plan(scale=SCALE, base=BASE, data=str(text(folder / TEXT)), rows=(settings.own,), variants=variants)
    (job,) = train_all(plan, folder, console)
    if not (target / CHECKSUMS_FILE).exists():  # written last
        source = load_parent(settings.parent)
        trained = load_latest(training_folder(plan, job, folder))
        assert trained is not None
        weights = deployed_weights(trained_model(candidate_of(plan, job, source), trained))
        write_pretrained(source.model._replace(weights={n: w.clone() for n, w in weights.items()}), target)
    return target


def _plan(settings: Settings, parent: Path, folder: Path, picks: Sequence[str]) -> Plan:
    """Return the trainings besides the search; `picks` are placements of members, none for an empty front."""
    scale = small_steps(settings.batch, settings.learning_rate)
    healing = RecipeChanges(scale=scale)
    unmoved = RecipeChanges(scale=replace(scale, learning_rate=UNMOVED))
    further = replace(UNTAUGHT, scale=replace(scale, learning_rate=settings.further_rate))
    longer = RecipeChanges(scale=replace(scale, learning_rate=settings.longer_rate))
    variants = {
        ASSEMBLED: (settings.assembled, 0, settings.batch * SCALES[SCALE].seq_len, unmoved),
        FURTHER: ((settings.own,), 0, settings.tokens, further),
        AGAIN: (picks, 1, settings.tokens, healing),
        LONGER: ((settings.longer,), 0, settings.longer_tokens, longer),
        ALONE: (settings.singles, 0, settings.single_tokens, healing),
    }
    return Plan(
        scale=SCALE,
        base=BASE,
        data=str(text(folder / TEXT)),
        rows=tuple(dict.fromkeys(row for rows, *_ in variants.values() for row in rows)),
        variants={
            name: Variant(seeds=(seed,), parent=str(parent), tokens=tokens, recipe=recipe)
            for name, (_, seed, tokens, recipe) in variants.items()
        },
        pairs=frozenset((name, row) for name, (rows, *_) in variants.items() for row in rows),
    )
