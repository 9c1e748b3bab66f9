"""The whole pipeline on a real model at full width: SmolLM2-135M is tuned, searched, priced and answers privately.

The model is first trained on the text itself; the result is the parent, from which candidates start and learn and with
which they are compared, so that losses are not hidden by gains from the text. Then follows a search within a share of
the parent's cost. Further trainings: assembled trained blocks without other training, the parent on more tokens, the
picks with a second seed, a cheap member on more tokens, and single replaced sub-layers, to compare with block scores.
Finally the parent and the picks answer a prompt privately.

The text is Python from the standard library and English from docstrings of installed packages. The second corpus is
English that is not trained on: descriptions of the installed packages, by many authors.
"""

import ast
import math
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Price
from costmodel.errors import UserError
from experiments.answers import answer_table, private_answers
from experiments.bars import Figure, figure_table, table
from experiments.ranking import spearman
from experiments.trainings import Ended, Job, Plan, Variant, candidate_of, train_all, training_folder
from nas.api import Run, Study, load_run
from nas.conversion.parent import load_parent
from nas.conversion.pretrained import CHECKSUMS_FILE, write_pretrained
from nas.corpus.local_files import stdlib_files
from nas.corpus.second import package_files
from nas.model.weights import deployed_weights
from nas.recipe.overrides import DistillationChanges, RecipeChanges, ScaleChanges
from nas.recipe.recipe import SCALES, ScaleName
from nas.report.draw import draw_panels, save_figure
from nas.report.panels import LinePanel, PanelFigure, Series
from nas.run.front import picked
from nas.run.second import second_perplexity
from nas.storage import RUNS, locked, replace_file
from nas.study.blocks import BLOCKS_FILE
from nas.study.verify_fold import trained_model
from nas.training.checkpoint import load_latest
from nas.training.distillation.sub_layers import BlockScores, from_csv, trained_sub_layers
from search_spaces.bases import base_architecture
from search_spaces.notation import parse
from search_spaces.pricing import price_architecture

CONFIGS = Path(__file__).parent / "configs"
BASE = "smollm2-135m"
SCALE: ScaleName = "parent"
UNTAUGHT = RecipeChanges(distillation=DistillationChanges(prediction_weight=0.0, hidden_state_weight=0.0))
DOCUMENTED = ("matplotlib", "networkx", "numpy", "ray", "scipy", "torch", "transformers")  # packages
DOCUMENTED_FILES = 160  # files per package, for about as much English as Python
DOCSTRING, DOCUMENT = 400, range(2_000, 40_000)  # characters: the shortest docstring, and the total of a file
DOCUMENTING = (ast.Module, ast.ClassDef, ast.FunctionDef)
DESCRIPTION = (
    1_500,
    4_000,
)  # characters: the shortest, since shorter ones are mostly headings, and the part that is read
TEXT, ENGLISH = "text", "english"  # folders
TUNED, FURTHER, ASSEMBLED = "fine-tuned", "fine-tuned twice", "put together"  # variants
AGAIN, LONGER, ALONE = "again", "longer", "alone"
PICKS = "best", "knee"
UNMOVED = 1e-30  # learning rate of a training's one obligatory step, which then changes no weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
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
    space: str
    protocol: str
    network: str
    budget_latency: str
    budget_comm: str
    num_trials: int
    num_proxy_evals: int
    finalist_seeds: int
    parent_tokens: int
    tokens: int
    batch: int
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


class Shown(NamedTuple):
    """A model in the table and the figure; `name` is `parent` or its arch_id, `placement` is the folded one."""

    name: str
    placement: str
    latency_s: float
    sent_bytes: float
    perplexity: float
    second_perplexity: float | None


def run(name: str, settings: Settings, console: Console) -> None:
    """Run the steps that are not done yet, and print the results; a UserError is raised without the model."""
    if not Path(settings.parent).exists():
        raise UserError(f"experiment {name} needs {settings.parent} in this folder; docs/llama.md says where it is.")
    folder = RUNS / "experiments" / name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        parent = _tuned(settings, folder, console)
        searched = _searched(settings, parent, folder, console)
        shown = models(searched)
        console.print(model_table(shown))
        written = save_figure(folder / name, draw_panels(model_figure(shown)))
        console.print(f"plot: {written[0]}", soft_wrap=True, highlight=False)
        picks = [picked(searched.front, choice) for choice in (PICKS if searched.front else ())]
        members = {member.arch_id: member for member in picks}
        rows = [member.first.placement for member in members.values()]
        ended = train_all(_plan(settings, parent, folder, rows), folder, console)
        console.print(trained_table(searched, ended))
        scores = from_csv((searched.folder / BLOCKS_FILE).read_text(encoding="utf-8"), BLOCKS_FILE)
        console.print(kind_table(scores))
        compared = _singles(scores, ended)
        console.print(single_table(compared))
        by_score, by_training = ({row: pair[at] for row, pair in compared.items()} for at in range(2))
        rank = Figure("Spearman, scores and trainings", spearman(by_score, by_training), least=settings.least_spearman)
        console.print(figure_table("", [rank]))
        deployed = {name: (str(searched.folder), "--pick", name) for name in members}
        asked = ("--prompt", settings.prompt, "--new-tokens", str(settings.new_tokens))
        asked_models = {"parent": (str(parent),), **deployed}
        answers = private_answers(asked_models, settings.answer_protocols, asked, folder, console)
    console.print(answer_table(answers))


def text(folder: Path) -> Path:
    """Return the folder of the training text: Python of the standard library, and docstrings of packages."""
    if not folder.exists():
        new = folder.with_suffix(".new")
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        for path in stdlib_files(stdlib):
            copy = new / "stdlib" / path.relative_to(stdlib)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
        for package in DOCUMENTED:
            for name, document in islice(_documents(package), DOCUMENTED_FILES):
                copy = new / "documented" / f"{name}.txt"
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(document, encoding="utf-8")
        new.rename(folder)
    return folder


def _documents(package: str) -> Iterator[tuple[str, str]]:
    for name, path in package_files(package):
        with suppress(SyntaxError, UnicodeError):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            said = (ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTING))
            document = "\n\n".join(docstring for docstring in said if docstring and len(docstring) >= DOCSTRING)
            if len(document) in DOCUMENT:
                yield name, document


def english(folder: Path) -> Path:
    """Return a folder with the beginning of the description of each installed package."""
    folder.mkdir(exist_ok=True)
    least, most = DESCRIPTION
    for package in distributions():
        _, _, description = (package.read_text("METADATA") or "").partition(
            "\n\n"
        )  # the description follows the fields
        if len(description) >= least:
            replace_file(folder / f"{package.name}.txt", description[:most])
    return folder


def _tuned(settings: Settings, folder: Path, console: Console) -> Path:
    """Return the folder of the parent, trained on the text to predict the next token, without a teacher."""
    target = folder / "parent"
    variant = Variant(seeds=(0,), parent=settings.parent, tokens=settings.parent_tokens, recipe=UNTAUGHT)
    data = str(text(folder / TEXT))
    plan = Plan(scale=SCALE, base=BASE, data=data, rows=(settings.own,), variants={TUNED: variant})
    (job,) = train_all(plan, folder, console)
    if not (target / CHECKSUMS_FILE).exists():  # written last
        source = load_parent(settings.parent)
        candidate = candidate_of(plan, job, source)
        trained = load_latest(training_folder(plan, job, folder))
        assert trained is not None
        weights = deployed_weights(trained_model(candidate, trained))
        write_pretrained(source.model._replace(weights={n: w.clone() for n, w in weights.items()}), target)
    return target


def _searched(settings: Settings, parent: Path, folder: Path, console: Console) -> Run:
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
        recipe=RecipeChanges(scale=_small_steps(settings)),
    )
    return study.run(output_dir=place, console=console)


def _small_steps(settings: Settings) -> ScaleChanges:
    return ScaleChanges(batch=settings.batch, micro_batch=settings.batch, learning_rate=settings.learning_rate)


def _plan(settings: Settings, parent: Path, folder: Path, picks: Sequence[str]) -> Plan:
    """Return the trainings besides the search; `picks` are placements of members, none for an empty front."""
    scale = _small_steps(settings)
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


def models(searched: Run) -> list[Shown]:
    """Return the folded parent, then the front, cheapest first."""
    parent, second = searched.parent, searched.meta.second
    assert parent is not None
    whole = _price_of(searched, parent.notation)
    theirs = math.exp(second.parent_loss) if second and second.parent_loss is not None else None
    shown = [Shown("parent", parent.notation, whole.latency_s, whole.sent_bytes, parent.perplexity, theirs)]
    for member in searched.front:
        record = member.most_expensive
        runs_as = record.deployed or record.placement
        perplexities = member.perplexity, second_perplexity(member)
        shown.append(Shown(member.arch_id, runs_as, record.latency_s, record.sent_bytes, *perplexities))
    return shown


def _price_of(searched: Run, row: str) -> Price:
    architecture = parse(row, searched.base).architecture
    return price_architecture(architecture, searched.pricer, searched.workload, "folded").price


def model_table(models: Sequence[Shown]) -> Table:
    """Tabulate the models with their cost and perplexity relative to the parent's, which comes first."""
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
    columns = ("model", "seconds", "sent", "perplexity", "on the second corpus", "runs as")
    return table(columns, rows, title="a token, and what of the parent's it is")


def model_figure(models: Sequence[Shown]) -> PanelFigure:
    """Plot perplexity on both corpora against the cost of a token, as a share of the parent's, which comes first."""
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


def trained_table(searched: Run, ended: Mapping[Job, Ended]) -> Table:
    """Tabulate the further trainings, with their cost relative to the parent's and the picks' first seed."""
    parent = searched.parent
    assert parent is not None
    whole = _price_of(searched, parent.notation)
    first = {member.first.placement: member.first.perplexity for member in searched.front}
    rows = []
    for job, end in ended.items():
        if job.variant != ALONE:
            price, nats = _price_of(searched, job.row), math.log(end.ranked / parent.perplexity)
            shares = f"{price.latency_s / whole.latency_s:.0%}", f"{price.sent_bytes / whole.sent_bytes:.0%}"
            perplexity = f"{end.ranked:.2f}"
            if job.variant == AGAIN:
                perplexity += f" (seed 0: {first[job.row]:.2f})"
            rows.append((job.variant, *shares, perplexity, f"{nats:+.3f}", job.row))
    columns = ("trained", "seconds", "sent", "perplexity", "nats above the parent", "placement")
    return table(columns, rows, title="beside the search")


def kind_table(scores: BlockScores) -> Table:
    """Tabulate median block scores by what is replaced, for the first layer and each third of the depth."""
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
    columns = ("block scores, medians in nats", "first layer", "first third", "second", "last")
    return table(columns, rows)


def _singles(scores: BlockScores, ended: Mapping[Job, Ended]) -> dict[str, tuple[float, float]]:
    compared = {}
    for job in (job for job in ended if job.variant == ALONE):
        sub_layers = trained_sub_layers(parse(job.row, base_architecture(BASE)).architecture)
        score = sum(scores.divergences.get(sub_layer, 0.0) for sub_layer in sub_layers)
        compared[job.row] = (score, ended[job].ranked)
    return compared


def single_table(compared: Mapping[str, tuple[float, float]]) -> Table:
    """Tabulate the single replacements, best first."""
    best_first = sorted(compared.items(), key=lambda item: item[1][1])
    rows = [(row, f"{score:.4f}", f"{perplexity:.3f}") for row, (score, perplexity) in best_first]
    return table(("one sub-layer replaced", "block score, nats", "perplexity trained"), rows)
