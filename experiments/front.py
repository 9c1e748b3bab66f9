"""The front of a real model: searched from its file on a mixture of text, next to the file itself.

`nas.search` does the work, as a user runs it. A stopped search continues, and a finished one is not repeated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.report.tables import table
from experiments.recovery import call, require_files, require_same
from nas.api import Run, load_run
from nas.report.draw import draw_panels, save_figure
from nas.report.front_figures import LinePanel, PanelFigure, Series
from nas.run.folder import CONFIG_FILE
from nas.storage import RUNS, locked
from nas.study.open_trials import BLOCKS_FILE
from nas.training.distillation.sub_layers import BlockScores, from_csv
from search_spaces.budget.priced_space import price_architecture
from search_spaces.notation import parse

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML.

    Attributes:
        parent: File of the model, in the current folder.
        mixture: Folder that `experiments run mixture` has written.
        space: File of the space in `experiments/configs`; None for the parent's own layers and cheaper replacements.
        search: Further flags of `nas.search`.
    """

    parent: str
    mixture: str
    space: str | None = None
    search: tuple[str, ...]


def run(name: str, settings: Settings, console: Console) -> None:
    """Search, or continue a search, and print and plot its models and block scores.

    A UserError is raised without the parent's file or the mixture, if the search fails or was begun with other
    settings, or if another process runs the experiment.
    """
    text = f"{settings.mixture}/recovery"
    require_files(name, settings.parent, text)
    folder = RUNS / "experiments" / name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        place = folder / "search"
        space = "parent" if settings.space is None else str(CONFIGS / settings.space)
        new = ("--parent", settings.parent, "--data", text, "--space", space, *settings.search)
        require_same(new, folder / "search.json", place)
        arguments = ("--resume",) if (place / CONFIG_FILE).exists() else (*new, "--output-dir")
        call("nas.search", *arguments, str(place), console=console)
        searched = load_run(place)
        shown = models(searched)
        title = f"{Path(settings.parent).stem}: a token after a prompt of {searched.config.seq_len}, private"
        written = save_figure(folder / name, draw_panels(model_figure(shown, title)))
    console.print(kind_table(from_csv((place / BLOCKS_FILE).read_text(encoding="utf-8"), BLOCKS_FILE)))
    console.print(model_table(shown))
    console.print(f"plot: {written[0]}", soft_wrap=True, highlight=False)


class Shown(NamedTuple):
    """A model in the table and the figure, with costs per token. name: `parent` or the arch_id.

    placement: of the folded model; the parent's is as it is written.
    """

    name: str
    placement: str
    latency_s: float
    sent_bytes: float
    perplexity: float


def models(searched: Run) -> list[Shown]:
    """Return the models of a search to show: the parent, at folded costs, then the front's members, cheapest first."""
    parent = searched.parent
    assert parent is not None
    architecture = parse(parent.notation, searched.base).architecture
    whole = price_architecture(architecture, searched.pricer, searched.workload, "folded").price
    shown = [Shown("parent", parent.notation, whole.latency_s, whole.sent_bytes, parent.perplexity)]
    for member in searched.front:
        runs_as = member.deployed or member.placement
        shown.append(Shown(member.arch_id, runs_as, member.latency_s, member.sent_bytes, member.perplexity))
    return shown


def model_table(models: Sequence[Shown]) -> Table:
    """Return a table of models, with costs and perplexities also relative to the parent, which is the first model."""
    parent = models[0]
    rows = [
        (
            model.name,
            f"{format_seconds(model.latency_s)} ({model.latency_s / parent.latency_s:.0%})",
            f"{format_bytes(model.sent_bytes)} ({model.sent_bytes / parent.sent_bytes:.0%})",
            f"{model.perplexity:.2f} ({100 * (model.perplexity / parent.perplexity - 1):+.1f} %)",
            model.placement,
        )
        for model in models
    ]
    columns = ("seconds", "sent", "perplexity", "runs as")
    return table(("model",), columns, rows, title="cost of one token, with its share of the parent's")


def model_figure(models: Sequence[Shown], title: str) -> PanelFigure:
    """Return a figure of perplexity against cost, in % of that of the first model, which is the parent."""
    parent = models[0]
    by_axis = {
        f"bytes of all parties, % of the parent's {format_bytes(parent.sent_bytes)}": [m.sent_bytes for m in models],
        f"predicted seconds, % of the parent's {format_seconds(parent.latency_s)}": [m.latency_s for m in models],
    }

    def series(values: Sequence[float]) -> Iterator[Series]:
        shares = tuple(100 * value / values[0] for value in values)
        perplexities = tuple(model.perplexity for model in models)
        yield Series("front", shares[1:], perplexities[1:])
        yield Series("parent", shares[:1], perplexities[:1])

    panels = (LinePanel("", axis, "perplexity", tuple(series(x))) for axis, x in by_axis.items())
    return PanelFigure(title, tuple(panels))


def kind_table(scores: BlockScores) -> Table:
    """Return a table of block scores by kind of sub-layer: the first layer's, and the median of each third of layers.

    Kinds that have 0 at all depths are left out, and so are medians of depths that were not scored.
    """
    num_layers = 1 + max(sub_layer.depth for sub_layer in scores.divergences)
    thirds = [range(place * num_layers // 3, (place + 1) * num_layers // 3) for place in range(3)]
    by_kind: dict[str, dict[int, float]] = {}
    for (depth, *kind), value in scores.divergences.items():
        by_kind.setdefault(" ".join(kind).removesuffix(" own"), {})[depth] = value

    def middle(values: dict[int, float], part: range) -> str:
        scored = [values[depth] for depth in part if depth in values]
        return f"{median(scored):.4f}" if scored else ""

    rows = [
        (kind, *(middle(values, part) for part in (range(1), *thirds)))
        for kind, values in sorted(by_kind.items())
        if any(values.values())
    ]
    return table(("block scores, medians in nats",), ("first layer", "first third", "second", "last"), rows)
