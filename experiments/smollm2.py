"""A real model through the whole of it, at its own width: SmolLM2-135M, tuned, searched, healed, priced.

The model is first trained on the text itself. What comes of that is the parent: candidates start from it, learn from it
and are held against it, so that what they lose is not hidden by what they gain from the text. Then a search within a
share of what the parent takes; members placed by hand, and the parent trained on as many tokens more; single sub-layers
replaced and trained, against which block scores must rank.
The second corpus is English: what the installed packages say of themselves, by their many authors.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Price
from costmodel.errors import UserError
from costmodel.protocols import load_pricer
from experiments.bars import Figure, figure_table, table
from experiments.ranking import spearman
from experiments.trainings import Ended, Job, Plan, Variant, candidate_of, train_all, training_folder
from nas.api import Run, Study, load_run
from nas.conversion.parent import load_parent
from nas.conversion.pretrained import CHECKSUMS_FILE, write_pretrained
from nas.conversion.score_bounds import bounding_tokens, unheld_by_parent
from nas.conversion.verified_fold import check_tokens
from nas.corpus.corpus import prepare
from nas.model.weights import deployed_weights
from nas.recipe.overrides import DistillationChanges, RecipeChanges, ScaleChanges
from nas.recipe.recipe import SCALES
from nas.report.draw import draw_panels, save_figure
from nas.report.panels import LinePanel, PanelFigure, Series
from nas.searchers.block_scores import BlockScores, from_csv, trained_sub_layers
from nas.storage import RUNS, locked, replace_file
from nas.study.blocks import BLOCKS_FILE
from nas.study.verify_fold import trained_model
from nas.training.checkpoint import load_latest
from search_spaces.bases import base_architecture
from search_spaces.notation import parse
from search_spaces.pricing import price_architecture
from search_spaces.workload import Workload

CONFIGS = Path(__file__).parent / "configs"
BASE = "smollm2-135m"
UNTAUGHT = RecipeChanges(route=DistillationChanges(distillation=0.0, streams=0.0))
LEAST_DESCRIPTION = 1_500  # characters, below which there is little but a heading
TUNED, HEALED, FURTHER, ALONE = "fine-tuned", "healed", "fine-tuned twice", "alone"  # variants


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it.

    parent: its file, in the folder where this is run. own: its placement. space: a file beside the experiment's.
    tokens: that the parent is tuned on, then each candidate.
    batch, learning_rate: of candidates and members, which begin nearer to their end than the parent did.
    healed_tokens: of each of the members by hand, and of the parent trained further, at `further_rate`.
    singles: placements of one sub-layer that is not its own, trained over `single_tokens`.
    """

    parent: str
    own: str
    space: str
    protocol: str
    network: str
    budget_latency: str
    num_trials: int
    finalist_seeds: int
    tokens: int
    batch: int
    learning_rate: float
    members: tuple[str, ...]
    healed_tokens: int
    further_rate: float
    singles: tuple[str, ...]
    single_tokens: int
    least_spearman: float


def run(name: str, settings: Settings, console: Console) -> None:
    """Trains and searches what is not done yet, and prints what came out. Raises UserError without the model."""
    if not Path(settings.parent).exists():
        raise UserError(f"experiment {name} needs {settings.parent} in this folder; docs/llama.md says where it is.")
    folder = RUNS / "experiments" / name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        parent, tuned = _tuned(settings, folder, console)
        ended = train_all(_plan(settings, parent), folder, console)
        members = _members(settings, ended, tuned, _unheld(parent))
        console.print(member_table(settings, members))
        written = save_figure(folder / name, draw_panels(member_figure(members)))
        console.print(f"plot: {written[0]}", soft_wrap=True, highlight=False)
        searched = _searched(settings, parent, folder, console)
    scores = from_csv((searched.folder / BLOCKS_FILE).read_text(encoding="utf-8"), BLOCKS_FILE)
    console.print(kind_table(scores))
    compared = dict(_singles(scores, ended))
    console.print(single_table(compared))
    by_score, by_training = ({row: pair[at] for row, pair in compared.items()} for at in range(2))
    rank = Figure("Spearman, scores and trainings", spearman(by_score, by_training), least=settings.least_spearman)
    console.print(figure_table("", [rank]))


def english(folder: Path) -> Path:
    """A folder of the descriptions of the installed packages, a file each."""
    folder.mkdir(exist_ok=True)
    for package in distributions():
        _, _, text = (package.read_text("METADATA") or "").partition("\n\n")  # fields, then the description
        if len(text) >= LEAST_DESCRIPTION:
            replace_file(folder / f"{package.name}.txt", text)
    return folder


def _tuned(settings: Settings, folder: Path, console: Console) -> tuple[Path, Ended]:
    """A folder of the parent, trained on the text: on the next token alone, as there is nobody to learn from."""
    target = folder / "parent"
    variant = Variant(seeds=(0,), parent=settings.parent, tokens=settings.tokens, recipe=UNTAUGHT)
    plan = Plan(scale="parent", base=BASE, rows=(settings.own,), variants={TUNED: variant})
    ((job, ended),) = train_all(plan, folder, console).items()
    if not (target / CHECKSUMS_FILE).exists():  # written last
        source = load_parent(settings.parent)
        candidate = candidate_of(plan, job, source)
        trained = load_latest(training_folder(plan, job, folder))
        assert trained is not None
        weights = deployed_weights(trained_model(candidate, trained))
        write_pretrained(source.model._replace(weights={n: w.clone() for n, w in weights.items()}), target)
    return target, ended


def _unheld(folder: Path) -> tuple[int, ...]:
    """Layers where the parent's scores hold no bound, so that a softmax is priced as it was; kept beside it."""
    kept = folder.with_name("unheld.txt")
    if kept.exists():
        return tuple(map(int, kept.read_text(encoding="utf-8").split()))
    parent = load_parent(str(folder))
    source = parent.model
    corpus = prepare("stdlib", source.architecture.vocab_size, tokenizer=source.tokenizer, of_parent=source.windows)
    _, tokens = check_tokens(corpus, source.architecture.vocab_size, SCALES["parent"].seq_len)
    layers = unheld_by_parent(parent, bounding_tokens(corpus, tokens))
    replace_file(kept, " ".join(map(str, layers)))
    return layers


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
        also_validate=str(english(folder / "english")),
        num_trials=settings.num_trials,
        num_looks=0,
        tokens=settings.tokens,
        finalist_seeds=settings.finalist_seeds,
        recipe=RecipeChanges(scale=_small_steps(settings)),
    )
    return study.run(output_dir=place, console=console)


def _small_steps(settings: Settings) -> ScaleChanges:
    return ScaleChanges(batch=settings.batch, micro_batch=settings.batch, learning_rate=settings.learning_rate)


def _plan(settings: Settings, parent: Path) -> Plan:
    """Members by hand, the parent itself again, and every single."""
    scale = _small_steps(settings)
    further = replace(UNTAUGHT, scale=replace(scale, learning_rate=settings.further_rate))
    start, tokens = str(parent), settings.healed_tokens
    rows = {HEALED: settings.members, FURTHER: (settings.own,), ALONE: settings.singles}
    return Plan(
        scale="parent",
        base=BASE,
        rows=tuple(row for of_variant in rows.values() for row in of_variant),
        variants={
            HEALED: Variant(seeds=(0,), parent=start, tokens=tokens, recipe=RecipeChanges(scale=scale)),
            FURTHER: Variant(seeds=(0,), parent=start, tokens=tokens, recipe=further),
            ALONE: Variant(seeds=(0,), parent=start, tokens=settings.single_tokens, recipe=RecipeChanges(scale=scale)),
        },
        pairs=frozenset((variant, row) for variant, of_variant in rows.items() for row in of_variant),
        committed="smollm2.csv",
    )


def _members(
    settings: Settings, ended: Mapping[Job, Ended], tuned: Ended, unheld: Container[int]
) -> list[tuple[str, Price, float]]:
    """The tuned parent, itself trained further, and the members by hand: name, price as deployed, with an exact softmax
    where the parent's scores hold no bound, and perplexity.
    """
    pricer, workload = load_pricer(settings.protocol, settings.network), Workload(prompt_len=SCALES["parent"].seq_len)

    def price(row: str) -> Price:
        architecture = parse(row, base_architecture(BASE)).architecture
        layers = tuple(
            replace(layer, attention="softmax") if layer.attention == "bounded" and depth in unheld else layer
            for depth, layer in enumerate(architecture.layers)
        )
        return price_architecture(replace(architecture, layers=layers), pricer, workload, "deployed").price

    shown = [(TUNED, settings.own, tuned)]
    shown += [(job.row if job.variant == HEALED else job.variant, job.row, end) for job, end in _by_hand(ended)]
    return [(name, price(row), end.perplexity or math.nan) for name, row, end in shown]


def _by_hand(ended: Mapping[Job, Ended]) -> Iterator[tuple[Job, Ended]]:
    return ((job, end) for job, end in ended.items() if job.variant != ALONE)


def member_table(settings: Settings, members: Sequence[tuple[str, Price, float]]) -> Table:
    """Each beside the tuned parent, the first, with what it takes of that one's price."""
    (_, whole, tuned), *_ = members
    rows = [
        (
            name,
            format_seconds(price.latency_s),
            format_bytes(price.sent_bytes),
            f"{price.latency_s / whole.latency_s:.1%}",
            f"{price.sent_bytes / whole.sent_bytes:.1%}",
            f"{perplexity:.2f}",
            f"{100 * (perplexity / tuned - 1):+.1f} %",
        )
        for name, price, perplexity in members
    ]
    columns = ("", "seconds", "sent", "of seconds", "of bytes", "perplexity", "above the tuned parent")
    return table(columns, rows, title=f"after {settings.healed_tokens:,} tokens from the tuned parent")


def member_figure(members: Sequence[tuple[str, Price, float]]) -> PanelFigure:
    """Perplexity against what a token takes privately."""
    (_, whole, _), *_ = members
    by_axis = {
        "GB sent by all parties": [price.sent_bytes / 1e9 for _, price, _ in members],
        "predicted seconds": [price.latency_s for _, price, _ in members],
    }
    perplexities = tuple(perplexity for _, _, perplexity in members)
    names = tuple(f"{price.sent_bytes / whole.sent_bytes:.0%} of the bytes" for _, price, _ in members)
    panels = tuple(
        LinePanel("", axis, "perplexity", (Series("", tuple(values), perplexities, names, joined=False),))
        for axis, values in by_axis.items()
    )
    return PanelFigure("SmolLM2-135M: a token after a prompt of 128, private", panels)


def kind_table(scores: BlockScores) -> Table:
    """Medians of block scores by what is replaced, of the first layer and of thirds of the depth; the parent's own have
    none.
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
    columns = ("block scores, medians in nats", "first layer", "first third", "second", "last")
    return table(columns, rows)


def _singles(scores: BlockScores, ended: Mapping[Job, Ended]) -> Iterator[tuple[str, tuple[float, float]]]:
    """By single: its block score in nats, and the perplexity that it was trained to."""
    for job, end in ended.items():
        if job.variant == ALONE:
            sub_layers = trained_sub_layers(parse(job.row, base_architecture(BASE)).architecture)
            score = sum(scores.divergences.get(sub_layer, 0.0) for sub_layer in sub_layers)
            yield job.row, (score, end.perplexity or math.inf)


def single_table(compared: Mapping[str, tuple[float, float]]) -> Table:
    """A line a single, best first."""
    rows = [
        (row, f"{score:.4f}", f"{perplexity:.3f}")
        for row, (score, perplexity) in sorted(compared.items(), key=lambda item: item[1][1])
    ]
    return table(("one sub-layer replaced", "block score, nats", "perplexity trained"), rows)
