"""The whole pipeline on a real model at full width: SmolLM2-135M is tuned, searched and priced, and answers privately.

The model is first trained on the text of the search; the result is the parent, from which candidates start and learn
and with which they are compared, so that training on the text does not hide what they lose. The text is Python of the
standard library with docstrings of packages. The second corpus is English that is not trained on: descriptions of the
installed packages, by many authors.
"""

import math
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.errors import UserError
from costmodel.report.tables import table
from experiments.mixture import DOCUMENTED, docstrings
from experiments.private_answers import answer_table, private_answers
from experiments.trainings import Plan, candidate_of, train_all, training_folder
from nas.api import Run, Study, load_run
from nas.conversion.parent import load_parent
from nas.conversion.pretrained import CHECKSUMS_FILE, write_pretrained
from nas.corpus.local_files import stdlib_files
from nas.model.weights import deployed_weights
from nas.recipe.overrides import DistillationChanges, RecipeChanges, ScaleChanges
from nas.report.draw import draw_panels, save_figure
from nas.report.front_figures import LinePanel, PanelFigure, Series
from nas.run.members import picked
from nas.storage import RUNS, locked, replace_file
from nas.study.open_trials import BLOCKS_FILE
from nas.study.parent import trained_model
from nas.training.checkpoint import load_latest
from nas.training.distillation.sub_layers import BlockScores, from_csv
from search_spaces.budget.priced_space import price_architecture
from search_spaces.notation import parse

CONFIGS = Path(__file__).parent / "configs"
UNTAUGHT = RecipeChanges(  # the parent's own rate; candidates have the default, which is lower
    scale=ScaleChanges(batch=8, learning_rate=2e-4),
    distillation=DistillationChanges(prediction_weight=0.0, hidden_state_weight=0.0),
)
PICKS = "best", "knee"
DOCUMENTED_FILES = 160  # files per package, for about as much English as Python
DOCUMENT = range(2_000, 40_000)  # characters of the docstrings of a file that is used
# characters: the shortest, since shorter ones are mostly headings, and the part that is read
DESCRIPTION = 1_500, 4_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML, a part of it as the flags of `nas.search`.

    Attributes:
        parent, own, space: File of the parent in the current folder, its placement, and file of the space in
            `experiments/configs`.
        parent_tokens, tokens: Training tokens of the parent, and of each candidate.
        prompt, new_tokens: What the parent and the picks answer privately, under `answer_protocols`.
    """

    parent: str
    own: str
    parent_tokens: int
    space: str
    protocol: str
    network: str
    budget_latency: str
    budget_comm: str
    num_trials: int
    num_proxy_evals: int
    finalist_seeds: int
    tokens: int
    prompt: str
    new_tokens: int
    answer_protocols: tuple[str, ...]


SEARCH_FLAGS = (  # settings that are those of `nas.search`
    "protocol", "network", "budget_latency", "budget_comm", "num_trials", "num_proxy_evals", "finalist_seeds", "tokens",
)  # fmt: skip


def run(name: str, settings: Settings, console: Console) -> None:
    """Run the steps that are not done yet, and print their results.

    A UserError is raised without the parent's file, or if another process runs the experiment or an answer fails.
    """
    if not Path(settings.parent).exists():
        raise UserError(f"experiment {name} needs {settings.parent} in this folder; docs/llama.md says where it is.")
    folder = RUNS / "experiments" / name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        parent = _tuned(settings, folder, console)
        searched = _searched(name, settings, parent, folder, console)
        blocks = (searched.folder / BLOCKS_FILE).read_text(encoding="utf-8")
        console.print(kind_table(from_csv(blocks, BLOCKS_FILE)))
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
        data=str(training_text(folder / "text")),
    )
    (job,) = train_all(plan, folder, console)
    if not (target / CHECKSUMS_FILE).exists():  # written last
        source = load_parent(settings.parent)
        trained = load_latest(training_folder(plan, job, folder, source))
        assert trained is not None
        weights = deployed_weights(trained_model(candidate_of(plan, job.row, source), trained))
        write_pretrained(source.model._replace(weights={n: w.clone() for n, w in weights.items()}), target)
    return target


def _searched(name: str, settings: Settings, parent: Path, folder: Path, console: Console) -> Run:
    """Run or resume the search in a folder, within shares of the parent's cost, and print and plot its models."""
    place = folder / "search"
    if (place / "meta.json").exists():
        searched = load_run(place).resume(console=console)
    else:
        study = Study(
            **{flag: getattr(settings, flag) for flag in SEARCH_FLAGS},
            space=str(CONFIGS / settings.space),
            parent=str(parent),
            data=str(training_text(folder / "text")),
            second_eval_data=str(_english(folder / "english")),
        )
        searched = study.run(output_dir=place, console=console)
    shown = models(searched)
    console.print(model_table(shown))
    written = save_figure(folder / name, draw_panels(model_figure(shown)))
    console.print(f"plot: {written[0]}", soft_wrap=True, highlight=False)
    return searched


def training_text(folder: Path) -> Path:
    """Return the folder of the training text: Python of the standard library, and docstrings of packages."""
    if not folder.exists():
        new = folder.with_suffix(".new")
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        copies = {new / "stdlib" / path.relative_to(stdlib): path.read_bytes() for path in stdlib_files(stdlib)}
        for package in DOCUMENTED:
            documents = (document for document in docstrings(package) if len(document[1]) in DOCUMENT)
            for name, document in islice(documents, DOCUMENTED_FILES):
                copies[new / "documented" / f"{name}.txt"] = document.encode()
        for path, content in copies.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        new.rename(folder)
    return folder


def _english(folder: Path) -> Path:
    """Return a folder with the beginnings of the descriptions, if not too short, of installed packages."""
    folder.mkdir(exist_ok=True)
    least, most = DESCRIPTION
    for package in distributions():
        description = (package.read_text("METADATA") or "").partition("\n\n")[2]  # it follows the fields
        if len(description) >= least:
            replace_file(folder / f"{package.name}.txt", description[:most])
    return folder


class Shown(NamedTuple):
    """A model in the table and the figure, with costs per token. name: `parent` or the arch_id.

    placement: of the folded model; the parent's is as it is written. second_perplexity: None if not measured.
    """

    name: str
    placement: str
    latency_s: float
    sent_bytes: float
    perplexity: float
    second_perplexity: float | None


def models(searched: Run) -> list[Shown]:
    """Return the models of a search to show: the parent, at folded costs, then the front's members, cheapest first."""
    parent, second = searched.parent, searched.meta.second
    assert parent is not None
    architecture = parse(parent.notation, searched.base).architecture
    whole = price_architecture(architecture, searched.pricer, searched.workload, "folded").price
    theirs = math.exp(second.parent_loss) if second and second.parent_loss is not None else None
    shown = [Shown("parent", parent.notation, whole.latency_s, whole.sent_bytes, parent.perplexity, theirs)]
    for member in searched.front:
        record = member.most_expensive
        runs_as = record.deployed or record.placement
        perplexities = member.perplexity, member.second_perplexity
        shown.append(Shown(member.arch_id, runs_as, record.latency_s, record.sent_bytes, *perplexities))
    return shown


def model_table(models: Sequence[Shown]) -> Table:
    """Return a table of models, with costs and perplexities also relative to the parent, which is the first model."""
    parent = models[0]

    def beside(value: float | None, parents: float | None) -> str:
        return "" if value is None or parents is None else f"{value:.2f} ({100 * (value / parents - 1):+.1f} %)"

    rows = [
        (
            model.name,
            f"{format_seconds(model.latency_s)} ({model.latency_s / parent.latency_s:.0%})",
            f"{format_bytes(model.sent_bytes)} ({model.sent_bytes / parent.sent_bytes:.0%})",
            beside(model.perplexity, parent.perplexity),
            beside(model.second_perplexity, parent.second_perplexity),
            model.placement,
        )
        for model in models
    ]
    columns = ("seconds", "sent", "perplexity", "on the second corpus", "runs as")
    return table(("model",), columns, rows, title="a token, and what of the parent's it is")


def model_figure(models: Sequence[Shown]) -> PanelFigure:
    """Return a figure of perplexity against the cost of a token, in % of that of the parent, which is the first model.

    Perplexities on the second corpus are shown only if all models have one.
    """
    parent = models[0]
    by_axis = {
        f"bytes of all parties, % of the parent's {format_bytes(parent.sent_bytes)}": [m.sent_bytes for m in models],
        f"predicted seconds, % of the parent's {format_seconds(parent.latency_s)}": [m.latency_s for m in models],
    }
    second = [model.second_perplexity for model in models if model.second_perplexity is not None]
    by_corpus = {"": [model.perplexity for model in models]}
    if len(second) == len(models):
        by_corpus[", on the second corpus"] = second

    def series(values: Sequence[float]) -> Iterator[Series]:
        shares = tuple(100 * value / values[0] for value in values)
        for words, perplexities in by_corpus.items():
            yield Series(f"front{words}", shares[1:], tuple(perplexities[1:]))
            yield Series(f"parent{words}", shares[:1], tuple(perplexities[:1]))

    panels = (LinePanel("", axis, "perplexity", tuple(series(x))) for axis, x in by_axis.items())
    return PanelFigure("SmolLM2-135M: a token after a prompt of 128, private", tuple(panels))


def kind_table(scores: BlockScores) -> Table:
    """Return a table of block scores by kind of sub-layer: the first layer's, and the median of each third of layers.

    Kinds that have 0 at all depths are left out.
    """
    num_layers = 1 + max(sub_layer.depth for sub_layer in scores.divergences)
    thirds = [range(place * num_layers // 3, (place + 1) * num_layers // 3) for place in range(3)]
    by_kind: dict[tuple[str, str, str], dict[int, float]] = {}
    for (depth, *kind), value in scores.divergences.items():
        by_kind.setdefault((kind[0], kind[1], kind[2]), {})[depth] = value
    rows = [
        (" ".join(kind), *(f"{median(values[depth] for depth in part):.4f}" for part in (range(1), *thirds)))
        for kind, values in sorted(by_kind.items())
        if any(values.values())
    ]
    return table(("block scores, medians in nats",), ("first layer", "first third", "second", "last"), rows)
