"""The whole pipeline on a real model at full width: SmolLM2-135M is tuned, searched, priced and answers privately.

The model is first trained on the text itself; the result is the parent, from which candidates start and learn and with
which they are compared, so that losses are not hidden by gains from the text.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from costmodel.errors import UserError
from experiments.private_answers import answer_table, private_answers
from experiments.smollm2.corpora import TEXT, text
from experiments.smollm2.search import SearchSettings, run_search
from experiments.smollm2.tables import kind_table
from experiments.trainings import Plan, candidate_of, train_all, training_folder
from nas.conversion.parent import load_parent
from nas.conversion.pretrained import CHECKSUMS_FILE, write_pretrained
from nas.model.weights import deployed_weights
from nas.recipe.overrides import DistillationChanges, RecipeChanges
from nas.run.members import picked
from nas.storage import RUNS, locked
from nas.study.verify_fold import trained_model
from nas.training.checkpoint import load_latest

UNTAUGHT = RecipeChanges(distillation=DistillationChanges(prediction_weight=0.0, hidden_state_weight=0.0))
PICKS = "best", "knee"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(SearchSettings):
    """The experiment's YAML.

    Attributes:
        parent, own, space: File of the parent in the current folder, its placement, and a file beside the experiment's.
        parent_tokens, tokens: Tokens to tune the parent, and of each candidate.
        prompt, new_tokens: What the parent and the picks answer privately, under `answer_protocols`.
    """

    parent: str
    own: str
    parent_tokens: int
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
        searched, scores = run_search(name, settings, parent, folder, console)
        console.print(kind_table(scores))
        picks = [picked(searched.front, choice).arch_id for choice in (PICKS if searched.front else ())]
        deployed = {arch_id: (str(searched.folder), "--pick", arch_id) for arch_id in picks}
        asked = ("--prompt", settings.prompt, "--new-tokens", str(settings.new_tokens))
        asked_models = {"parent": (str(parent),), **deployed}
        answers = private_answers(asked_models, settings.answer_protocols, asked, folder, console)
    console.print(answer_table(answers))


def _tuned(settings: Settings, folder: Path, console: Console) -> Path:
    """Return the folder of the parent, trained on the text to predict the next token, without a teacher."""
    target = folder / "parent"
    plan = Plan(
        name="fine-tuned",
        scale="parent",
        base="smollm2-135m",
        rows=(settings.own,),
        seeds=(0,),
        parent=settings.parent,
        tokens=settings.parent_tokens,
        recipe=UNTAUGHT,
        data=str(text(folder / TEXT)),
    )
    (job,) = train_all(plan, folder, console)
    if not (target / CHECKSUMS_FILE).exists():  # written last
        source = load_parent(settings.parent)
        trained = load_latest(training_folder(plan, job, folder, source))
        assert trained is not None
        weights = deployed_weights(trained_model(candidate_of(plan, job.row, source), trained))
        write_pretrained(source.model._replace(weights={n: w.clone() for n, w in weights.items()}), target)
    return target
